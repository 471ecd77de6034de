"""FlexDeMo's iteration in the same terms: encode, gather payloads among all nodes, decode.

Nodes stay equal, so all wait for all, as in All-Reduce; what travels is smaller, and costs work before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from flexdemo.runtime.errors import check_at_least, check_between
from flexdemo.runtime.links import crossings
from flexdemo.runtime.recursion import HORIZON, Horizon, Timing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flexdemo.runtime.workload import Cluster, Workload

__all__ = ["Compression", "Way", "choose_way", "sent_nbytes", "simulate_flexdemo"]

Way = Literal["gather", "split", "dense"]


@dataclass(frozen=True)
class Compression:
    """``k`` of every ``chunk * chunk`` coefficients travel, ``bits_per_kept`` each, index and headers included.

    Encoding touches every element a rank holds; decoding, too, and adds up the kept coefficients of every node.
    ``averaged_bits_per_kept`` is what a coefficient's average takes where each node averages a share and sends it on.
    """

    k: int = 32
    chunk: int = 64
    bits_per_kept: float = 25.0
    encode_s_per_element: float = 0.0
    decode_s_per_element: float = 0.0
    decode_s_per_kept: float = 0.0
    averaged_bits_per_kept: float = 41.0
    element_nbytes: int = 4

    def __post_init__(self) -> None:
        check_between("k", self.k, 1, self.chunk * self.chunk)
        for name in ("encode_s_per_element", "decode_s_per_element", "decode_s_per_kept"):
            check_at_least(name, getattr(self, name), 0.0)
        for name in ("bits_per_kept", "averaged_bits_per_kept", "element_nbytes"):
            check_at_least(name, getattr(self, name), 1)

    def kept(self, nbytes: float) -> float:
        """Return how many coefficients of a bucket of ``nbytes`` travel from one node."""
        return nbytes / self.element_nbytes * self.k / self.chunk**2

    def payload_nbytes(self, nbytes: float) -> float:
        """Return the bytes that a node sends of a bucket of ``nbytes``."""
        return self.kept(nbytes) * self.bits_per_kept / 8

    def averages_nbytes(self, nbytes: float, nodes: int) -> float:
        """Return the bytes of all averages; nodes hardly choose the same coefficients, and there are not more."""
        return min(nodes * self.kept(nbytes) * self.averaged_bits_per_kept / 8, nbytes)


class _Bucket(NamedTuple):
    encode_s: float
    exchange_s: float
    decode_s: float


def choose_way(nodes: int, compression: Compression, nbytes: float) -> Way:
    """Return the way between nodes on which a node sends the fewest bytes, as flexcomm's ``auto`` does.

    ``gather`` grows with the number of nodes; beyond some number ``split`` or sending everything (``dense``) is less.
    """
    sent: dict[Way, float] = {way: sent_nbytes(way, nodes, compression, nbytes) for way in get_args(Way)}
    return min(sent, key=lambda way: sent[way])


def sent_nbytes(way: Way, nodes: int, compression: Compression, nbytes: float) -> float:
    """Return the bytes that a node sends of a bucket of ``nbytes`` on that way."""
    if way == "dense":
        return crossings("all-reduce", nodes) * nbytes
    payload = compression.payload_nbytes(nbytes)
    if way == "gather":
        return crossings("gather", nodes) * payload
    return crossings("gather", nodes) / nodes * (payload + compression.averages_nbytes(nbytes, nodes))


def simulate_flexdemo(
    cluster: Cluster,
    workload: Workload,
    compression: Compression,
    *,
    overlap: bool = True,
    horizon: Horizon = HORIZON,
) -> Timing:
    """Return the timing of FlexDeMo's step.

    With ``overlap`` a bucket is encoded when its gradients are there, and travels while the backward pass goes on;
    without, all are encoded after it, each travelling while the next is encoded. Either way decoding comes after the
    backward pass, bucket after bucket, as they arrive. Ranks of a node share encoding, and decoding, evenly.
    """
    buckets = [_plan_bucket(cluster, workload, compression, nbytes) for nbytes in workload.bucket_nbytes]
    ready_s, finished = np.zeros(cluster.nodes), []
    for iteration in range(horizon.iterations):
        factors = workload.draw(cluster.nodes, iteration, horizon.seed)
        ready_s = _iterate(ready_s, factors, workload, buckets, overlap=overlap)
        finished.append(float(ready_s.max()))
    return Timing(tuple(finished), horizon.warmup)


def _plan_bucket(cluster: Cluster, workload: Workload, compression: Compression, nbytes: int) -> _Bucket:
    nodes, ranks = cluster.nodes, cluster.ranks_per_node
    way = choose_way(nodes, compression, nbytes)
    exchange_s = _exchange_s(cluster, compression, way, nbytes) + _legs_s(cluster, workload, nbytes)
    if way == "dense":
        return _Bucket(0.0, exchange_s, 0.0)
    elements, kept = nbytes / compression.element_nbytes / ranks, compression.kept(nbytes) / ranks
    # By split a node adds up its share of everybody's, which is as many as it kept, and then reads all averages.
    added = nodes * kept if way == "gather" else kept + min(nodes * kept, elements)
    return _Bucket(
        encode_s=elements * compression.encode_s_per_element,
        exchange_s=exchange_s,
        decode_s=elements * compression.decode_s_per_element + added * compression.decode_s_per_kept,
    )


def _exchange_s(cluster: Cluster, compression: Compression, way: Way, nbytes: int) -> float:
    nodes, tau = cluster.nodes, cluster.links.tau
    if nodes == 1:
        return 0.0
    if way == "dense":
        return tau("all-reduce", nodes, nbytes)
    payload = compression.payload_nbytes(nbytes)
    if way == "gather":
        return tau("gather", nodes, payload)
    averages = compression.averages_nbytes(nbytes, nodes)
    return tau("gather", nodes, payload / nodes) + tau("gather", nodes, averages / nodes)


def _legs_s(cluster: Cluster, workload: Workload, nbytes: int) -> float:
    return cluster.intra_s(nbytes) if workload.whole else 0.0


def _iterate(
    ready_s: NDArray[np.float64],
    factors: NDArray[np.float64],
    workload: Workload,
    buckets: list[_Bucket],
    *,
    overlap: bool,
) -> NDArray[np.float64]:
    """Return when each node has finished an iteration that it began at ``ready_s``."""
    now_s = ready_s + factors * (workload.forward_s + (0.0 if overlap else sum(workload.backward_s)))
    end_s, arrived_s = 0.0, []
    for bucket, backward_s in zip(buckets, workload.backward_s, strict=True):
        now_s = now_s + factors * (backward_s if overlap else 0.0) + bucket.encode_s
        end_s = max(float(now_s.max()), end_s) + bucket.exchange_s
        arrived_s.append(end_s)
    for bucket, at_s, step_s in zip(buckets, arrived_s, workload.optimizer_s, strict=True):
        now_s = np.maximum(now_s, at_s) + bucket.decode_s + step_s
    return now_s
