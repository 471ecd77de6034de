"""``flexcomm/kernels/gpu`` without a GPU: the same Python and the same CUDA text, run on the host, bit for bit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, get_args

import pytest
import torch

from bench.gpu.cuda_on_host import HostLauncher, compile_for_host
from flexcomm.kernels import (
    Average,
    Epilogue,
    Problem,
    ReferenceKernels,
    Region,
    Selection,
    StateUpdate,
    Status,
    TensorPlan,
    ValueCode,
)
from flexcomm.kernels.gpu import GpuKernels, tables
from flexcomm.testing import KERNEL_LAWS
from flexcomm.testing.cases import DTYPES, SEQUENCE, encode, encode_bucket, numbers, plan_single
from tests.slow import slow_but
from tests.unit.gpu_buckets import CHOICES, bucket_of, squares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import SupportsInt

    from torch import Tensor

    from flexcomm.kernels import Kernels

    MakeKernels = Callable[..., GpuKernels]
    Law = Callable[[Kernels, str], None]

UPDATE = StateUpdate(decay=0.875, gain=0.75)
REFERENCE = ReferenceKernels()
MUCH_SHARED, NEXT_TO_NONE_SHARED = 96 << 10, 18 << 10
GUARD = 0x600DBEEF
AVERAGES: tuple[Average, ...] = get_args(Average)


@pytest.fixture(scope="module")
def make_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeKernels]:
    """Give what makes GPU kernels that run on the host."""
    if shutil.which("g++") is None:
        pytest.fail("the GPU kernels are tested on the host, and there is no g++ to compile them. Install one.")
    library = compile_for_host(tmp_path_factory.mktemp("cuda"))

    def make(shared_limit: int = MUCH_SHARED, seed: int = 0) -> GpuKernels:
        return GpuKernels(HostLauncher(library, shared_limit, seed))

    with pytest.MonkeyPatch.context() as patch:
        # So few blocks that each has several chunks, one after the other, where shared memory is not enough.
        patch.setattr(tables, "_WORKSPACE_BLOCKS", 2)
        yield make


@pytest.mark.parametrize("shared_limit", slow_but([MUCH_SHARED], [MUCH_SHARED, NEXT_TO_NONE_SHARED]))
@pytest.mark.parametrize("law", KERNEL_LAWS, ids=lambda law: law.__name__)
def test_a_law_of_kernels_is_kept(law: Law, shared_limit: int, make_kernels: MakeKernels) -> None:
    law(make_kernels(shared_limit), "cpu")


# --- chunks of any shape ----------------------------------------------------------------------------------------------


def require_equal_bits(got: Tensor, expected: Tensor, what: str) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


def require_guarded(kernels: Kernels, x: Tensor, plan: TensorPlan, state: Tensor) -> None:
    """Encode into a buffer between guards that nobody may touch."""
    bucket = plan_single(plan)
    guarded = torch.full((bucket.nwords + 2,), GUARD, dtype=torch.int32)
    kernels.encoder(bucket, guarded[1:-1]).encode_([x], [state], [state], UPDATE, step=3, sequence=SEQUENCE)
    assert guarded[[0, -1]].tolist() == [GUARD, GUARD]


def require_equal_exchange(kernels: Kernels, plan: TensorPlan, x: Tensor | None = None) -> None:
    x = numbers("normal", (plan.rows, plan.cols), 1) if x is None else x
    state = numbers("normal", plan.state_shape, 2)
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
    for average in AVERAGES:
        outs = torch.full((2, plan.rows, plan.cols), torch.nan)
        for decoder, out in zip(decoders, outs, strict=True):
            decoder.decode_([out], step=3, average=average)
        require_equal_bits(*outs, "what is decoded")


@pytest.mark.parametrize("selection", list(Selection), ids=lambda selection: selection.name)
@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param((1, 401, 1, 200, True), id="one long row"),
        pytest.param((1, 500, 1, 140, False), id="long chunks"),
        pytest.param((31, 37, 12, 20, True), id="odd matrices"),
        pytest.param((1, 670, 1, 7, True), id="short chunks"),
        pytest.param((70, 65, 64, 64, True), id="squares"),
    ],
)
def test_chunks_of_any_shape_are_the_references(
    geometry: tuple[int, int, int, int, bool], selection: Selection, make_kernels: MakeKernels
) -> None:
    numel = geometry[2] * geometry[3]
    keep = numel if selection is Selection.EVERYTHING else numel // 6
    for values in (ValueCode.FP16, ValueCode.SIGN):
        require_equal_exchange(make_kernels(), TensorPlan(*geometry, selection, keep, values))


@pytest.mark.parametrize(("values", "divisor"), [(ValueCode.INT8, 127), (ValueCode.SIGN2, 3)])
def test_scales_are_divided_by_and_not_multiplied_with_a_reciprocal(
    values: ValueCode, divisor: int, make_kernels: MakeKernels
) -> None:
    plan = TensorPlan(1, 400, 1, 4, False, Selection.EVERYTHING, 4, values)
    x = torch.zeros(100, 4)
    x[:, 0] = divisor * torch.arange(100)
    require_equal_bits(encode(make_kernels(), x, plan).words, encode(REFERENCE, x, plan).words, "payload")


@pytest.mark.parametrize("keep", [75, 60, 50, 49, 25, 10])
def test_a_threshold_rises_to_the_bin_at_which_too_many_reach_it(keep: int, make_kernels: MakeKernels) -> None:
    one_bin_up = 1.0 + 2.0**-7
    x = torch.tensor([one_bin_up, -2.0, 1.0, 0.5] * 25)
    for tau, variable_length in ((1.0, False), (1.0, True), (1e300, False)):
        plan = TensorPlan(
            1, 100, 1, 10, False, Selection.THRESHOLD, keep, ValueCode.FP32, tau=tau, variable_length=variable_length
        )
        require_equal_exchange(make_kernels(), plan, x)


@pytest.mark.parametrize("values", list(ValueCode), ids=lambda values: values.name)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_state_with_more_broken_numbers_than_may_be_sent_is_reported(
    broken: float, values: ValueCode, make_kernels: MakeKernels
) -> None:
    plan = TensorPlan(1, 500, 1, 100, False, Selection.THRESHOLD, 20, values, tau=0.1)
    for kernels in (make_kernels(), REFERENCE):
        state = torch.full(plan.state_shape, broken)
        assert encode(kernels, torch.ones(500), plan, state, state).status == Status(Problem.STATE)


# --- chunks of 64 x 64, in registers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", squares())
def test_squares_are_encoded_as_the_reference_does(name: str, make_kernels: MakeKernels) -> None:
    x, state = squares()[name]
    kernels = make_kernels(seed=len(name))
    for number, (k, values) in enumerate(CHOICES):
        plan = TensorPlan(*x.shape, 64, 64, True, Selection.TOP_K, k, values)
        update, in_place = UPDATE._replace(alpha=(1.0, 0.3)[number % 2]), number % 3 > 0
        sent = []
        for one in (kernels, REFERENCE):
            size = float(x.abs().mean())
            before = numbers("normal", plan.state_shape, 11) * size if state is None else state.clone()
            after = before if in_place else torch.full_like(before, torch.nan)
            sent.append((encode_bucket(one, plan_single(plan), [x], ([before], [after]), update), after))
        (got, left), (expected, expected_left) = sent
        assert got.status == expected.status == Status()
        require_equal_bits(got.words, expected.words, f"{k} of {name} as {values.name}")
        require_equal_bits(left, expected_left, f"what is left of {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_of_any_dtype_are_encoded_without_states(dtype: torch.dtype, make_kernels: MakeKernels) -> None:
    for shape in ((64, 128), (70, 100), (130, 64)):
        x = numbers("normal", shape, 1).to(dtype)
        plan = TensorPlan(*shape, 64, 64, True, Selection.TOP_K, 32, ValueCode.SIGN)
        require_equal_bits(encode(make_kernels(), x, plan).words, encode(REFERENCE, x, plan).words, f"{shape}")


@pytest.mark.parametrize("senders", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", slow_but([torch.float32, torch.bfloat16], DTYPES), ids=str)
def test_squares_step_as_the_reference_does(dtype: torch.dtype, senders: int, make_kernels: MakeKernels) -> None:
    """Whole chunks and rims, rows aligned and not, few coefficients and many, averages that are denormal or vanish."""
    epilogues = Epilogue(), Epilogue("sign_step", 0.01, 0.9), Epilogue("plain_step", 0.0, 0.95)
    for number, shape in enumerate([(128, 128), (100, 90), (64, 68)]):
        k, values = ((32, ValueCode.BF16), (396, ValueCode.SIGN), (9, ValueCode.FP32))[(number + senders) % 3]
        bucket = plan_single(TensorPlan(*shape, 64, 64, True, Selection.TOP_K, k, values))
        size = (1.0, 1e-37, 1e-43)[number]
        sent = [encode_bucket(REFERENCE, bucket, [numbers("normal", shape, 20 + one) * size]) for one in range(senders)]
        words, nwords = torch.cat([one.words for one in sent]), sent[0].words.numel()
        regions = [Region(f"sender {one}", one * nwords, nwords) for one in range(senders)]
        decoders = [one.decoder(bucket, words, regions) for one in (make_kernels(), REFERENCE)]
        assert [int(one.verify(step=0, sequence=SEQUENCE)) for one in decoders] == [0, 0]
        for average in AVERAGES:
            for epilogue in epilogues:
                outs = [numbers("normal", shape, 30).to(dtype) for _ in decoders]
                for decoder, out in zip(decoders, outs, strict=True):
                    decoder.decode_([out], step=0, average=average, epilogue=epilogue)
                require_equal_bits(*outs, f"{senders} x {k} of {shape} over {average}, {epilogue}")


# --- launches and reads -----------------------------------------------------------------------------------------------


def refuse_reads(patch: pytest.MonkeyPatch) -> None:
    for read in ("item", "__int__", "__bool__", "__float__", "tolist", "cpu", "numpy"):
        patch.setattr(torch.Tensor, read, lambda *_: pytest.fail("a tensor was read"))


def test_a_bucket_takes_one_launch_each_way_and_no_read(
    make_kernels: MakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of tensors and of senders; the one read is the caller's, of what verify found."""
    plans = [
        TensorPlan(100, 90, 64, 64, True, Selection.TOP_K, 32, ValueCode.BF16),
        TensorPlan(1, 90, 1, 64, True, Selection.TOP_K, 8, ValueCode.SIGN),
        TensorPlan(1, 90, 1, 90, False, Selection.EVERYTHING, 90, ValueCode.FP32),
        TensorPlan(1, 300, 1, 150, False, Selection.RANDOM_K, 9, ValueCode.INT8),
    ] * 5
    senders = 4
    launcher = make_kernels()._launcher
    assert isinstance(launcher, HostLauncher)
    kernels = GpuKernels(launcher)
    bucket = bucket_of(plans)
    tensors = [numbers("normal", (plan.rows, plan.cols), 1) for plan in plans]
    states = [torch.zeros(plan.state_shape) for plan in plans]
    words = torch.empty(senders * bucket.nwords, dtype=torch.int32)
    regions = [Region(str(sender), sender * bucket.nwords, bucket.nwords) for sender in range(senders)]
    encoder, decoder = kernels.encoder(bucket, words[: bucket.nwords]), kernels.decoder(bucket, words, regions)

    def exchange() -> SupportsInt:
        encoder.encode_(tensors, states, states, UPDATE, step=0, sequence=0)
        for sender in range(1, senders):
            words[regions[sender].start :][: bucket.nwords] = words[: bucket.nwords]
        status = decoder.verify(step=0, sequence=0)
        decoder.decode_(tensors, step=0, average="nodes", epilogue=Epilogue("sign_step", 0.1))
        return status

    assert int(exchange()) == 0  # plans become tables
    launcher.launches.clear()
    with monkeypatch.context() as patch:
        refuse_reads(patch)
        status = exchange()
    assert launcher.launches == ["encode", "verify", "decode_sign_step"]
    assert int(status) == 0
    encoder.rollback_(tensors, states, UPDATE, step=0)
    assert launcher.launches[3:] == ["rollback"]


def test_thresholds_take_a_fixed_number_of_launches_and_no_read(
    make_kernels: MakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TensorPlan(1, 300, 1, 64, False, Selection.THRESHOLD, 40, ValueCode.BF16, tau=0.1, variable_length=True)
    for count in (1, 7):
        launcher = make_kernels()._launcher
        assert isinstance(launcher, HostLauncher)
        bucket = bucket_of([plan] * count)
        tensors, words = [torch.ones(300)] * count, torch.empty(bucket.nwords, dtype=torch.int32)
        encoder = GpuKernels(launcher).encoder(bucket, words)
        with monkeypatch.context() as patch:
            refuse_reads(patch)
            encoder.encode_(tensors, None, None, UPDATE, step=0, sequence=0)
        counted = ["count_chunks", "raise_thresholds", "count_chunks", "place_entries"]
        assert launcher.launches == [*counted, "encode", "seal"]


def test_buffers_that_were_found_wrong_are_not_decoded(make_kernels: MakeKernels) -> None:
    """Also if nobody has read the status before they are."""
    plan = TensorPlan(64, 64, 64, 64, True, Selection.TOP_K, 32, ValueCode.BF16)
    sent = encode(REFERENCE, numbers("normal", (64, 64), 1), plan)
    sent.words[20] ^= 1
    decoder = make_kernels().decoder(sent.plan, sent.words, [Region("sender", 0, sent.words.numel())])
    out = torch.full((64, 64), 7.0)
    status = decoder.verify(step=0, sequence=SEQUENCE)
    decoder.decode_([out], step=0, average="nodes")
    assert Status.of(int(status)) == Status(Problem.HEADER)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("in_state", [False, True])
def test_a_chunk_that_is_not_finite_is_not_stored(in_state: bool, make_kernels: MakeKernels) -> None:
    """The others are, and go back when the status is read."""
    plan = TensorPlan(128, 128, 64, 64, True, Selection.TOP_K, 32, ValueCode.BF16)
    bucket, x, state = plan_single(plan), numbers("normal", (128, 128), 1), numbers("normal", plan.state_shape, 2)
    broken = state[2] if in_state else x[70]
    broken[5] = torch.nan
    before = state.clone()
    encoder = make_kernels().encoder(bucket, torch.empty(bucket.nwords, dtype=torch.int32))
    status = encoder.encode_([x], [state], [state], UPDATE, step=0, sequence=0)
    require_equal_bits(state[2], before[2], "the chunk that is not finite")
    assert not torch.equal(state[0], before[0])
    assert Status.of(int(status)) == Status(Problem.STATE if in_state else Problem.NONFINITE)
    torch.testing.assert_close(state, before, rtol=2.0**-20, atol=2.0**-20, equal_nan=True)
    # Which chunks were refused is forgotten with them.
    broken[5] = 0.0
    expected = state.clone()
    assert int(encoder.encode_([x], [state], [state], UPDATE, step=1, sequence=1)) == 0
    encoder.rollback_([x], [state], UPDATE, step=1)
    torch.testing.assert_close(state, expected, rtol=2.0**-20, atol=2.0**-20, equal_nan=True)


def test_a_workspace_is_found_by_every_launch(make_kernels: MakeKernels) -> None:
    """Also where the launch that counts leaves out the tensors before, whose counts do not depend on the data."""
    first = TensorPlan(1, 640, 1, 100, False, Selection.TOP_K, 30, ValueCode.FP32)
    large = TensorPlan(1, 13000, 1, 4500, False, Selection.THRESHOLD, 900, ValueCode.FP32, tau=0.1)
    bucket = bucket_of([first, first, large])
    tensors = [numbers("normal", (1, plan.cols), 1) for plan in bucket.plans]
    got = encode_bucket(make_kernels(NEXT_TO_NONE_SHARED), bucket, tensors)
    require_equal_bits(got.words, encode_bucket(REFERENCE, bucket, tensors).words, "buffer")


def test_chunks_go_back_one_by_one(make_kernels: MakeKernels) -> None:
    """Blocks that put them back hold more short chunks than those that encode beside chunks in registers."""
    short = TensorPlan(1, 100 * 64, 1, 64, True, Selection.TOP_K, 8, ValueCode.BF16)
    bucket = bucket_of([TensorPlan(64, 64, 64, 64, True, Selection.TOP_K, 32, ValueCode.BF16), short])
    tensors = [numbers("normal", (plan.rows, plan.cols), 1) for plan in bucket.plans]
    states = [numbers("normal", plan.state_shape, 2) for plan in bucket.plans]
    before = [state.clone() for state in states]
    for broken in (5, 40 * 64, 6399):
        tensors[1][0, broken], kept = torch.nan, tensors[1][0, broken].clone()
        encoder = make_kernels().encoder(bucket, torch.empty(bucket.nwords, dtype=torch.int32))
        status = encoder.encode_(tensors, states, states, UPDATE, step=0, sequence=0)
        assert Status.of(int(status)) == Status(Problem.NONFINITE, tensor=1)
        torch.testing.assert_close(states, before, rtol=2.0**-19, atol=2.0**-19)
        tensors[1][0, broken] = kept


def test_what_was_refused_is_known_of_the_last_call_alone(make_kernels: MakeKernels) -> None:
    """Without states nothing is put back, so nobody has looked at what was refused."""
    plan = TensorPlan(64, 128, 64, 64, True, Selection.TOP_K, 32, ValueCode.BF16)
    for one in (plan, TensorPlan(1, 90, 1, 7, False, Selection.TOP_K, 2, ValueCode.BF16)):
        bucket, x = plan_single(one), numbers("normal", (one.rows, one.cols), 1)
        encoder = make_kernels().encoder(bucket, torch.empty(bucket.nwords, dtype=torch.int32))
        assert int(encoder.encode_([x * torch.nan], None, None, UPDATE, step=0, sequence=0)) == Problem.NONFINITE
        state = numbers("normal", one.state_shape, 2)
        before = state.clone()
        assert int(encoder.encode_([x], [state], [state], UPDATE, step=1, sequence=1)) == 0
        encoder.rollback_([x], [state], UPDATE, step=1)
        torch.testing.assert_close(state, before, rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.parametrize("overflowing", [[1], [1, 2, 70, 4095]], ids=len)
def test_squares_step_by_sums_that_overflow_as_the_reference_does(
    overflowing: list[int], make_kernels: MakeKernels
) -> None:
    """Averages are infinite, or not a number, which has no sign."""
    bucket = plan_single(TensorPlan(64, 64, 64, 64, True, Selection.TOP_K, 32, ValueCode.FP32))
    state = torch.linspace(0.5, 1.0, 4096)[None]
    state[0, overflowing] = -3e38
    sent = encode_bucket(REFERENCE, bucket, [torch.zeros(64, 64)], ([state], [state]))
    nwords = sent.words.numel()
    for senders in (2, 3):
        regions = [Region(f"sender {one}", one * nwords, nwords) for one in range(senders)]
        for average in AVERAGES:
            for epilogue in (Epilogue(), Epilogue("sign_step", 0.01, 0.9), Epilogue("plain_step", 0.0, 0.95)):
                outs = [torch.ones(64, 64) for _ in range(2)]
                for kernels, out in zip((make_kernels(), REFERENCE), outs, strict=True):
                    decoder = kernels.decoder(bucket, sent.words.repeat(senders), regions)
                    decoder.decode_([out], step=0, average=average, epilogue=epilogue)
                torch.testing.assert_close(*outs, rtol=0.0, atol=0.0, equal_nan=True)


def test_squares_step_backwards_as_the_reference_does(make_kernels: MakeKernels) -> None:
    bucket = plan_single(TensorPlan(64, 64, 64, 64, True, Selection.TOP_K, 32, ValueCode.FP32))
    sent = encode_bucket(REFERENCE, bucket, [numbers("normal", (64, 64), 1)])
    outs = [torch.ones(64, 64) for _ in range(2)]
    for kernels, out in zip((make_kernels(), REFERENCE), outs, strict=True):
        decoder = kernels.decoder(bucket, sent.words, [Region("sender", 0, sent.words.numel())])
        decoder.decode_([out], step=0, average="nodes", epilogue=Epilogue("sign_step", -0.5))
    require_equal_bits(*outs, "what is decoded")
