"""Closed forms of the runtime model in simple cases; docs/runtime-model.md says where they hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexdemo.runtime import Cluster, Workload


def expected_wait(sigma: float, compute_s: float, n: int) -> float:
    """Return about how much longer than average the slowest of ``n`` takes: ``sigma * C * sqrt(2 ln n)``."""
    return sigma * compute_s * math.sqrt(2 * math.log(n))


def all_reduce_seconds(cluster: Cluster, workload: Workload) -> float:
    """Return about the time of an iteration of All-Reduce: ``F + max(B, T) + tau_last + o`` and the wait.

    T is the time of all exchanges but the last, which overlaps with nothing.
    """
    tau_s = [cluster.links.tau("all-reduce", cluster.nodes, nbytes) for nbytes in workload.bucket_nbytes]
    compute_s = workload.forward_s + sum(workload.backward_s)
    hidden_s = max(sum(workload.backward_s), workload.backward_s[0] + sum(tau_s[:-1]))
    wait_s = expected_wait(workload.sigma, compute_s, cluster.nodes)
    return workload.forward_s + hidden_s + tau_s[-1] + sum(workload.optimizer_s) + wait_s


def decentralized_seconds(compute_s: float, exchange_s: float) -> float:
    """Return the time of an iteration when all phases take the same time: ``max(C, T)``."""
    return max(compute_s, exchange_s)


def alternating_lower_bound(workload: Workload, slow_s: float, fast_s: float) -> float:
    """Return a lower bound of an iteration in which slow and fast phases alternate, as in AER.

    Two iterations hold one slow exchange and, after it, the fast one or the work before the next launch. Nodes whose
    slow partner changes wait for each other on top of that.
    """
    between_s = max(workload.forward_s + workload.backward_s[0], fast_s)
    return max(2 * workload.compute_s, slow_s + between_s) / 2


def most_overlap_gains(workload: Workload) -> float:
    """Return the largest speedup by overlap alone, for many small buckets: ``1 + (F + o) / C``, reached at T = C."""
    hidden_s = workload.forward_s + sum(workload.optimizer_s)
    return 1 + hidden_s / workload.compute_s
