"""Compressors that are no pipeline: codecs of one's own for whole buckets.

Tensors are not cut inside a node then: each is worked on by one of its ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexcomm.codec import check_header, to_words
from flexcomm.compress import TensorSpec
from flexcomm.errors import CompressorError
from flexcomm.kernels import LARGEST_MAGNITUDE, Average, Region, StateUpdate, TensorPlan
from flexcomm.kernels.layout import HEADER_NBYTES, HEADER_NWORDS, NONFINITE, Header, aligned, checksum_of
from flexcomm.stats import Timed
from flexcomm.sync.algorithms import Collective, Received, Steps

if TYPE_CHECKING:
    from flexcomm.sync.bucket import BucketContext


class BucketCompressor(ABC):
    """A compressor that is no pipeline. Like every compressor it is a value: frozen, hashed and printed by settings.

    Example::

        @dataclass(frozen=True)
        class PowerSgd(flexcomm.BucketCompressor):
            rank: int

            def bucket_codec(self, specs):
                return PowerSgdCodec(specs, self.rank)  # a BucketCodec

    """

    @abstractmethod
    def bucket_codec(self, specs: tuple[TensorSpec, ...]) -> BucketCodec:
        """Return the codec of these tensors; the same for the same tensors, always."""

    def plan(self, spec: TensorSpec) -> TensorPlan:
        """Raise: what is sent of a tensor depends on its bucket. Mixing and resharding of states need plans."""
        no_plan = f"{self} has a codec for whole buckets, and no plan for {spec.name} alone"
        raise CompressorError(f"{no_plan}: use a compressor of flexcomm here.")


class BucketCodec(ABC):
    """How tensors become a buffer, and the buffers of all nodes their average.

    It holds settings and shapes, no tensors: memory is taken from ``ctx.buffers``. One buffer of equal length is
    gathered from every node; what needs other collectives overrides :meth:`exchange`.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The length of a buffer."""

    @property
    @abstractmethod
    def digest(self) -> int:
        """A number of 64 bits that differs wherever buffers would: all nodes must have the same."""

    @abstractmethod
    def state_numel(self, spec: TensorSpec) -> int:
        """Return how many float32 a tensor's state has, if residuals are kept; zeros before the first call."""

    @abstractmethod
    def encode_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None,
        states_out: Sequence[Tensor] | None,
        update: StateUpdate,
        buffer: Tensor,
        *,
        step: int,
    ) -> None:
        """Fill ``buffer``, uint8; read ``states``, and write ``states_out``. Tensors and states stay as they are."""

    @abstractmethod
    def decode_(self, gathered: Tensor, outputs: Sequence[Tensor], *, step: int, average: Average) -> None:
        """Fill ``outputs`` with the average of buffers ``[nodes, nbytes]``, added in node order.

        Outputs may be the tensors that were encoded.
        """

    def exchange(self, ctx: BucketContext, shard: list[Tensor]) -> Steps[Received]:
        """Send what is to be sent of this rank's tensors, and return what was received.

        A generator: it yields each :class:`flexcomm.sync.algorithms.Collective` it needs, at most one on each of the
        legs ``exchange`` and ``second_exchange``, and is resumed with the result.
        """
        nbytes = 4 * aligned(HEADER_NWORDS + -(-self.nbytes // 4))
        buffer = ctx.buffers.get("encoded", lambda: ctx.buffers.allocate(nbytes).zero_())
        gathered = ctx.buffers.get("gathered", lambda: ctx.buffers.allocate(ctx.plan.nodes, nbytes))
        with Timed(ctx.record, "encode"):
            if not ctx.nonfinite and not all(bool((x.abs() < LARGEST_MAGNITUDE).all()) for x in shard):
                ctx.nonfinite = "NaN, infinity or a magnitude of 2**100 or more"
            if not ctx.nonfinite:
                payload = buffer[HEADER_NBYTES : HEADER_NBYTES + self.nbytes]
                self.encode_(shard, ctx.states, ctx.states_out, ctx.update, payload, step=ctx.step)
            header = Header(self.digest, ctx.step, ctx.sequence, 0, NONFINITE if ctx.nonfinite else 0)
            write_header_(buffer, header.pack(nbytes - HEADER_NBYTES))
            write_header_(buffer, header.pack(nbytes - HEADER_NBYTES, checksum_of(to_words(buffer).cpu().numpy())))
        ctx.record.payload_bytes += nbytes
        moved = (ctx.plan.nodes - 1) * nbytes
        yield Collective("exchange", methodcaller("all_gather", buffer, gathered), moved, moved)
        return GatheredBuffers(self, gathered)


def write_header_(buffer: Tensor, octets: bytes) -> None:
    buffer[:HEADER_NBYTES] = torch.from_numpy(np.frombuffer(octets, np.uint8).copy())


class GatheredBuffers(NamedTuple):
    """The buffers of all nodes, one behind the other."""

    codec: BucketCodec
    gathered: Tensor

    def check(self, ctx: BucketContext) -> list[int]:
        words, expected = to_words(self.gathered), Header(self.codec.digest, ctx.step, ctx.sequence, 0)
        nwords = words.numel() // ctx.plan.nodes
        regions = [Region(sender, node * nwords, nwords) for node, sender in enumerate(ctx.senders)]
        return [check_header(words, region, expected).flags for region in regions]

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        return [sender for sender, flags in zip(ctx.senders, words, strict=True) if flags == NONFINITE]

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        payloads = self.gathered[:, HEADER_NBYTES : HEADER_NBYTES + self.codec.nbytes]
        self.codec.decode_(payloads, outputs, step=ctx.step, average=ctx.plan.settings.average)
