"""Attachments: an exchange between nodes that a model's own gradient reduction calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexcomm import InvalidArgumentError
from flexcomm.sync import BUCKET_BYTES
from flexcomm.world import default_world
from flexdemo.checkpoint import NodeAxis
from flexdemo.exchange import Exchange, Terms
from flexdemo.slots import find_slots, load_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from flexcomm import Compressor, World
    from flexcomm.kernels import Average
    from flexcomm.sync import NonFinitePolicy
    from flexdemo.checkpoint import OtherNodes
    from flexdemo.lots import Lot
    from flexdemo.slots import Slot, States

__all__ = ["HookHandle"]


class HookHandle:
    """The exchange of a model's gradients, with the residuals of what was not sent.

    ``state_dict`` and ``load_state_dict`` make it a ``Stateful`` of torch's distributed checkpoints: save it beside the
    model and its optimizer, and training goes on bit for bit.
    """

    def __init__(
        self,
        compressor: Compressor,
        world: World | None,
        *,
        decay: float,
        average: Average,
        nonfinite: NonFinitePolicy,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.world = default_world() if world is None else world
        self.terms = Terms(compressor, decay=decay)
        self.exchange = Exchange(
            self.world,
            {"average": average, "nonfinite": nonfinite, "bucket_bytes": bucket_bytes},
            remembers=True,
        )
        self.step = 0
        self._axis = NodeAxis(self.world)
        self._slots: dict[str, tuple[Slot, Tensor]] = {}
        self._removers: list[Callable[[], object]] = []

    def remove(self) -> None:
        """Give the model back as it was: its gradients are no longer exchanged. Doing it again does nothing."""
        self.exchange.abandon()
        while self._removers:
            self._removers.pop()()

    def on_remove(self, undo: Callable[[], object]) -> None:
        self._removers.append(undo)

    def start(self, lot: Lot, tensors: list[Tensor]) -> None:
        """Send a lot on its way."""
        self.exchange.start(lot, tensors, self.terms, self.step)

    def remember(self, lot: Lot, tensors: Sequence[Tensor]) -> None:
        """Plan what will be kept of a lot's tensors, on all ranks together: of that, states are saved."""
        slots = find_slots(lot, self.exchange, tensors, self.terms)
        self._slots |= {name: (slot, x) for name, slot, x in zip(lot.names, slots, tensors, strict=True)}

    def remembers(self, names: Iterable[str]) -> bool:
        """Return whether it is planned what will be kept of all these."""
        return self._slots.keys() >= set(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by parameter, with a node axis, and how many steps there were."""
        residuals = {name: slot.saved(self._axis, x.device) for name, (slot, x) in self._slots.items()}
        return {"residuals": residuals, "owner": self._axis.owner(), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes = "error") -> None:
        """Go on from a state, bit for bit. ``other_nodes`` says what to do if it is of another number of nodes."""
        saved = state_dict["residuals"]
        if saved.keys() != self._slots.keys():
            raise InvalidArgumentError(
                f"residuals were saved of {', '.join(saved)}, but here they are of {', '.join(self._slots)}: load into "
                f"the same model, attached with the same compressor."
            )
        self._axis.check_owner(state_dict["owner"])
        states: States = {}
        for name, (slot, _) in self._slots.items():
            slot.take(saved[name], self._axis, f"residual of {name}", other_nodes, states)
        load_states(states)
        self.step = int(state_dict["step"])
