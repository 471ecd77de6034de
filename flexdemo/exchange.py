"""The exchange of many lots as one: all of them succeed, or none changes anything."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexcomm import FlexcommError, Residuals, SyncError, TransportError, start_exchange, start_sync
from flexcomm.sync import plan_sync, shards_held

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm import Compressor, SyncHandle, World
    from flexcomm.sync import NonFinitePolicy, TensorShard
    from flexdemo.lots import Lot

__all__ = ["Exchange", "Received", "Terms"]


@dataclass(frozen=True)
class Terms:
    """What is sent of a lot, and how it joins what was not sent before: ``decay * residual + gain * gradient``."""

    compressor: Compressor
    decay: float = 1.0
    gain: float = 1.0
    alpha: float = 1.0


class Received(NamedTuple):
    """What all nodes hold of a lot after an exchange; ``averages`` are overwritten by the next one."""

    lot: Lot
    averages: list[Tensor]


class _Started(NamedTuple):
    received: Received
    handle: SyncHandle[list[Tensor]]


class Exchange:
    """Lots under way between nodes, and what was not sent of them.

    ``residuals[group]`` are kept by the number of the parameter group; none at all if nothing is remembered.
    """

    def __init__(self, world: World, options: dict[str, Any], *, remembers: bool) -> None:
        self.world = world
        self.residuals: dict[int, Residuals] = {}
        self.nonfinite: NonFinitePolicy = options.get("nonfinite", "raise")
        self._options = options
        self._remembers = remembers
        self._outputs: dict[Lot, list[Tensor]] = {}
        self._started: list[_Started] = []
        self._failures: list[FlexcommError] = []
        self._has_shards = False

    def residuals_of(self, lot: Lot) -> Residuals | None:
        return self.residuals.setdefault(lot.group, Residuals()) if self._remembers else None

    def pieces_of(self, lot: Lot, tensors: list[Tensor], terms: Terms) -> list[TensorShard | None]:
        """Return which piece of each tensor this rank remembers what was not sent of."""
        options = self._options_for(lot)
        plan = plan_sync(
            tensors,
            terms.compressor,
            all_ranks=not lot.averaged,
            has_residuals=options.pop("residuals") is not None,
            **options,
        )
        return shards_held(plan)

    def start(self, lot: Lot, tensors: list[Tensor], terms: Terms, step: int) -> None:
        """Send what the terms say of a lot's tensors on their way."""
        options = self._options_for(lot)
        residuals = options["residuals"]
        if residuals is not None:
            residuals.decay, residuals.gain, residuals.alpha = terms.decay, terms.gain, terms.alpha
        averages = self._outputs_for(lot, tensors)
        options["step"], options["out"] = step, averages
        self._has_shards |= lot.averaged
        verb = start_exchange if lot.averaged else start_sync
        try:
            handle = verb(tensors, terms.compressor, **options)
        except TransportError:
            self.abandon()
            raise
        except FlexcommError as failure:
            # Kept until the end: the other ranks of this node wait there, and hear of it.
            self._failures.append(failure)
        else:
            self._started.append(_Started(Received(lot, averages), handle))

    def finish(self) -> list[Received] | None:
        """Return what was received, of all lots; None if all ranks skip it. Nothing has changed if this raises."""
        started, failures = self._started, self._failures
        self._started, self._failures = [], []
        try:
            failures += [failure for one in started if (failure := _wait(one.handle)) is not None]
            skipped = any(one.handle.record.skipped for one in started)
            failed_ranks, skipped = self._hear(failed=bool(failures), skipped=skipped)
        except TransportError:
            _undo(started)
            raise
        if failed_ranks or skipped:
            _undo(started)
        if failures:
            raise failures[0]
        if failed_ranks:
            raise SyncError(
                f"{failed_ranks} other ranks of this node could not exchange their shards, and nothing was changed; "
                f"their own errors say why. Skip this step."
            )
        return None if skipped else [one.received for one in started]

    def abandon(self) -> None:
        """End what is under way as if it had not begun."""
        started, self._started, self._failures = self._started, [], []
        for one in started:
            with suppress(TransportError):
                _wait(one.handle)
        _undo(started)

    def forget_outputs(self) -> None:
        """Give back the memory of averages, when lots are no longer what they were."""
        self._outputs.clear()

    def _options_for(self, lot: Lot) -> dict[str, Any]:
        return {
            **self._options,
            "world": self.world,
            "residuals": self.residuals_of(lot),
            "names": lot.names,
            "nonfinite": self.nonfinite,
        }

    def _outputs_for(self, lot: Lot, tensors: list[Tensor]) -> list[Tensor]:
        if lot not in self._outputs:
            self._outputs[lot] = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        return self._outputs[lot]

    def _hear(self, *, failed: bool, skipped: bool) -> tuple[int, bool]:
        """Return how many ranks of this node failed, and whether any skips.

        Shards are exchanged by ranks of one local rank, so the others do not know. Whole tensors are not.
        """
        intra = self.world.intra
        if intra.size == 1 or not self._has_shards:
            return int(failed), skipped
        heard = intra.all_reduce(torch.tensor([failed, skipped], dtype=torch.int32, device=self.world.device)).wait()
        return int(heard[0]), bool(heard[1])


def _wait(handle: SyncHandle[list[Tensor]]) -> FlexcommError | None:
    try:
        handle.wait()
    except TransportError:
        raise
    except FlexcommError as failure:
        return failure
    return None


def _undo(started: list[_Started]) -> None:
    for one in started:
        one.handle.rollback()
