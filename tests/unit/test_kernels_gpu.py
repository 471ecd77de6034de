"""``flexcomm/kernels/gpu`` without a GPU: the same Python and the same CUDA text, run on the host, bit for bit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, get_args

import pytest
import torch

from flexcomm.kernels import Average, Problem, ReferenceKernels, Region, Selection, StateUpdate, Status, TensorPlan
from flexcomm.kernels import ValueCode as Value
from flexcomm.kernels.gpu import GpuKernels, launcher
from flexcomm.kernels.per_tensor import TensorState
from flexcomm.testing import KERNEL_LAWS
from flexcomm.testing.cases import SEQUENCE, encode, numbers, plan_single
from flexcomm.testing.kernels import mixing_gives_the_references_bits
from tests.slow import slow_but
from tests.unit.cuda_on_host import HostLauncher, compile_for_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from flexcomm.kernels import Kernels

    MakeKernels = Callable[..., GpuKernels]
    Law = Callable[[Kernels, str], None]

UPDATE = StateUpdate(decay=0.9, gain=0.7)
STATELESS = TensorState(None, None, StateUpdate())
REFERENCE = ReferenceKernels()
USUAL_SHARED = 48 << 10
NEXT_TO_NONE_SHARED = 256
GUARD = 0x600DBEEF


@pytest.fixture(scope="module")
def make_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeKernels]:
    """Give what makes GPU kernels that run on the host; few threads, because each one is real."""
    if shutil.which("g++") is None:
        pytest.fail("the GPU kernels are tested on the host, and there is no g++ to compile them. Install one.")
    library = compile_for_host(tmp_path_factory.mktemp("cuda"))

    def make(threads: int = 6, shared_limit: int = USUAL_SHARED) -> GpuKernels:
        return GpuKernels(HostLauncher(library, shared_limit), threads)

    with pytest.MonkeyPatch.context() as patch:
        # So few blocks that each has several chunks, one after the other, where shared memory is not enough.
        patch.setattr(launcher, "_WORKSPACE_BLOCKS", 2)
        launcher.plan_chunk_launch.cache_clear()
        yield make
    launcher.plan_chunk_launch.cache_clear()


@pytest.mark.parametrize(
    ("threads", "shared_limit"),
    [
        pytest.param(4, USUAL_SHARED, id="shared memory"),
        pytest.param(3, NEXT_TO_NONE_SHARED, id="global memory", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "law",
    # Thousands of launches, each with real threads.
    slow_but([law for law in KERNEL_LAWS if law is not mixing_gives_the_references_bits], KERNEL_LAWS),
    ids=lambda law: law.__name__,
)
def test_a_law_of_kernels_is_kept(law: Law, threads: int, shared_limit: int, make_kernels: MakeKernels) -> None:
    law(make_kernels(threads, shared_limit), "cpu")


# --- where blocks work differently ------------------------------------------------------------------------------------


def require_equal_bits(got: Tensor, expected: Tensor, what: str) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


def require_guarded(kernels: Kernels, x: Tensor, plan: TensorPlan, state: Tensor) -> None:
    """Encode into a buffer between guards that nobody may touch."""
    bucket = plan_single(plan)
    guarded = torch.full((bucket.nwords + 2,), GUARD, dtype=torch.int32)
    kernels.encoder(bucket, guarded[1:-1]).encode_([x], [state], [state], UPDATE, step=3, sequence=SEQUENCE)
    assert guarded[[0, -1]].tolist() == [GUARD, GUARD]


def require_equal_exchange(kernels: Kernels, plan: TensorPlan) -> None:
    x, state = numbers("normal", (plan.rows, plan.cols), 1), numbers("normal", plan.state_shape, 2)
    require_guarded(kernels, x, plan, state.clone())
    left, expected_left = state.clone(), state.clone()
    sent = encode(kernels, x, plan, left, left, UPDATE, step=3)
    expected = encode(REFERENCE, x, plan, expected_left, expected_left, UPDATE, step=3)
    require_equal_bits(sent.words, expected.words, "buffer")
    require_equal_bits(left, expected_left, "what is kept")
    nwords = sent.words.numel()
    gathered, regions = sent.words.repeat(2), [Region("a", 0, nwords), Region("b", nwords, nwords)]
    decoders = [one.decoder(sent.plan, gathered, regions) for one in (kernels, REFERENCE)]
    assert [int(one.verify(step=3, sequence=SEQUENCE)) for one in decoders] == [0, 0]
    averages: tuple[Average, ...] = get_args(Average)
    for average in averages:
        outs = torch.full((2, plan.rows, plan.cols), torch.nan)
        for decoder, out in zip(decoders, outs, strict=True):
            decoder.decode_([out], step=3, average=average)
        require_equal_bits(*outs, "what is decoded")


@pytest.mark.parametrize("threads", slow_but([1, 2], [1, 2, 33]))
@pytest.mark.parametrize("selection", [Selection.TOP_K, Selection.THRESHOLD], ids=lambda selection: selection.name)
def test_the_bits_do_not_depend_on_the_number_of_threads(
    selection: Selection, threads: int, make_kernels: MakeKernels
) -> None:
    require_equal_exchange(make_kernels(threads), TensorPlan(1, 700, 1, 140, True, selection, 20, Value.SIGN))


@pytest.mark.parametrize("threads", [1, 2, 33])
def test_what_is_mixed_does_not_depend_on_the_number_of_threads(threads: int, make_kernels: MakeKernels) -> None:
    x, other = numbers("wide", (2, 700), 3)
    out, expected = torch.empty(2, 700)
    far = make_kernels(threads).mix_(x, 0.3, [other], [0.7], out)
    torch.testing.assert_close(far, REFERENCE.mix_(x, 0.3, [other], [0.7], expected), rtol=1e-14, atol=0.0)
    require_equal_bits(out, expected, "what is mixed")


@pytest.mark.parametrize("selection", list(Selection), ids=lambda selection: selection.name)
@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param((1, 401, 1, 200, True), id="one long row", marks=pytest.mark.slow),
        pytest.param((1, 500, 1, 140, False), id="long chunks"),
        pytest.param((31, 37, 12, 20, True), id="odd matrices"),
        pytest.param((1, 670, 1, 7, True), id="short chunks"),
    ],
)
def test_chunks_of_any_shape_are_the_references(
    geometry: tuple[int, int, int, int, bool], selection: Selection, make_kernels: MakeKernels
) -> None:
    numel = geometry[2] * geometry[3]
    keep = numel if selection is Selection.EVERYTHING else numel // 6
    for values in (Value.FP16, Value.SIGN):
        require_equal_exchange(make_kernels(4), TensorPlan(*geometry, selection, keep, values))


def test_chunks_of_64_by_64_are_the_references(make_kernels: MakeKernels) -> None:
    require_equal_exchange(make_kernels(8), TensorPlan(70, 65, 64, 64, True, Selection.TOP_K, 32, Value.BF16))


@pytest.mark.parametrize(("values", "divisor"), [(Value.INT8, 127), (Value.SIGN2, 3)])
def test_scales_are_divided_by_and_not_multiplied_with_a_reciprocal(
    values: Value, divisor: int, make_kernels: MakeKernels
) -> None:
    plan = TensorPlan(1, 400, 1, 4, False, Selection.EVERYTHING, 4, values)
    x = torch.zeros(100, 4)
    x[:, 0] = divisor * torch.arange(100)
    require_equal_bits(encode(make_kernels(), x, plan).words, encode(REFERENCE, x, plan).words, "payload")


# --- a threshold with a capacity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "tau_bits"),
    [(75, 0x3F800000), (60, 0x3F800000), (50, 0x3F800000), (49, 0x3F810000), (25, 0x3F810000), (10, 0x40000000)],
)
def test_a_threshold_rises_to_the_bin_at_which_too_many_reach_it(
    keep: int, tau_bits: int, make_kernels: MakeKernels
) -> None:
    one_bin_up = 1.0 + 2.0**-7
    x = torch.tensor([one_bin_up, -2.0, 1.0, 0.5] * 25)
    plan = TensorPlan(1, 100, 1, 10, False, Selection.THRESHOLD, keep, Value.FP32, tau=1.0)
    for kernels in (make_kernels(), REFERENCE):
        threshold = kernels.find_threshold(x, plan, STATELESS)
        assert (threshold.tau_bits, int(threshold.counts.sum())) == (tau_bits, keep)


def test_a_threshold_beyond_all_float32_is_reached_by_nothing(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 100, 1, 10, False, Selection.THRESHOLD, 5, Value.FP32, tau=1e300)
    for kernels in (make_kernels(), REFERENCE):
        assert int(kernels.find_threshold(torch.full((100,), 1e30), plan, STATELESS).counts.sum()) == 0


def test_of_equals_the_first_chunks_and_the_lowest_indices_are_sent(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 500, 1, 100, False, Selection.THRESHOLD, 230, Value.FP32, tau=0.1)
    for kernels in (make_kernels(), make_kernels(4, NEXT_TO_NONE_SHARED), REFERENCE):
        left = torch.zeros(plan.state_shape)
        assert encode(kernels, torch.ones(500), plan, left, left).status == Status()
        assert left.view(-1).nonzero()[:, 0].tolist() == list(range(230, 500))


@pytest.mark.parametrize("values", list(Value), ids=lambda values: values.name)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_state_with_more_broken_numbers_than_may_be_sent_is_reported(
    broken: float, values: Value, make_kernels: MakeKernels
) -> None:
    plan = TensorPlan(1, 500, 1, 100, False, Selection.THRESHOLD, 20, values, tau=0.1)
    for kernels in (make_kernels(), REFERENCE):
        state = torch.full(plan.state_shape, broken)
        assert encode(kernels, torch.ones(500), plan, state, state).status == Status(Problem.STATE)
