"""Whatever arrives, a bucket is decoded in full or refused by ``WireError``; nothing is written beside the outputs.

``FLEXCOMM_MUTATIONS`` is how many buffers other than the one sent are tried, 8,400 unless set. Half keep the old
checksum, which always finds them out. The others are sealed again, as a sender with a broken program would: what is
left to find them out is the payload's own structure, and many are payloads that might have been sent. With any other
number, some are also tried by kernels compiled with bounds checks.

``python -m tests.unit.test_wire_mutations`` tries them without pytest.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from flexcomm.compress import Identity, Pipeline, RandomK, Striding, Threshold, TopK, demo, top_k
from flexcomm.errors import WireError
from flexcomm.kernels import LARGEST_MAGNITUDE, IndexCode, ReferenceKernels, Region, TensorPlan, ValueCode, plan_layout
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.kernels.layout import HEADER_NBYTES, HEADER_NWORDS
from flexcomm.testing.kernels import reseal_
from tests.unit.buckets import SEQUENCE, STEP, Gathered, gather, open_, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from flexcomm.compress import Compressor
    from flexcomm.kernels import BufferPlan
    from flexcomm.kernels.reference.buckets import Payload

DEFAULT_CASES, FEWEST_CASES = 8_400, 8_000
CASES = int(os.environ.get("FLEXCOMM_MUTATIONS", DEFAULT_CASES))
REFERENCE = ReferenceKernels()
GUARD, GUARD_VALUE, OLD_VALUE = 16, 77.0, 5.0

BUCKETS: dict[str, tuple[Compressor, tuple[tuple[int, ...], ...]]] = {
    "elias_fano_bf16": (Pipeline(Identity(60), TopK(6), "bf16"), ((170,),)),
    "packed_fp32": (Pipeline(Identity(20), TopK(1), "fp32"), ((95,),)),
    "bitmap_fp16": (Pipeline(Identity(40), TopK(15), "fp16"), ((115,),)),
    "capacity_bf16": (Pipeline(Identity(60), Threshold(0.5, 0.4), "bf16"), ((170,),)),
    "exact_fp32": (Pipeline(Identity(30), Threshold(1.5, None), "fp32"), ((110,),)),
    "int8": (Pipeline(Identity(50), TopK(7), "int8"), ((140,),)),
    "sign": (Pipeline(Identity(50), TopK(7), "sign"), ((140,),)),
    "sign2": (Pipeline(Identity(50), TopK(7), "sign2"), ((140,),)),
    "padded_fp16": (Pipeline(Identity(256), TopK(63), "fp16"), ((512,),)),
    "padded_sign": (Pipeline(Identity(256), TopK(63), "sign"), ((512,),)),
    "demo_fp32": (demo(k=5, chunk=8, values="fp32"), ((13, 18),)),
    "shared_bf16": (Pipeline(Identity(50), RandomK(0.2), "bf16"), ((130,),)),
    "strided_sign": (Pipeline(Identity(50), Striding(0.2), "sign"), ((130,),)),
    "mixed": (top_k(0.1, "int8"), ((), (3,), (0,), (7, 9), (2, 3, 11))),
}
# Enough elements, and chunks, that three threads have some each; a try takes far longer than of those above.
THREADED_BUCKETS: dict[str, tuple[Compressor, tuple[tuple[int, ...], ...]]] = {
    "threaded_fixed_bf16": (Pipeline(Identity(2048), TopK(6), "bf16"), ((200_000,),)),
    "threaded_capacity_int8": (Pipeline(Identity(2048), Threshold(2.9, 0.01), "int8"), ((200_000,),)),
}
THREADED_CASES = CASES // 80
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Guarded:
    """Outputs that are views into larger tensors, whose rims tell of writes that went astray."""

    def __init__(self, plan: BufferPlan) -> None:
        numels = [int(torch.Size(spec.shape).numel()) for spec in plan.specs]
        self._rooms = [
            torch.empty(numel + 2 * GUARD, dtype=spec.dtype) for numel, spec in zip(numels, plan.specs, strict=True)
        ]
        self._middles = [room[GUARD : GUARD + numel] for room, numel in zip(self._rooms, numels, strict=True)]
        self.outs = [middle.view(spec.shape) for middle, spec in zip(self._middles, plan.specs, strict=True)]
        self.refill()
        self._before = [room.clone() for room in self._rooms]

    def refill(self) -> None:
        for room, middle in zip(self._rooms, self._middles, strict=True):
            room.fill_(GUARD_VALUE)
            middle.fill_(OLD_VALUE)

    def require_unchanged(self) -> None:
        assert all(torch.equal(room, before) for room, before in zip(self._rooms, self._before, strict=True))

    def require_guards_and_refill(self) -> None:
        for middle in self._middles:
            middle.fill_(OLD_VALUE)
        self.require_unchanged()

    def are_finite(self) -> bool:
        return all(bool(out.isfinite().all()) for out in self.outs)


@dataclass
class Victim:
    """Two nodes' buffers, of which the second is damaged over and over, and outputs that must survive it."""

    gathered: Gathered
    guarded: Guarded
    random: np.random.Generator
    kernels: CpuKernels

    @property
    def start(self) -> int:
        return self.gathered.nbytes[0] // 4

    def copy(self) -> Gathered:
        return Gathered(self.gathered.plan, self.gathered.buffer.clone(), list(self.gathered.nbytes))

    def words(self, gathered: Gathered) -> Tensor:
        """The second node's buffer."""
        return gathered.words[self.start :][: gathered.nbytes[1] // 4]

    def below(self, limit: int) -> int:
        return int(self.random.integers(limit))

    def between(self, first: int, last: int) -> int:
        return int(self.random.integers(first, last))


def make_victim(name: str) -> Victim:
    compressor, shapes = (BUCKETS | THREADED_BUCKETS)[name]
    seed = list(BUCKETS | THREADED_BUCKETS).index(name)
    generator = torch.Generator().manual_seed(seed)
    dtypes = DTYPES if name == "mixed" else DTYPES[:1]
    nodes = [
        [torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
        for _ in range(2)
    ]
    gathered = gather(compressor, nodes, REFERENCE)
    kernels = CpuKernels(3 if name in THREADED_BUCKETS else 1)
    return Victim(gathered, Guarded(gathered.plan), np.random.default_rng(seed), kernels)


# --- damage without design --------------------------------------------------------------------------------------------


def flip_bits(victim: Victim, words: Tensor, first: int) -> None:
    for _ in range(victim.between(1, 4)):
        words[victim.between(first, words.numel())] ^= np.int32(np.uint32(1 << victim.below(32)))


def overwrite_a_word(victim: Victim, words: Tensor, first: int) -> None:
    words[victim.between(first, words.numel())] = (0, -1, victim.between(-(1 << 31), 1 << 31))[victim.below(3)]


def swap_words(victim: Victim, words: Tensor, first: int) -> None:
    places = [victim.between(first, words.numel()) for _ in range(2)]
    words[places] = words[places[::-1]]


def fill_with_garbage(victim: Victim, words: Tensor, first: int) -> None:
    begin = victim.between(first, words.numel())
    garbage = victim.random.integers(-(1 << 31), 1 << 31, words.numel() - begin, np.int32)
    words[begin:] = torch.from_numpy(garbage)


def shift_words(victim: Victim, words: Tensor, first: int) -> None:
    words[first:] = words[first:].roll(victim.between(1, 4))


RANDOM_DAMAGE: tuple[Callable[[Victim, Tensor, int], None], ...] = (
    flip_bits,
    flip_bits,
    overwrite_a_word,
    swap_words,
    fill_with_garbage,
    shift_words,
)


def refusal(victim: Victim, gathered: Gathered) -> WireError | None:
    try:
        open_(gathered, victim.guarded.outs, victim.kernels)
    except WireError as error:
        return error
    return None


def require_refused(victim: Victim, gathered: Gathered, what: str) -> WireError:
    error = refusal(victim, gathered)
    assert error is not None, f"{what} was decoded"
    assert error.sender == "node 1", what
    victim.guarded.require_unchanged()
    return error


def require_refused_or_legal(victim: Victim, gathered: Gathered, what: str) -> None:
    error = refusal(victim, gathered)
    if error is not None:
        assert error.sender == "node 1", what
        victim.guarded.require_unchanged()
        return
    # Only numbers no tensor may hold add up to infinity; a payload cannot tell by whom they were written.
    assert victim.guarded.are_finite() or largest_sent(victim, gathered) >= LARGEST_MAGNITUDE, what
    for out, expected in zip(victim.guarded.outs, opened(gathered, REFERENCE), strict=True):
        assert torch.equal(out.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), what
    victim.guarded.require_guards_and_refill()


def largest_sent(victim: Victim, gathered: Gathered) -> float:
    words, largest = victim.words(gathered), 0.0
    for one, payload in zip(gathered.plan.plans, payloads_of(gathered.plan, words), strict=True):
        sent = torch.empty(one.state_shape)
        REFERENCE.decode_tensor_(words, [payload], one.of_coefficients(), one.sample_key(STEP, "t0"), 1, sent)
        largest = max(largest, float(sent.abs().max()) if sent.numel() else 0.0)
    return largest


def payloads_of(plan: BufferPlan, words: Tensor) -> list[Payload]:
    """Return where the payloads of a sound buffer are."""
    decoder = REFERENCE.decoder(plan, words, [Region("node 1", 0, words.numel())])
    assert decoder.verify(step=STEP, sequence=SEQUENCE) == 0
    return decoder.payloads[0]


def spoiled(victim: Victim, count: int, spoil: Callable[[Tensor, int], str]) -> Iterator[tuple[str, Gathered]]:
    """Yield so many copies that differ from what was sent, and what was done to each."""
    numbers = itertools.count()
    for _ in range(count):
        what, gathered = "", victim.gathered
        while torch.equal(gathered.buffer, victim.gathered.buffer):
            number, gathered = next(numbers), victim.copy()
            what = spoil(victim.words(gathered), number)
        yield what, gathered


def try_damage(victim: Victim, count: int) -> int:
    """Damage is always found out by the checksum."""

    def spoil(words: Tensor, number: int) -> str:
        damage = RANDOM_DAMAGE[number % len(RANDOM_DAMAGE)]
        damage(victim, words, 0)
        return damage.__name__

    return sum(1 for what, gathered in spoiled(victim, count, spoil) if require_refused(victim, gathered, what))


def try_damage_sealed_again(victim: Victim, count: int) -> int:
    """Damage with a checksum that fits is refused, or is a payload like any other and decoded as the reference does."""

    def spoil(words: Tensor, number: int) -> str:
        damage = RANDOM_DAMAGE[number % len(RANDOM_DAMAGE)]
        damage(victim, words, 0 if number % 8 == 0 else HEADER_NWORDS)
        reseal_(words)
        return damage.__name__

    tried = 0
    for what, gathered in spoiled(victim, count, spoil):
        require_refused_or_legal(victim, gathered, what)
        tried += 1
    return tried


def try_other_lengths(victim: Victim, count: int) -> int:
    """A buffer cut short or drawn out is always refused."""
    length = victim.gathered.nbytes[1]
    room = torch.zeros(4 * length, dtype=torch.uint8)
    for number in range(count):
        other = 4 * (victim.below(length // 4) if number % 2 else length // 4 + victim.between(1, length // 2))
        gathered = Gathered(victim.gathered.plan, torch.cat((victim.gathered.buffer, room)), [4 * victim.start, other])
        words = victim.words(gathered)
        if number % 3 and words.numel() >= HEADER_NWORDS:
            words[10] = other - HEADER_NBYTES
            reseal_(words)
        require_refused(victim, gathered, f"{other} bytes instead of {length}")
    return count


# --- lies with design: sealed, and never legal ------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A tensor's payload in the second node's buffer."""

    plan: TensorPlan
    payload: Payload

    def counts(self) -> list[int]:
        counts = self.payload.counts
        return [self.plan.k] * self.plan.chunks if counts is None else counts.tolist()

    def bit(self, section: str) -> int:
        return 32 * (self.payload.start + getattr(self.payload.layout, section))


def places_of(victim: Victim) -> list[Place]:
    plan = victim.gathered.plan
    payloads = payloads_of(plan, victim.words(victim.gathered))
    return [Place(one, payload) for one, payload in zip(plan.plans, payloads, strict=True) if one.chunks]


def put(words: Tensor, position: int, value: int, width: int) -> None:
    bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
    bits[position : position + width] = [value >> i & 1 for i in range(width)]
    words.numpy().view(np.uint8)[:] = np.packbits(bits, bitorder="little")


def get(words: Tensor, position: int, width: int) -> int:
    bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
    return int((bits[position : position + width].astype(np.int64) << np.arange(width)).sum())


def lie_about_indices(victim: Victim, words: Tensor, place: Place) -> bool:
    """Repeat an index, put one after a greater one, put one beyond the chunk, or send one more or fewer."""
    layout, counts = place.payload.layout, place.counts()
    chunk = victim.below(place.plan.chunks)
    count, length = counts[chunk], place.plan.chunk_numel
    begin = place.bit("indices") + sum(counts[:chunk]) * layout.entry_bits + chunk * layout.chunk_bits
    if layout.code is IndexCode.PACKED and count:
        width, entry = layout.entry_bits, victim.below(count)
        beyond = victim.between(length, 1 << width)
        before = get(words, begin + (entry - 1) * width, width) if entry else beyond
        put(words, begin + entry * width, (beyond, before)[victim.below(2)], width)
        return True
    if layout.code in (IndexCode.ELIAS_FANO, IndexCode.BITMAP):
        skip = count * layout.low_bits
        width = length if layout.code is IndexCode.BITMAP else count + ((length - 1) >> layout.low_bits)
        at = begin + skip + victim.below(width)
        put(words, at, 1 - get(words, at, 1), 1)
        return True
    return False


def lie_about_a_repeated_index(victim: Victim, words: Tensor, place: Place) -> bool:
    """Two entries of one upper half, with equal lower halves: Elias and Fano could write that down."""
    layout, counts = place.payload.layout, place.counts()
    chunk = victim.below(place.plan.chunks)
    count, low = counts[chunk], layout.low_bits
    if layout.code is not IndexCode.ELIAS_FANO or count < 2 or not low:
        return False
    begin = place.bit("indices") + sum(counts[:chunk]) * layout.entry_bits + chunk * layout.chunk_bits
    width = count + ((place.plan.chunk_numel - 1) >> low)
    upper, entry = victim.below((place.plan.chunk_numel - 1) >> low), victim.between(1, count)
    ones = (((1 << count) - 1) << upper) if upper + count <= width else (1 << count) - 1
    put(words, begin + count * low, ones, width)
    for other in range(count):
        put(words, begin + other * low, min(other, (1 << low) - 1), low)
    put(words, begin + entry * low, get(words, begin + (entry - 1) * low, low), low)
    return True


def lie_about_counts(victim: Victim, words: Tensor, place: Place) -> bool:
    """A chunk has one more or fewer than it has, or none, or all, or more than all."""
    if place.payload.counts is None:
        return False
    width, chunk = place.plan.chunk_numel.bit_length(), victim.below(place.plan.chunks)
    count, length = place.counts()[chunk], place.plan.chunk_numel
    lies = [lie for lie in (count + 1, count - 1, 0, length, (1 << width) - 1) if lie >= 0 and lie != count]
    put(words, 32 * place.payload.start + chunk * width, lies[victim.below(len(lies))], width)
    return True


def lie_about_scales(victim: Victim, words: Tensor, place: Place) -> bool:
    scales = place.plan.chunks * place.plan.values.format.scales
    if not scales:
        return False
    lie = (0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xBF80, 0xFFFF)[victim.below(6)]
    put(words, place.bit("scales") + 16 * victim.below(scales), lie, 16)
    return True


def lie_about_values(victim: Victim, words: Tensor, place: Place) -> bool:
    lies = {
        ValueCode.FP32: (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF),
        ValueCode.BF16: (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF),
        ValueCode.FP16: (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF),
    }.get(place.plan.values)
    entries, counts = sum(place.counts()), place.counts()
    if lies is None or not entries:
        return False
    bits, entry = place.plan.values.format.bits, victim.below(entries)
    chunk = next(chunk for chunk in range(len(counts)) if sum(counts[: chunk + 1]) > entry)
    begin = place.bit("values") + chunk * place.payload.layout.value_padding
    put(words, begin + bits * entry, lies[victim.below(5)], bits)
    return True


LIES = (lie_about_indices, lie_about_a_repeated_index, lie_about_counts, lie_about_scales, lie_about_values)
FIELDS = {
    "lie_about_indices": {"indices"},
    "lie_about_a_repeated_index": {"indices"},
    "lie_about_counts": {"counts", "indices", "count", "length", "values"},
    "lie_about_scales": {"scales"},
    "lie_about_values": {"values"},
}


def try_lies(victim: Victim, count: int) -> int:
    """A lie is always found out, and blamed on what is wrong."""
    places, tried = places_of(victim), 0

    def spoil(words: Tensor, number: int) -> str:
        lie = LIES[number % len(LIES)]
        if lie(victim, words, places[victim.below(len(places))]):
            reseal_(words)
        return lie.__name__

    for what, gathered in spoiled(victim, count, spoil):
        error = require_refused(victim, gathered, what)
        assert error.field in FIELDS[what], f"{what}: {error}"
        tried += 1
    return tried


WAYS: dict[Callable[[Victim, int], int], float] = {
    try_damage: 1 / 2,
    try_damage_sealed_again: 1 / 5,
    try_lies: 1 / 4,
    try_other_lengths: 1 / 20,
}
"""Which part of all cases is tried in which way."""


def quota(way: Callable[[Victim, int], int]) -> int:
    return math.ceil(CASES * WAYS[way] / len(BUCKETS))


@pytest.mark.parametrize("name", BUCKETS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_was_not_sent_is_refused_or_is_a_payload_like_any_other(
    way: Callable[[Victim, int], int], name: str
) -> None:
    assert way(make_victim(name), quota(way)) == quota(way)


@pytest.mark.skipif(CASES < DEFAULT_CASES, reason="FLEXCOMM_MUTATIONS asks for fewer")
def test_enough_is_tried() -> None:
    assert sum(quota(way) for way in WAYS) * len(BUCKETS) >= FEWEST_CASES


@pytest.mark.parametrize("name", THREADED_BUCKETS)
def test_threads_refuse_and_decode_what_one_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted, submit = [], ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *args: submitted.append(args) or submit(*args))
    monkeypatch.setattr("flexcomm.kernels.cpu.groups.BLOCK_NUMEL", 1)
    victim = make_victim(name)
    open_(victim.gathered, victim.guarded.outs, victim.kernels)
    assert submitted, "this shows nothing unless decoding is work for several threads"
    victim.guarded.require_guards_and_refill()
    for way, part in WAYS.items():
        count = math.ceil(THREADED_CASES * part)
        assert way(victim, count) == count


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_index_leaves_its_array() -> None:
    """numba checks bounds only if told so before it compiles; what it compiled otherwise is not used."""
    cases = 1200
    environment = {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_OPT": "0",  # compiles in half the time
        "FLEXCOMM_MUTATIONS": str(cases),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_wire_mutations"],
        env={**os.environ, **environment},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= cases


def test_buckets_are_of_every_kind() -> None:
    plans = [one for name in BUCKETS for one in make_victim(name).gathered.plan.plans if one.chunks]
    assert {plan_layout(one, one.entries).code for one in plans} == set(IndexCode)
    assert {one.values for one in plans} == set(ValueCode)
    assert {(one.variable_count, one.variable_length) for one in plans} == {(False, False), (True, False), (True, True)}


def test_what_is_not_damaged_is_decoded() -> None:
    for name in BUCKETS:
        victim = make_victim(name)
        open_(victim.gathered, victim.guarded.outs, victim.kernels)
        assert victim.guarded.are_finite()
        assert all(bool((out != OLD_VALUE).any()) for out in victim.guarded.outs if out.numel())
        victim.guarded.require_guards_and_refill()


if __name__ == "__main__":
    print(sum(way(make_victim(bucket), quota(way)) for bucket in BUCKETS for way in WAYS))
