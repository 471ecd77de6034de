"""Measurements of a cluster: the calibration file, and the file of ``bench collectives``. docs/predict.md has both."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from flexcomm import InvalidArgumentError
from flexdemo.predict.errors import PredictError
from flexdemo.runtime import Compression, LinkTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "ASSUMED_COMPRESSION",
    "Calibration",
    "CodecTiming",
    "Compute",
    "compression_for_k",
    "fit_compression",
    "fit_compressions",
    "read_calibration",
    "read_collectives",
    "write_calibration",
]

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
    """Write the calibration file.

    Args:
        calibration: the measurements.
        remarks: information for people; it is not read again.
        file: where to write.

    Raises:
        PredictError: the file cannot be written.

    """
    document = {"schema": SCHEMA, "version": VERSION, **asdict(calibration), "remarks": dict(remarks)}
    try:
        file.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise PredictError(f"cannot write to {file}: {error.strerror}. Give --calibrate another file.") from error


def read_calibration(file: Path) -> Calibration:
    """Return what ``write_calibration`` wrote.

    Raises:
        PredictError: the file cannot be read, or a field is missing or invalid; the message names it.

    """
    document = _read_json(file)
    if "schema" not in document or document.string("schema") != SCHEMA:
        raise PredictError(
            f'{file} is no calibration: needed "schema": "{SCHEMA}". `flexdemo predict --calibrate FILE` writes one; '
            f"a file of `bench collectives --json` is read by --collectives."
        )
    if document.integer("version") != VERSION:
        raise PredictError(
            f"{file} has version {document.integer('version')}, needed {VERSION}: measure anew with this library."
        )
    try:
        return Calibration(
            nodes=document.integer("nodes", least=1),
            ranks_per_node=document.integer("ranks_per_node", least=1),
            links=tuple(_read_table(table) for table in document.children("links")),
            compute=_read_compute(document.child("compute")) if "compute" in document else None,
            codec=tuple(_read_compression(one) for one in document.children("codec")),
        )
    except InvalidArgumentError as error:
        raise PredictError(f"{file}: {error}") from error


def _read_table(table: JsonObject) -> LinkTable:
    sizes = tuple(int(size) for size in table.numbers("nbytes"))
    return LinkTable(table.string("link"), table.integer("k", least=1), sizes, table.numbers("seconds"))


def _read_compute(compute: JsonObject) -> Compute:
    return Compute(
        name=compute.string("name"),
        model_nbytes=compute.integer("model_nbytes", least=1),
        forward_s=compute.number("forward_s"),
        backward_s=compute.number("backward_s"),
        optimizer_s=compute.number("optimizer_s"),
        sigma=compute.number("sigma"),
        slowness=compute.numbers("slowness"),
    )


def _read_compression(one: JsonObject) -> Compression:
    return Compression(
        k=one.integer("k", least=1),
        chunk=one.integer("chunk", least=1),
        bits_per_coefficient=one.number("bits_per_coefficient"),
        encode_s_per_element=one.number("encode_s_per_element"),
        decode_s_per_element=one.number("decode_s_per_element"),
        decode_s_per_coefficient=one.number("decode_s_per_coefficient"),
        averaged_bits_per_coefficient=one.number("averaged_bits_per_coefficient"),
        element_nbytes=one.integer("element_nbytes", least=1),
    )


# bench collectives --json

_BASELINE = "all-reduce fp32"
_MIN_SHARE_OF_LARGEST = 0.25
"""In calls of smaller tensors, relative to the largest, overheads dominate the costs per element."""


def read_collectives(file: Path) -> Calibration:
    """Return the tables of all-reduce and gather, and the costs of ``demo``, that ``bench collectives`` measured.

    Raises:
        PredictError: the file cannot be read, was written by a version that did not state the number of nodes, is of
            one node, or has no rows of all-reduce or of gather.

    """
    rows = list(_read_json(file).children("rows"))
    if any("nodes" not in row or "ranks_per_node" not in row for row in rows):
        raise PredictError(
            f"{file} does not state nodes and ranks_per_node of its rows: an older version wrote it. Measure again "
            f"with `python -m bench collectives --json {file.name}`."
        )
    baseline = [row for row in rows if row.string("compressor") == _BASELINE]
    gathers = [row for row in rows if row.string("algorithm") == "gather"]
    if not baseline or not gathers:
        raise PredictError(
            f"{file} has {len(baseline)} rows of {_BASELINE} and {len(gathers)} of the algorithm gather, needed some "
            f"of both: measure with `python -m bench collectives --json {file.name}`, baselines included."
        )
    nodes, ranks = rows[0].integer("nodes", least=1), rows[0].integer("ranks_per_node", least=1)
    if nodes < 2:
        raise PredictError(f"{file} was measured on one node, needed a run on two nodes or more.")
    all_reduces = [(row.integer("size_nbytes"), row.number("time_median_s")) for row in baseline]
    gathered = [(round(row.number("payload_nbytes") * ranks), row.number("inter_s")) for row in gathers]
    timings = [_read_timing(row, nodes, ranks) for row in gathers if row.string("compressor").startswith("demo:")]
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


def _read_timing(row: JsonObject, nodes: int, ranks: int) -> CodecTiming:
    name = row.string("compressor")
    arguments = dict(word.split("=", 1) for word in name.partition(":")[2].split(",") if "=" in word)
    try:
        k, chunk = int(arguments.get("k", 32)), int(arguments.get("chunk", 64))
    except ValueError:
        raise PredictError(f"{row.where}: cannot read k and chunk from {name!r}.") from None
    return CodecTiming(
        k=k,
        chunk=chunk,
        elements=max(1, row.integer("count", least=1) // ranks),
        payload_nbytes=row.number("payload_nbytes"),
        encode_s=row.number("encode_s"),
        decode_s={nodes: row.number("decode_s")},
    )


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
        """The number of coefficients in one payload."""
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


@dataclass(frozen=True)
class JsonObject:
    """A JSON object; ``where`` is its file and the names that lead to it, for messages.

    Every method raises ``PredictError`` if the field is missing or of another type.
    """

    where: str
    content: dict[str, object]

    def __contains__(self, name: str) -> bool:
        return self.content.get(name) is not None

    def number(self, name: str) -> float:
        return _check_number(f"{self.where}: {name}", self._get(name))

    def integer(self, name: str, *, least: int = 0) -> int:
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PredictError(f"{self.where}: {name} is {value!r}, needed a whole number from {least}.")
        return value

    def string(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise PredictError(f"{self.where}: {name} is {value!r}, needed a string.")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        return tuple(
            _check_number(f"{self.where}: {name}[{place}]", value) for place, value in enumerate(self._list(name))
        )

    def child(self, name: str) -> JsonObject:
        return _check_object(f"{self.where}: {name}", self._get(name))

    def children(self, name: str) -> Iterator[JsonObject]:
        for place, value in enumerate(self._list(name)):
            yield _check_object(f"{self.where}: {name}[{place}]", value)

    def _list(self, name: str) -> list[object]:
        value = self._get(name)
        if not isinstance(value, list):
            raise PredictError(f"{self.where}: {name} is {value!r}, needed a list.")
        return value

    def _get(self, name: str) -> object:
        if name not in self.content:
            raise PredictError(f"{self.where}: {name} is missing; there are {', '.join(self.content) or 'no fields'}.")
        return self.content[name]


def _read_json(file: Path) -> JsonObject:
    try:
        return _check_object(str(file), json.loads(file.read_text()))
    except OSError as error:
        raise PredictError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise PredictError(f"{file} is not JSON: {error}.") from error


def _check_object(where: str, value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise PredictError(f"{where} is {type(value).__name__}, needed an object with named fields.")
    return JsonObject(where, value)


def _check_number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise PredictError(f"{where} is {value!r}, needed a number from 0.")
    return float(value)
