"""``python -m bench step``: the communication of one optimizer step of a real GPT, by our methods and by others.

Runs under mpirun, torchrun or ``python -m bench cluster``; started alone, it starts two ranks as two nodes of this
host. All methods run in one go, one after the other, and the table shows ratios.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import torch
import typer
from torch import Tensor

import flexcomm
from bench.cluster.launchers import start_two_ranks
from bench.cluster.links import Link, describe_link, find_link, parse_rate, read_sent_nbytes
from bench.common_options import CheckOption, JsonOption, LinkOption, QuickOption, Report, check_count, conclude
from bench.errors import UsageError
from bench.step.methods import BucketedAllReduce, FlexcommSync, Method
from bench.step.models import Gradients, draw_gradients, find_model
from bench.step.peers import PeerMissingError, PowerSgd, detonation_demo, detonation_random
from bench.tables import print_table
from bench.world import describe_world, hold_same_bits
from flexcomm import Topology, World, demo, random_k
from flexcomm.topology import read_launcher


@dataclass(frozen=True)
class StepPhases:
    """Seconds of the phases of one step, by flexcomm's own statistics: the slowest rank of the median step.

    They add up to the step. ``decode_s`` includes verification, ``waiting_s`` is what the caller was blocked by
    collectives for. Elements are those that the rank encodes and decodes.
    """

    encode_s: float
    decode_s: float
    waiting_s: float
    rest_s: float
    encode_ns_per_element: float
    decode_ns_per_element: float


@dataclass(frozen=True)
class Row:
    """Seconds and bytes of a step of one method: of the slowest rank, medians over steps.

    ``counted_nbytes`` are from the counters of the emulated link, if there is one, divided by a node's ranks;
    ``own_nbytes`` are counted by the method itself. ``phases`` are known of our methods only.
    """

    method: str
    transport: str
    step_s: float
    main_cpu_s: float
    process_cpu_s: float
    own_nbytes: float
    counted_nbytes: float | None
    replicas_equal: bool
    phases: StepPhases | None = None

    @property
    def counted(self) -> bool:
        return self.counted_nbytes is not None

    @property
    def sent(self) -> float:
        """Bytes a rank sent for a step: counted, if they could be."""
        return self.own_nbytes if self.counted_nbytes is None else self.counted_nbytes


_K = 32
_OURS, _SIGN, _BF16 = "demo", "demo-sign", "all-reduce-bf16"
_DETONATION, _POWERSGD = "detonation", "powersgd-1"

METHODS: Mapping[str, str] = {
    _OURS: f"flexcomm demo(k={_K}), bf16",
    _SIGN: f"flexcomm demo(k={_K}), sign",
    "random": "flexcomm random_k(1/32)",
    "all-reduce-fp32": "all-reduce fp32, DDP's buckets",
    _BF16: "all-reduce bf16, DDP's buckets",
    _POWERSGD: "torch PowerSGD rank 1",
    "powersgd-4": "torch PowerSGD rank 4",
    _DETONATION: f"detonation DeMo, k={_K}",
    "detonation-random": "detonation random 1/32",
}
"""Values of ``--methods``, and their names in the table."""

_COLUMNS = (
    "method",
    "transport",
    "s/step",
    "ratio",
    "main CPU s",
    "ratio",
    "all CPU s",
    "MB sent/rank",
    "ratio",
    "bits",
)
_PHASE_COLUMNS = (
    "method",
    "encode s",
    "ns/element",
    "verify + decode s",
    "ns/element",
    "waiting s",
    "rest s",
    "s/step",
)
_RATIOS: Mapping[str, tuple[str, str, Callable[[Row, Row], float]]] = {
    "cpu_of_detonation": (_OURS, _DETONATION, lambda ours, other: ours.main_cpu_s / other.main_cpu_s),
    "bytes_saved_bf16": (_OURS, _DETONATION, lambda ours, other: other.sent / ours.sent),
    "bytes_saved_sign": (_SIGN, _DETONATION, lambda ours, other: other.sent / ours.sent),
    "speedup_over_bf16": (_OURS, _BF16, lambda ours, other: other.step_s / ours.step_s),
    "speedup_over_powersgd_1": (_OURS, _POWERSGD, lambda ours, other: other.step_s / ours.step_s),
}
"""The figures: two methods each, and the ratio of them."""

_TARGET_NODES = 4
_TARGET_RATE = "100mbit"
_QUICK_ITERATIONS = 3


@dataclass(frozen=True)
class Settings:
    """Model, methods and repetitions to measure."""

    model: str
    methods: tuple[str, ...]
    iterations: int
    warmups: int


@dataclass
class Findings:
    """Rows measured so far, by method, and why others were skipped; an interrupted run reports them."""

    rows: dict[str, Row] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def step(
    model: Annotated[str, typer.Option(help="23m, 124m (GPT-2 small), or tiny to try the command out.")] = "23m",
    iterations: Annotated[int, typer.Option("-n", "--iterations", help="Timed steps of each method.")] = 5,
    warmups: Annotated[int, typer.Option("-w", "--warmup-iterations", help="Steps before, which do not count.")] = 1,
    methods: Annotated[str, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(METHODS)}; or all.")] = "all",
    link_rate: LinkOption = None,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Communicate what one optimizer step of a GPT needs, by our methods and by others, in one run.

    Seconds are of the slowest rank, medians over steps. Peers that are not installed are listed as skipped.
    """
    shapes, wanted = find_model(model), parse_methods(methods)
    check_count("-n", iterations, 1)
    check_count("-w", warmups, 0)
    link = find_link(link_rate)
    if read_launcher(os.environ).launcher == "none":
        raise typer.Exit(start_two_ranks())
    torch.set_num_threads(1)
    settings = Settings(model, wanted, min(iterations, _QUICK_ITERATIONS) if quick else iterations, warmups)
    findings = Findings()
    with flexcomm.connect() as world:
        first = world.topology.rank == 0
        if first:
            print(f"# bench step: {model}, {shapes.numel:,} parameters in {len(shapes.shapes())} tensors")
            print(f"# {describe_world(world)}; {describe_link(link)}", flush=True)
        try:
            _run(settings, draw_gradients(shapes, world), world, findings)
        finally:
            if first:
                print_findings(findings, len(wanted))
    if first:
        report = make_report(findings, settings, world.topology, link)
        raise typer.Exit(conclude(report, json_file=json_file, check=check))


def parse_methods(text: str) -> tuple[str, ...]:
    """Return the names asked for, in the table's order."""
    if text == "all":
        return tuple(METHODS)
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    unknown = sorted(set(wanted) - set(METHODS))
    if unknown or not wanted:
        raise UsageError(f"got --methods {text!r}, needed all, or some of {', '.join(METHODS)}, with commas between.")
    return tuple(name for name in METHODS if name in wanted)


def make_method(name: str, gradients: Gradients, world: World) -> Method:
    """Return the method of that name; raise PeerMissingError if it is of a package that is not installed."""
    makers: dict[str, Callable[[], Method]] = {
        _OURS: lambda: FlexcommSync(gradients, world, demo(_K), "contributors"),
        _SIGN: lambda: FlexcommSync(gradients, world, demo(_K, values="sign"), "contributors"),
        "random": lambda: FlexcommSync(gradients, world, random_k(1 / 32), "nodes"),
        "all-reduce-fp32": lambda: BucketedAllReduce(gradients, world, torch.float32),
        _BF16: lambda: BucketedAllReduce(gradients, world, torch.bfloat16),
        _POWERSGD: lambda: PowerSgd(gradients, world, 1),
        "powersgd-4": lambda: PowerSgd(gradients, world, 4),
        _DETONATION: lambda: detonation_demo(gradients, world, _K),
        "detonation-random": lambda: detonation_random(gradients, world),
    }
    return makers[name]()


def _run(settings: Settings, gradients: Gradients, world: World, findings: Findings) -> None:
    """Run the methods one after the other; each is freed, with its memory, before the next begins."""
    for name in settings.methods:
        try:
            method = make_method(name, gradients, world)
        except PeerMissingError as error:
            findings.skipped[name] = str(error)
            continue
        findings.rows[name] = measure(name, method, settings.iterations, settings.warmups, world)


def print_findings(findings: Findings, wanted: int) -> None:
    """Print the rows so far: each method beside the first one."""
    rows = list(findings.rows.values())
    if rows:
        print_table("slowest rank, median; ratios to the first line", _COLUMNS, format_rows(rows), sys.stdout)
        source = "the link's counters, headers included" if rows[0].counted else "the method's own count"
        print(f"# MB sent: {source}; bits: whether all ranks hold the same")
    if phases := format_phases(rows):
        print_table("where the time goes: slowest rank of the median step", _PHASE_COLUMNS, phases, sys.stdout)
        print("# waiting: blocked by collectives; ns: per element that the rank encodes and decodes")
    for name, reason in findings.skipped.items():
        print(f"# skipped {METHODS[name]}: {reason}")
    if len(rows) + len(findings.skipped) < wanted:
        print(f"# interrupted: {len(rows)} of {wanted} methods were measured")
    sys.stdout.flush()


def format_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the table's cells."""
    return [
        (
            METHODS[row.method],
            row.transport,
            f"{row.step_s:.3f}",
            _ratio(row.step_s, rows[0].step_s),
            f"{row.main_cpu_s:.3f}",
            _ratio(row.main_cpu_s, rows[0].main_cpu_s),
            f"{row.process_cpu_s:.3f}",
            f"{row.sent / 1e6:.3g}",
            _ratio(row.sent, rows[0].sent),
            "same" if row.replicas_equal else "DIFFER",
        )
        for row in rows
    ]


def format_phases(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of the table of phases: a line for each of our methods."""
    return [
        (
            METHODS[row.method],
            f"{phases.encode_s:.4f}",
            f"{phases.encode_ns_per_element:.2f}",
            f"{phases.decode_s:.4f}",
            f"{phases.decode_ns_per_element:.2f}",
            f"{phases.waiting_s:.4f}",
            f"{phases.rest_s:.4f}",
            f"{row.step_s:.4f}",
        )
        for row in rows
        if (phases := row.phases) is not None
    ]


def _ratio(number: float, unit: float) -> str:
    return f"{number / unit:.2f}x" if unit else "-"


def make_report(findings: Findings, settings: Settings, topology: Topology, link: Link | None) -> Report:
    """Return the ratios that targets bound; speedups only on the link that their targets are for."""
    rows = findings.rows
    figures: dict[str, float] = {}
    unmeasured: dict[str, str] = {}
    elsewhere = why_no_speedup(topology, link)
    for figure, (ours, other, ratio) in _RATIOS.items():
        absent = [name for name in (ours, other) if name not in rows]
        if absent:
            reasons = (f"{name}: {findings.skipped.get(name, 'not among --methods')}" for name in absent)
            unmeasured[figure] = "; ".join(reasons)
        elif figure.startswith("bytes") and topology.nodes == 1:
            unmeasured[figure] = "one node sends nothing to others"
        elif figure.startswith("speedup") and elsewhere:
            unmeasured[figure] = elsewhere
        else:
            figures[figure] = ratio(rows[ours], rows[other])
    model = find_model(settings.model)
    said = {
        **asdict(settings),
        "parameters": model.numel,
        "tensors": len(model.shapes()),
        "skipped": findings.skipped,
        "link_rate_bits_per_s": link.rate_bits_per_s if link else None,
    }
    return Report("step", frozenset(_RATIOS), figures, [asdict(row) for row in rows.values()], said, unmeasured)


def why_no_speedup(topology: Topology, link: Link | None) -> str:
    """Return why the speedups of this run cannot be compared with their targets; empty if they can."""
    if topology.nodes == _TARGET_NODES and link is not None and link.rate_bits_per_s == parse_rate(_TARGET_RATE):
        return ""
    return (
        f"its target is for {_TARGET_NODES} nodes on links of {_TARGET_RATE}: `python -m bench cluster --nodes "
        f"{_TARGET_NODES} --rate {_TARGET_RATE} -- python -m bench step`"
    )


def measure(name: str, method: Method, iterations: int, warmups: int, world: World) -> Row:
    """Return the same line on every rank. All ranks call it together."""
    for _ in range(warmups):
        method.prepare()
        method.step()
    world.control.barrier().wait()
    before = read_sent_nbytes()
    seen = torch.zeros(iterations, len(_STATISTICS) + 3, dtype=torch.float64)
    for iteration in range(iterations):
        method.prepare()
        world.control.barrier().wait()
        seen[iteration] = torch.tensor(_time(method, world), dtype=torch.float64)
    world.control.barrier().wait()
    after = read_sent_nbytes()
    gathered = world.control.all_gather(seen).wait()
    wall_s, main_s, process_s = gathered[..., :3].amax(dim=0).median(dim=0).values.tolist()
    counted = -1.0 if before is None or after is None else (after - before) / iterations / world.topology.local_size
    own, counted = _average([method.sent_nbytes(), counted], world)
    return Row(
        name,
        method.transport,
        wall_s,
        main_s,
        process_s,
        own,
        counted if counted >= 0 else None,
        hold_same_bits(method.results(), world),
        find_phases(gathered),
    )


_STATISTICS = ("encode_s", "decode_s", "waiting_s", "dense_bytes")
"""What is read of a world's statistics before and after a step."""


def _time(method: Method, world: World) -> list[float]:
    """Return seconds, processor seconds of this thread, and of all threads; then what the step added to statistics."""
    stats = world.stats()
    begin = (time.perf_counter(), time.thread_time(), time.process_time())
    method.step()
    end = (time.perf_counter(), time.thread_time(), time.process_time())
    seconds = [then - now for now, then in zip(begin, end, strict=True)]
    return seconds + [world.stats()[name] - stats[name] for name in _STATISTICS]


def find_phases(gathered: Tensor) -> StepPhases | None:
    """Return the phases of the slowest rank of the median step; None if the step was not one of flexcomm.

    Args:
        gathered: what ``_time`` returned, ``[rank, step, number]``.

    """
    slowest = gathered[..., 0].max(dim=0)
    step = int(slowest.values.median(dim=0).indices)
    wall_s, _, _, encode_s, decode_s, waiting_s, dense_nbytes = gathered[slowest.indices[step], step].tolist()
    if not dense_nbytes:
        return None
    ns_per_s = 1e9 * torch.float32.itemsize / dense_nbytes
    rest_s = wall_s - encode_s - decode_s - waiting_s
    return StepPhases(encode_s, decode_s, waiting_s, rest_s, ns_per_s * encode_s, ns_per_s * decode_s)


def _average(numbers: Sequence[float], world: World) -> list[float]:
    total: Tensor = world.control.all_reduce(torch.tensor(numbers, dtype=torch.float64)).wait()
    means: list[float] = (total / world.topology.size).tolist()
    return means
