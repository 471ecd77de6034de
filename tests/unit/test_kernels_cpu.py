"""``flexcomm/kernels/cpu``: the reference's bits for any number of threads, chosen rightly, and compiled once."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flexcomm.codec import assemble_buffer
from flexcomm.compress import Identity, Pipeline, TensorSpec, TopK
from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels import (
    KERNELS_VARIABLE,
    Epilogue,
    ReferenceKernels,
    Selection,
    StateUpdate,
    Status,
    TensorPlan,
    ValueCode,
    choose_kernels,
)
from flexcomm.kernels.__main__ import CALLS, compile_ahead
from flexcomm.kernels.cpu import CpuKernels, checks, codelets, indices, mixing, selection, tables, transform, values
from flexcomm.kernels.cpu.compiler import kernel_folders
from flexcomm.kernels.cpu.kernels import run, split_work
from flexcomm.kernels.layout import Region
from flexcomm.testing import KERNEL_LAWS
from flexcomm.testing.cases import SEQUENCE, decode, encode, encode_bucket, plan_single, sent_coefficients
from tests.slow import slow_but

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flexcomm.kernels import Kernels

SMALLEST_SHARE = "flexcomm.kernels.cpu.kernels._SMALLEST_SHARE"
BLOCK_NUMEL = "flexcomm.kernels.cpu.groups.BLOCK_NUMEL"
LOOPS = {
    *("accumulate_any", "accumulate_flat", "accumulate_plain", "accumulate_squares", "check_headers", "check_values"),
    *("count_reaching", "fill_histogram", "mix_halves", "mix_many", "mix_two", "pick_threshold", "pick_top_k"),
    *(
        "pick_random_k",
        "pick_striding",
        "pick_top_k_of_rows",
        "put_indices",
        "read_counts",
        "read_indices",
        "decode_any",
        "decode_flat",
    ),
    *("decode_plain", "decode_squares", "put_counts", "write_header", "add_sent", "run_loops"),
}
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def signatures() -> dict[str, list[str]]:
    """What every kernel was compiled for, or loaded for."""
    modules = (checks, codelets, indices, mixing, selection, tables, transform, values)
    kernels = {name: kernel for module in modules for name, kernel in vars(module).items() if name in LOOPS}
    kernels |= {loop.__name__: loop for loops in values.CODES.values() for loop in loops}
    return {name: [str(signature) for signature in kernel.signatures] for name, kernel in kernels.items()}


@pytest.fixture(scope="module")
def compiled_ahead() -> dict[str, list[str]]:
    for name in CALLS:
        compile_ahead(name)
    return signatures()


@pytest.mark.timeout(600)  # The first one compiles everything.
@pytest.mark.parametrize("threads", slow_but([3], [1, 3]))
@pytest.mark.parametrize("law", KERNEL_LAWS, ids=lambda law: law.__name__)
def test_cpu_kernels_keep_the_law_and_compile_nothing_but_what_is_compiled_ahead(
    law: Callable[[Kernels, str], None],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    compiled_ahead: dict[str, list[str]],
) -> None:
    assert all(compiled_ahead.values()), "every kernel is compiled ahead"
    monkeypatch.setattr(SMALLEST_SHARE, 1)
    monkeypatch.setattr(BLOCK_NUMEL, 1)
    law(CpuKernels(threads=threads), "cpu")
    assert signatures() == compiled_ahead


def test_work_is_shared_by_as_many_threads_as_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SMALLEST_SHARE, 1)
    assert [len(split_work(70, 70 * 5, threads)) for threads in (1, 2, 3)] == [1, 2, 3]


def test_a_small_tensor_is_not_worth_a_second_thread() -> None:
    assert len(split_work(70, 70 * 5, 3)) == 1


@pytest.mark.parametrize("wrong", ["words", "state"])
def test_kernels_that_differ_in_one_bit_are_found_out(wrong: str) -> None:
    class Careless(ReferenceKernels):
        def encode_tensor_(self, x, words, *others) -> bool:  # type: ignore[no-untyped-def]
            done, state = super().encode_tensor_(x, words, *others), others[-1]
            if wrong == "words":
                words[-1:] ^= 1
            elif state.state_out is not None:
                state.state_out.view(torch.int32)[-1:] ^= 1
            return done

    with pytest.raises(AssertionError, match="reference kernels: broken law"):
        KERNEL_LAWS[0](Careless(), "cpu")


class MixesBackwards(ReferenceKernels):
    def mix_(self, x, self_weight, others, weights, out):  # type: ignore[no-untyped-def]
        return super().mix_(x, self_weight, others[::-1], weights[::-1], out)


class MixesInDoubles(ReferenceKernels):
    def mix_(self, x, self_weight, others, weights, out):  # type: ignore[no-untyped-def]
        filled = torch.empty_like(x, dtype=torch.float64)
        far = super().mix_(x.double(), self_weight, [other.double() for other in others], weights, filled)
        out.copy_(filled)
        return far


class MixesZeros(ReferenceKernels):
    def mix_(self, x, self_weight, others, weights, out):  # type: ignore[no-untyped-def]
        return super().mix_(x, self_weight or 1e-45, others, [weight or 1e-45 for weight in weights], out)


class ForgetsHowFar(ReferenceKernels):
    def mix_(self, x, self_weight, others, weights, out):  # type: ignore[no-untyped-def]
        super().mix_(x, self_weight, others, weights, out)
        return (out.double() - x.double()).square().sum()


@pytest.mark.parametrize("careless", [MixesBackwards, MixesInDoubles, MixesZeros, ForgetsHowFar])
def test_kernels_that_mix_otherwise_are_found_out(careless: type[ReferenceKernels]) -> None:
    laws = [law for law in KERNEL_LAWS if "mix" in law.__name__]
    with pytest.raises(AssertionError, match="reference kernels: broken law"):
        for law in laws:
            law(careless(), "cpu")


@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_parameter_is_mixed_outside_of_autograd(others: int) -> None:
    param = torch.ones(5, requires_grad=True)
    far = CpuKernels(1).mix_(param, 0.5, [torch.ones(5, requires_grad=True)] * others, [0.25] * others, param)
    moved = 0.5 - 0.25 * others
    assert torch.equal(param.detach(), torch.full((5,), 1.0 - moved))
    assert (float(far), far.requires_grad) == (5 * moved * moved, False)


def picked(x: Tensor, k: int, chunk: int) -> list[list[int]]:
    plan = Pipeline(Identity(chunk), TopK(k), "fp32").plan(TensorSpec("x", tuple(x.shape), x.dtype))
    sent = sent_coefficients(CpuKernels(1), encode(CpuKernels(1), x, plan))
    return [row.nonzero()[:, 0].tolist() for row in sent]


def naively_picked(row: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[:k])


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    assert picked(torch.tensor([1.0, -2.0, 2.0, 1.0, -2.0, 2.0, 1.0, 2.0]), 3, 8) == [[1, 2, 4]]
    assert picked(torch.full((64,), -3.0), 5, 64) == [[0, 1, 2, 3, 4]]
    assert picked(torch.full((2048,), 0.5), 3, 1024) == [[0, 1, 2], [0, 1, 2]]
    late = torch.full((1024,), 0.5)
    late[1000:] = -1.0
    assert picked(late, 26, 1024) == [[0, 1, *range(1000, 1024)]]


@pytest.mark.parametrize("k", [1, 2, 15, 31, 63])
@pytest.mark.parametrize("kind", ["normal", "ties", "wide", "denormal"])
def test_the_largest_are_what_sorting_finds(kind: str, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(7 * 64, generator=generator)
    x = {
        "normal": x,
        "ties": (2 * x).round() + 0.5,
        "wide": x * torch.exp2(torch.randint(-60, 60, x.shape, generator=generator)),
        "denormal": x * 1e-40,
    }[kind]
    assert picked(x, k, 64) == [naively_picked(row, k) for row in x.view(7, 64).tolist()]


@pytest.mark.parametrize("k", [1, 7, 32, 500])
def test_the_largest_of_a_long_chunk_are_what_sorting_finds(k: int) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(k))
    rounded = (8 * x).round() / 8 + 1 / 16
    for numbers in (x, rounded):
        assert picked(numbers, k, 4096) == [naively_picked(numbers.tolist(), k)]


@pytest.mark.parametrize("code", list(ValueCode), ids=lambda code: code.name)
def test_zeros_travel_as_zeros(code: ValueCode) -> None:
    for choice in (Selection.EVERYTHING, Selection.TOP_K, Selection.RANDOM_K, Selection.STRIDING):
        keep = 16 if choice is Selection.EVERYTHING else 5
        plan = TensorPlan(1, 48, 1, 16, False, choice, keep, code)
        sent = encode(CpuKernels(1), torch.zeros(48), plan, step=1)
        assert sent.status == Status()
        assert not sent_coefficients(CpuKernels(1), sent).any()


def test_the_fastest_kernels_are_chosen_and_say_their_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    import_module("flexcomm.kernels")._choose.cache_clear()
    with caplog.at_level(logging.INFO, "flexcomm"):
        assert choose_kernels(CPU).name == "cpu"
    assert "cpu tensors are compressed by the cpu kernels" in caplog.text


def test_kernels_can_be_forced_by_argument_and_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "reference")
    assert choose_kernels(CPU).name == "reference"
    assert choose_kernels(CPU, "cpu").name == "cpu"


@pytest.mark.parametrize(
    ("device", "name", "words"),
    [
        ("cpu", "abacus", ["'abacus'", "reference, cpu, gpu"]),
        ("cpu", "gpu", ["the gpu kernels cannot work on cpu tensors", KERNELS_VARIABLE]),
        ("cuda", "cpu", ["the cpu kernels cannot work on cuda tensors", "reference"]),
    ],
)
def test_kernels_that_cannot_be_are_refused_by_name(
    device: str, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        choose_kernels(torch.device(device), name)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    monkeypatch.setenv(KERNELS_VARIABLE, name)
    with pytest.raises(InvalidArgumentError, match=str(caught.value)):
        choose_kernels(torch.device(device))


COMPILE_ALL = """
import logging
logging.basicConfig(level=logging.INFO)
from flexcomm.kernels.__main__ import CALLS, compile_ahead
for name in CALLS:
    compile_ahead(name)
"""


@pytest.mark.usefixtures("compiled_ahead")
def test_a_second_process_compiles_nothing_again() -> None:
    command = [sys.executable, "-c", COMPILE_ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "compiling" not in done.stderr


@pytest.mark.usefixtures("compiled_ahead")
def test_the_command_compiles_everything_and_says_where_it_is() -> None:
    """Takes as long as two interpreters need to import torch and numba."""
    command = [sys.executable, "-m", "flexcomm.kernels", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"{len(CALLS)} of {len(CALLS)}: " in done.stdout
    assert str(kernel_folders()[0]) in done.stdout


@pytest.mark.parametrize("length", [300, 257, 320])
def test_the_largest_are_found_also_behind_the_last_whole_vector_of_a_long_chunk(length: int) -> None:
    keep = 5
    x = torch.arange(float(length)) + 1.0
    plan = TensorPlan(1, length, 1, length, False, Selection.TOP_K, keep, ValueCode.FP32)
    sent = sent_coefficients(CpuKernels(1), encode(CpuKernels(1), x, plan))
    assert torch.equal(sent.view(-1), torch.where(x > length - keep, x, 0.0))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_does_not_matter(default: torch.dtype) -> None:
    plan = TensorPlan(1, 4096, 1, 4096, False, Selection.TOP_K, 1024, ValueCode.FP32)
    x, kernels = torch.arange(4096.0), CpuKernels(1)
    torch.set_default_dtype(default)
    try:
        sent = sent_coefficients(kernels, encode(kernels, x, plan))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(sent.float().view(-1), torch.where(x >= 3072, x, 0.0))


@pytest.mark.parametrize("length", [576, 704, 832, 1600])
def test_the_largest_are_found_also_in_the_rest_of_a_chunk_that_bins_do_not_divide(length: int) -> None:
    x = torch.ones(length)
    x[-64:] = torch.arange(2.0, 66.0)
    assert picked(x, 6, length) == [naively_picked(x.tolist(), 6)]


def test_a_bucket_of_empty_tensors_holds_nothing() -> None:
    for choice in (Selection.TOP_K, Selection.THRESHOLD):
        plan, out = TensorPlan(1, 0, 1, 64, False, choice, 4, ValueCode.BF16), torch.empty(1, 0)
        sent = encode(CpuKernels(1), torch.empty(1, 0), plan)
        assert sent.status == Status()
        decode(CpuKernels(1), sent, plan, out)


@pytest.mark.parametrize(
    "law",
    [law for law in KERNEL_LAWS if "nonfinite" in law.__name__ or "flag" in law.__name__],
    ids=lambda law: law.__name__,
)
def test_the_reference_keeps_the_laws_that_compare_it_with_nothing(law: Callable[[Kernels, str], None]) -> None:
    law(ReferenceKernels(), "cpu")


def test_an_encoder_follows_a_gain_that_changes() -> None:
    plan = plan_single(TensorPlan(1, 64, 1, 32, False, Selection.TOP_K, 4, ValueCode.FP32))
    words, x = torch.empty(plan.nwords, dtype=torch.int32), torch.arange(64.0)
    encoder = CpuKernels(1).encoder(plan, words)
    for gain in (1.0, 0.5, 2.0):
        update = StateUpdate(gain=gain)
        assert encoder.encode_([x], None, None, update, step=0, sequence=SEQUENCE) == 0
        assert torch.equal(words, encode_bucket(ReferenceKernels(), plan, [x], None, update).words)


@pytest.mark.parametrize("rows", [1, 64])
def test_averages_that_are_no_numbers_step_as_the_references_do(rows: int) -> None:
    """Sums of finite values may overflow; infinities of both signs, transformed back, are NaN."""
    plan = plan_single(TensorPlan(rows, 64, rows, 64, True, Selection.TOP_K, 4, ValueCode.FP32))
    state, outputs = torch.zeros(plan.plans[0].state_shape), []
    state.view(-1)[:4] = torch.tensor([3e38, -3e38, 3e38, 1.0])
    for kernels in (ReferenceKernels(), CpuKernels(1)):
        states = [state.clone()]
        words = encode_bucket(kernels, plan, [torch.zeros(rows, 64)], (states, states)).words.repeat(3)
        regions = [Region(f"node {node}", node * plan.nwords, plan.nwords) for node in range(3)]
        decoder, out = kernels.decoder(plan, words, regions), torch.full((rows, 64), 2.0)
        assert decoder.verify(step=0, sequence=SEQUENCE) == 0
        decoder.decode_([out], step=0, average="nodes", epilogue=Epilogue("sign_step", lr=0.5, keep=0.5))
        outputs.append(out)
    assert torch.equal(*outputs)
    assert (outputs[0] == 1.0).any(), "no NaN was decoded, so this compares nothing"


def test_an_interrupt_leaves_the_momentum_of_what_was_encoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [
        TensorPlan(64, 64, 64, 64, True, Selection.TOP_K, 8, ValueCode.BF16),
        TensorPlan(1, 640, 1, 64, True, Selection.TOP_K, 4, ValueCode.BF16),
    ]
    specs = tuple(TensorSpec(str(plan.rows), (plan.rows, plan.cols), torch.float32) for plan in plans)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(plan.rows, plan.cols, generator=generator) for plan in plans]
    before = [torch.randn(plan.state_shape, generator=generator) for plan in plans]
    buffer, calls = assemble_buffer(specs, tuple(plans)), []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr("flexcomm.kernels.cpu.kernels.run", interrupted)
    states = [one.clone() for one in before]
    encoder = CpuKernels(1).encoder(buffer, torch.empty(buffer.nwords, dtype=torch.int32))
    with pytest.raises(KeyboardInterrupt):
        encoder.encode_(tensors, states, states, StateUpdate(decay=0.9), step=0, sequence=SEQUENCE)
    for state, old, x in zip(states, before, tensors, strict=True):
        assert float((state - old).abs().max()) <= 2.0**-21 / 0.9 * float(2 * old.abs().max() + 64 * x.abs().max())


def test_indices_drawn_for_a_later_step_are_not_those_of_an_earlier_one() -> None:
    """A bucket may be encoded for the next step before this one is decoded: both have one plan."""
    plan = plan_single(TensorPlan(1, 4096, 1, 4096, False, Selection.RANDOM_K, 128, ValueCode.FP32))
    kernels, x, averages = CpuKernels(1), torch.arange(1.0, 4097.0), []
    buffers = [torch.zeros(plan.nwords, dtype=torch.int32) for _ in range(2)]
    for step, words in enumerate(buffers):
        assert kernels.encoder(plan, words).encode_([x], None, None, StateUpdate(), step=step, sequence=0) == 0
    for one in (kernels, ReferenceKernels()):
        for step, words in enumerate(buffers):
            averages.append(torch.empty(4096))
            decoder = one.decoder(plan, words, [Region("self", 0, plan.nwords)])
            assert int(decoder.verify(step=step, sequence=0)) == 0
            decoder.decode_(averages[-1:], step=step, average="nodes")
    assert torch.equal(averages[0], averages[2])
    assert torch.equal(averages[1], averages[3])
    assert not torch.equal(averages[0], averages[1])
