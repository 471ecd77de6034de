"""What the ranks of a cluster found, on its way from them to us."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from flexdemo.runtime import LinkTable


@dataclass(frozen=True)
class HostCosts:
    """Seconds of one iteration on this host, of all buckets together, with all ranks at work.

    ``all_reduce_s`` and ``decentralized_s`` are iterations without sleep and without peers, of the slowest rank.
    ``mix_s`` is what joining a peer's parameters adds; ``flexdemo_s`` is an iteration without ``encode_s``,
    ``decode_s`` and waiting for the cables: all of the average rank, because parts of an iteration are not slowest on
    the same one. ``payload_nbytes`` is what FlexDeMo sends of one bucket.
    """

    all_reduce_s: float
    decentralized_s: float
    mix_s: float
    encode_s: float
    decode_s: float
    flexdemo_s: float
    payload_nbytes: float


@dataclass(frozen=True)
class Found:
    """What one job found: a calibration, if it was one, and when each iteration of each method had ended."""

    tables: tuple[LinkTable, ...] = ()
    costs: HostCosts | None = None
    finished_s: dict[str, list[float]] = field(default_factory=dict)


def write_found(found: Sequence[Found], folder: Path) -> None:
    """Lay down what was found."""
    _file(folder).write_text(json.dumps([asdict(one) for one in found]))


def read_found(folder: Path) -> list[Found]:
    """Return what :func:`write_found` was given."""
    return [
        Found(
            tuple(_table(words) for words in one["tables"]),
            HostCosts(**one["costs"]) if one["costs"] else None,
            one["finished_s"],
        )
        for one in json.loads(_file(folder).read_text())
    ]


def seconds_per_iteration(finished_s: Sequence[float], warmups: int, period: int) -> float:
    """Return the median, after warm-up, of the seconds of an iteration by the last node to finish.

    Phases of a schedule cost more or less, so ``period`` iterations count as one, from wherever they begin; what was
    predicted is told by the same rule.
    """
    length = min(period, len(finished_s) - warmups)
    ends = range(warmups + length - 1, len(finished_s))
    before_s = [finished_s[end - length] if end >= length else 0.0 for end in ends]
    return median((finished_s[end] - began_s) / length for end, began_s in zip(ends, before_s, strict=True))


def _table(words: dict[str, Any]) -> LinkTable:
    return LinkTable(words["link"], words["k"], tuple(words["nbytes"]), tuple(words["seconds"]))


def _file(folder: Path) -> Path:
    return folder / "found.json"
