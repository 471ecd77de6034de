"""How long an iteration takes, by arithmetic: All-Reduce, decentralized training and FlexDeMo on the same links.

A reconstruction of the runtime model of "From promise to practice" (arXiv 2410.11998); docs/runtime-model.md says what
of it was checked against what. No tensors, no ranks: 1,024 nodes take a second.
"""

from flexdemo.runtime.closed_forms import (
    all_reduce_seconds,
    alternating_lower_bound,
    decentralized_seconds,
    expected_wait,
    most_overlap_gains,
)
from flexdemo.runtime.comparison import BreakEven, Factors, explain, find_break_even, find_break_evens
from flexdemo.runtime.compressed import Compression, choose_way, sent_nbytes, simulate_flexdemo
from flexdemo.runtime.errors import ModelError
from flexdemo.runtime.links import AlphaBeta, Links, LinkTable, MeasuredLinks, fit_alpha_beta
from flexdemo.runtime.recursion import Horizon, Timing, Updates, simulate_all_reduce, simulate_decentralized
from flexdemo.runtime.schedules import Everybody, Schedule
from flexdemo.runtime.workload import Cluster, Straggler, Workload, plan_workload

__all__ = [
    "AlphaBeta",
    "BreakEven",
    "Cluster",
    "Compression",
    "Everybody",
    "Factors",
    "Horizon",
    "LinkTable",
    "Links",
    "MeasuredLinks",
    "ModelError",
    "Schedule",
    "Straggler",
    "Timing",
    "Updates",
    "Workload",
    "all_reduce_seconds",
    "alternating_lower_bound",
    "choose_way",
    "decentralized_seconds",
    "expected_wait",
    "explain",
    "find_break_even",
    "find_break_evens",
    "fit_alpha_beta",
    "most_overlap_gains",
    "plan_workload",
    "sent_nbytes",
    "simulate_all_reduce",
    "simulate_decentralized",
    "simulate_flexdemo",
]
