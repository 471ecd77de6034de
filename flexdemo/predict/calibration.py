"""What was measured of a cluster, as a value and as a file. docs/predict.md describes the file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from flexdemo.predict.errors import PredictError
from flexdemo.predict.fields import Fields, read_document
from flexdemo.runtime import Compression, LinkTable, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Calibration", "Compute", "read_calibration", "write_calibration"]

SCHEMA = "flexdemo-calibration"
VERSION = 1


@dataclass(frozen=True)
class Compute:
    """What a node computes in an iteration: mean seconds, and their relative standard deviation from one to the next.

    ``slowness`` holds each node's factor on the mean over nodes.
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
    """A cluster: who was there, seconds of exchanges by bytes of a node, seconds of compute, and of compression."""

    nodes: int
    ranks_per_node: int
    links: tuple[LinkTable, ...] = ()
    compute: Compute | None = None
    codec: tuple[Compression, ...] = ()


def write_calibration(calibration: Calibration, remarks: Mapping[str, object], file: Path) -> None:
    """Write the file; ``remarks`` are for people, and not read again."""
    document = {"schema": SCHEMA, "version": VERSION, **asdict(calibration), "remarks": dict(remarks)}
    try:
        file.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise PredictError(f"cannot write to {file}: {error.strerror}. Give --calibrate another file.") from error


def read_calibration(file: Path) -> Calibration:
    """Return what ``write_calibration`` was given; what it did not write is an error that says what is wrong."""
    document = read_document(file)
    if "schema" not in document or document.text("schema") != SCHEMA:
        raise PredictError(
            f'{file} is no calibration: needed "schema": "{SCHEMA}". `flexdemo predict --calibrate FILE` writes one; '
            f"what `bench collectives --json` wrote is read by --collectives."
        )
    if document.whole("version") != VERSION:
        raise PredictError(
            f"{file} has version {document.whole('version')}, needed {VERSION}: measure anew with this library."
        )
    try:
        return Calibration(
            nodes=document.whole("nodes", least=1),
            ranks_per_node=document.whole("ranks_per_node", least=1),
            links=tuple(_read_table(table) for table in document.each("links")),
            compute=_read_compute(document.nested("compute")) if "compute" in document else None,
            codec=tuple(_read_compression(one) for one in document.each("codec")),
        )
    except ModelError as error:
        raise PredictError(f"{file}: {error}") from error


def _read_table(table: Fields) -> LinkTable:
    sizes = tuple(int(size) for size in table.numbers("nbytes"))
    return LinkTable(table.text("link"), table.whole("k", least=1), sizes, table.numbers("seconds"))


def _read_compute(compute: Fields) -> Compute:
    return Compute(
        name=compute.text("name"),
        model_nbytes=compute.whole("model_nbytes", least=1),
        forward_s=compute.number("forward_s"),
        backward_s=compute.number("backward_s"),
        optimizer_s=compute.number("optimizer_s"),
        sigma=compute.number("sigma"),
        slowness=compute.numbers("slowness"),
    )


def _read_compression(one: Fields) -> Compression:
    return Compression(
        k=one.whole("k", least=1),
        chunk=one.whole("chunk", least=1),
        bits_per_coefficient=one.number("bits_per_coefficient"),
        encode_s_per_element=one.number("encode_s_per_element"),
        decode_s_per_element=one.number("decode_s_per_element"),
        decode_s_per_coefficient=one.number("decode_s_per_coefficient"),
        averaged_bits_per_coefficient=one.number("averaged_bits_per_coefficient"),
        element_nbytes=one.whole("element_nbytes", least=1),
    )
