"""The handle of a hook: the exchange of a model's gradients, called by the model's own gradient reduction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flexcomm import Average, Compressor, InvalidArgumentError, NonFinitePolicy, World, default_world
from flexdemo.checkpoint import NodeAxis, OtherNodes, ResidualShard, load_residuals, residual_shards
from flexdemo.gradients import Bucket, CompressionSettings, GradientSync


class HookHandle:
    """The exchange of a model's gradients, with the residuals of what was not sent.

    It is a ``Stateful`` of torch's distributed checkpoints: save it beside the model and its optimizer.
    """

    def __init__(
        self, compressor: Compressor, world: World | None, *, decay: float, average: Average, nonfinite: NonFinitePolicy
    ) -> None:
        self.world = default_world() if world is None else world
        self.settings = CompressionSettings(compressor, decay=decay)
        self.sync = GradientSync(self.world, average=average, nonfinite=nonfinite, in_background=True)
        self.step = 0
        self._axis = NodeAxis(self.world)
        self._residual_shards: dict[str, ResidualShard] = {}
        self._sent: dict[Bucket, list[Tensor]] = {}
        self.on_remove = ExitStack()
        """Callbacks that give the model back as it was."""

    def remove(self) -> None:
        """Give the model back as it was: its gradients are no longer exchanged. Doing it again does nothing."""
        self.sync.cancel()
        self.on_remove.close()

    def start(self, bucket: Bucket, tensors: list[Tensor]) -> None:
        """Start the exchange of a bucket's tensors, which :meth:`finish` overwrites."""
        self.sync.start(bucket, tensors, self.settings, self.step)
        self._sent[bucket] = tensors

    def finish(self) -> None:
        """Wait for all that was started, and write averages over what was sent; zeros if all ranks skip it."""
        sent, self._sent = self._sent, {}
        averages = self.sync.finish()
        for bucket, gradients in sent.items():
            if averages is None:
                torch._foreach_zero_(gradients)
                continue
            for gradient, average in zip(gradients, averages[bucket], strict=True):
                if average is not gradient:  # that has gaps
                    gradient.copy_(average)

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Plan the residuals of all buckets, on all ranks together: their states are saved."""
        self.sync.buckets += buckets
        for bucket in buckets:
            shards = residual_shards(bucket, self.sync, self.settings.compressor)
            self._residual_shards |= zip(bucket.names, shards, strict=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by parameter, with a node axis, and how many steps there were."""
        residuals = {name: shard.saved(self._axis) for name, shard in self._residual_shards.items()}
        return {"residuals": residuals, "owner": self._axis.owner(), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes = "error") -> None:
        """Go on from a state, bit for bit. ``other_nodes`` says what to do if it is of another number of nodes."""
        saved, shards = state_dict["residuals"], self._residual_shards
        if saved.keys() != shards.keys():
            raise InvalidArgumentError(
                f"residuals were saved of {', '.join(saved)}, but here they are of {', '.join(shards)}: load into the "
                f"same model, attached with the same compressor."
            )
        self._axis.check_owner(state_dict["owner"])
        load_residuals(
            (shard, shard.taken(saved[name], self._axis, f"residual of {name}", other_nodes))
            for name, shard in shards.items()
        )
        self.step = int(state_dict["step"])
