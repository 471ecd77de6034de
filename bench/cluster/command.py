"""``python -m bench cluster``: run a command on an emulated cluster of slow links."""

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from bench.cluster import stale_clusters
from bench.cluster.cluster import Cluster, ClusterSpec, open_cluster
from bench.cluster.launchers import Launcher, find_launcher, parse_launcher, run_on_loopback
from bench.cluster.links import Traffic, format_rate
from bench.cluster.netns import check_available
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.errors import UsageError
from bench.tables import print_table

_KNOWN_FIGURES = frozenset({"rate_error", "setup_s"})
_QUICK_PROBE_S = 0.05

CommandArgument = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command of every rank.", show_default=False)
]
NodesOption = Annotated[int, typer.Option(help="How many hosts to emulate.")]
RanksOption = Annotated[int, typer.Option(help="How many ranks on each.")]
RateOption = Annotated[str, typer.Option(help="Rate of each link, in each direction: kbit, mbit or gbit per second.")]
LauncherOption = Annotated[str, typer.Option(help="openmpi, mpich or torchrun.")]
SweepOption = Annotated[
    bool,
    typer.Option("--sweep", help="Remove the folders of clusters that were killed with SIGKILL, and do nothing else."),
]


def cluster(
    command: CommandArgument = None,
    nodes: NodesOption = 4,
    ranks_per_node: RanksOption = 1,
    rate: RateOption = "100mbit",
    launcher: LauncherOption = "openmpi",
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Run the ranks on this host instead: no root needed, no rate emulated.")
    ] = False,
    sweep: SweepOption = False,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Run COMMAND on an emulated cluster of slow links, and exit with its code.

    Afterwards, the bytes that crossed each node's link are shown, from its interface counters.
    """
    if sweep:
        _sweep()
        return
    if not command:
        raise UsageError("got no command, needed the command of the ranks: put it last, after `--`.")
    chosen = parse_launcher(launcher)
    if loopback:
        code, report = _run_on_loopback(command, nodes, ranks_per_node, chosen)
    else:
        probe_s = _QUICK_PROBE_S if quick else ClusterSpec.probe_s
        code, report = _run_on_cluster(command, ClusterSpec(nodes, ranks_per_node, rate, probe_s), chosen)
    missed_code = conclude(report, json_file=json_file, check=check)
    raise typer.Exit(code or missed_code)


def _sweep() -> None:
    removed = stale_clusters.remove_stale_folders()
    for folder in removed:
        print(f"removed {folder}")
    print(f"{len(removed)} stale clusters removed")


def _run_on_loopback(command: Sequence[str], nodes: int, ranks_per_node: int, launcher: Launcher) -> tuple[int, Report]:
    ranks = nodes * ranks_per_node
    _say(f"loopback: {ranks} ranks on this host as {nodes} nodes; no rate is emulated, no bytes are counted")
    code = run_on_loopback(command, nodes=nodes, ranks_per_node=ranks_per_node, launcher=launcher)
    settings = {"nodes": nodes, "ranks_per_node": ranks_per_node, "rate": None}
    unmeasured = dict.fromkeys(sorted(_KNOWN_FIGURES), "--loopback makes no links")
    return code, Report("cluster", _KNOWN_FIGURES, {}, (), _settings(settings, command, launcher, code), unmeasured)


def _run_on_cluster(command: Sequence[str], spec: ClusterSpec, launcher: Launcher) -> tuple[int, Report]:
    check_available()
    find_launcher(launcher)
    _tell_of_stale_clusters()
    with open_cluster(spec) as running:
        _tell_of_rates(running)
        before = running.bytes()
        code = running.run_attached(command, launcher=launcher)
        traffic = [now.since(then) for now, then in zip(running.bytes(), before, strict=True)]
    _print_traffic(traffic)
    settings = {"nodes": spec.nodes, "ranks_per_node": spec.ranks_per_node, "rate": spec.rate}
    figures = {"rate_error": _rate_error(running), "setup_s": running.setup_s}
    rows = _rows(running, traffic)
    return code, Report("cluster", _KNOWN_FIGURES, figures, rows, _settings(settings, command, launcher, code))


def _settings(sizes: Mapping[str, object], command: Sequence[str], launcher: Launcher, code: int) -> dict[str, object]:
    return {**sizes, "launcher": launcher, "command": list(command), "exit_code": code}


def _rate_error(running: Cluster) -> float:
    return max(rate.error(running.spec.rate_bits_per_s) for rate in running.rates)


def _rows(running: Cluster, traffic: Sequence[Traffic]) -> list[dict[str, object]]:
    return [
        {
            "node": index,
            "sent_nbytes": crossed.sent_nbytes,
            "received_nbytes": crossed.received_nbytes,
            "sent_bits_per_s": rate.sent_bits_per_s,
            "received_bits_per_s": rate.received_bits_per_s,
        }
        for index, (crossed, rate) in enumerate(zip(traffic, running.rates, strict=True))
    ]


def _tell_of_stale_clusters() -> None:
    stale = stale_clusters.stale_folders()
    if stale:
        _say(
            f"{len(stale)} killed clusters left folders, e.g. {stale[0]}; "
            f"`python -m bench cluster --sweep` removes them"
        )


def _tell_of_rates(running: Cluster) -> None:
    spec, rates = running.spec, running.rates
    seen = [r for rate in rates for r in (rate.sent_bits_per_s, rate.received_bits_per_s)]
    _say(
        f"cluster: {spec.nodes} nodes x {spec.ranks_per_node} ranks, links of {spec.rate} each way "
        f"(payload measured {format_rate(min(seen))} to {format_rate(max(seen))}); no delay is emulated"
    )


def _print_traffic(traffic: Sequence[Traffic]) -> None:
    rows = [(t.node, f"{t.sent_nbytes:,}", f"{t.received_nbytes:,}") for t in traffic]
    print_table("bytes on the links, headers included", ("node", "sent", "received"), rows, sys.stderr)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
