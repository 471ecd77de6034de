"""``python -m bench decentralized``: the GPT of ``bench train``, by Adam on nodes that mix with few others at a time.

Beside it Adam with a full All-Reduce, on the same bytes in the same order. Starts its own ranks, as nodes of this host
or, with ``--rate``, on an emulated cluster; replicas are averaged for every validation.
"""

from typing import Annotated

import typer

from bench.cluster.command import LauncherOption, RanksOption
from bench.collectives.arguments import check_count
from bench.common_options import CheckOption, JsonOption, QuickOption, conclude
from bench.decentralized.report import make_report
from bench.decentralized.table import tabulate
from bench.errors import UsageError
from bench.train.comparison import Contest, check_settings, plan_settings, run_contest, sweep_rates
from bench.train.decentralized_methods import ALLREDUCE, DECENTRALIZED_METHODS
from bench.train.methods import parse_methods
from bench.train.options import (
    EvalOption,
    NodesOption,
    OutOption,
    RateLrOption,
    RateOption,
    SeedsOption,
    SizeOption,
    StepsOption,
    SweepOption,
    SweepStepsOption,
    WindowsOption,
)
from bench.train.plan import Settings

_LAUNCHER = "torchrun"
"""gloo's all-reduce takes half the time of Open MPI's on emulated cables: the baseline gets the faster one."""
_QUICK_METHODS = "allreduce-adam,exponential,aer-accum,choco-int8"
_QUICK_STEPS = 100
_QUICK_EVAL_EVERY = 20

MethodsOption = Annotated[
    str, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(DECENTRALIZED_METHODS)}; or all.")
]
AccumulateOption = Annotated[
    int, typer.Option("--window", help="Steps in which the moments of methods that accumulate advance once.")
]
ComputeOption = Annotated[
    float,
    typer.Option(
        "--compute-ms",
        metavar="MS",
        help="Let the passes of a step last so long, by sleeping in them, as on an accelerator that leaves cores idle.",
    ),
]
StragglerOption = Annotated[
    float,
    typer.Option(
        "--straggler", metavar="PERCENT", help="By how much one node, another in every step, computes longer."
    ),
]

_CONTEST = Contest("decentralized", ALLREDUCE, tabulate)


def decentralized(
    size: SizeOption = "small",
    methods: MethodsOption = "all",
    steps: StepsOption = 1000,
    seeds: SeedsOption = "0",
    lr: RateLrOption = None,
    windows: WindowsOption = None,
    eval_every: EvalOption = None,
    accumulate: AccumulateOption = Settings.accumulate,
    compute_ms: ComputeOption = Settings.compute_ms,
    straggler: StragglerOption = Settings.straggler_percent,
    nodes: NodesOption = 4,
    ranks_per_node: RanksOption = 1,
    rate: RateOption = None,
    launcher: LauncherOption = _LAUNCHER,
    out: OutOption = None,
    sweep: SweepOption = False,
    sweep_steps: SweepStepsOption = 300,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Train a small GPT by Adam with All-Reduce and by decentralized Adam, and compare losses, bytes and seconds.

    Learning rates are those that ``--sweep`` found and wrote down.
    """
    if quick:
        size, methods = "tiny", _QUICK_METHODS if methods == "all" else methods
        steps, sweep_steps = min(steps, _QUICK_STEPS), min(sweep_steps, _QUICK_STEPS)
        eval_every = eval_every or _QUICK_EVAL_EVERY
    settings = plan_settings(
        size,
        sweep_steps if sweep else steps,
        windows,
        eval_every,
        shard=False,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        launcher=launcher,
        rate=rate,
        accumulate=accumulate,
        compute_ms=compute_ms,
        straggler_percent=straggler,
    )
    names = parse_methods(methods, DECENTRALIZED_METHODS)
    check_emulation(settings)
    check_settings(settings, names)
    if sweep:
        sweep_rates(_CONTEST, settings, names, lr, out)
        return
    summaries = run_contest(_CONTEST, settings, names, lr, seeds, out)
    report = make_report(summaries, settings, quick=quick)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def check_emulation(settings: Settings) -> None:
    """Raise unless nodes have others to mix with, and it is known how long they compute."""
    check_count("--window", settings.accumulate, 1)
    check_count("--nodes", settings.nodes, 2)
    for option, value in (("--compute-ms", settings.compute_ms), ("--straggler", settings.straggler_percent)):
        if not 0 <= value < float("inf"):
            raise UsageError(f"got {option} {value:g}, needed a number from 0 on.")
    if settings.straggler_percent and not settings.compute_ms:
        raise UsageError(
            "got --straggler without --compute-ms: say how long a step computes, such as --compute-ms 500."
        )
