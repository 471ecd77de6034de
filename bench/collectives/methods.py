"""Methods of ``bench collectives``: our synchronisation with a compressor, and an all-reduce of everything."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from bench.collectives.arguments import DTYPES, NamedCompressor
from bench.world import all_ranks_transport, crossing_nbytes
from flexcomm import BUCKET_BYTES, TensorSpec, World, dense, start_sync
from flexcomm import AlgorithmOption as Algorithm
from flexcomm.codec import plan_tensor
from flexcomm.kernels import TensorPlan
from flexcomm.sync.plan import BucketPlan, SyncSettings, plan_buckets


class Cost(NamedTuple):
    """Bytes between nodes and seconds of one call on this rank; ``inter_s`` is None if the call has no other phase."""

    wire_nbytes: float
    payload_nbytes: float
    encode_s: float = 0.0
    intra_s: float = 0.0
    inter_s: float | None = None
    decode_s: float = 0.0


class Plan(NamedTuple):
    """Plan that follows from a tensor's shape: its encoding, the algorithm, and how many elements this rank sends."""

    tensor: TensorPlan
    algorithm: str
    kept: int | None


class Method(Protocol):
    """Averages one tensor over all ranks."""

    @property
    def name(self) -> str:
        """The name in the table."""
        ...

    def plan(self, spec: TensorSpec) -> Plan:
        """Return the plan for a shape; moves no data."""
        ...

    def average(self, x: Tensor) -> tuple[Tensor, Cost]:
        """Return the average of every rank's ``x``, and its cost."""
        ...


@dataclass(frozen=True)
class Sync:
    """Our verb with one compressor."""

    asked: NamedCompressor
    algorithm: Algorithm
    world: World

    @property
    def name(self) -> str:
        return self.asked.name

    def plan(self, spec: TensorSpec) -> Plan:
        buckets = self._plan_buckets(spec)
        plans = [bucket.buffers[self.world.intra.rank] for bucket in buckets]
        counts = [plan.entries for plan in plans]
        whole = plan_tensor(spec, self.asked.compressor)
        algorithms = "+".join(dict.fromkeys(bucket.algorithm for bucket in buckets))
        if algorithms == "dense":
            # Everything travels, so everything must arrive, whatever the compressor would have left out.
            whole = dense().plan(spec) if whole.selection.rule.sample_key else whole
        return Plan(whole, algorithms, None if -1 in counts else sum(counts))

    def average(self, x: Tensor) -> tuple[Tensor, Cost]:
        handle = start_sync(x, self.asked.compressor, world=self.world, algorithm=self.algorithm)
        out = handle.wait()
        record = handle.record
        times = (record.encode_s, record.intra_s, record.inter_s, record.decode_s)
        return out, Cost(record.inter_sent_bytes, record.payload_bytes, *times)

    def _plan_buckets(self, spec: TensorSpec) -> tuple[BucketPlan, ...]:
        settings = SyncSettings(
            specs=(spec,),
            compressor=self.asked.compressor,
            average="nodes",
            algorithm=self.algorithm,
            nonfinite="raise",
            bucket_bytes=BUCKET_BYTES,
            has_residuals=False,
        )
        return plan_buckets(settings, self.world.inter.size, self.world.intra.size)


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce over all ranks, in ``wire_dtype``: what data-parallel training does today."""

    wire_name: str
    world: World

    @property
    def name(self) -> str:
        return f"all-reduce {self.wire_name}"

    def plan(self, spec: TensorSpec) -> Plan:
        tensor = dense(DTYPES[self.wire_name]).plan(spec)
        return Plan(tensor, "all-reduce", tensor.chunks * tensor.chunk_numel)

    def average(self, x: Tensor) -> tuple[Tensor, Cost]:
        topology, dtype = self.world.topology, DTYPES[self.wire_name]
        buffer = x.to(dtype, copy=True)
        all_ranks_transport(self.world).all_reduce(buffer).wait()
        out = buffer.to(x.dtype).div_(topology.size)
        return out, Cost(crossing_nbytes(buffer.nbytes, topology), buffer.nbytes)
