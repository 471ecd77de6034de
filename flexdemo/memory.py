"""What an optimizer remembers of every parameter on this rank, into a state dict with a node axis and back."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexcomm import InvalidArgumentError
from flexdemo.checkpoint import NodeAxis
from flexdemo.parameters import local, wrapped_like

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Parameter

    from flexcomm import Residuals, World
    from flexcomm.pieces import Piece
    from flexdemo.checkpoint import OtherNodes
    from flexdemo.exchange import Exchange, Terms
    from flexdemo.feed import Feed
    from flexdemo.local_steps import LocalSteps
    from flexdemo.lots import Lot
    from flexdemo.parameters import Group

__all__ = ["NodeMemory"]

MOMENTUM, UNSENT, OWNER = "momentum", "unsent", "owner"
"""Residuals of gradients, those of the way gone alone, and whose they are."""
ANCHOR, VELOCITY, HERE = "anchor", "velocity", "here"
"""Where nodes were together last, how they moved then, and where this one is now."""


class _Slot(NamedTuple):
    """Where a residual is kept, and the length of the longest on this node; without a piece, this rank has none."""

    residuals: Residuals
    piece: Piece | None
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return (0, 0) if self.piece is None else self.piece.plan.state_shape

    def state(self, device: torch.device) -> Tensor:
        if self.piece is not None and self.piece.spec.name in self.residuals.names():
            return self.residuals[self.piece.spec.name]
        return torch.zeros(self.shape, device=device)


class NodeMemory:
    """The residuals, anchors and moments of an optimizer's parameters."""

    def __init__(self, world: World, feed: Feed, local_steps: LocalSteps | None) -> None:
        self._world, self._feed, self._local_steps = world, feed, local_steps
        self._axis = NodeAxis(world)
        self._slots: dict[Parameter, dict[str, _Slot]] = {}
        self._lengths: dict[Parameter, int] = {}

    def measure(self) -> None:
        """Plan what is kept of parameters that joined. The ranks of a node tell each other how much that is."""
        found = list(self._find_pieces())
        numels = [local(param).numel() for param, *_ in found]
        states = [0 if piece is None else math.prod(piece.plan.state_shape) for *_, piece in found]
        mine = torch.tensor([numels, states], dtype=torch.int64)
        longest = self._world.intra.all_gather(mine).wait().amax(dim=0).tolist()
        for (param, key, residuals, piece), numel, state in zip(found, *longest, strict=True):
            self._lengths[param] = numel
            self._slots.setdefault(param, {})[key] = _Slot(residuals, piece, state)

    def added_to(self, state_dict: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
        """Return torch's state dict with all that is kept here in it."""
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            # By what it prints: what is loaded must not be able to run anything.
            packed["compressor"] = repr(group["compressor"])
            for number, param in zip(packed["params"], group["params"], strict=True):
                state_dict["state"][number] = self._saved(param, state_dict["state"].get(number, {}))
        return state_dict

    def taken_from(self, state_dict: dict[str, Any], groups: list[Group], other_nodes: OtherNodes) -> dict[str, Any]:
        """Load all that is kept here, and return the rest for torch to load. Nothing changes if this raises."""
        _check_groups(state_dict["param_groups"], groups)
        rest: dict[str, Any] = {"state": {}, "param_groups": []}
        commits: list[Callable[[], object]] = []
        states: dict[Residuals, dict[str, Tensor]] = {}
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            rest["param_groups"].append({**packed, "compressor": group["compressor"]})
            for number, param in zip(packed["params"], group["params"], strict=True):
                saved = dict(state_dict["state"].get(number, {}))
                self._take_residuals(param, saved, other_nodes, states)
                commits += self._take_places(param, saved, other_nodes)
                rest["state"][number] = saved
        for residuals, by_name in states.items():
            residuals.load_state_dict(by_name)
        for commit in commits:
            commit()
        return rest

    def _find_pieces(self) -> Iterator[tuple[Parameter, str, Residuals, Piece | None]]:
        for lot in self._feed.lots:
            yield from _pieces_of(lot, self._feed.exchange, self._feed.terms_of(lot), MOMENTUM)
        if self._local_steps is not None:
            for lot in self._local_steps.lots:
                yield from _pieces_of(lot, self._local_steps.exchange, self._local_steps.terms_of(lot), UNSENT)

    def _saved(self, param: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        here, axis = local(param), self._axis
        slots = self._slots.get(param, {})
        saved = {key: axis.stacked(slot.state(here.device), slot.length) for key, slot in slots.items()}
        if slots:
            saved[OWNER] = axis.owner()
        if self._local_steps is None or param not in self._local_steps.anchors:
            return {**state, **saved}
        length = self._lengths[param]
        saved[HERE] = axis.stacked(here, length)
        saved[ANCHOR] = wrapped_like(self._local_steps.anchors[param], param)
        if param in self._local_steps.velocities:
            saved[VELOCITY] = wrapped_like(self._local_steps.velocities[param], param)
        own = {key: axis.stacked(local(value), length) if _is_moment(value) else value for key, value in state.items()}
        return {**own, **saved}

    def _take_residuals(
        self,
        param: Parameter,
        saved: dict[str, Any],
        other_nodes: OtherNodes,
        states: dict[Residuals, dict[str, Tensor]],
    ) -> None:
        slots = self._slots.get(param, {})
        if slots:
            self._axis.check_owner(_required(saved, OWNER))
        for key, slot in slots.items():
            taken = self._axis.taken(_required(saved, key), slot.shape, key, other_nodes)
            by_name = states.setdefault(slot.residuals, {})
            if slot.piece is not None:
                by_name[slot.piece.spec.name] = taken

    def _take_places(
        self, param: Parameter, saved: dict[str, Any], other_nodes: OtherNodes
    ) -> list[Callable[[], object]]:
        steps = self._local_steps
        if steps is None or param not in steps.anchors:
            return []
        here = local(param)
        places = [(here, self._axis.taken(_required(saved, HERE), here.shape, HERE, other_nodes))]
        places.append((steps.anchors[param], local(_required(saved, ANCHOR))))
        if param in steps.velocities:
            places.append((steps.velocities[param], local(_required(saved, VELOCITY))))
        for key, value in saved.items():
            if _is_moment(value):
                saved[key] = wrapped_like(self._axis.taken(value, here.shape, key, other_nodes), param)
        return [partial(to.copy_, value) for to, value in places]


def _pieces_of(
    lot: Lot, exchange: Exchange, terms: Terms, key: str
) -> Iterator[tuple[Parameter, str, Residuals, Piece | None]]:
    residuals = exchange.residuals_of(lot)
    if residuals is None:
        return
    pieces = exchange.pieces_of(lot, [local(param) for param in lot.params], terms)
    for param, piece in zip(lot.params, pieces, strict=True):
        yield param, key, residuals, piece


def _is_moment(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _required(saved: dict[str, Any], key: str) -> Tensor:
    if key not in saved:
        raise InvalidArgumentError(
            f"the state to be loaded has no {key}, but {', '.join(map(str, saved)) or 'nothing'}: it was saved by "
            f"another optimizer, or by one with another exchange_every or outer."
        )
    value: Tensor = saved.pop(key)
    return value


def _check_groups(saved: list[dict[str, Any]], groups: list[Group]) -> None:
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes[0] != sizes[1]:
        raise InvalidArgumentError(
            f"the state to be loaded has groups of {sizes[0]} parameters, but this optimizer has {sizes[1]}."
        )
    for number, (packed, group) in enumerate(zip(saved, groups, strict=True)):
        if packed.get("compressor") != repr(group["compressor"]):
            raise InvalidArgumentError(
                f"group {number} was saved with compressor {packed.get('compressor')}, but has "
                f"{group['compressor']!r}, which may see momenta differently. Load with the same, then set "
                f"group['compressor']."
            )
