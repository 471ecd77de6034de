"""Which method to use, and why, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexdemo.predict.arguments import format_number, format_seconds
from flexdemo.predict.prediction import WORTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexdemo.predict.prediction import Row

__all__ = ["Recommendation", "recommend"]

_ALIKE = 1.03
"""Methods within this factor of the fastest count as alike; the first of them in the order of the rows is taken."""

_REASONS = {
    "overlap": "an exchange has a whole iteration to arrive, not only a backward pass",
    "links": "nodes exchange with few others instead of with all",
    "variation": "nodes wait only for those they exchange with, not for the slowest of all",
}


@dataclass(frozen=True)
class Recommendation:
    """The method, and why."""

    method: str
    sentence: str


def recommend(rows: Sequence[Row]) -> Recommendation:
    """Return what to use: All-Reduce unless something gains 5 %, else the fastest.

    Of several that take about as long, the first: rows come in the order of how well a method averages. The first row
    is All-Reduce's.
    """
    all_reduce, *others = rows
    fastest_s = min(row.iteration_s for row in rows)
    chosen = next((row for row in others if row.iteration_s <= _ALIKE * fastest_s), all_reduce)
    if chosen is all_reduce or all_reduce.iteration_s <= WORTH * fastest_s:
        gain = all_reduce.iteration_s / fastest_s - 1
        return Recommendation(
            all_reduce.method,
            f"Stay with all-reduce: nothing is more than {max(gain, 0.0):.0%} faster, and that is too little to be "
            f"told from nothing.",
        )
    return Recommendation(
        chosen.method,
        f"Use {chosen.method}: {format_seconds(chosen.iteration_s)} ms an iteration where all-reduce takes "
        f"{format_seconds(all_reduce.iteration_s)} ms, {chosen.speedup:.2f} times as fast, mostly because "
        f"{_say_why(chosen, all_reduce)}.",
    )


def _say_why(row: Row, all_reduce: Row) -> str:
    if row.factors is not None:
        factors = row.factors
        return _REASONS[max(_REASONS, key=lambda name: float(getattr(factors, name)))]
    ours, theirs = (format_number(one.sent_nbytes / 1e6) for one in (row, all_reduce))
    return f"a node sends {ours} MB an iteration instead of {theirs}"
