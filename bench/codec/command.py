"""``python -m bench codec``: what compression costs, against the published operations, in time, bits, memory and error.

One thread. Ours is a whole bucket: check of the elements, momentum, transform, selection, packing, header, checksum;
on the way back, validation of everything before the first write.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import typer

from bench.codec.memory import VERBS, MemoryUnknownError, measure_memory
from bench.codec.payloads import NODES, Weight, bits_of, measure_losses, measure_weights
from bench.codec.speed import Race, geometries, keep_freed_memory, race_decode, race_encode
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.tables import print_table

_DECODED_NODES = (2, 4, 8)
_SUFFIXES = [geometry.suffix for geometry in geometries((64, 64))]
_ENCODE_FIGURES = [f"encode_speedup{suffix or '_2d'}" for suffix in _SUFFIXES]
_DECODE_FIGURES = [f"decode_speedup{suffix}_{nodes}" for suffix in _SUFFIXES for nodes in _DECODED_NODES]
_BITS_FIGURES = ["bits_4096_32_bf16", "bits_4096_32_sign", "bits_64_8_bf16"]
_MEMORY_FIGURES = [f"{verb}_extra_mb" for verb in VERBS]
_KEPT = "_kept"
"""Ends the figures of races that are run while malloc keeps what is freed."""
_KEPT_FIGURES = [figure + _KEPT for figure in (*_ENCODE_FIGURES, *_DECODE_FIGURES)]
_FIGURES = frozenset([*_ENCODE_FIGURES, *_DECODE_FIGURES, *_KEPT_FIGURES, *_BITS_FIGURES, *_MEMORY_FIGURES])
_KS = (8, 32)


@dataclass(frozen=True)
class Settings:
    """How much is measured. Smaller tensors stay in caches, which helps the published operations most."""

    shape: tuple[int, int]
    rounds: int
    memory_cases: int
    training_steps: int


_FULL = Settings((2048, 4096), rounds=7, memory_cases=3, training_steps=90)
_QUICK = Settings((512, 2048), rounds=5, memory_cases=1, training_steps=48)


class Findings(NamedTuple):
    """What one table found."""

    figures: dict[str, float]
    rows: list[dict[str, object]]
    unmeasured: dict[str, str]


def codec(json_file: JsonOption = None, quick: QuickOption = False, check: CheckOption = False) -> None:
    """Encode and decode against the published operations: speed, bits per coefficient, memory, error of value codes."""
    torch.set_num_threads(1)
    settings = _QUICK if quick else _FULL
    tables = [
        _race(settings),
        _race_without_fresh_pages(settings),
        _weigh(settings),
        _remember(settings),
        _lose(settings),
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


def _race(settings: Settings, note: str = "", ending: str = "") -> Findings:
    cases = geometries(settings.shape)
    encodes = [race_encode(case, settings.rounds) for case in cases]
    _print_races(f"encode {_size(settings)}{note}, ms", encodes)
    decodes = [race for case in cases for race in race_decode(case, _DECODED_NODES, settings.rounds)]
    _print_races(f"decode and average {_size(settings)}{note}, ms", decodes)
    races = [replace(race, figure=race.figure + ending) for race in encodes + decodes]
    rows = [{"table": "speed", **asdict(race), "speedup": race.speedup} for race in races]
    return Findings({race.figure: race.speedup for race in races}, rows, {})


def _race_without_fresh_pages(settings: Settings) -> Findings:
    """Race again while the temporaries of the published operations cost as little as those of smaller tensors do."""
    if not keep_freed_memory():
        return Findings({}, [], dict.fromkeys(_KEPT_FIGURES, "this malloc cannot be told to keep what is freed"))
    return _race(settings, ", freed memory kept", _KEPT)


def _size(settings: Settings) -> str:
    rows, cols = settings.shape
    return f"{rows * cols / 1e6:.1f} M float32 elements"


def _print_races(title: str, races: Sequence[Race]) -> None:
    columns = ("chunks", "ours", "its CPU", "published", "its CPU", "speedup")
    rows = [
        (race.case, *(f"{1e3 * second:.1f}" for second in (*race.ours, *race.published)), f"{race.speedup:.1f}x")
        for race in races
    ]
    print_table(title, columns, rows, sys.stdout)


def _weigh(settings: Settings) -> Findings:
    weights = measure_weights(settings.shape, settings.rounds)
    columns = ("n", "k", "values", "bits", "of them index", "entropy", "encode", f"decode {NODES}", "copy")
    title = f"bits per sent coefficient of {_size(settings)}, header included; GB/s of dense bytes"
    print_table(title, columns, [_format_weight(weight) for weight in weights], sys.stdout)
    rows: list[dict[str, object]] = [{"table": "bits", **asdict(weight)} for weight in weights]
    return Findings(bits_of(weights, _BITS_FIGURES), rows, {})


def _format_weight(weight: Weight) -> tuple[str, ...]:
    bits = (weight.bits, weight.index_bits, weight.entropy_bits)
    speeds = (weight.encode_gb_per_s, weight.decode_gb_per_s, weight.copy_gb_per_s)
    shown = (*(f"{value:.2f}" for value in bits), *(f"{value:.2f}" for value in speeds))
    return (str(weight.n), str(weight.k), weight.values, *shown)


def _remember(settings: Settings) -> Findings:
    try:
        takings = measure_memory(settings.memory_cases)
    except MemoryUnknownError as error:
        return Findings({}, [], dict.fromkeys(_MEMORY_FIGURES, str(error)))
    shown = [(taken.case, taken.verb, f"{taken.extra_mb:.2f}") for taken in takings]
    title = "peak memory beyond inputs, momentum, payloads (of 8 nodes) and outputs; 8.4 M float32 elements"
    print_table(title, ("chunks", "verb", "MB"), shown, sys.stdout)
    figures = {f"{verb}_extra_mb": max(one.extra_mb for one in takings if one.verb == verb) for verb in VERBS}
    return Findings(figures, [{"table": "memory", **asdict(taken)} for taken in takings], {})


def _lose(settings: Settings) -> Findings:
    losses = measure_losses(_KS, settings.training_steps)
    shown = [(loss.values, str(loss.k), f"{loss.settled:.5f}", f"{loss.worst:.5f}") for loss in losses]
    title = f"relative L2 error of what is sent, over {settings.training_steps} steps of a small network"
    print_table(title, ("values", "k", "last third", "worst step"), shown, sys.stdout)
    return Findings({}, [{"table": "error", **asdict(loss)} for loss in losses], {})
