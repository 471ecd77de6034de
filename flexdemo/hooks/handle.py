"""The handle of a hook: the exchange of a model's gradients, called by the model's own gradient reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flexcomm import (
    AlgorithmOption,
    Average,
    Compressor,
    InvalidArgumentError,
    NonFinitePolicy,
    TensorSpec,
    World,
    choose_algorithms,
    default_world,
)
from flexdemo.checkpoint import NodeAxis, OtherNodes, StateEntry, find_entries, load_residuals
from flexdemo.gradients import Bucket, BucketExchange, CompressionSettings, spec_of


class HookHandle:
    """The exchange of a model's gradients, with the residuals of what was not sent.

    ``state_dict`` and ``load_state_dict`` make it a ``Stateful`` of torch's distributed checkpoints: save it beside the
    model and its optimizer, and training goes on bit for bit.
    """

    def __init__(
        self, compressor: Compressor, world: World | None, *, decay: float, average: Average, nonfinite: NonFinitePolicy
    ) -> None:
        self.world = default_world() if world is None else world
        self.settings = CompressionSettings(compressor, decay=decay)
        self.exchange = BucketExchange(
            self.world, average=average, nonfinite=nonfinite, has_residuals=True, in_background=True
        )
        self.step = 0
        self._axis = NodeAxis(self.world)
        self._entries: dict[str, StateEntry] = {}
        self._algorithms: dict[torch.dtype, AlgorithmOption] = {}
        self._sent: dict[Bucket, list[Tensor]] = {}
        self.on_remove = ExitStack()
        """Callbacks that give the model back as it was."""

    def remove(self) -> None:
        """Give the model back as it was: its gradients are no longer exchanged. Doing it again does nothing."""
        self.exchange.cancel()
        self.on_remove.close()

    def start(self, bucket: Bucket, tensors: list[Tensor]) -> None:
        """Start the exchange of a bucket's tensors, which :meth:`finish` overwrites."""
        algorithm = self._algorithms.get(tensors[0].dtype, "auto") if tensors else "auto"
        self.exchange.start(bucket, tensors, self.settings, self.step, algorithm=algorithm)
        self._sent[bucket] = tensors

    def finish(self) -> None:
        """Wait for all that was started, and write averages over what was sent; zeros if all ranks skip it."""
        sent, self._sent = self._sent, {}
        averages = self.exchange.finish()
        if averages is None:
            zero_(sent)
        for bucket, received in (averages or {}).items():
            for x, average in zip(sent[bucket], received, strict=True):
                x.copy_(average)

    def plan(self, buckets: Sequence[tuple[Bucket, Sequence[Tensor]]]) -> None:
        """Plan the residuals of all buckets' tensors, on all ranks together: their states are saved.

        One algorithm is chosen for all tensors of a dtype, so that results do not depend on how they are bucketed.
        """
        specs: list[TensorSpec] = []
        for bucket, tensors in buckets:
            entries = find_entries(bucket, self.exchange, tensors, self.settings.compressor)
            self._entries |= zip(bucket.names, entries, strict=True)
            specs += map(spec_of, tensors, bucket.names)
        chosen = choose_algorithms(specs, self.settings.compressor, self.world.inter.size)
        self._algorithms |= {dtype: one.algorithm for dtype, one in chosen.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by parameter, with a node axis, and how many steps there were."""
        residuals = {name: entry.saved(self._axis) for name, entry in self._entries.items()}
        return {"residuals": residuals, "owner": self._axis.owner(), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes = "error") -> None:
        """Go on from a state, bit for bit. ``other_nodes`` says what to do if it is of another number of nodes."""
        saved = state_dict["residuals"]
        if saved.keys() != self._entries.keys():
            raise InvalidArgumentError(
                f"residuals were saved of {', '.join(saved)}, but here they are of {', '.join(self._entries)}: load "
                f"into the same model, attached with the same compressor."
            )
        self._axis.check_owner(state_dict["owner"])
        load_residuals(
            (entry, entry.taken(saved[name], self._axis, f"residual of {name}", other_nodes))
            for name, entry in self._entries.items()
        )
        self.step = int(state_dict["step"])


def zero_(sent: Mapping[Bucket, Sequence[Tensor]]) -> None:
    for gradients in sent.values():
        for gradient in gradients:
            gradient.zero_()
