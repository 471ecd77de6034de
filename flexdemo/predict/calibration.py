"""Measurements of a cluster: the calibration file, and the file of ``bench collectives``. docs/predict.md has both."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from statistics import median
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flexcomm import InvalidArgumentError
from flexdemo.predict import PredictError
from flexdemo.runtime import Compression, LinkTable

SCHEMA = "flexdemo-calibration"
VERSION = 2

ASSUMED_COMPRESSION = Compression(
    k=32,
    chunk=64,
    bits_per_coefficient=25.0,
    encode_s_per_element=3e-9,
    decode_s_per_element=1.5e-9,
    decode_s_per_coefficient=5e-8,
)
"""About the costs on one core of a 2-core cloud machine; accelerators are far faster."""


@dataclass(frozen=True)
class Compute:
    """Compute times of a node in an iteration.

    Args:
        name: the model that was timed.
        model_nbytes: bytes of the model that the ranks of a node exchange together.
        forward_s: mean seconds of the forward pass.
        backward_s: mean seconds of the backward pass.
        optimizer_s: mean seconds of the optimizer.
        sigma: standard deviation of forward + backward from iteration to iteration, relative to a node's mean.
        slowness: each node's factor on the mean over nodes.

    """

    name: str
    model_nbytes: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    sigma: float
    slowness: tuple[float, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """Measurements of a cluster of ``nodes`` with ``ranks_per_node`` each: links, compute times, compression."""

    nodes: int
    ranks_per_node: int
    links: tuple[LinkTable, ...] = ()
    compute: Compute | None = None
    codec: tuple[Compression, ...] = ()


def write_calibration(calibration: Calibration, remarks: Mapping[str, object], file: Path) -> None:
    """Write the calibration file; ``remarks`` are for people, and are not read again."""
    document = {"schema": SCHEMA, "version": VERSION, **asdict(calibration), "remarks": dict(remarks)}
    try:
        file.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise PredictError(f"cannot write to {file}: {error.strerror}. Give --calibrate another file.") from error


def read_calibration(file: Path) -> Calibration:
    """Return what ``write_calibration`` wrote; an error names the field that is missing or invalid."""
    document = _read_json(file)
    if document.get("schema") != SCHEMA:
        raise PredictError(
            f'{file} is no calibration: needed "schema": "{SCHEMA}". `flexdemo predict --calibrate FILE` writes one; '
            f"a file of `bench collectives --json` is read by --collectives."
        )
    if document.get("version") != VERSION:
        raise PredictError(
            f"{file} has version {document.get('version')}, needed {VERSION}: measure anew with this library."
        )
    try:
        calibration: Calibration = _read(Calibration, document, str(file))
    except InvalidArgumentError as error:
        raise PredictError(f"{file}: {error}") from error
    return calibration


# bench collectives --json


@dataclass(frozen=True)
class _CollectivesRow:
    compressor: str
    algorithm: str
    nodes: int
    ranks_per_node: int
    count: int
    size_nbytes: int
    payload_nbytes: float
    time_median_s: float
    encode_s: float
    inter_s: float
    decode_s: float


@dataclass(frozen=True)
class _Collectives:
    rows: tuple[dict[str, object], ...]


_BASELINE = "all-reduce fp32"
_MIN_SHARE_OF_LARGEST = 0.25
"""In calls of smaller tensors, relative to the largest, overheads dominate the costs per element."""


def read_collectives(file: Path) -> Calibration:
    """Return the tables of all-reduce and gather, and the costs of ``demo``, that ``bench collectives`` measured."""
    document: _Collectives = _read(_Collectives, _read_json(file), str(file))
    if any("nodes" not in row or "ranks_per_node" not in row for row in document.rows):
        raise PredictError(
            f"{file} does not state nodes and ranks_per_node of its rows: an older version wrote it. Measure again "
            f"with `python -m bench collectives --json {file.name}`."
        )
    rows: list[_CollectivesRow] = [
        _read(_CollectivesRow, row, f"{file}: rows[{place}]") for place, row in enumerate(document.rows)
    ]
    baseline = [row for row in rows if row.compressor == _BASELINE]
    gathers = [row for row in rows if row.algorithm == "gather"]
    if not baseline or not gathers:
        raise PredictError(
            f"{file} has {len(baseline)} rows of {_BASELINE} and {len(gathers)} of the algorithm gather, needed some "
            f"of both: measure with `python -m bench collectives --json {file.name}`, baselines included."
        )
    nodes, ranks = rows[0].nodes, rows[0].ranks_per_node
    if nodes < 2:
        raise PredictError(f"{file} was measured on one node, needed a run on two nodes or more.")
    all_reduces = [(row.size_nbytes, row.time_median_s) for row in baseline]
    gathered = [(round(row.payload_nbytes * ranks), row.inter_s) for row in gathers]
    timings = [_timing_of(row, file) for row in gathers if row.compressor.startswith("demo:")]
    largest = max((timing.elements for timing in timings), default=0)
    timings = [timing for timing in timings if timing.elements > _MIN_SHARE_OF_LARGEST * largest]
    try:
        links = _make_table("all-reduce", nodes, all_reduces), _make_table("gather", nodes, gathered)
        return Calibration(nodes, ranks, links, None, fit_compressions(timings) if timings else ())
    except InvalidArgumentError as error:
        raise PredictError(f"{file}: {error}") from error


def _make_table(link: str, nodes: int, points: Iterable[tuple[int, float]]) -> LinkTable:
    """Return the table of (bytes, seconds), with the median of rows of one size."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for size, second in points:
        seconds[size].append(second)
    sizes = sorted(seconds)
    return LinkTable(link, nodes, tuple(sizes), tuple(median(seconds[size]) for size in sizes))


def _timing_of(row: _CollectivesRow, file: Path) -> CodecTiming:
    arguments = dict(word.split("=", 1) for word in row.compressor.partition(":")[2].split(",") if "=" in word)
    try:
        k, chunk = int(arguments.get("k", 32)), int(arguments.get("chunk", 64))
    except ValueError:
        raise PredictError(f"{file}: cannot read k and chunk from {row.compressor!r}.") from None
    elements = max(1, row.count // row.ranks_per_node)
    return CodecTiming(k, chunk, elements, row.payload_nbytes, row.encode_s, {row.nodes: row.decode_s})


# Costs of compression

_INDEX_BITS = 9
_AVERAGE_VALUE_BITS = 32


@dataclass(frozen=True)
class CodecTiming:
    """Measured encoding and decoding of ``elements`` by ``demo(k, chunk)`` on one rank.

    ``decode_s`` holds the seconds of decoding by the number of payloads, one of each node.
    """

    k: int
    chunk: int
    elements: int
    payload_nbytes: float
    encode_s: float
    decode_s: Mapping[int, float]

    @property
    def coefficients(self) -> float:
        """Those of one payload."""
        return self.elements * self.k / self.chunk**2

    def with_decode_costs(self, per_element_s: float, per_coefficient_s: float) -> Compression:
        """Return all costs, given those of decoding."""
        return Compression(
            k=self.k,
            chunk=self.chunk,
            bits_per_coefficient=8 * self.payload_nbytes / self.coefficients,
            encode_s_per_element=self.encode_s / self.elements,
            decode_s_per_element=per_element_s,
            decode_s_per_coefficient=per_coefficient_s,
            averaged_bits_per_coefficient=_INDEX_BITS + _AVERAGE_VALUE_BITS,
        )


def fit_compression(timing: CodecTiming) -> Compression:
    """Return the costs from one timing with two numbers of payloads: what more payloads cost is per coefficient."""
    (few, few_s), (many, many_s) = sorted(timing.decode_s.items())
    per_coefficient_s = max((many_s - few_s) / (many - few) / timing.coefficients, 0.0)
    rest_s = max(few_s - few * timing.coefficients * per_coefficient_s, 0.0)
    return timing.with_decode_costs(rest_s / timing.elements, per_coefficient_s)


def fit_compressions(timings: Sequence[CodecTiming]) -> tuple[Compression, ...]:
    """Return the costs of each k from timings with one number of payloads, by a least-squares line over their k.

    With a single k all of the decoding counts as per element.
    """
    points = [
        (timing.coefficients * payloads / timing.elements, seconds / timing.elements)
        for timing in timings
        for payloads, seconds in timing.decode_s.items()
    ]
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return tuple(timing.with_decode_costs(max(mean_y - slope * mean_x, 0.0), slope) for timing in timings)


def compression_for_k(codec: Sequence[Compression], k: int) -> Compression:
    """Return the costs at ``k``: those of the nearest known k, by ratio, or the assumed ones if none is known."""
    nearest = min(codec or (ASSUMED_COMPRESSION,), key=lambda one: abs(math.log(one.k / max(k, 1))))
    return replace(nearest, k=k)


# Reading JSON


def _read_json(file: Path) -> dict[str, object]:
    try:
        document: dict[str, object] = _read(dict, json.loads(file.read_text()), str(file))
    except OSError as error:
        raise PredictError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise PredictError(f"{file} is not JSON: {error}.") from error
    return document


def _read(kind: Any, value: object, where: str) -> Any:  # any type in, a value of that type out
    """Return a JSON value as ``kind``: a dataclass, a tuple or one of ``_CHECKS``.

    ``where`` is the file and the names that lead to the value, for messages.
    """
    if get_origin(kind) is UnionType:
        return None if value is None else _read(get_args(kind)[0], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise PredictError(f"{where} is {value!r}, needed a list.")
        return tuple(_read(get_args(kind)[0], one, f"{where}[{place}]") for place, one in enumerate(value))
    if isinstance(kind, type) and is_dataclass(kind):
        fields, hints = _read(dict, value, where), get_type_hints(kind)
        missing = [name for name, hint in hints.items() if name not in fields and get_origin(hint) is not UnionType]
        if missing:
            raise PredictError(f"{where}: {missing[0]} is missing; there are {', '.join(fields) or 'no fields'}.")
        return kind(**{name: _read(hint, fields.get(name), f"{where}: {name}") for name, hint in hints.items()})
    allows, needed = _CHECKS[get_origin(kind) or kind]
    if not allows(value):
        got = type(value).__name__ if kind is dict else repr(value)
        raise PredictError(f"{where} is {got}, needed {needed}.")
    return kind(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


_CHECKS: dict[type, tuple[Callable[[object], bool], str]] = {
    int: (lambda value: isinstance(value, int) and _is_number(value) and value >= 1, "a whole number from 1"),
    float: (_is_number, "a number from 0"),
    str: (lambda value: isinstance(value, str), "a string"),
    dict: (lambda value: isinstance(value, dict), "an object with named fields"),
}
