"""``flexcomm/kernels/gpu.py`` without a GPU: the same Python and the same CUDA text, run on the host, bit for bit.

And compiled by NVRTC for real devices, with the options a launch would use.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flexcomm.errors import FlexcommError
from flexcomm.kernels import gpu
from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct
from flexcomm.kernels.gpu import GpuKernels
from flexcomm.kernels.plan import Draw, IndexCode, Layout, Selection, TensorPlan, ValueCode
from flexcomm.kernels.protocol import LARGEST_MAGNITUDE, Fault, Kernels, Momentum, Payload, Survey
from flexcomm.kernels.reference import ReferenceKernels
from flexcomm.testing import check_kernels
from flexcomm.wire import plan_layout
from tests.unit.cuda_on_host import HostLauncher, compile_for_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    MakeKernels = Callable[..., GpuKernels]

CAPABILITIES = ("80", "90", "100")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REFERENCE = ReferenceKernels()

needs_nvrtc = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed: nothing can ask NVRTC")


@pytest.fixture(scope="module")
def make_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeKernels]:
    """Give what makes GPU kernels that run on the host; few threads, because each one is real."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernels for the host")
    library = compile_for_host(tmp_path_factory.mktemp("cuda"))

    def make(threads: int = 6, shared_limit: int = 48 << 10) -> GpuKernels:
        return GpuKernels(HostLauncher(library, shared_limit), threads)

    with pytest.MonkeyPatch.context() as patch:
        # So few blocks that each has several chunks, one after the other, where shared memory is not enough.
        patch.setattr(gpu, "_WORKSPACE_BLOCKS", 2)
        gpu._plan_share.cache_clear()
        yield make
    gpu._plan_share.cache_clear()


# --- what is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometry:
    """A tensor's shape, how it is cut, and whether chunks are transformed."""

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int
    transformed: bool


GEOMETRIES = (
    Geometry(1, 331, 1, 32, False),
    Geometry(1, 331, 1, 16, True),
    Geometry(1, 67, 1, 7, True),
    Geometry(1, 500, 1, 140, False),
    Geometry(1, 401, 1, 200, True),
    Geometry(1, 1, 1, 1, True),
    Geometry(1, 64, 1, 64, True),
    Geometry(0, 8, 8, 8, True),
    Geometry(1, 0, 1, 16, False),
    Geometry(16, 24, 8, 8, True),
    Geometry(19, 23, 8, 8, True),
    Geometry(31, 37, 12, 20, True),
    Geometry(9, 5, 5, 1, True),
)


@dataclass(frozen=True)
class Case:
    """Everything one exchange depends on."""

    plan: TensorPlan
    code: IndexCode | None
    dtype: torch.dtype
    kind: str
    remembers: bool
    in_place: bool
    threads: int
    shared_limit: int
    senders: int

    def __str__(self) -> str:
        plan = self.plan
        shape = f"{plan.rows}x{plan.cols}by{plan.chunk_rows}x{plan.chunk_cols}{'t' if plan.transformed else ''}"
        code = self.code.name if self.code else "shortest"
        return f"{plan.selection.name}-{plan.values.name}-{code}-{shape}-{str(self.dtype)[6:]}-{self.kind}"


def sampled_cases(count: int) -> list[Case]:
    """Return cases in which every selection meets every value code, and the rest is drawn, always alike."""
    draw = random.Random(20260801)
    pairs = [(selection, values) for selection in Selection for values in ValueCode]
    geometries = [draw.sample(GEOMETRIES, len(GEOMETRIES)) for _ in pairs]
    return [
        sampled_case(draw, *pairs[number % len(pairs)], geometries[number % len(pairs)][number // len(pairs)])
        for number in range(count)
    ]


def sampled_case(draw: random.Random, selection: Selection, values: ValueCode, geometry: Geometry) -> Case:
    numel = geometry.chunk_rows * geometry.chunk_cols
    keep = (
        numel if selection is Selection.EVERYTHING else draw.choice([1, max(1, numel // 6), max(1, numel // 2), numel])
    )
    plan = TensorPlan(**vars(geometry), selection=selection, keep=keep, values=values)
    code = None
    if selection is Selection.ABOVE:
        whole = plan.chunks * numel
        plan = dataclasses.replace(
            plan, keep=max(1, draw.choice([whole, whole // 3, whole // 9])), tau=draw.choice([0.0, 0.3, 1.0, 1e30]),
            exact=draw.random() < 0.5,
        )  # fmt: skip
    if plan_layout(plan, plan.entries).code is not IndexCode.NONE:
        code = draw.choice([None, IndexCode.PACKED, IndexCode.ELIAS_FANO, IndexCode.BITMAP])
    return Case(
        plan=plan,
        code=code,
        dtype=draw.choice(DTYPES),
        kind=draw.choice(["normal", "ties", "tiny", "sparse", "wide"]),
        remembers=draw.random() < 0.6,
        in_place=draw.random() < 0.5,
        threads=draw.choice([1, 3, 4, 6]),
        shared_limit=draw.choice([48 << 10, 48 << 10, 256]),
        senders=draw.choice([1, 2, 3]),
    )


def make_tensor(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return float32 of a kind: equal magnitudes to be told apart by index, denormals, mostly zeros, and so on."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    if kind == "ties":
        return (2 * normal).round() / 4
    if kind == "tiny":
        return normal * 1e-39
    if kind == "sparse":
        return normal * (torch.rand(shape, generator=generator) < 0.03)
    if kind == "wide":
        return normal * torch.exp2(torch.randint(-30, 15, shape, generator=generator))
    return normal


def layout_for(plan: TensorPlan, entries: int, code: IndexCode | None) -> Layout:
    """Return the shortest layout, or one with a code that is not the shortest."""
    if code is None:
        return plan_layout(plan, entries)
    width = max(1, (plan.chunk_numel - 1).bit_length())
    low = width // 2
    entry_bits, chunk_bits = {
        IndexCode.PACKED: (width, 0),
        IndexCode.ELIAS_FANO: (low + 1, (plan.chunk_numel - 1) >> low),
        IndexCode.BITMAP: (0, plan.chunk_numel),
    }[code]
    indices = -(-plan.chunks * plan.chunk_numel.bit_length() // 32) if plan.is_variable else 0
    scales = indices + -(-(entries * entry_bits + plan.chunks * chunk_bits) // 32)
    values = scales + -(-plan.chunks * plan.values.scales // 2)
    nwords = values + -(-entries * plan.values.bits // 32)
    return Layout(
        code, low if code is IndexCode.ELIAS_FANO else 0, entry_bits, chunk_bits, 0, indices, scales, values, nwords
    )


@dataclass
class Sent:
    """What encoding left behind."""

    words: Tensor
    layout: Layout
    survey: Survey | None
    rest: Tensor | None
    is_finite: bool


DRAW = Draw(key=0xDEADBEEF, start=3)


def encode(kernels: Kernels, case: Case, sender: int) -> Sent:
    plan = case.plan
    x = make_tensor(case.kind, (plan.rows, plan.cols), sender).to(case.dtype)
    momentum = Momentum()
    if case.remembers:
        state = make_tensor(case.kind, plan.state_shape, 100 + sender)
        momentum = Momentum(state, state if case.in_place else torch.full_like(state, torch.nan), 0.9, 0.7)
    survey = kernels.survey(x, plan, momentum) if plan.is_variable else None
    entries = int(survey.counts.sum()) if survey and plan.exact else plan.entries
    layout = layout_for(plan, entries, case.code)
    words = torch.full((layout.nwords,), -1, dtype=torch.int32)
    is_finite = kernels.encode_(x, words, plan, layout, DRAW, momentum, survey)
    return Sent(words, layout, survey, momentum.next_state, is_finite)


def join(sent: list[Sent], kernels: Kernels, plan: TensorPlan) -> tuple[Tensor, list[Payload]]:
    """Put payloads behind one another, with a gap before each; read the counts back."""
    words, payloads = torch.zeros(0, dtype=torch.int32), []
    for one in sent:
        start = words.numel() + 3
        words = torch.cat([words, torch.full((3,), -1, dtype=torch.int32), one.words])
        counts = kernels.read_counts(words, plan, start) if plan.is_variable else None
        payloads.append(Payload(start, one.layout, counts))
    return words, payloads


def decode(kernels: Kernels, case: Case, words: Tensor, payloads: list[Payload]) -> list[Tensor]:
    outs = []
    for average in ("nodes", "contributors"):
        out = torch.full((case.plan.rows, case.plan.cols), torch.nan, dtype=case.dtype)
        kernels.decode_(words, payloads, case.plan, DRAW, average, out)
        outs.append(out)
    return outs


def require_equal_bits(got: Tensor | None, expected: Tensor | None, what: str) -> None:
    if got is None or expected is None:
        assert got is expected, what
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


# --- the laws ---------------------------------------------------------------------------------------------------------


def test_every_law_of_kernels_is_kept(make_kernels: MakeKernels) -> None:
    check_kernels(make_kernels(4))


@pytest.mark.parametrize("case", sampled_cases(60), ids=str)
def test_the_gpu_computes_the_references_bits(case: Case, make_kernels: MakeKernels) -> None:
    kernels = make_kernels(case.threads, case.shared_limit)
    sent = [encode(kernels, case, sender) for sender in range(case.senders)]
    expected = [encode(REFERENCE, case, sender) for sender in range(case.senders)]
    for one, other in zip(sent, expected, strict=True):
        if one.survey and other.survey:
            assert one.survey.tau_bits == other.survey.tau_bits
            require_equal_bits(one.survey.counts, other.survey.counts, "counts")
        assert one.is_finite == other.is_finite
        require_equal_bits(one.words, other.words, "payload")
        require_equal_bits(one.rest, other.rest, "what is kept")
    words, payloads = join(sent, kernels, case.plan)
    words, expected_payloads = join(expected, REFERENCE, case.plan)
    for payload, expected_payload in zip(payloads, expected_payloads, strict=True):
        require_equal_bits(payload.counts, expected_payload.counts, "counts read back")
        assert kernels.find_fault(words, payload, case.plan) is Fault.NONE
    decoded = decode(kernels, case, words, payloads)
    for out, expected_out in zip(decoded, decode(REFERENCE, case, words, expected_payloads), strict=True):
        require_equal_bits(out, expected_out, "what is decoded")


@pytest.mark.parametrize("threads", [1, 2, 33])
def test_the_bits_do_not_depend_on_the_number_of_threads(threads: int, make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 700, 1, 140, True, Selection.LARGEST, 20, ValueCode.SIGN)
    case = Case(plan, None, torch.float32, "normal", True, True, threads, 48 << 10, 1)
    one, other = encode(make_kernels(threads), case, 0), encode(REFERENCE, case, 0)
    require_equal_bits(one.words, other.words, "payload")
    require_equal_bits(one.rest, other.rest, "what is kept")


def test_chunks_of_64_by_64_fit_the_shared_memory_every_device_has(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(70, 65, 64, 64, True, Selection.LARGEST, 32, ValueCode.BF16)
    case = Case(plan, None, torch.float32, "normal", True, False, 8, 48 << 10, 1)
    kernels = make_kernels(8)
    one, other = encode(kernels, case, 0), encode(REFERENCE, case, 0)
    require_equal_bits(one.words, other.words, "payload")
    require_equal_bits(one.rest, other.rest, "what is kept")
    share = gpu._plan_share(plan, 256, 48 << 10)
    assert (share.threads, share.workspace_words) == (256, 0)


def test_payloads_of_one_average_may_have_different_index_codes(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 500, 1, 100, False, Selection.ABOVE, 500, ValueCode.FP32, tau=0.5, exact=True)
    codes = [IndexCode.PACKED, IndexCode.BITMAP, IndexCode.ELIAS_FANO]
    cases = [Case(plan, code, torch.float32, "normal", False, False, 4, 48 << 10, 3) for code in codes]
    kernels = make_kernels(4)
    sent = [encode(kernels, case, sender) for sender, case in enumerate(cases)]
    words, payloads = join(sent, kernels, plan)
    for out, other in zip(
        decode(kernels, cases[0], words, payloads), decode(REFERENCE, cases[0], words, payloads), strict=True
    ):
        require_equal_bits(out, other, "what is decoded")


@pytest.mark.parametrize(("values", "divisor"), [(ValueCode.INT8, 127), (ValueCode.SIGN2, 3)])
def test_scales_are_divided_by_and_not_multiplied_with_a_reciprocal(
    values: ValueCode, divisor: int, make_kernels: MakeKernels
) -> None:
    plan = TensorPlan(1, 400, 1, 4, False, Selection.EVERYTHING, 4, values)
    x = torch.zeros(100, 4)
    x[:, 0] = divisor * torch.arange(100)
    layout = plan_layout(plan, plan.entries)
    words, expected = torch.empty(2, layout.nwords, dtype=torch.int32)
    make_kernels().encode_(x, words, plan, layout, DRAW, Momentum())
    REFERENCE.encode_(x, expected, plan, layout, DRAW, Momentum())
    require_equal_bits(words, expected, "payload")


def test_a_threshold_rises_until_no_more_reach_it_than_may_be_sent(make_kernels: MakeKernels) -> None:
    one_bin_up = 1.0 + 2.0**-7
    x = torch.tensor([one_bin_up, -2.0, 1.0, 0.5] * 25)
    for keep, expected in ((25, 0x3F820000), (49, 0x3F820000), (50, 0x3F810000), (75, 0x3F800000)):
        plan = TensorPlan(1, 100, 1, 10, False, Selection.ABOVE, keep, ValueCode.FP32, tau=1.0)
        for kernels in (make_kernels(), REFERENCE):
            survey = kernels.survey(x, plan, Momentum())
            assert (survey.tau_bits, int(survey.counts.sum()) <= keep) == (expected, True)


def test_tensors_with_gaps_are_read_and_filled(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(10, 12, 8, 8, True, Selection.EVERYTHING, 64, ValueCode.FP32)
    kernels, x = make_kernels(), make_tensor("normal", (12, 10), 0).t()
    layout = plan_layout(plan, plan.entries)
    words, expected = torch.empty(2, layout.nwords, dtype=torch.int32)
    state = torch.zeros(*plan.state_shape, 2)
    assert kernels.encode_(x, words, plan, layout, DRAW, Momentum(state[..., 0], state[..., 1], 1.0, 1.0))
    REFERENCE.encode_(x, expected, plan, layout, DRAW, Momentum())
    require_equal_bits(words, expected, "payload")
    out, other = torch.empty(12, 10).t(), torch.empty(10, 12)
    kernels.decode_(words, [Payload(0, layout)], plan, DRAW, "nodes", out)
    REFERENCE.decode_(words, [Payload(0, layout)], plan, DRAW, "nodes", other)
    require_equal_bits(out, other, "what is decoded")


def test_a_broken_state_is_reported_when_it_is_sent(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 64, 1, 32, False, Selection.LARGEST, 2, ValueCode.BF16)
    state = torch.zeros(plan.state_shape)
    state[1, 7] = torch.inf
    layout = plan_layout(plan, plan.entries)
    words = torch.empty(layout.nwords, dtype=torch.int32)
    assert not make_kernels().encode_(torch.ones(64), words, plan, layout, DRAW, Momentum(state, state))


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(words: Tensor, payload: Payload, draw: random.Random) -> Tensor:
    """Return words with one bit flipped, or one word all ones or zeros, behind the counts."""
    broken = words.clone()
    at = draw.randrange(payload.start + payload.layout.indices, payload.start + payload.layout.nwords)
    broken[at] = draw.choice([-1, 0, int(words[at]) ^ (1 << draw.randrange(31))])
    return broken


@pytest.mark.parametrize("values", list(ValueCode), ids=lambda values: values.name)
@pytest.mark.parametrize("code", list(IndexCode)[1:], ids=lambda code: code.name)
def test_a_payload_is_faulty_for_the_gpu_exactly_when_it_is_for_the_reference(
    values: ValueCode, code: IndexCode, make_kernels: MakeKernels
) -> None:
    draw = random.Random(int(values) + 10 * int(code))
    variable = TensorPlan(1, 200, 1, 40, False, Selection.ABOVE, 200, values, tau=0.8)
    fixed = TensorPlan(9, 23, 8, 8, True, Selection.LARGEST, 9, values)
    for plan in (variable, fixed):
        case = Case(plan, code, torch.float32, "normal", False, False, 4, 48 << 10, 1)
        kernels = make_kernels(4)
        words, (payload,) = join([encode(kernels, case, 0)], kernels, plan)
        for _ in range(8):
            broken = damaged(words, payload, draw)
            got, expected = (each.find_fault(broken, payload, plan) for each in (kernels, REFERENCE))
            assert bool(got) == bool(expected), f"{got!r} is not {expected!r}"


@pytest.mark.parametrize(
    ("section", "word", "fault"),
    [("indices", -1, Fault.INDEX), ("scales", 0x7F80, Fault.SCALE), ("values", 0, Fault.NONE)],
)
def test_what_is_wrong_is_named(section: str, word: int, fault: Fault, make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 200, 1, 40, False, Selection.LARGEST, 5, ValueCode.INT8)
    case = Case(plan, IndexCode.PACKED, torch.float32, "normal", False, False, 4, 48 << 10, 1)
    sent = encode(REFERENCE, case, 0)
    sent.words[getattr(sent.layout, section)] = word
    assert make_kernels().find_fault(sent.words, Payload(0, sent.layout), plan) is fault


def test_values_that_are_not_finite_are_found(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 100, 1, 20, False, Selection.EVERYTHING, 20, ValueCode.FP32)
    case = Case(plan, None, torch.float32, "normal", False, False, 4, 48 << 10, 1)
    sent = encode(REFERENCE, case, 0)
    sent.words[sent.layout.values + 77] = 0x7F800001
    assert make_kernels().find_fault(sent.words, Payload(0, sent.layout), plan) is Fault.VALUE


def test_a_count_beyond_a_chunk_is_refused(make_kernels: MakeKernels) -> None:
    plan = TensorPlan(1, 400, 1, 40, False, Selection.ABOVE, 400, ValueCode.FP32)
    words = torch.zeros(6, dtype=torch.int32)
    counts = make_kernels().read_counts(words, plan, 2)
    require_equal_bits(counts, torch.zeros(10, dtype=torch.int64), "counts")
    words[3] = 41 << 4
    assert REFERENCE.read_counts(words, plan, 2) is None
    assert make_kernels().read_counts(words, plan, 2) is None


# --- one thread an element --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 100, 5000])
def test_the_checksum_is_the_references(length: int, make_kernels: MakeKernels) -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (length,), generator=torch.Generator().manual_seed(length)).to(
        torch.int32
    )
    for first in (0, 12345, (1 << 33) + 7):
        assert make_kernels().checksum(words, first) == REFERENCE.checksum(words, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fit_is_what_the_reference_finds_fit(dtype: torch.dtype, make_kernels: MakeKernels) -> None:
    below = torch.tensor(LARGEST_MAGNITUDE, dtype=torch.float64) * (1 - 2**-9)
    for value in (
        0.0,
        -65504.0,
        float(below),
        -LARGEST_MAGNITUDE,
        2 * LARGEST_MAGNITUDE,
        torch.inf,
        -torch.inf,
        torch.nan,
    ):
        x = torch.zeros(301, dtype=dtype)
        x[250] = value
        assert make_kernels().is_fit(x) == REFERENCE.is_fit(x), value
    assert make_kernels().is_fit(torch.zeros(0, dtype=dtype))


# --- what a device would be given -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 12, 20, 64, 140])
def test_steps_of_one_level_can_be_done_in_any_order(length: int) -> None:
    for program in (plan_dct(length), plan_inverse_dct(length)):
        order, bounds = gpu._plan_levels(program)
        assert sorted(order.tolist()) == list(range(len(program.steps)))
        for first, last in pairwise(bounds.tolist()):
            rows = [gpu._rows_of_step(*program.steps[number].tolist()) for number in order[first:last]]
            written = [row for rows_written, _ in rows for row in rows_written]
            assert len(written) == len(set(written))
            assert not set(written) & {row for _, rows_read in rows for row in rows_read}


def test_large_chunks_ask_for_global_memory_within_bounds() -> None:
    plan = TensorPlan(1, 1 << 26, 1, 1 << 20, False, Selection.LARGEST, 1000, ValueCode.BF16)
    share = gpu._plan_share(plan, 256, 227 << 10)
    assert 0 < share.workspace_words <= 1 << 26
    assert share.shared_nbytes <= 48 << 10


@needs_nvrtc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nvrtc_compiles_the_kernels(capability: str) -> None:
    assert gpu.compile_cubin(capability)[:4] == b"\x7fELF"


@needs_nvrtc
def test_compiled_arithmetic_is_ieees() -> None:
    nvrtc: Any = pytest.importorskip("cupy").cuda.nvrtc
    program = nvrtc.createProgram(gpu.SOURCE.read_text(), gpu.SOURCE.name, (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_80", *gpu.OPTIONS))
    text = bytes(nvrtc.getPTX(program)).decode()
    nvrtc.destroyProgram(program)
    assert "div.rn.f32" in text
    assert not [word for word in (".ftz", "fma.", ".approx", "div.full") if word in text]


@needs_nvrtc
def test_compiled_kernels_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu, "compile_cubin", str.encode)
    path = gpu._find_cubin("90")
    assert path.read_bytes() == b"90"
    monkeypatch.setattr(gpu, "compile_cubin", lambda _: pytest.fail("compiled again"))
    assert gpu._find_cubin("90") == path
    assert list((tmp_path / "cache").iterdir()) == [path]


@needs_nvrtc
def test_a_device_nvrtc_does_not_know_is_an_error_that_says_so() -> None:
    with pytest.raises(FlexcommError, match="compute capability 11"):
        gpu.compile_cubin("11")


# --- a real device ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_real_device_keeps_every_law_of_kernels() -> None:
    check_kernels(GpuKernels(), "cuda")
