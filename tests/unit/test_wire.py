"""The format cannot change unnoticed, and every lie in a buffer is found out by name.

``python -m tests.unit.test_wire`` writes the golden files anew, after a change of format that is meant.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flexcomm.compress import (
    Compressor,
    Identity,
    Pipeline,
    RandomK,
    Striding,
    Threshold,
    TopK,
    demo,
    dense,
    random_k,
    sign,
    striding,
    threshold,
    top_k,
)
from flexcomm.errors import WireError
from flexcomm.kernels import IndexCode, Kernels, ReferenceKernels, Selection, TensorPlan, ValueCode
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.kernels.layout import ALIGNMENT, HEADER_NBYTES, HEADER_NWORDS, VERSION, Header, plan_layout
from flexcomm.testing.kernels import reseal_
from tests.unit.buckets import SEQUENCE, STEP, Gathered, gather, opened

CPU, REFERENCE = CpuKernels(1), ReferenceKernels()
GOLDEN = Path(__file__).parent / "golden"
HEADER = struct.Struct("<4sHHQQQQQI12s")


def fixed(length: int, keep: int, chunks: int = 1, values: ValueCode = ValueCode.BF16) -> TensorPlan:
    return TensorPlan(1, chunks * length, 1, length, False, Selection.TOP_K, keep, values)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "keep", "code", "published_bits"),
    [
        (64, 1, IndexCode.PACKED, 6),
        (64, 4, IndexCode.ELIAS_FANO, 6),
        (64, 8, IndexCode.ELIAS_FANO, 5),
        (64, 16, IndexCode.ELIAS_FANO, 4),
        (64, 32, IndexCode.BITMAP, 2),
        (4096, 1, IndexCode.PACKED, 12),
        (4096, 4, IndexCode.ELIAS_FANO, 12),
        (4096, 32, IndexCode.ELIAS_FANO, 9),
        (4096, 128, IndexCode.ELIAS_FANO, 7),
        (4096, 1024, IndexCode.ELIAS_FANO, 4),
        (4096, 2048, IndexCode.BITMAP, 2),
    ],
)
def test_the_index_code_is_the_shortest_of_three(length: int, keep: int, code: IndexCode, published_bits: int) -> None:
    """The published figures spend one bit more on the upper halves than the largest index needs."""
    layout = plan_layout(fixed(length, keep), keep)
    width = (length - 1).bit_length()
    packed, bitmap = keep * width, length
    elias_fano = min(keep * (low + 1) + ((length - 1) >> low) for low in range(width))
    chosen = min(packed, elias_fano, bitmap)
    assert layout.code is code
    assert keep * layout.entry_bits + layout.chunk_bits in (chosen, chosen + -chosen % 32)
    assert published_bits - 1 / keep <= chosen / keep <= published_bits


@pytest.mark.parametrize("values", list(ValueCode), ids=lambda values: values.name)
@pytest.mark.parametrize("keep", [1, 5, 20, 40])
def test_a_fixed_payloads_length_follows_from_shapes(values: ValueCode, keep: int) -> None:
    plan = fixed(40, keep, chunks=7, values=values)
    layout = plan_layout(plan, plan.entries)
    sections = [
        7 * (keep * layout.entry_bits + layout.chunk_bits),
        7 * 16 * values.format.scales,
        7 * (keep * values.format.bits + layout.value_padding),
    ]
    lengths = [-(-bits // 32) for bits in sections]
    assert layout.indices == 0
    assert (layout.scales, layout.values, layout.nwords) == (lengths[0], sum(lengths[:2]), sum(lengths))
    assert (layout.code is IndexCode.NONE) == (keep == 40)


def section_bits(gathered: Gathered, entries: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of the indices and of the values of a bucket of one tensor."""
    plan, octets = gathered.plan.plans[0], gathered.words[HEADER_NWORDS:].numpy().view(np.uint8)
    layout = plan_layout(plan, plan.entries if entries is None else entries)
    ends = (layout.indices, layout.scales), (layout.values, layout.nwords)
    indices, values = (np.unpackbits(octets[4 * first : 4 * last], bitorder="little") for first, last in ends)
    return indices, values


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize(
    ("compressor", "shape", "apart_bits"),
    [
        (demo(k=32), (64, 64), (288, 32 * 16)),  # of 287, and 512
        (demo(k=396, values="sign"), (64, 64), (2112, 416)),  # of 2095, and 396
        (demo(k=396, values="sign2"), (64, 64), (2112, 1216)),  # of 2095, and 1188
        (demo(k=1), (64,), (6, 16)),  # padding would make 22 bits 64
        (demo(k=2, values="sign"), (64,), (12, 2)),
        (demo(k=8), (64,), (39, 128)),  # padding would make 167 bits 192
        (sign(), (3334,), (0, 3360)),
        (dense(torch.bfloat16), (3335,), (0, 16 * 3336)),
        (Pipeline(Identity(256), TopK(128), "int8"), (255,), (256, 1024)),  # of 255, and 1024
    ],
    ids=str,
)
def test_chunks_begin_at_words_where_that_costs_little(
    compressor: Compressor, shape: tuple[int, ...], apart_bits: tuple[int, int], kernels: Kernels
) -> None:
    """Sections hold what each chunk sends alone, so many bits apart, and zeros between."""
    chunks = [numbers(int(torch.Size(shape).numel()), seed).reshape(shape) for seed in range(3)]
    whole = gather(compressor, [[torch.cat(chunks, dim=-1)]], kernels)
    assert whole.plan.plans[0].chunks == 3
    alone = [section_bits(gather(compressor, [[chunk]], kernels)) for chunk in chunks]
    for section, (bits, apart) in enumerate(zip(section_bits(whole), apart_bits, strict=True)):
        expected = np.zeros(-(-3 * apart // 32) * 32, np.uint8)
        for chunk, sections in enumerate(alone):
            expected[chunk * apart :][:apart] = sections[section][:apart]
        assert np.array_equal(bits, expected)


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("capacity", [None, 9 / 192])
def test_chunks_of_as_many_entries_as_the_data_has_follow_bit_by_bit(capacity: float | None, kernels: Kernels) -> None:
    x, sent = torch.zeros(192), [3, 4, 63, 64, 70, 80, 90, 127, 191]
    x[sent] = torch.tensor([1.0] * 3 + [-1.0] * 5 + [1.0])
    gathered = gather(Pipeline(Identity(64), Threshold(1.0, capacity), "sign"), [[x]], kernels)
    indices, values = section_bits(gathered, entries=9)
    assert np.packbits(values, bitorder="little").tolist() == [0b11111000, 0, 0, 0]
    # Six bits each, as short as Elias and Fano's code.
    assert [int(indices[6 * entry :][:6] @ (1 << np.arange(6))) for entry in range(9)] == [at % 64 for at in sent]


def test_a_variable_payload_begins_with_counts_wide_enough_for_a_full_chunk() -> None:
    plan = TensorPlan(1, 640, 1, 64, False, Selection.THRESHOLD, 100, ValueCode.BF16, tau=1.0)
    layout = plan_layout(plan, plan.entries)
    assert layout.indices == -(-10 * 7 // 32)
    assert plan_layout(replace(plan, variable_length=True), 0).nwords < layout.nwords


@pytest.mark.parametrize("selection", [Selection.EVERYTHING, Selection.RANDOM_K, Selection.STRIDING])
def test_indices_all_ranks_derive_are_not_sent(selection: Selection) -> None:
    plan = replace(fixed(64, 64 if selection is Selection.EVERYTHING else 9), selection=selection)
    layout = plan_layout(plan, plan.entries)
    assert (layout.code, layout.scales) == (IndexCode.NONE, 0)


@pytest.mark.parametrize(
    ("length", "keep", "values", "most"),
    [(4096, 32, "bf16", 25.2), (4096, 32, "sign", 10.7), (64, 8, "bf16", 21.2)],
)
def test_bits_of_a_kept_element_with_all_headers(length: int, keep: int, values: str, most: float) -> None:
    chunks = 8_388_608 // length
    plan = fixed(length, keep, chunks, ValueCode[values.upper()])
    bits = 8 * HEADER_NBYTES + 32 * plan_layout(plan, plan.entries).nwords + 8 * ALIGNMENT
    assert bits / plan.entries <= most


# --- headers ----------------------------------------------------------------------------------------------------------


def sample(compressor: Compressor | None = None) -> Gathered:
    compressor = compressor or Pipeline(Identity(64), TopK(5), "fp32")
    nodes = [[numbers(200, node), numbers(64, node + 5)] for node in range(2)]
    return gather(compressor, nodes, CPU)


def numbers(count: int, seed: int) -> torch.Tensor:
    """Dyadic numbers of many magnitudes, no two alike in a chunk, and none that any code has to round away."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    return (order + 1) / 64 * (1 - 2 * (order % 2))


def test_the_header_holds_what_the_page_says() -> None:
    gathered = sample()
    raw = gathered.buffer[: HEADER.size].numpy().tobytes()
    magic, version, flags, plan, step, sequence, count, payload_nbytes, checksum, spare = HEADER.unpack(raw)
    assert HEADER_NBYTES == HEADER.size == 64
    assert (magic, version, flags, plan) == (b"FLXC", VERSION, 0, gathered.plan.digest)
    assert (step, sequence, count) == (STEP, SEQUENCE, 4 * 5 + 5)
    assert payload_nbytes == gathered.nbytes[0] - HEADER_NBYTES
    assert spare == bytes(12)
    words = gathered.words[: gathered.nbytes[0] // 4].clone()
    reseal_(words)
    assert int(words[12]) & 0xFFFFFFFF == checksum


def test_a_buffer_is_a_multiple_of_the_alignment_and_padded_with_zeros() -> None:
    gathered = gather(dense(), [[torch.ones(5)]], CPU)
    assert gathered.nbytes == [HEADER_NBYTES + 32]
    assert not gathered.buffer[HEADER_NBYTES + 20 :].any()


def refused(gathered: Gathered) -> WireError:
    with pytest.raises(WireError) as caught:
        opened(gathered, CPU)
    assert caught.value.sender in str(caught.value)
    assert caught.value.field in str(caught.value)
    return caught.value


def write_header_(words: torch.Tensor, header: Header) -> None:
    octets = header.pack(4 * words.numel() - HEADER_NBYTES)
    words[:HEADER_NWORDS] = torch.from_numpy(np.frombuffer(octets, np.int32).copy())
    reseal_(words)


def second_buffer(gathered: Gathered) -> torch.Tensor:
    return gathered.words[gathered.nbytes[0] // 4 :]


@pytest.mark.parametrize(
    ("field", "offset", "value"),
    [
        ("magic", 0, ord("G")),
        ("version", 4, VERSION + 1),
        ("payload bytes", 40, 0xFF),
        ("checksum", 48, 0),
        ("checksum", 55, 1),
        ("checksum", 63, 1),
        ("checksum", 64, 0x5A),
    ],
)
def test_a_damaged_byte_is_blamed_on_its_field_and_sender(field: str, offset: int, value: int) -> None:
    gathered = sample()
    gathered.buffer[gathered.nbytes[0] + offset] = value
    error = refused(gathered)
    assert (error.sender, error.field) == ("node 1", field)


def test_spare_bytes_are_zero_even_if_the_checksum_says_otherwise() -> None:
    gathered = sample()
    second_buffer(gathered)[15] = 1
    reseal_(second_buffer(gathered))
    error = refused(gathered)
    assert error.field == "spare bytes"
    assert "00000000 00000000 01000000, but must be zero" in str(error)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("plan hash", {"plan": 1}),
        ("step", {"step": STEP + 1}),
        ("sequence", {"sequence": SEQUENCE - 1}),
        ("flags", {"flags": 2}),
        ("count", {"flags": 1}),
        ("count", {"entries": 24}),
        ("count", {"entries": 1 << 63}),
    ],
)
def test_what_ranks_do_not_agree_on_is_named(field: str, changes: dict[str, int]) -> None:
    gathered = sample()
    write_header_(second_buffer(gathered), Header(gathered.plan.digest, STEP, SEQUENCE, 25)._replace(**changes))
    error = refused(gathered)
    assert (error.sender, error.field) == ("node 1", field)


def test_a_variable_bucket_holds_as_many_entries_as_it_announces() -> None:
    gathered = sample(Pipeline(Identity(64), Threshold(2.0, 0.5), "fp32"))
    write_header_(second_buffer(gathered), Header(gathered.plan.digest, STEP, SEQUENCE, 3))
    assert refused(gathered).field == "count"


# --- sections ---------------------------------------------------------------------------------------------------------


def with_word(compressor: Compressor, section: str, word: int, place: int = 0) -> Gathered:
    """Return a bucket whose second sender wrote this word into the first tensor's section, and sealed it."""
    gathered = sample(compressor)
    one = gathered.plan.plans[0]
    begin = 0 if section == "counts" else getattr(plan_layout(one, one.entries), section)
    second_buffer(gathered)[HEADER_NWORDS + begin + place] = word
    reseal_(second_buffer(gathered))
    return gathered


@pytest.mark.parametrize(
    ("field", "compressor", "section", "word"),
    [
        ("counts", Pipeline(Identity(63), Threshold(1.5, 0.9), "bf16"), "counts", -1),
        ("counts", Pipeline(Identity(64), Threshold(1.5, 0.1), "bf16"), "counts", 0x02040810),
        ("indices", Pipeline(Identity(64), TopK(5), "fp32"), "indices", 0),
        ("indices", Pipeline(Identity(64), TopK(1), "fp32"), "indices", -1),
        ("indices", Pipeline(Identity(64), TopK(32), "fp32"), "indices", -1),
        ("indices", Pipeline(Identity(64), Threshold(2.0, 0.9), "fp32"), "indices", -1),
        ("scales", Pipeline(Identity(64), TopK(5), "int8"), "scales", 0x7F80),
        ("scales", Pipeline(Identity(64), TopK(5), "int8"), "scales", 0x7FC0),
        ("scales", Pipeline(Identity(64), TopK(5), "sign"), "scales", 0x8000),
        ("scales", Pipeline(Identity(64), TopK(5), "sign2"), "scales", -0x3F800000),
        ("values", Pipeline(Identity(64), TopK(5), "fp32"), "values", 0x7F800000),
        ("values", Pipeline(Identity(64), TopK(5), "fp32"), "values", -1),
        ("values", Pipeline(Identity(64), TopK(5), "bf16"), "values", 0x7F80),
        ("values", Pipeline(Identity(64), TopK(5), "fp16"), "values", 0x7E000000),
    ],
)
def test_a_section_that_cannot_be_is_named(field: str, compressor: Compressor, section: str, word: int) -> None:
    error = refused(with_word(compressor, section, word))
    assert (error.sender, error.field) == ("node 1", field)


@pytest.mark.parametrize("nbytes", [0, 4, 48, 64, -16, 16])
def test_a_buffer_of_another_length_is_refused(nbytes: int) -> None:
    gathered = sample()
    length = nbytes if 0 <= nbytes <= HEADER_NBYTES and nbytes != 16 else gathered.nbytes[0] + nbytes
    room = torch.zeros(1000, dtype=torch.uint8)
    other = Gathered(gathered.plan, torch.cat((gathered.buffer, room)), [gathered.nbytes[0], length])
    assert refused(other).field == "length"


@pytest.mark.parametrize("nbytes", [0, 32, 64, 80, -16, 16, 100_000])
def test_an_exact_buffer_of_another_length_is_refused(nbytes: int) -> None:
    gathered = sample(Pipeline(Identity(64), Threshold(2.0, None), "fp32"))
    length = nbytes if nbytes in (0, 32, 64, 80, 100_000) else gathered.nbytes[1] + nbytes
    buffer = torch.cat((gathered.buffer, torch.zeros(100_000, dtype=torch.uint8)))
    other = Gathered(gathered.plan, buffer, [gathered.nbytes[0], length])
    if HEADER_NBYTES <= length <= gathered.plan.nbytes:
        words = other.words[gathered.nbytes[0] // 4 :][: length // 4]
        count = HEADER.unpack(gathered.buffer[gathered.nbytes[0] :][: HEADER.size].numpy().tobytes())[6]
        write_header_(words, Header(gathered.plan.digest, STEP, SEQUENCE, count))
    assert refused(other).field == "length"


# --- golden files -----------------------------------------------------------------------------------------------------

GOLDEN_BUCKETS: dict[str, tuple[Compressor, tuple[tuple[int, ...], ...]]] = {
    "demo_bf16": (demo(k=4, chunk=8), ((10, 16),)),
    "demo_flat_sign": (demo(k=3, chunk=16, values="sign"), ((50,),)),
    "top_k_int8": (Pipeline(Identity(32), TopK(3), "int8"), ((96,),)),
    "top_k_packed_fp32": (Pipeline(Identity(32), TopK(1), "fp32"), ((64,),)),
    "top_k_bitmap_fp16": (top_k(0.5, "fp16"), ((40,),)),
    "threshold_capacity_sign2": (threshold(0.75, 0.25, "sign2"), ((80,),)),
    "threshold_exact_fp16": (Pipeline(Identity(40), Threshold(0.75, None), "fp16"), ((80,),)),
    "top_k_padded_sign": (Pipeline(Identity(256), TopK(63), "sign"), ((512,),)),
    "random_k_fp32": (Pipeline(Identity(40), RandomK(0.1, seed=3), "fp32"), ((80,),)),
    "striding_sign": (Pipeline(Identity(40), Striding(0.2), "sign"), ((80,),)),
    "sign": (sign(), ((33,),)),
    "mixed": (top_k(0.1), ((), (3,), (0,), (7, 9), (2, 3, 11))),
}
GOLDEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def golden_inputs(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    return [
        numbers(int(torch.Size(shape).numel()), seed).reshape(shape).to(GOLDEN_DTYPES[seed % 4])
        for seed, shape in enumerate(shapes)
    ]


def hex_lines(raw: bytes) -> str:
    return "\n".join(raw[begin : begin + 16].hex(" ", 4) for begin in range(0, len(raw), 16))


def golden_text(name: str, kernels: Kernels) -> str:
    """The buffer, and below it what is decoded from it, tensor by tensor; both as bytes in hex."""
    compressor, shapes = GOLDEN_BUCKETS[name]
    gathered = gather(compressor, [golden_inputs(shapes)], kernels)
    tensors = [out.reshape(-1).view(torch.uint8).numpy().tobytes() for out in opened(gathered, kernels)]
    parts = [gathered.buffer.numpy().tobytes(), *tensors]
    return "\n\n".join(hex_lines(part) for part in parts) + "\n"


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("name", GOLDEN_BUCKETS)
def test_the_format_and_what_is_decoded_from_it_stay_as_they_are(name: str, kernels: Kernels) -> None:
    assert golden_text(name, kernels) == (GOLDEN / f"{name}.hex").read_text()


@pytest.mark.parametrize("name", ["top_k_packed_fp32", "top_k_bitmap_fp16", "random_k_fp32"])
def test_what_golden_files_decode_to_is_part_of_what_was_sent(name: str) -> None:
    compressor, shapes = GOLDEN_BUCKETS[name]
    (x,) = golden_inputs(shapes)
    raw = bytes.fromhex((GOLDEN / f"{name}.hex").read_text().split("\n\n")[0])
    gathered = gather(compressor, [[x]], CPU)
    stored = Gathered(gathered.plan, torch.frombuffer(bytearray(raw), dtype=torch.uint8), [len(raw)])
    out = opened(stored, CPU)[0]
    assert torch.equal(out[out != 0], x[out != 0])
    assert int((out != 0).sum()) == gathered.plan.plans[0].entries


def test_there_is_no_golden_file_too_many() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(GOLDEN_BUCKETS)


def test_shared_indices_differ_from_name_to_name_and_step_to_step() -> None:
    first = gather(random_k(0.1, values="fp32"), [[numbers(100, 0), numbers(100, 0)]], CPU)
    one, other = opened(first, CPU)
    assert not torch.equal(one != 0, other != 0)
    later = opened(gather(striding(0.1, "fp32"), [[numbers(100, 0)]], CPU, step=3), CPU, step=3)[0]
    assert later.nonzero()[:, 0].tolist() == list(range(3, 100, 10))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for bucket in GOLDEN_BUCKETS:
        (GOLDEN / f"{bucket}.hex").write_text(golden_text(bucket, REFERENCE))
        print("wrote", GOLDEN / f"{bucket}.hex")
