"""Runtime model: the seconds of a training iteration by All-Reduce, decentralized training and FlexDeMo.

Everything is arithmetic: no tensors and no ranks, and 1,024 nodes take a second. The model is a reconstruction of the
one in "From promise to practice" (arXiv 2410.11998); docs/runtime-model.md lists what was checked, and against what.

Example::

    from flexcomm import gossip
    from flexdemo.runtime import AlphaBeta, Cluster, Compression, plan_workload
    from flexdemo.runtime import simulate_all_reduce, simulate_decentralized, simulate_flexdemo

    cluster = Cluster(nodes=64, links=AlphaBeta(bytes_per_s=1.25e9, latency_s=50e-6))
    workload = plan_workload(500_000_000, bucket_nbytes=25 << 20, forward_s=0.2, backward_s=0.4)
    simulate_all_reduce(cluster, workload).iteration_s
    simulate_decentralized(cluster, workload, gossip.one_peer_exponential(64)).iteration_s
    simulate_flexdemo(cluster, workload, Compression(k=32, encode_s_per_element=3e-9)).iteration_s

Impossible numbers, such as a negative time, raise ``flexcomm.InvalidArgumentError``.
"""

from flexdemo.runtime.inputs import (
    AlphaBeta,
    Cluster,
    Compression,
    Links,
    LinkTable,
    MeasuredLinks,
    Straggler,
    Workload,
    fit_alpha_beta,
    plan_workload,
)
from flexdemo.runtime.simulation import (
    Algorithm,
    AllReduceSchedule,
    BreakEven,
    Horizon,
    Schedule,
    SpeedupFactors,
    Timing,
    Updates,
    choose_algorithm,
    explain_speedup,
    find_break_evens,
    sent_nbytes,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)

__all__ = [
    "Algorithm",
    "AllReduceSchedule",
    "AlphaBeta",
    "BreakEven",
    "Cluster",
    "Compression",
    "Horizon",
    "LinkTable",
    "Links",
    "MeasuredLinks",
    "Schedule",
    "SpeedupFactors",
    "Straggler",
    "Timing",
    "Updates",
    "Workload",
    "choose_algorithm",
    "explain_speedup",
    "find_break_evens",
    "fit_alpha_beta",
    "plan_workload",
    "sent_nbytes",
    "simulate_all_reduce",
    "simulate_decentralized",
    "simulate_flexdemo",
]
