"""Measurements of a cluster: the calibration file, and the file of ``bench collectives``. docs/predict.md has both."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression, median
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flexcomm import InvalidArgumentError
from flexdemo.runtime import Compression, LinkTable

SCHEMA = "flexdemo-calibration"
VERSION = 2

ASSUMED_COMPRESSION = Compression(encode_s_per_element=3e-9, decode_s_per_element=1.5e-9, decode_s_per_coefficient=5e-8)
"""About the costs on one core of a 2-core cloud machine; accelerators are far faster."""


@dataclass(frozen=True)
class Compute:
    """Mean compute times of a node in an iteration of the model ``name``; docs/predict.md explains the fields."""

    name: str
    model_nbytes: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    sigma: float
    slowness: tuple[float, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """Measurements of a cluster of ``nodes`` with ``ranks_per_node`` each; by default nothing was measured."""

    nodes: int = 0
    ranks_per_node: int = 1
    links: tuple[LinkTable, ...] = ()
    compute: Compute | None = None
    codec: tuple[Compression, ...] = ()


# Files


def write_json(document: Mapping[str, object], file: Path) -> None:
    """Write a document that may hold dataclasses; null stands for infinity, which JSON cannot express."""
    plain = json.loads(json.dumps(document, default=asdict), parse_constant=lambda _: None)
    try:
        file.write_text(json.dumps(plain, indent=2) + "\n")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {file}: {error.strerror}. Give another file.") from error


def write_calibration(calibration: Calibration, remarks: Mapping[str, object], file: Path) -> None:
    """Write the calibration file; ``remarks`` are for people, and are not read again."""
    write_json({"schema": SCHEMA, "version": VERSION, **asdict(calibration), "remarks": remarks}, file)


def read_calibration(file: Path) -> Calibration:
    """Return what ``write_calibration`` wrote; an error names the field that is missing or invalid."""
    document = _read_json(file)
    if document.get("schema") != SCHEMA:
        raise InvalidArgumentError(
            f'{file} is no calibration: needed "schema": "{SCHEMA}". `flexdemo predict --calibrate FILE` writes one; '
            f"a file of `bench collectives --json` is read by --collectives."
        )
    if document.get("version") != VERSION:
        raise InvalidArgumentError(f"{file} has version {document.get('version')}, needed {VERSION}: measure anew.")
    calibration: Calibration = _read(Calibration, document, str(file))
    return calibration


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
    rows: tuple[_CollectivesRow, ...]


_BASELINE = "all-reduce fp32"
_MIN_SHARE_OF_LARGEST = 0.25
"""In calls of smaller tensors, relative to the largest, overheads dominate the costs per element."""


def read_collectives(file: Path) -> Calibration:
    """Return the tables of all-reduce and gather, and the costs of ``demo``, that ``bench collectives`` measured."""
    document = _read_json(file)
    try:
        return _calibration_of(_read(_Collectives, document, str(file)).rows)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"{error} Measure with `python -m bench collectives --json {file.name}`, on two nodes or more."
        ) from error


def _calibration_of(rows: Sequence[_CollectivesRow]) -> Calibration:
    baseline = [row for row in rows if row.compressor == _BASELINE]
    gathers = [row for row in rows if row.algorithm == "gather"]
    if not baseline or not gathers:
        found = f"{len(baseline)} rows of {_BASELINE} and {len(gathers)} of the algorithm gather"
        raise InvalidArgumentError(f"the file has {found}, needed some of both.")
    nodes, ranks = rows[0].nodes, rows[0].ranks_per_node
    if nodes < 2:
        raise InvalidArgumentError("the file was measured on one node, needed a run on two nodes or more.")
    timings = [_timing_of(row) for row in gathers if row.compressor.startswith("demo:")]
    largest = max((timing.elements for timing in timings), default=0)
    timings = [timing for timing in timings if timing.elements > _MIN_SHARE_OF_LARGEST * largest]
    links = (
        _make_table("all-reduce", nodes, [(row.size_nbytes, row.time_median_s) for row in baseline]),
        _make_table("gather", nodes, [(round(row.payload_nbytes * ranks), row.inter_s) for row in gathers]),
    )
    return Calibration(nodes, ranks, links, None, fit_compressions(timings))


def _make_table(link: str, nodes: int, points: Iterable[tuple[int, float]]) -> LinkTable:
    """Return the table of (bytes, seconds), with the median of rows of one size."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for size, second in sorted(points):
        seconds[size].append(second)
    return LinkTable(link, nodes, tuple(seconds), tuple(map(median, seconds.values())))


def _timing_of(row: _CollectivesRow) -> CodecTiming:
    arguments = dict(word.split("=", 1) for word in row.compressor.partition(":")[2].split(",") if "=" in word)
    try:
        k, chunk = int(arguments.get("k", 32)), int(arguments.get("chunk", 64))
    except ValueError:
        raise InvalidArgumentError(f"cannot read k and chunk from {row.compressor!r}.") from None
    elements = max(1, row.count // row.ranks_per_node)
    return CodecTiming(k, chunk, elements, row.payload_nbytes, row.encode_s, {row.nodes: row.decode_s})


def _read_json(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidArgumentError(f"{file} is not JSON: {error}.") from error
    document: dict[str, object] = _read(dict, value, str(file))
    return document


def _read(kind: Any, value: object, where: str) -> Any:  # any type in, a value of that type out
    """Return a JSON value as ``kind``: a dataclass, a tuple or one of ``_CHECKS``.

    ``where`` is the file and the names that lead to the value, for messages.
    """
    if get_origin(kind) is UnionType:
        return None if value is None else _read(get_args(kind)[0], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise InvalidArgumentError(f"{where} is {value!r}, needed a list.")
        return tuple(_read(get_args(kind)[0], one, f"{where}[{place}]") for place, one in enumerate(value))
    if isinstance(kind, type) and is_dataclass(kind):
        fields, hints = _read(dict, value, where), get_type_hints(kind)
        missing = [name for name, hint in hints.items() if name not in fields and get_origin(hint) is not UnionType]
        if missing:
            there = ", ".join(fields) or "no fields"
            raise InvalidArgumentError(f"{where}: {missing[0]} is missing; there are {there}.")
        values = {name: _read(hint, fields.get(name), f"{where}: {name}") for name, hint in hints.items()}
        try:
            return kind(**values)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{where}: {error}") from error
    allows, needed = _CHECKS[kind]
    if not allows(value):
        got = type(value).__name__ if kind is dict else repr(value)
        raise InvalidArgumentError(f"{where} is {got}, needed {needed}.")
    return kind(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


_CHECKS: dict[type, tuple[Callable[[object], bool], str]] = {
    int: (lambda value: isinstance(value, int) and _is_number(value) and value >= 1, "a whole number from 1"),
    float: (_is_number, "a number from 0"),
    str: (lambda value: isinstance(value, str), "a string"),
    dict: (lambda value: isinstance(value, dict), "an object with named fields"),
}


# Costs of compression


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


def fit_compressions(timings: Sequence[CodecTiming]) -> tuple[Compression, ...]:
    """Return the costs of each timing; decoding costs, the same for all of them, are a least-squares line.

    Over different numbers of payloads or different k it tells the cost per coefficient from that per element; with one
    of each, all of the decoding counts as per element. Neither is negative, whatever the noise.
    """
    if not timings:
        return ()
    densities = [timing.k / timing.chunk**2 for timing in timings]
    points = [
        (density * payloads, seconds / timing.elements)
        for density, timing in zip(densities, timings, strict=True)
        for payloads, seconds in timing.decode_s.items()
    ]
    xs, ys = zip(*points, strict=True)
    slope = linear_regression(xs, ys).slope if len(set(xs)) > 1 else 0.0
    slope = min(max(slope, 0.0), fmean(ys) / fmean(xs))
    return tuple(
        Compression(
            k=timing.k,
            chunk=timing.chunk,
            bits_per_coefficient=8 * timing.payload_nbytes / (timing.elements * density),
            encode_s_per_element=timing.encode_s / timing.elements,
            decode_s_per_element=max(fmean(ys) - slope * fmean(xs), 0.0),
            decode_s_per_coefficient=slope,
        )
        for density, timing in zip(densities, timings, strict=True)
    )


def compression_for_k(codec: Sequence[Compression], k: int) -> Compression:
    """Return the costs at ``k``: those of the nearest known k, by ratio, or the assumed ones if none is known."""
    nearest = min(codec or (ASSUMED_COMPRESSION,), key=lambda one: abs(math.log(one.k / max(k, 1))))
    return replace(nearest, k=k)
