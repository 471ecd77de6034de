"""The table of ``bench decentralized``: every method beside All-Reduce."""

from collections.abc import Sequence

from bench.train.comparison import Table
from bench.train.decentralized_methods import ALLREDUCE
from bench.train.summary import Summary, find_baseline, format_losses

_COLUMNS = (
    "method",
    "lr",
    "val loss",
    "spread",
    f"/ {ALLREDUCE}",
    "MB/step",
    "compute s",
    "s/step",
    "speedup",
    "apart",
)
_LEGEND = (
    "val loss in nats per byte, of the mean of all replicas; MB sent by a node; compute s: passes of a mean rank;\n"
    f"speedup of a step over {ALLREDUCE}'s; apart: consensus distance at the end, from replicas to their mean"
)


def tabulate(summaries: Sequence[Summary]) -> Table:
    """Return what is shown of all methods."""
    baseline = find_baseline(summaries, ALLREDUCE)
    return Table(_COLUMNS, [_format_row(one, baseline) for one in summaries], _LEGEND)


def _format_row(one: Summary, baseline: Summary | None) -> tuple[str, ...]:
    return (
        *format_losses(one, baseline),
        f"{one.sent_nbytes / 1e6:.4g}",
        f"{one.compute_s:.3f}",
        f"{one.step_s:.3f}",
        f"{baseline.step_s / one.step_s:.2f}x" if baseline is not None and one.step_s else "-",
        "-" if one.consensus_distance is None else f"{one.consensus_distance:.3g}",
    )
