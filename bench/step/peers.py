"""Methods of others, as published: torch's PowerSGD, and the FlexDeMo authors' package ``detonation``."""

import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from bench.step.methods import DECAY, fill_buckets
from bench.step.models import Gradients
from bench.world import crossing_nbytes
from flexcomm import World

PEERS_COMMAND = "pip install '.[peers]'"
_RATE = 1 / 32


class PeerMissingError(Exception):
    """A peer cannot be measured; the message says why."""


class _Bucket:
    """The methods of DDP's GradBucket that ``powerSGD_hook`` calls; only DDP itself can make a real one."""

    def __init__(self, number: int, tensors: list[Tensor], is_last: bool) -> None:
        self._number = number
        self._sources = tensors
        self._is_last = is_last
        self._buffer = torch.empty(sum(x.numel() for x in tensors))

    def refill(self) -> None:
        torch.cat([x.view(-1) for x in self._sources], out=self._buffer)

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        parts = torch.split(self._buffer, [x.numel() for x in self._sources])
        return [part.view(x.shape) for part, x in zip(parts, self._sources, strict=True)]

    def is_last(self) -> bool:
        return self._is_last


class PowerSgd:
    """torch's ``powerSGD_hook`` with error feedback and warm start, as it comes.

    One bucket at a time: with several in flight on gloo it aborts, because its collectives start in callbacks, in an
    order that differs from rank to rank.
    """

    transport = "gloo"

    def __init__(self, gradients: Gradients, world: World, rank: int) -> None:
        self._topology = world.topology
        self._state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        # Its first steps are plain all-reduces, meant for DDP to settle its buckets; ours are settled.
        self._state.iter = self._state.start_powerSGD_iter
        groups = list(fill_buckets(gradients.tensors))
        self._buckets = [_Bucket(i, tensors, i == len(groups) - 1) for i, tensors in enumerate(groups)]
        self._sent_numel = 0

    def prepare(self) -> None:
        for bucket in self._buckets:
            bucket.refill()

    def step(self) -> None:
        before = self._state.total_numel_after_compression
        for bucket in self._buckets:
            hooked: Any = bucket  # Not a GradBucket, but all the hook asks of one.
            powerSGD_hook(self._state, hooked).wait()
        self._sent_numel = self._state.total_numel_after_compression - before

    def sent_nbytes(self) -> float:
        return crossing_nbytes(self._sent_numel * torch.float32.itemsize, self._topology)

    def results(self) -> Sequence[Tensor]:
        return [bucket.buffer() for bucket in self._buckets]


class Detonation:
    """A replicator of ``detonation``, called tensor by tensor as its ``DeToNATIONMixin.step`` calls it.

    Only that: no sign, no optimizer, no reduce-scatter inside a node.
    """

    transport = "gloo"

    def __init__(self, gradients: Gradients, world: World, replicator: Any) -> None:  # detonation has no types
        if world.topology.local_size > 1:
            raise PeerMissingError("it works on FSDP's flat shards where a node has several ranks: give each node one")
        self._gradients = gradients
        self._topology = world.topology
        self._replicator = replicator
        parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in gradients.tensors]
        self._optimizer = torch.optim.SGD(parameters, lr=1.0)
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # It prints the chunks it found.
            replicator.init(self._optimizer, replication_parallel_group=dist.group.WORLD)
        self._outputs: list[Tensor] = []

    def prepare(self) -> None:
        self._outputs = []

    @torch.no_grad()
    def step(self) -> None:
        self._replicator.pre_step()
        (group,) = self._optimizer.param_groups
        for parameter, gradient in zip(group["params"], self._gradients.tensors, strict=True):
            state = self._optimizer.state[parameter]
            self._outputs.append(self._replicator.replicate(gradient, parameter, state, group))
        self._replicator.post_step()

    def sent_nbytes(self) -> float:
        """Return the bytes of its own log for one receiver, times the receivers, or as an all-reduce in a ring."""
        nbytes = float(self._replicator.data_transmitted[-1])
        is_reduced = type(self._replicator).__name__ == "RandomReplicator"
        return crossing_nbytes(nbytes, self._topology) if is_reduced else (self._topology.nodes - 1) * nbytes

    def results(self) -> Sequence[Tensor]:
        return self._outputs


def detonation_demo(gradients: Gradients, world: World, k: int) -> Detonation:
    """Return its DeMo: chunks of 64 or the nearest divisor, int32 indices and float32 values."""
    repl = import_detonation()
    return Detonation(gradients, world, repl.DeMoReplicator(DECAY, compression_topk=k, compression_chunk=64))


def detonation_random(gradients: Gradients, world: World) -> Detonation:
    """Return its random replication: rows of each tensor, all-reduced in float32."""
    repl = import_detonation()
    return Detonation(gradients, world, repl.RandomReplicator(DECAY, compression_rate=_RATE))


def import_detonation() -> Any:
    """Return the package's replicators, or raise with the command that installs it."""
    try:
        return import_module("detonation.repl")
    except ModuleNotFoundError as error:
        # Perhaps not its own: it imports mltiming, but asks for it in extras only.
        raise PeerMissingError(f"no module {error.name}: `{PEERS_COMMAND}` in the checkout") from error
