"""Tensors share a buffer and come out as if each had travelled alone; or an error says why, and nothing changed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcomm.codec import Decoder, Encoder, check_numbers, plan_buffer
from flexcomm.compress import (
    Compressor,
    Identity,
    Pipeline,
    TensorSpec,
    Threshold,
    demo,
    dense,
    random_k,
    sign,
    striding,
    threshold,
    top_k,
)
from flexcomm.errors import CompressorError, InvalidArgumentError, InvalidTensorError, NonFiniteError, WireError
from flexcomm.kernels import ReferenceKernels, TensorPlan, ValueCode
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.kernels.layout import HEADER_NBYTES
from tests.unit.buckets import SEQUENCE, STEP, Gathered, blank_states, gather, open_, opened, specs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm.kernels import Kernels

REFERENCE, CPU = ReferenceKernels(), CpuKernels(1)
VALUES = ("fp32", "bf16", "fp16", "int8", "sign", "sign2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

compressors = st.one_of(
    st.builds(demo, k=st.integers(1, 16), chunk=st.sampled_from([4, 6, 8]), values=st.sampled_from(VALUES)),
    st.builds(top_k, st.sampled_from([0.02, 0.3, 1.0]), st.sampled_from(VALUES)),
    st.builds(threshold, st.sampled_from([0.01, 1.0]), st.sampled_from([None, 0.1, 1.0]), st.sampled_from(VALUES)),
    st.builds(random_k, st.sampled_from([0.1, 0.5]), st.integers(0, 9), st.sampled_from(VALUES)),
    st.builds(striding, st.sampled_from([0.1, 0.5]), st.sampled_from(VALUES)),
    st.builds(sign, st.sampled_from(VALUES)),
    st.builds(dense),
)
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(compressors, shapes, st.integers(1, 4), st.integers(0, 3), st.integers(0, 1000))
def test_what_the_reference_sends_and_decodes_the_cpu_does_to_the_bit(
    compressor: Compressor, shapes: list[tuple[int, ...]], nodes: int, dtype: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        [torch.randn(shape, generator=generator).to(DTYPES[(dtype + i) % 4]) for i, shape in enumerate(shapes)]
        for _ in range(nodes)
    ]
    plan = plan_buffer(specs_of(tensors[0]), compressor)
    states = [[blank_states(plan) for _ in range(nodes)] for _ in range(2)]
    for step in (STEP, STEP + 1):
        one, other = (
            gather(compressor, tensors, kernels, states[i], step) for i, kernels in enumerate((REFERENCE, CPU))
        )
        assert torch.equal(one.buffer, other.buffer)
        for average in ("nodes", "contributors"):
            for expected, out in zip(
                opened(one, REFERENCE, average, step), opened(one, CPU, average, step), strict=True
            ):
                assert torch.equal(out, expected)
    for node in range(nodes):
        assert all(torch.equal(a, b) for a, b in zip(states[0][node], states[1][node], strict=True))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(shapes, st.integers(1, 4), st.sampled_from([dense(), top_k(1.0, "fp32"), random_k(1.0, values="fp32")]))
def test_everything_sent_is_the_exact_mean_of_small_whole_numbers(
    shapes: list[tuple[int, ...]], nodes: int, compressor: Compressor
) -> None:
    tensors = [
        [(torch.arange(math.prod(shape)) % 7 - node).reshape(shape).float() for shape in shapes]
        for node in range(nodes)
    ]
    for number, out in enumerate(opened(gather(compressor, tensors, CPU), CPU)):
        assert torch.equal(out, torch.stack([row[number] for row in tensors]).sum(dim=0) / nodes)


def test_nothing_at_all_is_sent_as_a_header() -> None:
    gathered = gather(dense(), [[], []], CPU)
    assert gathered.nbytes == [HEADER_NBYTES, HEADER_NBYTES]
    assert opened(gathered, CPU) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**100])
def test_every_nonfinite_tensor_is_named_and_nothing_is_touched(value: float) -> None:
    tensors = [torch.ones(100), torch.ones(8, 8), torch.ones(()), torch.ones(30)]
    for number in (1, 3):
        tensors[number].view(-1)[-1] = value
    plan = plan_buffer(specs_of(tensors), top_k(0.1))
    states = [torch.full(one.state_shape, 3.0) for one in plan.plans]
    encoder = Encoder(plan, torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8), CPU)
    assert encoder.encode_(tensors, states, states, step=0, sequence=0).endswith("in t1, t3")
    assert all(bool((state == 3.0).all()) for state in states)


@pytest.mark.parametrize("compressor", [demo(), threshold(1.0, capacity=None)], ids=["fixed", "exact"])
def test_a_sender_with_nonfinite_values_is_named_and_nothing_is_written(compressor: Compressor) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    sent = gather(compressor, [[x], [x]], CPU)
    flag = torch.empty(sent.plan.nbytes, dtype=torch.uint8)
    encoder = Encoder(sent.plan, flag, CPU)
    encoder.mark_nonfinite_(step=STEP, sequence=SEQUENCE)
    used = encoder.nbytes
    mixed = Gathered(sent.plan, torch.cat((sent.buffer[: sent.nbytes[0]], flag[:used])), [sent.nbytes[0], used])
    out = torch.full((5000,), 7.0)
    with pytest.raises(NonFiniteError, match="node 1 had NaN, infinity"):
        open_(mixed, [out], CPU)
    assert bool((out == 7.0).all())


def test_a_broken_state_is_named() -> None:
    state = torch.full(plan_buffer(specs_of([torch.ones(64)]), top_k(0.1)).plans[0].state_shape, math.nan)
    with pytest.raises(NonFiniteError, match="state kept for t0"):
        gather(top_k(0.1), [[torch.ones(64)]], CPU, [[state]])


def test_a_tensor_that_would_grow_is_sent_whole() -> None:
    specs = (TensorSpec("tiny", (3,), torch.bfloat16), TensorSpec("large", (4096,), torch.float32))
    tiny, large = plan_buffer(specs, top_k(0.99, "fp32")).plans
    assert tiny == dense().plan(specs[0])
    assert plan_buffer(specs, demo(k=60, values="fp32")).plans[0] == tiny
    assert large == dense().plan(specs[1])
    assert plan_buffer(specs, top_k(0.9)).plans[1] == top_k(0.9).plan(specs[1])


def test_a_dtype_that_was_asked_for_is_used() -> None:
    specs = [TensorSpec(str(dtype), shape, dtype) for dtype in DTYPES for shape in ((), (3,), (5000,))]
    wide = plan_buffer([specs[number]._replace(name=f"{number}") for number, _ in enumerate(specs)], dense(DTYPES[0]))
    assert {plan.values for plan in wide.plans} == {ValueCode.FP32}
    assert plan_buffer([TensorSpec("x", (5000,), torch.bfloat16)], dense(torch.float32)).nbytes == HEADER_NBYTES + 20000
    x = torch.arange(100.0).bfloat16()
    state = torch.full((1, 100), 2.0**-20)
    gathered = gather(dense(torch.float32), [[x]], CPU, [[state]])
    assert torch.equal(gathered.words[HEADER_NBYTES // 4 :].view(torch.float32), x.float() + 2.0**-20)
    assert not state.any()


def test_a_scale_that_costs_more_than_the_elements_is_not_sent() -> None:
    scalar = TensorSpec("scalar", (), torch.bfloat16)
    for compressor in (sign(), dense(values="int8")):
        assert plan_buffer([scalar], compressor).plans[0] == dense().plan(scalar)


def test_specs_may_be_any_sequence() -> None:
    specs = specs_of([torch.ones(3, 4), torch.ones(5)])
    assert plan_buffer(list(specs), top_k(0.1)) == plan_buffer(specs, top_k(0.1))


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "order", "compressor"])
def test_the_digest_tells_plans_apart(change: str) -> None:
    a, b = TensorSpec("a", (40, 4), torch.float32), TensorSpec("b", (160,), torch.float32)
    one = plan_buffer((a, b), top_k(0.1))
    other = {
        "name": lambda: plan_buffer((a._replace(name="c"), b), top_k(0.1)),
        "shape": lambda: plan_buffer((a._replace(shape=(4, 40)), b), top_k(0.1)),
        "dtype": lambda: plan_buffer((a._replace(dtype=torch.bfloat16), b), top_k(0.1)),
        "order": lambda: plan_buffer((b, a), top_k(0.1)),
        "compressor": lambda: plan_buffer((a, b), top_k(0.1, "fp16")),
    }[change]()
    assert one.digest != other.digest
    assert one.digest == plan_buffer((TensorSpec("a", (40, 4), torch.float32), b), top_k(0.1)).digest


def test_buffers_of_an_exact_plan_are_as_long_as_what_they_hold() -> None:
    compressor = Pipeline(Identity(), Threshold(1.0, None), "fp32")
    nodes = [[torch.where(torch.arange(500) < count, 2.0, 0.5)] for count in (0, 3, 400, 500)]
    gathered = gather(compressor, nodes, CPU)
    assert gathered.plan.variable_length
    assert gathered.nbytes == sorted(set(gathered.nbytes))
    assert gathered.nbytes[-1] <= gathered.plan.nbytes
    assert gathered.nbytes[0] == HEADER_NBYTES + 16
    out = opened(gathered, REFERENCE)[0]
    assert torch.equal(out, sum(torch.where(x >= 1.0, x, 0.0) for (x,) in nodes) / 4)


def test_buffers_of_exact_plans_may_be_coded_differently_and_are_decoded_alike() -> None:
    compressor = Pipeline(Identity(), Threshold(1.0, None), "fp32")
    gathered = gather(compressor, [[torch.where(torch.arange(500) < n, 2.0, 0.5)] for n in (2, 40, 500)], CPU)
    for average in ("nodes", "contributors"):
        assert torch.equal(opened(gathered, CPU, average)[0], opened(gathered, REFERENCE, average)[0])


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
def test_contributors_count_only_where_they_sent(kernels: ReferenceKernels) -> None:
    nodes = [torch.zeros(64) for _ in range(4)]
    nodes[0][[3, 5]] = torch.tensor([8.0, 4.0])
    nodes[1][[3, 9]] = torch.tensor([2.0, -6.0])
    nodes[2][[3, 5]] = torch.tensor([-4.0, 4.0])
    nodes[3][[9, 7]] = torch.tensor([2.0, 1.0])
    gathered = gather(top_k(2 / 64, "fp32"), [[x] for x in nodes], kernels)
    by_nodes, by_contributors = torch.zeros(64), torch.zeros(64)
    by_nodes[[3, 5, 7, 9]] = torch.tensor([6.0 / 4, 8.0 / 4, 1.0 / 4, -4.0 / 4])
    by_contributors[[3, 5, 7, 9]] = torch.tensor([6.0 / 3, 8.0 / 2, 1.0, -4.0 / 2])
    assert torch.equal(opened(gathered, kernels, "nodes")[0], by_nodes)
    assert torch.equal(opened(gathered, kernels, "contributors")[0], by_contributors)


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
def test_what_exceeds_the_capacity_spills_and_the_largest_are_sent(kernels: ReferenceKernels) -> None:
    x = torch.exp2(torch.arange(160) % 40 / 4.0) * torch.where(torch.arange(160) % 3 == 0, -1.0, 1.0)
    compressor = threshold(2.0, capacity=1 / 10, values="fp32")
    state = torch.zeros(plan_buffer(specs_of([x]), compressor).plans[0].state_shape)
    out = opened(gather(compressor, [[x]], kernels, [[state]]), kernels)[0]
    largest = x.abs() >= x.abs().sort(descending=True).values[15]
    assert torch.equal(out, torch.where(largest, x, 0.0))
    assert torch.equal(state.view(-1), torch.where(largest, 0.0, x))
    second = opened(gather(compressor, [[torch.zeros(160)]], kernels, [[state]]), kernels)[0]
    assert bool((second[largest] == 0).all())
    assert int((second != 0).sum()) == 16


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("chunk", [50, 4096])
@pytest.mark.parametrize("keep", [35, 100])
def test_a_constant_tensor_is_sent_by_its_capacity_until_all_was_sent(kernels: Kernels, chunk: int, keep: int) -> None:
    """Of equals those of the first chunks and lowest indices go first, so that none waits for ever."""
    n = 350
    compressor = Pipeline(Identity(chunk), Threshold(1.0, capacity=keep / n), "fp32")
    state = torch.zeros(plan_buffer(specs_of([torch.ones(n)]), compressor).plans[0].state_shape)
    sent = torch.zeros(n)
    for step in range(math.ceil(n / keep)):
        x = torch.full((n,), -3.0 if step == 0 else 0.0)
        out = opened(gather(compressor, [[x]], kernels, [[state]]), kernels)[0]
        assert out.nonzero()[:, 0].tolist() == list(range(n))[step * keep : (step + 1) * keep]
        sent += out
    assert torch.equal(sent, torch.full((n,), -3.0))
    assert not state.any()


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
def test_what_is_above_the_edge_is_sent_before_what_is_at_it(kernels: Kernels) -> None:
    """A bin is as wide as a bfloat16's step: 1 + 1/256 and 1 share one, 1 + 1/64 is in another."""
    x = torch.ones(100)
    x[[60, 90]] = 1 + 1 / 64
    x[70] = 1 + 1 / 256
    out = opened(gather(threshold(0.5, 0.05, "fp32"), [[x]], kernels), kernels)[0]
    assert out.nonzero()[:, 0].tolist() == [0, 1, 2, 60, 90]


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("many", [1, 20, 400])
@pytest.mark.parametrize("capacity", [0.05, 1.0, None])
def test_a_broken_state_is_found_whatever_the_capacity(kernels: Kernels, many: int, capacity: float | None) -> None:
    for values, broken in itertools.product(VALUES, (math.nan, -math.nan, math.inf, -math.inf)):
        compressor = Pipeline(Identity(50), Threshold(1.0, capacity), values)  # type: ignore[arg-type]
        state = torch.zeros(plan_buffer(specs_of([torch.ones(400)]), compressor).plans[0].state_shape)
        state.view(-1)[-many:] = broken
        with pytest.raises(NonFiniteError, match=r"state kept for t0.*zero all states, or load them"):
            gather(compressor, [[torch.ones(400)]], kernels, [[state]])


X = torch.arange(1.0, 4097.0)
BUFFERS = {
    "a short buffer": torch.zeros(4096, dtype=torch.uint8)[:128],
    "a buffer of floats": torch.zeros(4096),
    "a buffer with gaps": torch.zeros(8192, dtype=torch.uint8)[::2],
    "a buffer that ends within a word": torch.zeros(4097, dtype=torch.uint8),
    "a buffer that begins within a word": torch.zeros(4097, dtype=torch.uint8)[1:],
}


@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_that_cannot_be_filled_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(InvalidTensorError):
        Encoder(plan_buffer(specs_of([X]), top_k(0.1)), buffer, CPU)
    assert not buffer.any()


NUMBERS = {
    "negative": -1,
    "no number": "1",
    "not whole": 1.0,
    "a tensor": torch.tensor(1),
    "a bool": True,
    "too large": 1 << 64,
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_step_or_sequence_that_cannot_be_is_refused(number: int) -> None:
    check_numbers(0, (1 << 64) - 1)
    for numbers in ((number, 0), (0, number)):
        with pytest.raises(InvalidArgumentError, match="must be a whole number from 0 to"):
            check_numbers(*numbers)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda buffer: buffer[:-1], ["bytes from byte 0 on", "cut at multiples of 16"]),
        (lambda buffer: torch.cat((buffer[:1], buffer))[1:], ["from byte 1 on", "cut at multiples of 16"]),
        (lambda buffer: torch.cat((buffer, buffer)).view(2, -1).t(), ["with strides", "contiguous torch.uint8"]),
        (lambda buffer: buffer.view(torch.int8), ["torch.int8", "must be contiguous torch.uint8"]),
        (lambda buffer: buffer.float(), ["torch.float32", "must be contiguous torch.uint8"]),
    ],
    ids=["cut", "shifted", "gaps", "int8", "float"],
)
def test_what_is_no_buffer_is_refused_with_advice(
    spoil: Callable[[torch.Tensor], torch.Tensor], words: list[str]
) -> None:
    gathered = gather(top_k(0.1), [[X]], CPU)
    out = torch.zeros(4096)
    with pytest.raises(InvalidTensorError) as caught:
        open_(replace(gathered, buffer=spoil(gathered.buffer)), [out], CPU)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not out.any()


def test_gathered_buffers_may_be_rows() -> None:
    gathered = gather(top_k(0.1), [[X], [-2 * X]], CPU)
    rows = replace(gathered, buffer=gathered.buffer.view(2, -1))
    assert torch.equal(opened(rows, CPU)[0], opened(gathered, CPU)[0])


def test_a_plan_for_another_size_is_refused() -> None:
    class Elsewhere:
        def plan(self, tensor: TensorSpec) -> TensorPlan:
            return top_k(0.1).plan(tensor._replace(shape=(100_000,)))

    with pytest.raises(CompressorError, match="cover the tensor exactly"):
        plan_buffer(specs_of([X]), Elsewhere())


@pytest.mark.parametrize("nbytes", [-16, 0, 3, 16, 67, 1 << 20])
@pytest.mark.parametrize("compressor", [threshold(1.0, capacity=None), top_k(0.1)], ids=["variable", "fixed"])
def test_lengths_that_no_buffer_has_are_refused(compressor: Compressor, nbytes: int) -> None:
    plan, gathered = plan_buffer(specs_of([X]), compressor), torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(WireError, match=r"node 1.*length") as caught:
        Decoder(plan, gathered, ["node 0", "node 1"], CPU, [plan.nbytes, nbytes])
    assert caught.value.field == "length"


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda one: one.name)
@pytest.mark.parametrize("compressor", [demo(k=2, chunk=8), random_k(0.5), threshold(1.0)], ids=str)
def test_encoders_and_decoders_are_used_again_and_again(compressor: Compressor, kernels: Kernels) -> None:
    shapes, nodes = ((9, 17), (0,), (300,)), 2
    plan = plan_buffer(specs_of([torch.empty(shape) for shape in shapes]), compressor)
    memory = torch.empty(nodes, plan.nbytes, dtype=torch.uint8)
    encoders = [Encoder(plan, row, kernels) for row in memory]
    decoder = Decoder(plan, memory, ["node 0", "node 1"], kernels)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tensors = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(nodes)]
        for one, xs in zip(encoders, tensors, strict=True):
            one.encode_(xs, step=step, sequence=SEQUENCE)
        outs = [torch.full(shape, torch.nan) for shape in shapes]
        assert decoder.verify(step=step, sequence=SEQUENCE) == []
        decoder.decode_(outs, step=step, average="nodes")
        fresh = gather(compressor, tensors, kernels, step=step)
        assert torch.equal(memory.view(-1), fresh.buffer)
        assert all(torch.equal(out, other) for out, other in zip(outs, opened(fresh, kernels, step=step), strict=True))
