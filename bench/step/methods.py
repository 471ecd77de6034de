"""Methods of ``bench step``: each reduces every rank's gradients to one update that all ranks hold.

A method is made once, keeps its own state, and takes steps. Preparing a step's input is not timed.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bench.step.models import Gradients
from bench.world import all_ranks_transport, crossing_nbytes
from flexcomm import Compressor, Residuals, World, hierarchical_sync
from flexcomm.kernels import Average

DECAY = 0.999
_MIB = 1 << 20


class Method(Protocol):
    """Communicates the gradients of one optimizer step."""

    transport: str
    """Name of the transport between ranks."""

    def prepare(self) -> None:
        """Copy the gradients into the buffers of the step: not timed."""
        ...

    def step(self) -> None:
        """Communicate: timed."""
        ...

    def sent_nbytes(self) -> float:
        """Return the bytes this rank's last step sent to other nodes, by the method's own count: no headers."""
        ...

    def results(self) -> Sequence[Tensor]:
        """Return the update of the last step; every rank must hold the same bits."""
        ...


class FlexcommSync:
    """``hierarchical_sync`` of all gradients at once, with residuals."""

    def __init__(self, gradients: Gradients, world: World, compressor: Compressor, average: Average) -> None:
        self.transport = world.inter.name
        self._gradients = gradients
        self._world = world
        self._compressor = compressor
        self._average: Average = average
        self._residuals = Residuals(decay=DECAY)
        self._outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in gradients.tensors]
        self._before = 0.0

    def prepare(self) -> None:
        self._before = self._world.stats()["inter_sent_bytes"]

    def step(self) -> None:
        hierarchical_sync(
            self._gradients.tensors,
            self._compressor,
            world=self._world,
            residuals=self._residuals,
            names=self._gradients.names,
            average=self._average,
            out=self._outputs,
        )

    def sent_nbytes(self) -> float:
        return self._world.stats()["inter_sent_bytes"] - self._before

    def results(self) -> Sequence[Tensor]:
        return self._outputs


class BucketedAllReduce:
    """All-reduce of all gradients as DDP does it: buckets of 25 MiB, the first of 1 MiB, last parameters first.

    Buckets hold the gradients themselves (``gradient_as_bucket_view``), so nothing is copied in or out.
    """

    def __init__(self, gradients: Gradients, world: World, wire_dtype: torch.dtype) -> None:
        self._transport = all_ranks_transport(world)
        self.transport = self._transport.name
        self._dtype = wire_dtype
        self._topology = world.topology
        self._sources = list(fill_buckets(gradients.tensors))
        self._buckets = [torch.empty(sum(x.numel() for x in bucket)) for bucket in self._sources]

    def prepare(self) -> None:
        for bucket, tensors in zip(self._buckets, self._sources, strict=True):
            torch.cat([x.view(-1) for x in tensors], out=bucket)

    def step(self) -> None:
        size = self._transport.size
        # The average is taken before the sum, as DDP's hooks do: sixteen bits overflow less easily.
        wires = [bucket.to(self._dtype).div_(size) for bucket in self._buckets]
        for handle in [self._transport.all_reduce(wire) for wire in wires]:
            handle.wait()
        for bucket, wire in zip(self._buckets, wires, strict=True):
            bucket.copy_(wire)

    def sent_nbytes(self) -> float:
        return crossing_nbytes(sum(one.numel() for one in self._buckets) * self._dtype.itemsize, self._topology)

    def results(self) -> Sequence[Tensor]:
        return self._buckets


def fill_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in groups as DDP's reducer makes them: a group is closed when it has reached its bytes."""
    limit = _MIB
    bucket: list[Tensor] = []
    for x in reversed(tensors):
        bucket.append(x)
        if sum(one.nbytes for one in bucket) >= limit:
            yield bucket
            limit, bucket = 25 * _MIB, []
    if bucket:
        yield bucket
