"""What ``python -m bench collectives --json FILE`` measured, as a calibration without compute times."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from flexdemo.predict.calibration import Calibration
from flexdemo.predict.codec import Call, fit_codec
from flexdemo.predict.errors import PredictError
from flexdemo.predict.fields import Fields, read_document
from flexdemo.runtime import LinkTable, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["read_collectives"]

_BASELINE = "all-reduce fp32"
_MOST_RANKS_PER_NODE = 1024
_LARGEST_SHARE = 0.25
"""Calls of less than this share of the largest tensor cost overheads rather than elements."""


def read_collectives(file: Path) -> Calibration:
    """Return tables of all-reduce and gather, and the costs of ``demo``.

    The file does not say how many nodes there were; it follows from the bytes that a rank sent.
    """
    rows = list(read_document(file).each("rows"))
    baseline = [row for row in rows if row.text("compressor") == _BASELINE]
    gathers = [row for row in rows if row.text("algorithm") == "gather"]
    if not baseline or not gathers:
        raise PredictError(
            f"{file} has {len(baseline)} rows of {_BASELINE} and {len(gathers)} that went by gather, needed some of "
            f"both: measure with `python -m bench collectives --json {file.name}`, baselines included."
        )
    nodes = _find_nodes(gathers[0])
    ranks = _find_ranks_per_node(baseline[0], nodes)
    try:
        links = (
            _make_table(
                "all-reduce", nodes, ((row.whole("size_nbytes"), row.number("time_median_s")) for row in baseline)
            ),
            _make_table(
                "gather",
                nodes,
                ((round(row.number("payload_nbytes") * ranks), row.number("inter_s")) for row in gathers),
            ),
        )
        calls = [_read_call(row, nodes, ranks) for row in gathers if row.text("compressor").startswith("demo:")]
        largest = max((call.elements for call in calls), default=0)
        calls = [call for call in calls if call.elements > _LARGEST_SHARE * largest]
        return Calibration(nodes, ranks, links, None, fit_codec(calls) if calls else ())
    except ModelError as error:
        raise PredictError(f"{file}: {error}") from error


def _find_nodes(row: Fields) -> int:
    """By gather a rank sends its payload to every other node."""
    sent, payload = row.number("wire_nbytes"), row.number("payload_nbytes")
    nodes = 1 + round(sent / payload) if payload else 1
    if nodes < 2:
        raise PredictError(f"{row.where}: nothing went from node to node, needed a run on two nodes or more.")
    return nodes


def _find_ranks_per_node(row: Fields, nodes: int) -> int:
    """Of L ranks a node, each sends 2 (n-1)/n / L of the tensor to other nodes, n = nodes * L."""
    share = row.number("wire_nbytes") / row.whole("size_nbytes", least=1)

    def is_off(ranks: int) -> float:
        return abs(2 * (nodes * ranks - 1) / (nodes * ranks) / ranks - share)

    return min(range(1, _MOST_RANKS_PER_NODE), key=is_off)


def _make_table(link: str, nodes: int, points: Iterable[tuple[int, float]]) -> LinkTable:
    """Return the table; sizes that several rows share count once, with their median."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for size, second in points:
        seconds[size].append(second)
    sizes = sorted(seconds)
    return LinkTable(link, nodes, tuple(sizes), tuple(median(seconds[size]) for size in sizes))


def _read_call(row: Fields, nodes: int, ranks: int) -> Call:
    words = dict(word.split("=", 1) for word in row.text("compressor").partition(":")[2].split(",") if "=" in word)
    try:
        k, chunk = int(words.get("k", 32)), int(words.get("chunk", 64))
    except ValueError:
        raise PredictError(f"{row.where}: cannot read k and chunk from {row.text('compressor')!r}.") from None
    return Call(
        k=k,
        chunk=chunk,
        elements=max(1, row.whole("count", least=1) // ranks),
        nodes=nodes,
        payload_nbytes=row.number("payload_nbytes"),
        encode_s=row.number("encode_s"),
        decode_s=row.number("decode_s"),
    )
