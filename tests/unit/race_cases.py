"""What the thread sanitizer watches: every kernel of the GPU's set, and every path through them, on the host.

    LD_PRELOAD=libtsan.so python -m tests.unit.race_cases LIBRARY SEED [CASE...]

``LIBRARY`` is made by ``bench.gpu.cuda_on_host``; ``SEED`` says in which order threads take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import SupportsInt, get_args

import torch
from torch import Tensor

from bench.gpu.cuda_on_host import HostLauncher
from flexcomm.kernels import (
    Average,
    BufferPlan,
    Epilogue,
    IndexCode,
    Problem,
    Region,
    Selection,
    StateUpdate,
    Status,
    TensorPlan,
    ValueCode,
    plan_layout,
)
from flexcomm.kernels.gpu import GpuKernels, tables
from flexcomm.kernels.layout import HEADER_NWORDS, WORD_NBYTES, Header, aligned
from flexcomm.testing.cases import DTYPES, numbers
from tests.unit.gpu_buckets import bucket_of, squares

MakeKernels = Callable[..., GpuKernels]

UPDATE = StateUpdate(decay=0.875, gain=0.75, alpha=0.3)
AVERAGES: tuple[Average, ...] = get_args(Average)
EPILOGUES = (Epilogue(), Epilogue("sign_step", 0.01, 0.9), Epilogue("plain_step", 0.0, 0.95))
MUCH_SHARED, NEXT_TO_NONE_SHARED = 96 << 10, 18 << 10


def exchange(kernels: GpuKernels, bucket: BufferPlan, tensors: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Encode, put back, encode again, and step by the average of two buffers, and of three."""
    words = torch.full((bucket.nwords,), -1, dtype=torch.int32)
    encoder = kernels.encoder(bucket, words)
    require(encoder.encode_(tensors, states, states, UPDATE, step=0, sequence=0), Problem.NONE)
    sent = [filled(words)]
    encoder.rollback_(tensors, states, UPDATE, step=0)
    require(encoder.encode_(tensors, None, None, UPDATE, step=0, sequence=0), Problem.NONE)
    sent += [filled(words), sent[0]]
    for senders, epilogues in ((2, EPILOGUES[:1]), (3, EPILOGUES[1:])):
        decoder = kernels.decoder(bucket, torch.cat(sent[:senders]), regions_of(sent[:senders]))
        require(decoder.verify(step=0, sequence=0), Problem.NONE)
        for average, epilogue in product(AVERAGES, epilogues):
            decoder.decode_(tensors, step=0, average=average, epilogue=epilogue)


def filled(words: Tensor) -> Tensor:
    """Return a copy of what is filled of a buffer."""
    header = Header.unpack(words[:HEADER_NWORDS].numpy().tobytes())
    return words[: HEADER_NWORDS + header.payload_nbytes // WORD_NBYTES].clone()


def regions_of(sent: Sequence[Tensor]) -> list[Region]:
    ends = list(accumulate(words.numel() for words in sent))
    return [Region(str(end), end - words.numel(), words.numel()) for end, words in zip(ends, sent, strict=True)]


def require(status: SupportsInt, problem: Problem) -> None:
    found = Status.of(int(status))
    if found.problem is not problem:
        raise AssertionError(f"got {found}, needed {problem!r}: the case is not what it says.")


def coded(bucket: BufferPlan, codes: Sequence[IndexCode | None]) -> BufferPlan:
    """Return the plan with these index codes instead of the shortest."""
    layouts = tuple(plan_layout(plan, plan.entries, code) for plan, code in zip(bucket.plans, codes, strict=True))
    nwords = aligned(HEADER_NWORDS + sum(layout.nwords for layout in layouts))
    return replace(bucket, layouts=layouts, nbytes=WORD_NBYTES * nwords)


# --- chunks in registers ----------------------------------------------------------------------------------------------

# Few candidates, more than 64, and ties; rims; sums too small to be scaled; all index codes; payloads that share words
# with those of the next chunk. What is too small to be scaled is float32, as every third is.
SQUARES: tuple[tuple[str, int, ValueCode, IndexCode | None], ...] = (
    ("noise", 32, ValueCode.BF16, None),
    ("noise", 32, ValueCode.INT8, IndexCode.PACKED),
    ("ragged", 33, ValueCode.SIGN2, None),
    ("a rim of one row", 9, ValueCode.FP16, None),
    ("heavy tails", 5, ValueCode.FP32, IndexCode.PACKED),
    ("zeros", 32, ValueCode.SIGN, None),
    ("denormal", 32, ValueCode.FP32, None),
    ("constant", 96, ValueCode.FP32, None),
    ("all equal", 32, ValueCode.BF16, None),
    ("sixty equal", 32, ValueCode.BF16, None),
    ("equal below", 300, ValueCode.INT8, IndexCode.BITMAP),
    ("few large, the rest equal", 396, ValueCode.SIGN, None),
    ("to the last bit", 700, ValueCode.BF16, IndexCode.ELIAS_FANO),
)


def squares_are_exchanged(make: MakeKernels, dtypes: Sequence[torch.dtype] = DTYPES[:3]) -> None:
    drawn, plans, tensors, states, codes = squares(), [], [], [], []
    for number, (name, k, values, code) in enumerate(SQUARES):
        x, state = drawn[name]
        plan = TensorPlan(*x.shape, 64, 64, True, Selection.TOP_K, k, values)
        plans.append(plan)
        # Several squares share their zeros, and no two outputs of a bucket may be the same memory.
        tensors.append(x.to(dtypes[number % len(dtypes)], copy=True))
        states.append(numbers("normal", plan.state_shape, number) if state is None else state)
        codes.append(code)
    exchange(make(), coded(bucket_of(plans), codes), tensors, states)


def squares_of_float64_are_exchanged(make: MakeKernels) -> None:
    squares_are_exchanged(make, DTYPES)


def squares_are_refused(make: MakeKernels) -> None:
    """With payloads so long that they are where the maxima were."""
    are_refused(make(), TensorPlan(128, 192, 64, 64, True, Selection.TOP_K, 300, ValueCode.INT8))


# --- chunks of any shape ----------------------------------------------------------------------------------------------

# Short chunks side by side, in several blocks; long ones; matrices of an odd shape; squares.
SHAPES = (
    (1, 64 * 7 * 3 + 3, 1, 7, True),
    (1, 1000, 1, 9, False),
    (1, 500, 1, 140, True),
    (1, 900, 1, 300, False),
    (31, 37, 12, 20, True),
    (70, 130, 64, 64, True),
)


def shapes(selection: Selection, **options: float) -> list[TensorPlan]:
    """Return a plan of each shape and value code."""
    plans = []
    for geometry, values in zip(SHAPES, ValueCode, strict=True):
        rows, cols, height, width, _ = geometry
        most = height * width if selection is not Selection.THRESHOLD else rows * cols
        k = most if selection is Selection.EVERYTHING else max(1, most // 6)
        plans.append(TensorPlan(*geometry, selection, k, values, **options))
    return plans


def are_exchanged(kernels: GpuKernels, plans: Sequence[TensorPlan]) -> None:
    tensors = [numbers("normal", (plan.rows, plan.cols), 1).to(DTYPES[n % 4]) for n, plan in enumerate(plans)]
    states = [numbers("ties", plan.state_shape, 2) for plan in plans]
    exchange(kernels, bucket_of(plans), tensors, states)


def are_refused(kernels: GpuKernels, plan: TensorPlan) -> None:
    """Encode a tensor, and then a state, that is nowhere finite."""
    x, state = numbers("normal", (plan.rows, plan.cols), 1), numbers("normal", plan.state_shape, 2)
    bucket = bucket_of([plan] * 2)
    encoder = kernels.encoder(bucket, torch.empty(bucket.nwords, dtype=torch.int32))
    nan = torch.full_like(state, torch.nan)
    for tensors, states, problem in (
        ([x, x * torch.nan], [state, state.clone()], Problem.NONFINITE),
        ([x, x], [state, nan], Problem.STATE),
    ):
        require(encoder.encode_(tensors, states, states, UPDATE, step=0, sequence=0), problem)
    encoder.mark_nonfinite_(step=0, sequence=0)


def every_selection_is_exchanged(make: MakeKernels) -> None:
    for selection in (Selection.EVERYTHING, Selection.TOP_K, Selection.RANDOM_K, Selection.STRIDING):
        are_exchanged(make(), shapes(selection))


def large_chunks_are_exchanged_in_a_workspace(make: MakeKernels) -> None:
    for selection in (Selection.TOP_K, Selection.STRIDING):
        are_exchanged(make(NEXT_TO_NONE_SHARED), [plan for plan in shapes(selection) if plan.chunk_rows == 64] * 2)


def shapes_are_refused(make: MakeKernels) -> None:
    for plan in (*shapes(Selection.TOP_K)[:-1], shapes(Selection.THRESHOLD, tau=0.3, variable_length=True)[0]):
        are_refused(make(), plan)


def thresholds_are_exchanged(make: MakeKernels) -> None:
    """In payloads of fixed length, with a threshold that rises, and of variable length, few entries and all of them."""
    for tau, variable_length in ((0.3, False), (0.3, True), (1e-6, True)):
        plans = shapes(Selection.THRESHOLD, tau=tau, variable_length=variable_length)[:4]
        if tau < 0.1:
            plans = [replace(plan, k=plan.rows * plan.cols) for plan in plans]
        are_exchanged(make(), [*plans, *shapes(Selection.TOP_K)[:2]])


# --- many senders -----------------------------------------------------------------------------------------------------


def damage_of_many_senders_is_found(make: MakeKernels) -> None:
    """Of more senders than a warp has lanes, in headers, payloads and lengths."""
    few = shapes(Selection.TOP_K)[:2]
    for plans in (few, [*shapes(Selection.THRESHOLD, tau=0.3, variable_length=True)[:2], *few]):
        bucket, kernels = bucket_of(plans), make()
        words = torch.empty(bucket.nwords, dtype=torch.int32)
        tensors = [numbers("normal", spec.shape, 1) for spec in bucket.specs]
        encoder = kernels.encoder(bucket, words)
        require(encoder.encode_(tensors, None, None, UPDATE, step=0, sequence=0), Problem.NONE)
        sent = [filled(words) for _ in range(40)]
        for payload in sent[::3]:
            payload[HEADER_NWORDS:] = -1
        for header in sent[1::3]:
            header[0] = 0
        sent[20] = sent[20][:HEADER_NWORDS]
        decoder = kernels.decoder(bucket, torch.cat(sent), regions_of(sent))
        require(decoder.verify(step=0, sequence=0), Problem.HEADER)


# --- gossip -----------------------------------------------------------------------------------------------------------


def vectors_are_mixed(make: MakeKernels) -> None:
    for dtype in DTYPES:
        x, *others = (numbers("normal", (5000,), seed).to(dtype) for seed in range(4))
        make().mix_(x, 0.5, others, [0.2, 0.2, 0.1], torch.empty_like(x))
        make().mix_(x, 0.5, others, [0.2, 0.2, 0.1], x)


CASES: dict[str, Callable[[MakeKernels], None]] = {
    case.__name__: case
    for case in (
        squares_are_exchanged,
        squares_of_float64_are_exchanged,
        squares_are_refused,
        every_selection_is_exchanged,
        large_chunks_are_exchanged_in_a_workspace,
        shapes_are_refused,
        thresholds_are_exchanged,
        damage_of_many_senders_is_found,
        vectors_are_mixed,
    )
}


def main(library: str, seed: str, *names: str) -> None:
    # So few blocks that each has several chunks, one after the other.
    tables._WORKSPACE_BLOCKS = 2
    for case in (CASES[name] for name in names or CASES):
        case(lambda shared=MUCH_SHARED: GpuKernels(HostLauncher(Path(library), shared, int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
