"""Slots: where the residual of a tensor is kept on this rank, into a tensor with a node axis and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from flexcomm import Residuals
    from flexcomm.pieces import Piece
    from flexcomm.transport import Transport
    from flexdemo.checkpoint import NodeAxis, OtherNodes
    from flexdemo.exchange import Exchange, Terms
    from flexdemo.lots import Lot

__all__ = ["Slot", "States", "find_slots", "load_states", "longest_on_node"]

States = dict["Residuals", dict[str, "Tensor"]]
"""What is to be loaded into which residuals, by name."""


class Slot(NamedTuple):
    """Where a residual is kept, and the length of the longest on this node; without a piece, this rank has none."""

    residuals: Residuals
    piece: Piece | None
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return (0, 0) if self.piece is None else self.piece.plan.state_shape

    def saved(self, axis: NodeAxis, device: torch.device) -> Tensor:
        """Return the residual, zeros if it has not begun, with a node axis."""
        if self.piece is not None and self.piece.spec.name in self.residuals.names():
            return axis.stacked(self.residuals[self.piece.spec.name], self.length)
        return axis.stacked(torch.zeros(self.shape, device=device), self.length)

    def take(self, saved: Tensor, axis: NodeAxis, name: str, other_nodes: OtherNodes, states: States) -> None:
        """Add what was saved to what is to be loaded."""
        taken = axis.taken(saved, self.shape, name, other_nodes)
        by_name = states.setdefault(self.residuals, {})
        if self.piece is not None:
            by_name[self.piece.spec.name] = taken


def find_slots(lot: Lot, exchange: Exchange, tensors: Sequence[Tensor], terms: Terms) -> list[Slot]:
    """Return the slots of a lot's tensors; none if nothing is remembered. All ranks of a node ask together."""
    residuals = exchange.residuals_of(lot)
    if residuals is None:
        return []
    pieces = exchange.pieces_of(lot, list(tensors), terms)
    mine = [0 if piece is None else math.prod(piece.plan.state_shape) for piece in pieces]
    lengths = longest_on_node(mine, exchange.world.intra)
    return [Slot(residuals, piece, length) for piece, length in zip(pieces, lengths, strict=True)]


def longest_on_node(lengths: Iterable[int], intra: Transport) -> list[int]:
    """Return, number by number, the largest that any rank of this node has."""
    mine = torch.tensor(list(lengths), dtype=torch.int64)
    longest: list[int] = intra.all_gather(mine).wait().amax(dim=0).tolist()
    return longest


def load_states(states: States) -> None:
    for residuals, by_name in states.items():
        residuals.load_state_dict(by_name)
