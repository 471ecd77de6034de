"""Options of the commands that train."""

from pathlib import Path
from typing import Annotated

import typer

from bench.train.model import SIZES

SizeOption = Annotated[str, typer.Option(help=f"The model: {', '.join(SIZES)}.")]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps of each run.")]
SeedsOption = Annotated[str, typer.Option(metavar="N,...", help="A run of every method for each of these.")]
WindowsOption = Annotated[
    int | None, typer.Option("--batch", help="Windows a rank takes for a step; without it, what fits the size.")
]
RateLrOption = Annotated[
    float | None,
    typer.Option("--lr", help="For all methods, instead of what a sweep found; with --sweep, the only one to try."),
]
EvalOption = Annotated[
    int | None, typer.Option("--eval-every", help="Steps between validations; without it, a tenth of all.")
]
NodesOption = Annotated[int, typer.Option(help="How many nodes.")]
RateOption = Annotated[
    str | None, typer.Option(metavar="RATE", help="Emulate cables of this rate, such as 100mbit; needs root.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where records and plot go; without it, below runs/.")
]
SweepOption = Annotated[
    bool, typer.Option("--sweep", help="Try each method's learning rates with seed 0, and write down the losses.")
]
SweepStepsOption = Annotated[int, typer.Option(help="Optimizer steps of each run of a sweep.")]
