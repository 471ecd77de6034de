"""Recipes are what they say, tensors are cut as promised, and every compressor keeps the laws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
import torch

from flexcomm.codec import plan_buffer
from flexcomm.compress import (
    Compressor,
    Dct,
    Everything,
    Identity,
    Pipeline,
    RandomK,
    Striding,
    TensorSpec,
    Threshold,
    TopK,
    TopRate,
    ValueName,
    demo,
    dense,
    random_k,
    sign,
    striding,
    threshold,
    top_k,
)
from flexcomm.errors import CompressorError
from flexcomm.kernels import ReferenceKernels, TensorPlan, ValueCode
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.testing import COMPRESSOR_LAWS, check_compressor
from flexcomm.testing.cases import encode, sent_coefficients
from tests.slow import slow_but
from tests.unit.buckets import blank_states, gather, opened, specs_of

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = CpuKernels(1)
RATES = (1 / 2, 1 / 4, 1 / 8, 1 / 32, 0.3, 0.1, 1.0)


def spec(*shape: int, name: str = "x", dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name, shape, dtype)


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (demo(), Pipeline(Dct(64), TopK(32), "bf16")),
        (demo(k=8, chunk=32, values="sign"), Pipeline(Dct(32), TopK(8), "sign")),
        (top_k(0.1), Pipeline(Identity(4096), TopRate(0.1), "bf16")),
        (threshold(0.5), Pipeline(Identity(4096), Threshold(0.5, 1 / 16), "bf16")),
        (threshold(0.5, None, "int8"), Pipeline(Identity(4096), Threshold(0.5, None), "int8")),
        (random_k(0.25, seed=7), Pipeline(Identity(4096), RandomK(0.25, 7), "bf16")),
        (striding(0.25, "fp16"), Pipeline(Identity(4096), Striding(0.25), "fp16")),
        (sign(), Pipeline(Identity(4096), Everything(), "sign")),
        (dense(), Pipeline(Identity(4096), Everything(), "native")),
        (dense(torch.bfloat16), Pipeline(Identity(4096), Everything(), "bf16")),
        (dense(torch.float64), Pipeline(Identity(4096), Everything(), "fp32")),
        (dense(values="int8"), Pipeline(Identity(4096), Everything(), "int8")),
    ],
    ids=str,
)
def test_a_recipe_is_a_composition_with_a_name(recipe: Pipeline, expected: Pipeline) -> None:
    assert recipe == expected
    assert (hash(recipe), repr(recipe)) == (hash(expected), repr(expected))


@pytest.mark.parametrize("values", get_args(ValueName))
def test_every_recipe_takes_every_value_code(values: ValueName) -> None:
    recipes = (demo, sign, dense, lambda **kw: top_k(0.1, **kw), lambda **kw: threshold(1.0, **kw))
    recipes += (lambda **kw: random_k(0.1, **kw), lambda **kw: striding(0.1, **kw))  # type: ignore[assignment]
    assert {recipe(values=values).values for recipe in recipes} == {values}  # type: ignore[operator]


def test_settings_that_differ_make_compressors_that_differ() -> None:
    different = [demo(), demo(k=31), demo(chunk=32), demo(values="fp16"), top_k(0.1), top_k(0.2), random_k(0.1)]
    different += [random_k(0.1, seed=1), striding(0.1), threshold(0.1), threshold(0.1, None), sign(), dense()]
    assert len(set(different)) == len({repr(one) for one in different}) == len(different)


@pytest.mark.parametrize(
    ("dtype", "native"),
    [
        (torch.float32, ValueCode.FP32),
        (torch.bfloat16, ValueCode.BF16),
        (torch.float16, ValueCode.FP16),
        (torch.float64, ValueCode.FP32),
    ],
    ids=str,
)
def test_native_values_are_the_tensors_own(dtype: torch.dtype, native: ValueCode) -> None:
    assert dense().plan(spec(5, dtype=dtype)).values is native
    assert demo(values="int8").plan(spec(5, dtype=dtype)).values is ValueCode.INT8


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((64, 64), (64, 64, 64, 64)),
        ((65, 1000), (65, 1000, 64, 64)),
        ((3, 5, 100), (15, 100, 16, 64)),
        ((2, 3, 4, 5), (24, 5, 32, 8)),
        ((10, 7), (10, 7, 16, 8)),
        ((1000,), (1, 1000, 1, 64)),
        ((1, 1000), (1, 1000, 1, 64)),
        ((1000, 1), (1, 1000, 1, 64)),
        ((1, 1, 40), (1, 40, 1, 64)),
        ((37,), (1, 37, 1, 64)),
        ((), (1, 1, 1, 1)),
        ((1,), (1, 1, 1, 1)),
        ((0,), (1, 0, 1, 1)),
        ((0, 8), (1, 0, 1, 1)),
        ((8, 0, 3), (1, 0, 1, 1)),
        ((2, 97), (2, 97, 2, 64)),
    ],
    ids=str,
)
def test_the_dct_cuts_matrices_and_pads_to_powers_of_two(
    shape: tuple[int, ...], cut: tuple[int, int, int, int]
) -> None:
    assert Dct(64).cut(shape) == cut
    plan = demo(k=1).plan(spec(*shape))
    assert plan.rows * plan.cols == math.prod(shape)
    rows, cols, chunk_rows, chunk_cols = cut
    assert plan.chunks == -(-rows // chunk_rows) * -(-cols // chunk_cols)


def test_a_chunk_that_is_no_power_of_two_is_taken_as_it_is() -> None:
    assert Dct(100).cut((1000, 1000)) == (1000, 1000, 100, 100)
    assert Dct(100).cut((1000, 90)) == (1000, 90, 100, 100)
    assert Dct(100).cut((1000, 60)) == (1000, 60, 100, 64)


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((4096,), (1, 4096, 1, 4096)),
        ((4097,), (1, 4097, 1, 2049)),
        ((100, 100), (1, 10000, 1, 3334)),
        ((3, 5), (1, 15, 1, 15)),
        ((1, 7), (1, 7, 1, 7)),
        ((7, 1), (1, 7, 1, 7)),
        ((), (1, 1, 1, 1)),
        ((0,), (1, 0, 1, 1)),
        ((4, 0), (1, 0, 1, 1)),
    ],
    ids=str,
)
def test_the_identity_cuts_chunks_of_nearly_equal_length(
    shape: tuple[int, ...], cut: tuple[int, int, int, int]
) -> None:
    assert Identity().cut(shape) == cut
    plan = top_k(0.1).plan(spec(*shape))
    assert plan.chunks * plan.chunk_numel - plan.cols < max(1, plan.chunks)


def test_a_chunk_shorter_than_k_is_sent_whole() -> None:
    assert demo(k=32).plan(spec(5)).k == 8
    assert demo(k=32).plan(spec(2, 2)).k == 4
    assert [top_k(rate).plan(spec(7)).k for rate in (0.001, 0.3, 0.5, 1.0)] == [1, 2, 4, 7]


# --- indices all ranks derive alike -----------------------------------------------------------------------------------


def chosen(plan: TensorPlan, step: int, name: str = "x") -> torch.Tensor:
    """Which coefficients a step sends, as a mask ``[chunks, chunk_numel]``."""
    return sent_coefficients(CPU, encode(CPU, torch.ones(plan.cols), plan, step=step, name=name)) != 0


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("numel", [1, 7, 64, 97, 250])
@pytest.mark.parametrize("recipe", [RandomK, Striding], ids=lambda recipe: recipe.__name__)
def test_every_coordinate_is_sent_within_one_over_the_rate_steps(
    recipe: type[RandomK] | type[Striding], numel: int, rate: float
) -> None:
    plan = Pipeline(Identity(100), recipe(rate), "fp32").plan(spec(numel))
    turns = -(-plan.chunk_numel // plan.k)
    padding = torch.arange(plan.chunks * plan.chunk_numel).view(plan.state_shape) >= numel
    for first in (0, 3 * turns):
        masks = torch.stack([chosen(plan, first + turn) for turn in range(turns)])
        assert bool((masks.any(dim=0) | padding).all())
        assert int(masks.sum(dim=0).max()) <= math.ceil(turns * plan.k / plan.chunk_numel)


@pytest.mark.parametrize("rate", RATES)
def test_striding_reaches_every_coordinate_from_any_step_on(rate: float) -> None:
    plan = Pipeline(Identity(97), Striding(rate), "fp32").plan(spec(97))
    turns = -(-97 // plan.k)
    for first in range(5):
        assert bool(torch.stack([chosen(plan, first + turn) for turn in range(turns)]).any(dim=0).all())


def test_random_indices_follow_from_seed_name_deal_and_chunk() -> None:
    plan = Pipeline(Identity(100), RandomK(0.1), "fp32").plan(spec(200))
    other_seed = Pipeline(Identity(100), RandomK(0.1, seed=1), "fp32").plan(spec(200))
    mask = chosen(plan, 0)
    assert torch.equal(mask, chosen(plan, 0))
    assert not torch.equal(mask, chosen(plan, 0, name="y"))
    assert not torch.equal(mask, chosen(other_seed, 0))
    assert not torch.equal(mask, chosen(plan, 10))
    assert not torch.equal(mask[0], mask[1])


def test_a_random_share_is_spread_evenly() -> None:
    """1600 draws of 100 places, 16 expected on each; four standard deviations either side are 0 to 32."""
    plan = random_k(0.16, values="fp32").plan(spec(100))
    drawn = sum(chosen(plan, 7 * step).int().sum(dim=0) for step in range(100))
    assert isinstance(drawn, torch.Tensor)
    assert int(drawn.min()) > 0
    assert int(drawn.max()) < 32


def test_magnitudes_need_no_draw() -> None:
    for compressor in (demo(), top_k(0.1), threshold(1.0), sign(), dense()):
        plan = compressor.plan(spec(100))
        assert plan.sample_key(3, "x") == plan.sample_key(4, "y")


# --- rate 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compressor",
    [top_k(1.0, "fp32"), random_k(1.0, values="fp32"), striding(1.0, "fp32"), Pipeline(Identity(9), TopK(9), "fp32")],
    ids=str,
)
def test_rate_1_is_dense_to_the_bit(compressor: Compressor) -> None:
    nodes = [[torch.randn(7, 11, generator=torch.Generator().manual_seed(node))] for node in range(3)]
    expected = opened(gather(dense(), nodes, CPU), CPU)[0]
    assert torch.equal(opened(gather(compressor, nodes, CPU), CPU)[0], expected)


# --- settings that cannot be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: demo(k=0), ["k is 0"]),
        (lambda: demo(k=65, chunk=8), ["k is 65", "no more than 64"]),
        (lambda: demo(k=-3, chunk=1, values="fp8"), ["k is -3", "chunk is 1", "values is 'fp8'", "sign2"]),
        (lambda: demo(chunk=2048), ["chunk is 2048", "1024"]),
        (lambda: top_k(0.0), ["rate is 0.0"]),
        (lambda: top_k(1.5, values="nothing"), ["rate is 1.5", "values is 'nothing'"]),
        (lambda: random_k(-0.1), ["rate is -0.1"]),
        (lambda: striding(math.nan), ["rate is nan"]),
        (lambda: threshold(0.0), ["tau is 0.0"]),
        (lambda: threshold(-1.0, capacity=2.0, values="x"), ["tau is -1.0", "capacity is 2.0", "values is 'x'"]),
        (lambda: threshold(math.inf), ["tau is inf"]),
        (lambda: threshold(math.nan, capacity=0.0), ["tau is nan", "capacity is 0.0"]),
        (lambda: threshold(1e39), ["tau is 1e+39", "finite as a float32", "3.4e+38"]),
        (lambda: threshold(1e-50), ["tau is 1e-50", "positive and finite as a float32", "1.5e-45"]),
        (lambda: threshold(10**400), ["tau is 1000", "3.4e+38"]),
        (lambda: threshold(torch.tensor(1.0)), ["tau is tensor(1.)"]),
        (lambda: threshold(True, capacity="1/16"), ["tau is True", "capacity is '1/16'", "or None"]),
        (lambda: demo(k=2.5), ["k is 2.5", "a whole number"]),
        (lambda: demo(k=2.0, chunk=64.0), ["k is 2.0", "chunk is 64.0", "a whole number from 2"]),
        (lambda: demo(k=True, chunk=False), ["k is True", "chunk is False"]),
        (lambda: demo(k="32", chunk=None, values=None), ["k is '32'", "chunk is None", "values is None"]),
        (lambda: top_k("0.1"), ["rate is '0.1'", "above 0 and at most 1"]),
        (lambda: top_k(True), ["rate is True"]),
        (lambda: striding(None), ["rate is None"]),
        (lambda: random_k(0.1, seed=1.0), ["seed is 1.0", "a whole number"]),
        (lambda: random_k(2, seed="x"), ["rate is 2.0", "seed is 'x'"]),
        (lambda: demo(chunk=1021), ["chunk is 1021", "odd divisor above 127"]),
        (lambda: demo(chunk=2 * 129), ["chunk is 258", "odd divisor above 127"]),
        (lambda: Pipeline("dct", 4), ["basis is 'dct'", "Identity, Dct", "selector is 4", "TopK"]),
        (lambda: Pipeline(TopK(3), Dct()), ["basis is TopK(k=3)", "selector is Dct(chunk=64)"]),
        (lambda: dense("float32"), ["dtype='float32'", "torch.bfloat16"]),
        (lambda: dense([torch.float32]), ["dtype=[torch.float32]"]),
        (lambda: Pipeline(Identity(1), TopRate(2), "bf16"), ["chunk is 1", "rate is 2"]),
        (lambda: Pipeline(Identity(65537), Everything()), ["chunk is 65537", "65536"]),
        (lambda: dense(torch.int32), ["torch.int32", "torch.bfloat16"]),
        (lambda: dense(torch.float32, values="sign"), ["torch.float32", "'sign'"]),
    ],
)
def test_every_offending_setting_is_listed(attempt: Callable[[], Pipeline], words: list[str]) -> None:
    with pytest.raises(CompressorError) as caught:
        attempt()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "alike",
    [
        [threshold(1), threshold(1.0), threshold(np.float32(1)), threshold(np.int8(1), np.float64(1 / 16))],
        [top_k(1), top_k(1.0), top_k(np.float16(1))],
        [striding(0.5), striding(np.float32(0.5))],
        [demo(8, 16), demo(np.int64(8), np.uint8(16))],
        [random_k(0.5, 3), random_k(np.float32(0.5), np.int32(3))],
        [Pipeline(Identity(64), TopK(3)), Pipeline(Identity(np.int16(64)), TopK(np.uint64(3)))],
    ],
    ids=lambda alike: str(alike[0]),
)
def test_a_number_of_any_kind_makes_the_same_compressor_and_plan(alike: list[Pipeline]) -> None:
    assert len(set(alike)) == len({repr(one) for one in alike}) == 1
    assert len({plan_buffer([spec(1000)], one).digest for one in alike}) == 1
    assert len({repr(one.plan(spec(1000))) for one in alike}) == 1


def test_a_step_of_any_kind_draws_the_same() -> None:
    for compressor in (random_k(0.1), striding(0.1)):
        plan = compressor.plan(spec(100))
        assert plan.sample_key(np.int64(23), "x") == plan.sample_key(23, "x")


@pytest.mark.parametrize("tau", [1.5e-45, 1e-39, 3.4e38])
def test_any_positive_float32_is_a_threshold(tau: float) -> None:
    assert threshold(tau).plan(spec(100)).tau == tau


@pytest.mark.parametrize("seed", [-1, 0, 2**32, 10**30])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    keys = [random_k(0.1, one).plan(spec(100)).sample_key(0, "x") for one in (seed, 1)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("chunk", [2, 3, 100, 127, 1016, 1000, 1024])
def test_a_chunk_may_have_a_small_odd_part(chunk: int) -> None:
    assert demo(k=1, chunk=chunk).plan(spec(5000)).chunk_numel == chunk


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_an_unsupported_dtype_names_the_tensor(dtype: torch.dtype) -> None:
    with pytest.raises(CompressorError, match=rf"'layer\.weight' is {dtype}.*torch\.bfloat16"):
        demo().plan(spec(4, name="layer.weight", dtype=dtype))


# --- laws -------------------------------------------------------------------------------------------------------------

LAWFUL = (
    demo(),
    demo(k=4, chunk=8, values="fp32"),
    demo(k=5, chunk=6, values="int8"),
    demo(k=5, chunk=8, values="sign"),
    demo(k=256, chunk=16, values="fp32"),
    top_k(1 / 32, "fp16"),
    top_k(0.3, "sign2"),
    top_k(1.0, "bf16"),
    threshold(0.5),
    threshold(0.5, None, "int8"),
    threshold(1.0, 0.3, "sign"),
    random_k(1 / 4),
    random_k(0.1, seed=3, values="sign2"),
    striding(0.3, "fp16"),
    striding(1 / 32, "int8"),
    sign(),
    sign("sign2"),
    dense(),
    dense(torch.float32),
)


@pytest.mark.parametrize("compressor", slow_but(LAWFUL[::2], LAWFUL), ids=str)
def test_a_compressor_keeps_the_laws(compressor: Compressor) -> None:
    check_compressor(compressor, CPU)


@pytest.mark.parametrize("compressor", slow_but(LAWFUL[::2], LAWFUL), ids=str)
def test_the_bits_of_a_large_tensor_do_not_depend_on_the_number_of_threads(compressor: Compressor) -> None:
    x = torch.randn(600, 512, generator=torch.Generator().manual_seed(0))
    outs = []
    for kernels in map(CpuKernels, (1, 2, 3)):
        states = [blank_states(plan_buffer(specs_of([x]), compressor))]
        for step in range(2):
            out = opened(gather(compressor, [[x]], kernels, states, step), kernels, step=step)[0]
        outs.append(out)
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


@pytest.mark.parametrize("law", COMPRESSOR_LAWS, ids=lambda law: law.__name__)
def test_the_laws_can_be_held_with_the_reference(law: Callable[..., None]) -> None:
    law(demo(k=6, chunk=4), ReferenceKernels(), "cpu")


class Forgetful:
    """Plans another share with every call, and is equal to nothing but itself."""

    def __init__(self) -> None:
        self.calls = 0

    def plan(self, tensor: TensorSpec) -> TensorPlan:
        self.calls += 1
        return top_k(1 / (1 + self.calls)).plan(tensor)


def test_a_compressor_that_is_no_value_is_found_out() -> None:
    with pytest.raises(AssertionError, match="equal settings compare equal"):
        check_compressor(Forgetful(), CPU)


def test_a_compressor_that_plans_differently_every_time_is_found_out() -> None:
    law = next(law for law in COMPRESSOR_LAWS if law.__name__ == "a_tensor_is_always_planned_alike")
    with pytest.raises(AssertionError, match="always planned alike"):
        law(Forgetful(), CPU, "cpu")
