"""Pieces of a tensor make the tensor, and their chunks are its chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import flexcomm
from flexcomm.codec import TensorShard, plan_tensor, shard_tensor
from flexcomm.compress import Dct, Pipeline, TensorSpec, Threshold
from flexcomm.kernels.reference.transform import accumulate

if TYPE_CHECKING:
    from flexcomm.kernels import TensorPlan

SHAPES = ((), (1,), (7,), (1009,), (5000,), (2, 3), (64, 64), (65, 130), (129, 40), (300, 200), (3, 5, 9), (4, 65, 20))
RANKS = (1, 2, 3, 7)
RECIPES = {
    "demo": flexcomm.demo(),
    "small demo": flexcomm.demo(k=4, chunk=8),
    "top_k": flexcomm.top_k(1 / 32),
    "threshold": flexcomm.threshold(1.0),
    "exact threshold": flexcomm.threshold(1.0, capacity=None),
    "threshold of components": Pipeline(Dct(16), Threshold(1.0, 1 / 8)),
    "exact threshold of components": Pipeline(Dct(16), Threshold(1.0, None)),
}


def spec_of(shape: tuple[int, ...], name: str = "x") -> TensorSpec:
    return TensorSpec(name, shape, torch.float32)


def pieces_of(spec: TensorSpec, plan: TensorPlan, ranks: int) -> list[TensorShard]:
    """The pieces in the order of the tensor, which is not that of the ranks."""
    dealt = shard_tensor(spec, plan, ranks)
    assert len(dealt) == ranks
    return sorted((piece for piece in dealt if piece is not None), key=lambda piece: piece.first)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_element_and_every_chunk_is_in_one_piece(recipe: str, ranks: int) -> None:
    for shape in SHAPES:
        spec = spec_of(shape)
        plan = plan_tensor(spec, RECIPES[recipe])
        x, state = torch.arange(torch.Size(shape).numel()).reshape(shape), torch.arange(plan.chunks)[:, None]
        pieces = pieces_of(spec, plan, ranks)
        assert torch.equal(torch.cat([piece.of(x).reshape(-1) for piece in pieces]), x.reshape(-1))
        assert torch.equal(torch.cat([piece.state_of(state) for piece in pieces]), state)
        assert all(tuple(piece.of(x).shape) == piece.spec.shape for piece in pieces)
        assert all(piece.plan.rows * piece.plan.cols == piece.last - piece.first for piece in pieces)


@pytest.mark.parametrize("recipe", ["demo", "small demo", "top_k"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_coefficients_of_pieces_are_those_of_the_whole(shape: tuple[int, ...], recipe: str) -> None:
    spec = spec_of(shape)
    plan = plan_tensor(spec, RECIPES[recipe])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = accumulate(x, plan)
    for piece in (piece for ranks in (2, 3) for piece in pieces_of(spec, plan, ranks)):
        assert torch.equal(accumulate(piece.of(x), piece.plan), piece.state_of(whole))


def test_a_last_row_of_chunks_with_one_row_of_elements_is_not_cut_off() -> None:
    spec = spec_of((129, 40))
    pieces = pieces_of(spec, plan_tensor(spec, flexcomm.demo()), 3)
    assert [piece.spec.shape for piece in pieces] == [(64, 40), (65, 40)]


def test_ranks_beyond_the_number_of_chunks_get_nothing() -> None:
    spec = spec_of((100, 50))
    dealt = shard_tensor(spec, plan_tensor(spec, flexcomm.demo()), 7)
    assert sum(piece is not None for piece in dealt) == 2
    assert shard_tensor(spec_of((0,)), plan_tensor(spec_of((0,)), flexcomm.demo()), 3) == [None] * 3


def test_small_tensors_are_spread_over_the_ranks_by_their_names() -> None:
    owners = set[int]()
    for number in range(32):
        spec = spec_of((10,), f"bias {number}")
        dealt = shard_tensor(spec, plan_tensor(spec, flexcomm.demo()), 4)
        owners.update(rank for rank, piece in enumerate(dealt) if piece is not None)
    assert owners == {0, 1, 2, 3}


def test_an_uncut_tensor_keeps_its_name_and_its_pieces_tell_where_they_are() -> None:
    spec = spec_of((1000,), "w")
    plan = replace(plan_tensor(spec, flexcomm.top_k(0.1)), chunk_cols=100, k=10)
    assert [piece.spec.name for piece in pieces_of(spec, plan, 1)] == ["w"]
    assert [piece.spec.name for piece in pieces_of(spec, plan, 2)] == ["w[0:500]", "w[500:1000]"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if "threshold" in name])
def test_pieces_share_the_capacity_by_chunks_and_lose_none(recipe: str, ranks: int) -> None:
    for shape in SHAPES:
        spec = spec_of(shape)
        plan = plan_tensor(spec, RECIPES[recipe])
        if not plan.variable_count:
            continue
        pieces = pieces_of(spec, plan, ranks)
        assert plan.k <= sum(piece.plan.k for piece in pieces) < plan.k + ranks
        for piece in pieces:
            most = piece.plan.chunks * piece.plan.chunk_numel
            assert piece.plan.k == most if plan.variable_length else piece.plan.k <= most
