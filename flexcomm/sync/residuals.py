"""Residuals: what was not sent yet, by name, joined to what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flexcomm.errors import InvalidArgumentError, InvalidTensorError
from flexcomm.kernels import StateUpdate, TensorPlan


class Residuals:
    """What a compressor did not send yet: ``decay * residual + gain * x`` is compressed, the rest is kept.

    States are float32, in the compressor's coordinates, and of this rank's shard of each tensor only. A sync that fails
    leaves them as they were. Where it can, it updates them in place and restores them from what was sent and the
    inputs, to rounding: at most ``2**-21 / decay`` of what it was, what it became and what was added, together. A
    second copy, and bits, are kept with ``exact_rollback``, with a decay below 0.5, where all is sent
    (``algorithm="dense"``), by codecs of one's own, and by calls in the background, whose inputs may change before
    they end. Arguments may change from call to call.

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
        self.decay, self.gain, self.alpha, self.exact_rollback = decay, gain, alpha, exact_rollback
        self._states: dict[str, Tensor] = {}
        self._spares: dict[str, Tensor] = {}  # where the next states go that are not updated in place
        self._new: set[str] = set()
        self._claimed: set[str] = set()

    def names(self) -> list[str]:
        """Return the names of all states, in the order they came."""
        return list(self._states)

    def __getitem__(self, name: str) -> Tensor:
        return self._states[name]

    def claim(self, names: Iterable[str]) -> None:
        """Take tensors into use until :meth:`unclaim`, also those of which this rank keeps no part.

        So a second use is refused on all ranks alike; one that went on alone would wait for the others.
        """
        names = list(names)
        taken = [name for name in names if name in self._claimed]
        if taken:
            advice = "wait for the earlier handle first, or use others."
            raise InvalidArgumentError(f"{', '.join(taken)}: being synchronised with these residuals; {advice}")
        self._claimed.update(names)

    def unclaim(self, names: Iterable[str]) -> None:
        self._claimed.difference_update(names)

    def update(self, share: float = 1.0) -> StateUpdate:
        """Return how states are updated; ``share`` is one over the number of ranks whose sum is encoded."""
        return StateUpdate(self.decay, self.gain * share, self.alpha)

    def lend(self, name: str, plan: TensorPlan, device: torch.device, *, in_place: bool = False) -> list[Tensor]:
        """Return the state that an encode reads, and where it writes the next one, which :meth:`commit` takes over.

        It follows its tensor: a state that was loaded from a file may be on the host, and a model may move.
        """
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _zeros(plan, device)
            self._new.add(name)
        elif state.shape != plan.state_shape:
            raise InvalidTensorError(
                f"the residual of {name} is {list(state.shape)}, but the compressor now needs "
                f"{list(plan.state_shape)}: use new residuals, or reset these."
            )
        elif state.device != device:
            self._spares.pop(name, None)
            with torch.inference_mode(False):
                state = self._states[name] = state.to(device)
        if in_place:
            self._spares.pop(name, None)
            return [state, state]
        if name not in self._spares:
            self._spares[name] = _zeros(plan, device)
        return [state, self._spares[name]]

    def commit(self, names: Iterable[str]) -> None:
        """Keep what the encodes of these names left."""
        for name in names:
            if name in self._spares:
                self._states[name], self._spares[name] = self._spares[name], self._states[name]
        self._new.difference_update(names)

    def cancel(self, names: Iterable[str]) -> None:
        """Stay with what was before the encodes of these names."""
        for name in self._new.intersection(names):
            del self._states[name]
            self._spares.pop(name, None)
        self._new.difference_update(names)

    def reset(self) -> None:
        """Forget everything."""
        self._require_rest("reset")
        self._states.clear()
        self._spares.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states by name: of this rank's node and part. They are not copies."""
        self._require_rest("saved")
        return dict(self._states)

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace all states by copies of these."""
        self._require_rest("loaded")
        for name, state in states.items():
            if state.dtype != torch.float32 or state.dim() != 2:
                found = f"the residual of {name} is {state.dtype} {list(state.shape)}"
                raise InvalidTensorError(f"{found}, but must be float32 of two dims, as state_dict() returns it.")
        contiguous = torch.contiguous_format
        self._states = {name: state.detach().clone(memory_format=contiguous) for name, state in states.items()}
        self._spares.clear()

    def _require_rest(self, what: str) -> None:
        if self._claimed:
            busy = f"{', '.join(sorted(self._claimed))} are being synchronised"
            raise InvalidArgumentError(f"residuals cannot be {what} while {busy}: wait for their handles first.")


def _zeros(plan: TensorPlan, device: torch.device) -> Tensor:
    # Not as inference tensors, which no later call could write.
    with torch.inference_mode(False):
        return torch.zeros(plan.state_shape, dtype=torch.float32, device=device)
