"""One line of the table: check a method on exact inputs, time it on random ones, and gather the times of all ranks."""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from bench.cluster.links import Link
from bench.collectives.inputs import count_wrong, expect_average, make_input
from bench.collectives.methods import Method, Plan
from flexcomm import TensorSpec, Topology, World

_FIELDS = ("time_s", "encode_s", "intra_s", "inter_s", "decode_s", "wire_nbytes", "payload_nbytes", "kept")
_MB = 10**6


@dataclass(frozen=True)
class Case:
    """A tensor of ``shape`` to be averaged, and the number of repetitions."""

    shape: tuple[int, int]
    dtype: torch.dtype
    dtype_name: str
    iterations: int
    warmups: int
    checked: bool

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec("0", self.shape, self.dtype)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Row:
    """Results of one method for one size; ``None`` where nothing was measured, or nothing is sent.

    Times are those of the slowest rank in each iteration, and so are encode, intra and decode; inter lasts from when
    the last rank has encoded until the last rank has everything. All are medians over iterations. Bytes are means over
    ranks, of what goes from node to node.
    """

    size_nbytes: int
    count: int
    dtype: str
    compressor: str
    algorithm: str
    time_min_s: float
    time_median_s: float
    time_p99_s: float
    wire_nbytes: float
    payload_nbytes: float
    bits_per_kept: float | None
    effective_bytes_per_s: float
    wire_bytes_per_s: float | None
    link_share: float | None
    encode_s: float
    intra_s: float
    inter_s: float
    decode_s: float
    wrong: int | None
    nodes: int
    ranks_per_node: int


def measure(method: Method, case: Case, world: World, link: Link | None) -> Row:
    """Return the same line on every rank. All ranks call it together."""
    plan = method.plan(case.spec)
    wrong = verify(method, plan, case, world) if case.checked else None
    gathered = _time(method, plan, case, world)
    return summarise(gathered, method.name, plan.algorithm, case, world.topology, link, wrong)


def verify(method: Method, plan: Plan, case: Case, world: World) -> int:
    """Return how many elements, on all ranks together, are not the average, or not the same bits as on rank 0."""
    topology = world.topology
    x = make_input(plan.tensor, case.shape, case.dtype, topology).to(world.device)
    out, _ = method.average(x)
    expected = expect_average(plan.tensor, case.shape, topology).to(out.device)
    wrong = torch.tensor([max(count_wrong(out, expected, plan.tensor, topology), _count_unlike(out, world))])
    return int(world.control.all_reduce(wrong).wait())


def _count_unlike(out: Tensor, world: World) -> int:
    """Return how many elements differ from rank 0's. Only if some do, tensors travel for that."""
    bits = out.cpu().contiguous().view(torch.uint8).view(-1)
    digest = torch.tensor(list(hashlib.blake2b(bits.numpy().tobytes(), digest_size=8).digest()), dtype=torch.uint8)
    digests = world.control.all_gather(digest).wait()
    if bool((digests == digests[0]).all()):
        return 0
    first = world.control.broadcast(bits.clone()).wait()
    return int((first != bits).view(-1, out.element_size()).any(dim=1).sum())


def _time(method: Method, plan: Plan, case: Case, world: World) -> Tensor:
    """Return ``[ranks, iterations, fields]``."""
    draw = torch.Generator().manual_seed(world.topology.rank)
    x = torch.randn(case.shape, generator=draw).to(device=world.device, dtype=case.dtype)
    for _ in range(case.warmups):
        method.average(x)
    seen = torch.zeros(case.iterations, len(_FIELDS), dtype=torch.float64)
    for iteration in range(case.iterations):
        world.control.barrier().wait()
        begin_s = time.perf_counter()
        out, cost = method.average(x)
        if out.is_cuda:
            torch.cuda.synchronize()
        time_s = time.perf_counter() - begin_s
        inter_s = time_s if cost.inter_s is None else cost.inter_s
        kept = _count_kept(plan, x, world)
        phases = (time_s, cost.encode_s, cost.intra_s, inter_s, cost.decode_s)
        seen[iteration] = torch.tensor([*phases, cost.wire_nbytes, cost.payload_nbytes, kept], dtype=torch.float64)
    return world.control.all_gather(seen).wait()


def _count_kept(plan: Plan, x: Tensor, world: World) -> int:
    """Return how many elements this rank sent; 0 if that cannot be told.

    Where it depends on the data, those count that reach the threshold; but not if a node first adds up several ranks.
    """
    if plan.kept is not None:
        return plan.kept
    if world.topology.local_size > 1:
        return 0
    return min(plan.tensor.k, int((x.abs() >= plan.tensor.tau).sum()))


def summarise(
    gathered: Tensor, name: str, algorithm: str, case: Case, topology: Topology, link: Link | None, wrong: int | None
) -> Row:
    """Return the line of one method and size from its ``[ranks, iterations, fields]``."""
    fields = {field: gathered[:, :, number] for number, field in enumerate(_FIELDS)}
    times_s = sorted(fields["time_s"].amax(dim=0).tolist())
    inter_s = median(_last_phase(fields["encode_s"], fields["inter_s"]))
    wire, payload, kept = (float(fields[one].mean()) for one in ("wire_nbytes", "payload_nbytes", "kept"))
    wire_bytes_per_s = wire * topology.local_size / inter_s if wire and inter_s else None
    return Row(
        size_nbytes=case.nbytes,
        count=case.count,
        dtype=case.dtype_name,
        compressor=name,
        algorithm=algorithm,
        time_min_s=times_s[0],
        time_median_s=median(times_s),
        time_p99_s=_percentile(times_s, 0.99),
        wire_nbytes=wire,
        payload_nbytes=payload,
        bits_per_kept=8 * payload / kept if kept else None,
        effective_bytes_per_s=case.nbytes / median(times_s),
        wire_bytes_per_s=wire_bytes_per_s,
        link_share=8 * wire_bytes_per_s / link.rate_bits_per_s if link and wire_bytes_per_s else None,
        encode_s=median(fields["encode_s"].amax(dim=0).tolist()),
        intra_s=median(fields["intra_s"].amax(dim=0).tolist()),
        inter_s=inter_s,
        decode_s=median(fields["decode_s"].amax(dim=0).tolist()),
        wrong=wrong,
        nodes=topology.nodes,
        ranks_per_node=topology.local_size,
    )


def _last_phase(before_s: Tensor, phase_s: Tensor) -> list[float]:
    """Return, for each iteration, how long the phase took from when the last rank entered it to when the last left.

    Ranks leave a barrier together, so their clocks need not agree. Not the longest phase: the first rank in waits for
    the last, which may still encode. Nor the shortest: the last one in finds what the others sent already there.
    """
    left_s, entered_s = (before_s + phase_s).amax(dim=0), before_s.amax(dim=0)
    durations_s: list[float] = (left_s - entered_s).tolist()
    return durations_s


def _percentile(ascending: Sequence[float], share: float) -> float:
    """Return the least number that at least ``share`` of them do not exceed; of fewer than a hundred, the largest."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def find_link_share(rows: Sequence[Row], baselines: frozenset[str]) -> float | None:
    """Return the worst share of the link that our methods reach with payloads of 1 MB and more."""
    shares = [
        row.link_share
        for row in rows
        if row.link_share is not None and row.payload_nbytes >= _MB and row.compressor not in baselines
    ]
    return min(shares, default=None)
