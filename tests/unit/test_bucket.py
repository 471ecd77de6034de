"""Tensors share a buffer and come out as if each had travelled alone; or an error says why, and nothing changed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcomm.bucket import decode_bucket_, encode_bucket_, plan_bucket, regions_of
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
from flexcomm.kernels import Momentum, ReferenceKernels, TensorPlan
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.wire import HEADER_NBYTES
from tests.unit.buckets import SEQUENCE, STEP, Gathered, blank_states, gather, open_, opened, specs_of

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
    plan = plan_bucket(specs_of(tensors[0]), compressor)
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


def encoded_by_hand(tensors: list[torch.Tensor], states: list[torch.Tensor], compressor: Compressor) -> torch.Tensor:
    plan = plan_bucket(specs_of(tensors), compressor)
    buffer = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
    momenta = [Momentum(state, state) for state in states]
    encode_bucket_(plan, tensors, buffer, step=0, sequence=0, kernels=CPU, momenta=momenta)
    return buffer


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**100])
def test_every_unfit_tensor_is_named_and_nothing_is_touched(value: float) -> None:
    tensors = [torch.ones(100), torch.ones(8, 8), torch.ones(()), torch.ones(30)]
    for number in (1, 3):
        tensors[number].view(-1)[-1] = value
    plan = plan_bucket(specs_of(tensors), top_k(0.1))
    states = [torch.full(one.state_shape, 3.0) for one in plan.plans]
    buffer = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
    momenta = [Momentum(state, state) for state in states]
    with pytest.raises(NonFiniteError, match=r"in t1, t3; nothing was changed"):
        encode_bucket_(plan, tensors, buffer, step=0, sequence=0, kernels=CPU, momenta=momenta)
    assert bool((buffer == 0xA5).all())
    assert all(bool((state == 3.0).all()) for state in states)


def test_a_broken_state_is_named() -> None:
    state = torch.full(plan_bucket(specs_of([torch.ones(64)]), top_k(0.1)).plans[0].state_shape, math.nan)
    with pytest.raises(NonFiniteError, match="state kept for t0"):
        encoded_by_hand([torch.ones(64)], [state], top_k(0.1))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.ones(3)], ["for 2 tensors", "1 were given"]),
        ([torch.ones(3), torch.ones(4), torch.ones(1)], ["for 2 tensors", "3 were given"]),
        ([torch.ones(3), torch.ones(5)], ["t1", "[5]", "[4]"]),
        ([torch.ones(3), torch.ones(2, 2)], ["t1", "[2, 2]", "[4]"]),
        ([torch.ones(3).half(), torch.ones(4)], ["t0", "torch.float16", "torch.float32"]),
    ],
)
def test_tensors_the_plan_is_not_for_are_refused(tensors: list[torch.Tensor], words: list[str]) -> None:
    gathered = gather(dense(), [[torch.ones(3), torch.ones(4)]], CPU)
    buffer = torch.zeros(gathered.plan.nbytes, dtype=torch.uint8)
    with pytest.raises(InvalidTensorError) as at_encode:
        encode_bucket_(gathered.plan, tensors, buffer, step=STEP, sequence=SEQUENCE, kernels=CPU)
    with pytest.raises(InvalidTensorError) as at_decode:
        regions = regions_of(gathered.senders, gathered.nbytes)
        decode_bucket_(gathered.plan, gathered.buffer, regions, tensors, step=STEP, sequence=SEQUENCE, kernels=CPU)
    assert all(word in str(at_encode.value) and word in str(at_decode.value) for word in words)
    assert not buffer.any()


def test_tensors_of_one_name_are_refused_by_name() -> None:
    specs = tuple(TensorSpec(name, (4,), torch.float32) for name in ("a", "b", "a", "c", "b"))
    with pytest.raises(CompressorError, match="called a, b:"):
        plan_bucket(specs, dense())


def test_a_tensor_that_would_grow_is_sent_whole() -> None:
    specs = (TensorSpec("tiny", (3,), torch.bfloat16), TensorSpec("large", (4096,), torch.float32))
    tiny, large = plan_bucket(specs, top_k(0.99, "fp32")).plans
    assert tiny == dense().plan(specs[0])
    assert plan_bucket(specs, demo(k=60, values="fp32")).plans[0] == tiny
    assert large == dense().plan(specs[1])
    assert plan_bucket(specs, top_k(0.9)).plans[1] == top_k(0.9).plan(specs[1])


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "order", "compressor"])
def test_the_digest_tells_plans_apart(change: str) -> None:
    a, b = TensorSpec("a", (40, 4), torch.float32), TensorSpec("b", (160,), torch.float32)
    one = plan_bucket((a, b), top_k(0.1))
    other = {
        "name": lambda: plan_bucket((a._replace(name="c"), b), top_k(0.1)),
        "shape": lambda: plan_bucket((a._replace(shape=(4, 40)), b), top_k(0.1)),
        "dtype": lambda: plan_bucket((a._replace(dtype=torch.bfloat16), b), top_k(0.1)),
        "order": lambda: plan_bucket((b, a), top_k(0.1)),
        "compressor": lambda: plan_bucket((a, b), top_k(0.1, "fp16")),
    }[change]()
    assert one.digest != other.digest
    assert one.digest == plan_bucket((TensorSpec("a", (40, 4), torch.float32), b), top_k(0.1)).digest


def test_buffers_of_an_exact_plan_are_as_long_as_what_they_hold() -> None:
    compressor = Pipeline(Identity(), Threshold(1.0, None), "fp32")
    nodes = [[torch.where(torch.arange(500) < count, 2.0, 0.5)] for count in (0, 3, 400, 500)]
    gathered = gather(compressor, nodes, CPU)
    assert gathered.plan.exact
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
    state = torch.zeros(plan_bucket(specs_of([x]), compressor).plans[0].state_shape)
    out = opened(gather(compressor, [[x]], kernels, [[state]]), kernels)[0]
    largest = x.abs() >= x.abs().sort(descending=True).values[15]
    assert torch.equal(out, torch.where(largest, x, 0.0))
    assert torch.equal(state.view(-1), torch.where(largest, 0.0, x))
    second = opened(gather(compressor, [[torch.zeros(160)]], kernels, [[state]]), kernels)[0]
    assert bool((second[largest] == 0).all())
    assert int((second != 0).sum()) == 16


def test_a_region_beyond_what_was_gathered_is_refused() -> None:
    compressor = Pipeline(Identity(), Threshold(1.0, None), "fp32")
    gathered = gather(compressor, [[torch.full((500,), 2.0)]], CPU)
    cut = Gathered(gathered.plan, gathered.buffer[:-400], gathered.nbytes)
    with pytest.raises(WireError, match=r"node 0.*length") as caught:
        opened(cut, CPU)
    assert caught.value.field == "length"


X = torch.arange(1.0, 4097.0)
MISUSES = {
    "a short buffer": {"buffer": torch.zeros(4096, dtype=torch.uint8)[:128]},
    "a buffer of floats": {"buffer": torch.zeros(4096)},
    "a buffer with gaps": {"buffer": torch.zeros(8192, dtype=torch.uint8)[::2]},
    "a state of another shape": {"state": torch.zeros(1, 64)},
    "a state of another dtype": {"state": torch.zeros(1, 4096, dtype=torch.float64)},
    "a state with gaps": {"state": torch.zeros(1, 8192)[:, ::2]},
    "two momenta": {"momenta": 2},
    "a negative step": {"step": -1},
    "too large a sequence": {"sequence": 1 << 64},
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_what_cannot_be_encoded_is_refused_before_anything_changes(misuse: dict[str, object]) -> None:
    plan = plan_bucket(specs_of([X]), top_k(0.1))
    buffer = misuse.get("buffer", torch.zeros(plan.nbytes, dtype=torch.uint8))
    state = misuse.get("state", torch.zeros(1, 4096))
    momenta = [Momentum(state, state)] * misuse.get("momenta", 1)
    numbers = {name: misuse.get(name, 0) for name in ("step", "sequence")}
    with pytest.raises((InvalidTensorError, InvalidArgumentError)):
        encode_bucket_(plan, [X], buffer, kernels=CPU, momenta=momenta, **numbers)
    assert not state.any()
    assert not buffer.any()


def test_a_plan_for_another_size_is_refused() -> None:
    class Elsewhere:
        def plan(self, tensor: TensorSpec) -> TensorPlan:
            return top_k(0.1).plan(tensor._replace(shape=(100_000,)))

    with pytest.raises(CompressorError, match="cover the tensor exactly"):
        plan_bucket(specs_of([X]), Elsewhere())


def test_outputs_that_cannot_be_written_are_refused_before_the_first_is() -> None:
    gathered = gather(top_k(1.0), [[X, X]], CPU)
    first, expanded = torch.zeros(4096), torch.zeros(1).expand(4096)
    with pytest.raises(InvalidTensorError, match="expanded"):
        open_(gathered, [first, expanded], CPU)
    with pytest.raises(InvalidArgumentError, match="no buffers"):
        open_(replace(gathered, nbytes=[]), [first, first], CPU)
    assert not first.any()


@pytest.mark.parametrize("nbytes", [-16, 3, 67])
def test_lengths_that_no_buffer_has_are_refused(nbytes: int) -> None:
    with pytest.raises(WireError, match=r"node 1.*length"):
        regions_of(["node 0", "node 1"], [64, nbytes])
