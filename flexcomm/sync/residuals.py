"""Residuals: what was not sent yet, by name, joined to what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.errors import InvalidArgumentError, InvalidTensorError
from flexcomm.kernels import StateUpdate, TensorPlan


class LentState(NamedTuple):
    """A state, and the memory its successor is written to, if it is not updated in place."""

    state: Tensor
    spare: Tensor | None = None


class Residuals:
    """What a compressor did not send yet: ``decay * residual + gain * x`` is compressed, the rest is kept.

    States are float32, in the compressor's coordinates, and of this rank's shard of each tensor only. A sync that fails
    leaves them as they were. Where it can, it updates them in place, and restores them from what was sent and the
    inputs, to rounding: at most ``2**-21 / decay`` of what it was, what it became and what was added, together. A
    second copy, and bits, are kept with ``exact_rollback``, with a decay below 0.5, where all is sent
    (``algorithm="dense"``), by codecs of one's own, and by calls in the background, whose inputs may change before
    they end. All arguments may change from call to call. FlexDeMo's momentum is kept in such an object.

    Args:
        decay: the share of the residual that is left when it is used; 1.0 is error feedback, less is a momentum.
        gain: what inputs are multiplied by.
        alpha: the share of what was sent that is taken out; less than 1 sends it again, fading.
        exact_rollback: keep a second copy of every state, so that a sync that fails leaves them bit for bit.

    Example:
        >>> import torch, flexcomm
        >>> residuals = flexcomm.Residuals()
        >>> with flexcomm.connect() as world:
        ...     for _ in range(2):
        ...         out = flexcomm.hierarchical_sync(torch.tensor([4.0, 3.0]), flexcomm.top_k(1 / 2), world=world,
        ...                                          residuals=residuals)
        >>> out
        tensor([0., 6.])

    """

    def __init__(
        self, decay: float = 1.0, gain: float = 1.0, alpha: float = 1.0, *, exact_rollback: bool = False
    ) -> None:
        self.exact_rollback = exact_rollback
        self.decay = decay
        self.gain = gain
        self.alpha = alpha
        self._states: dict[str, LentState] = {}
        self._new: set[str] = set()
        self._claimed: set[str] = set()

    def names(self) -> list[str]:
        """Return the names of all states, in the order they came."""
        return list(self._states)

    def __getitem__(self, name: str) -> Tensor:
        return self._states[name].state

    def claim(self, names: Iterable[str]) -> None:
        """Take whole tensors into use until :meth:`unclaim`, whether or not this rank keeps a part of them.

        So a second use is refused on all ranks alike; one that went on alone would wait for the others.
        """
        names = list(names)
        taken = [name for name in names if name in self._claimed]
        if taken:
            raise InvalidArgumentError(
                f"{', '.join(taken)}: being synchronised with these residuals. Wait for the earlier handle first, or "
                f"use other residuals."
            )
        self._claimed.update(names)

    def unclaim(self, names: Iterable[str]) -> None:
        """Give tensors free again."""
        self._claimed.difference_update(names)

    def update(self, share: float = 1.0) -> StateUpdate:
        """Return how states are updated; ``share`` is one over the number of ranks whose sum is encoded."""
        return StateUpdate(self.decay, self.gain * share, self.alpha)

    def lend(self, name: str, plan: TensorPlan, device: torch.device, *, in_place: bool = False) -> LentState:
        """Return what an encode reads and writes; a state with a spare changes when :meth:`commit` is called."""
        entry = self._states.get(name)
        if entry is None:
            entry = LentState(_zeros(plan, device))
            self._new.add(name)
        elif entry.state.shape != plan.state_shape or entry.state.device != device:
            raise InvalidTensorError(
                f"the residual of {name} is {list(entry.state.shape)} on {entry.state.device}, but the compressor now "
                f"needs {list(plan.state_shape)} on {device}: its tensor, compressor or place changed. Use new "
                f"residuals, or reset these."
            )
        spare = None if in_place else _zeros(plan, device) if entry.spare is None else entry.spare
        self._states[name] = LentState(entry.state, spare)
        return self._states[name]

    def commit(self, names: Iterable[str]) -> None:
        """Keep what the encodes of these names left."""
        for name in names:
            state, spare = self._states[name]
            self._states[name] = LentState(state if spare is None else spare, None if spare is None else state)
        self._new.difference_update(names)

    def cancel(self, names: Iterable[str]) -> None:
        """Stay with what was before the encodes of these names."""
        for name in self._new.intersection(names):
            del self._states[name]
        self._new.difference_update(names)

    def reset(self) -> None:
        """Forget everything."""
        self._require_rest("reset")
        self._states.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states by name: of this rank's node and part. They are not copies."""
        self._require_rest("saved")
        return {name: entry.state for name, entry in self._states.items()}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace all states by copies of these."""
        self._require_rest("loaded")
        for name, state in states.items():
            if state.dtype != torch.float32 or state.dim() != 2:
                raise InvalidTensorError(
                    f"the residual of {name} is {state.dtype} {list(state.shape)}, but must be torch.float32 of two "
                    f"dims, chunks and their coefficients, as state_dict() returns them."
                )
        contiguous = torch.contiguous_format
        copies = {name: state.detach().clone(memory_format=contiguous) for name, state in states.items()}
        self._states = {name: LentState(copy) for name, copy in copies.items()}

    def _require_rest(self, what: str) -> None:
        if self._claimed:
            busy = ", ".join(sorted(self._claimed))
            raise InvalidArgumentError(
                f"residuals cannot be {what} while {busy} are being synchronised: wait for their handles first."
            )


def _zeros(plan: TensorPlan, device: torch.device) -> Tensor:
    # Not as inference tensors, which no later call could write.
    with torch.inference_mode(False):
        return torch.zeros(plan.state_shape, dtype=torch.float32, device=device)
