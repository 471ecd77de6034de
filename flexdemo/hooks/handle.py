"""The handle of a hook: the exchange of a model's gradients, called by the model's own gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexcomm import (
    AlgorithmOption,
    Average,
    Compressor,
    FlexcommError,
    InvalidArgumentError,
    NonFinitePolicy,
    TensorSpec,
    TransportError,
    World,
    choose_algorithms,
    default_world,
)
from flexdemo.checkpoint.node_axis import NodeAxis, OtherNodes
from flexdemo.checkpoint.residuals import StateEntry, States, find_entries, load_states
from flexdemo.gradients import Bucket, BucketExchange, CompressionSettings, spec_of
from flexdemo.torch_private import queue_callback


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
    ) -> None:
        self.world = default_world() if world is None else world
        self.settings = CompressionSettings(compressor, decay=decay)
        self.exchange = BucketExchange(
            self.world, average=average, nonfinite=nonfinite, has_residuals=True, in_background=True
        )
        self.step = 0
        self._axis = NodeAxis(self.world)
        self._entries: dict[str, tuple[StateEntry, Tensor]] = {}
        self._algorithms: dict[torch.dtype, AlgorithmOption] = {}
        self._removers: list[Callable[[], object]] = []

    def remove(self) -> None:
        """Give the model back as it was: its gradients are no longer exchanged. Doing it again does nothing."""
        self.exchange.cancel()
        while self._removers:
            self._removers.pop()()

    def on_remove(self, restore: Callable[[], object]) -> None:
        """Have ``restore`` called when the hook is removed."""
        self._removers.append(restore)

    def start(self, bucket: Bucket, tensors: list[Tensor]) -> None:
        """Start the exchange of a bucket."""
        algorithm = self._algorithms.get(tensors[0].dtype, "auto") if tensors else "auto"
        self.exchange.start(bucket, tensors, self.settings, self.step, algorithm=algorithm)

    def finish(self, sent: Mapping[Bucket, Sequence[Tensor]]) -> None:
        """Wait for all that was started, and write averages over what was sent; zeros if all ranks skip it."""
        results = self.exchange.finish()
        if results is None:
            _zero_(sent)
        for bucket, averages in results or []:
            for gradient, average in zip(sent[bucket], averages, strict=True):
                gradient.copy_(average)

    def plan(self, buckets: Sequence[tuple[Bucket, Sequence[Tensor]]]) -> None:
        """Plan the residuals of all buckets' tensors, on all ranks together: their states are saved.

        One algorithm is chosen for all tensors of a dtype, so that results do not depend on how they are bucketed.
        """
        specs: list[TensorSpec] = []
        for bucket, tensors in buckets:
            entries = find_entries(bucket, self.exchange, tensors, self.settings)
            self._entries |= {name: (entry, x) for name, entry, x in zip(bucket.names, entries, tensors, strict=True)}
            specs += map(spec_of, tensors, bucket.names)
        chosen = choose_algorithms(specs, self.settings.compressor, self.world.inter.size)
        self._algorithms |= {dtype: one.algorithm for dtype, one in chosen.items()}

    def has_planned(self, names: Iterable[str]) -> bool:
        """Return whether the residuals of all these tensors are planned."""
        return self._entries.keys() >= set(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by parameter, with a node axis, and how many steps there were."""
        residuals = {name: entry.saved(self._axis, x.device) for name, (entry, x) in self._entries.items()}
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
        states: States = {}
        for name, (entry, _) in self._entries.items():
            entry.take(saved[name], self._axis, f"residual of {name}", other_nodes, states)
        load_states(states)
        self.step = int(state_dict["step"])


class BackwardPass:
    """The gradients of one backward pass that are under way between nodes; their averages are written at its end.

    Errors are raised when the pass ends: FSDP does not survive an exception in the middle of it.
    """

    def __init__(self, handle: HookHandle) -> None:
        self._handle = handle
        self._has_sent = False
        self._failure: FlexcommError | None = None
        self._sent: dict[Bucket, list[Tensor]] = {}

    def send(self, bucket: Bucket, gradients: list[Tensor], *, at_once: bool) -> None:
        """Exchange gradients in place: until this returns if ``at_once``, else until the backward pass ends."""
        # With every send: a pass that failed has dropped its callbacks, and left its exchange under way.
        queue_callback(self._end)
        if bucket in self._sent:
            self._handle.exchange.cancel()
            self._sent = {}
        self._has_sent = True
        self._handle.start(bucket, gradients)
        self._sent[bucket] = gradients
        if at_once:
            self._receive()

    def _end(self) -> None:
        if not self._has_sent:
            return
        self._receive()
        self._has_sent = False
        self._handle.step += 1
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _receive(self) -> None:
        """Write what was received over what was sent, zeros if it failed."""
        sent, self._sent = self._sent, {}
        if not sent:
            return
        try:
            self._handle.finish(sent)
        except TransportError:
            raise
        except FlexcommError as failure:
            self._failure = self._failure or failure
            _zero_(sent)


def _zero_(sent: Mapping[Bucket, Sequence[Tensor]]) -> None:
    for gradients in sent.values():
        for gradient in gradients:
            gradient.zero_()
