"""``python -m bench codec``: time, bits, memory and error of compression, against the published operations.

One thread. Ours is a whole bucket: check of the elements, momentum, transform, selection, packing, header, checksum; in
decode, validation of everything before the first write.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import typer

from bench.codec.memory import VERBS, MemoryUnknownError, measure_memory
from bench.codec.payloads import NODES, PayloadBits, bits_of, measure_bits, measure_code_errors
from bench.codec.speed import Comparison, compare_decode, compare_encode, geometries, keep_freed_memory
from bench.codec.stages import ALL, StageTime, measure_stages
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.tables import print_table

_DECODED_NODES = (2, 4, 8)
_SUFFIXES = [geometry.suffix for geometry in geometries((64, 64))]
_ENCODE_FIGURES = [f"encode_speedup{suffix or '_2d'}" for suffix in _SUFFIXES]
_DECODE_FIGURES = [f"decode_speedup{suffix}_{nodes}" for suffix in _SUFFIXES for nodes in _DECODED_NODES]
_BITS_FIGURES = ["bits_4096_32_bf16", "bits_4096_32_sign", "bits_64_8_bf16"]
_MEMORY_FIGURES = [f"{verb}_extra_mb" for verb in VERBS]
_KEPT = "_kept"
"""Suffix of the figures that are measured while malloc keeps freed memory."""
_KEPT_FIGURES = [figure + _KEPT for figure in (*_ENCODE_FIGURES, *_DECODE_FIGURES)]
_FIGURES = frozenset([*_ENCODE_FIGURES, *_DECODE_FIGURES, *_KEPT_FIGURES, *_BITS_FIGURES, *_MEMORY_FIGURES])
_KS = (8, 32)


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurements. Smaller tensors stay in caches, which helps the published operations most."""

    shape: tuple[int, int]
    rounds: int
    memory_cases: int
    training_steps: int
    stage_shapes: tuple[tuple[int, int], ...]
    """Of the tensors whose stages are timed: together, larger than any cache."""


_STAGE_SHAPES = ((6144, 384),) * 4
_FULL = Settings((2048, 4096), rounds=7, memory_cases=3, training_steps=90, stage_shapes=_STAGE_SHAPES)
_QUICK = Settings((512, 2048), rounds=5, memory_cases=1, training_steps=48, stage_shapes=_STAGE_SHAPES)


class Findings(NamedTuple):
    """Results of one table."""

    figures: dict[str, float]
    rows: list[dict[str, object]]
    unmeasured: dict[str, str]


def codec(json_file: JsonOption = None, quick: QuickOption = False, check: CheckOption = False) -> None:
    """Encode and decode against the published operations: speed, bits per coefficient, memory, error of value codes.

    And where the time goes: each stage, beside what the machine's memory allows.
    """
    torch.set_num_threads(1)
    settings = _QUICK if quick else _FULL
    tables = [
        _compare_speed(settings),
        _compare_speed_with_kept_memory(settings),
        _measure_bits(settings),
        _measure_memory(settings),
        _measure_code_errors(settings),
        _measure_stages(settings),
    ]
    report = Report(
        "codec",
        _FIGURES,
        {name: value for table in tables for name, value in table.figures.items()},
        [row for table in tables for row in table.rows],
        asdict(settings),
        {name: reason for table in tables for name, reason in table.unmeasured.items()},
    )
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def _compare_speed(settings: Settings, note: str = "", ending: str = "") -> Findings:
    cases = geometries(settings.shape)
    encodes = [compare_encode(case, settings.rounds) for case in cases]
    _print_comparisons(f"encode {_size(settings)}{note}, ms", encodes)
    decodes = [comparison for case in cases for comparison in compare_decode(case, _DECODED_NODES, settings.rounds)]
    _print_comparisons(f"decode and average {_size(settings)}{note}, ms", decodes)
    comparisons = [replace(comparison, figure=comparison.figure + ending) for comparison in encodes + decodes]
    rows = [{"table": "speed", **asdict(comparison), "speedup": comparison.speedup} for comparison in comparisons]
    return Findings({comparison.figure: comparison.speedup for comparison in comparisons}, rows, {})


def _compare_speed_with_kept_memory(settings: Settings) -> Findings:
    """Compare again with a malloc that makes temporaries of the published operations as cheap as smaller ones."""
    if not keep_freed_memory():
        return Findings({}, [], dict.fromkeys(_KEPT_FIGURES, "this malloc cannot be told to keep freed memory"))
    return _compare_speed(settings, ", freed memory kept", _KEPT)


def _size(settings: Settings) -> str:
    rows, cols = settings.shape
    return f"{rows * cols / 1e6:.1f} M float32 elements"


def _print_comparisons(title: str, comparisons: Sequence[Comparison]) -> None:
    columns = ("chunks", "ours", "its CPU", "published", "its CPU", "speedup")
    rows = [
        (
            comparison.case,
            *(f"{1e3 * second:.1f}" for second in (*comparison.ours, *comparison.published)),
            f"{comparison.speedup:.1f}x",
        )
        for comparison in comparisons
    ]
    print_table(title, columns, rows, sys.stdout)


def _measure_bits(settings: Settings) -> Findings:
    payloads = measure_bits(settings.shape, settings.rounds)
    columns = ("n", "k", "values", "bits", "of them index", "entropy", "encode", f"decode {NODES}", "copy")
    title = f"bits per sent coefficient of {_size(settings)}, header included; GB/s of dense bytes"
    print_table(title, columns, [_format_bits(payload) for payload in payloads], sys.stdout)
    rows: list[dict[str, object]] = [{"table": "bits", **asdict(payload)} for payload in payloads]
    return Findings(bits_of(payloads, _BITS_FIGURES), rows, {})


def _format_bits(payload: PayloadBits) -> tuple[str, ...]:
    bits = (payload.bits, payload.index_bits, payload.entropy_bits)
    speeds = (payload.encode_gb_per_s, payload.decode_gb_per_s, payload.copy_gb_per_s)
    shown = (*(f"{value:.2f}" for value in bits), *(f"{value:.2f}" for value in speeds))
    return (str(payload.n), str(payload.k), payload.values, *shown)


def _measure_memory(settings: Settings) -> Findings:
    try:
        found = measure_memory(settings.memory_cases)
    except MemoryUnknownError as error:
        return Findings({}, [], dict.fromkeys(_MEMORY_FIGURES, str(error)))
    shown = [(memory.case, memory.verb, f"{memory.extra_mb:.2f}") for memory in found]
    title = "peak memory beyond inputs, momentum, payloads (of 8 nodes) and outputs; 8.4 M float32 elements"
    print_table(title, ("chunks", "verb", "MB"), shown, sys.stdout)
    figures = {f"{verb}_extra_mb": max(one.extra_mb for one in found if one.verb == verb) for verb in VERBS}
    return Findings(figures, [{"table": "memory", **asdict(memory)} for memory in found], {})


def _measure_code_errors(settings: Settings) -> Findings:
    errors = measure_code_errors(_KS, settings.training_steps)
    shown = [(error.values, str(error.k), f"{error.settled:.5f}", f"{error.worst:.5f}") for error in errors]
    title = f"relative L2 error of what is sent, over {settings.training_steps} steps of a small network"
    print_table(title, ("values", "k", "last third", "worst step"), shown, sys.stdout)
    return Findings({}, [{"table": "error", **asdict(error)} for error in errors], {})


def _measure_stages(settings: Settings) -> Findings:
    found = measure_stages(settings.stage_shapes, settings.rounds)
    memory_gb_per_s = found[0].gb_per_s
    numel = sum(rows * cols for rows, cols in settings.stage_shapes)
    title = f"where the time goes: {numel / 1e6:.1f} M float32 elements, one thread, one sender, step by the sign"
    columns = ("stage", "ns/element", "bytes/element", "GB/s", "of memory")
    print_table(title, columns, [_format_stage(one, memory_gb_per_s) for one in found], sys.stdout)
    print("# ns: processor time; bytes: of dense arrays, read and written at least, the rest stays in cache")
    print("# bytes of decode: of the 64-byte lines with an element that changes, counted; of memory: GB/s to add_'s")
    rows: list[dict[str, object]] = [
        {"table": "stages", **asdict(one), "gb_per_s": one.gb_per_s, "of_memory": one.gb_per_s / memory_gb_per_s}
        for one in found
    ]
    return Findings({}, rows, {})


def _format_stage(one: StageTime, memory_gb_per_s: float) -> tuple[str, ...]:
    name = f"{one.recipe}: {one.verb}" if one.stage == ALL else f"    {one.stage}"
    if not one.bytes_per_element:
        return (name, f"{one.ns_per_element:z.2f}", "-", "-", "-")
    speed = (f"{one.gb_per_s:.1f}", f"{one.gb_per_s / memory_gb_per_s:.0%}")
    return (name, f"{one.ns_per_element:z.2f}", f"{one.bytes_per_element:.1f}", *speed)
