"""Ranks of the commands that train: all runs of a plan, one after the other, in the same processes.

``python -m bench.train.rank FOLDER``, under a launcher; the plan is in the folder, and rank 0 writes records there.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import flexcomm
from bench.cluster.links import parse_rate
from bench.paced import pace
from bench.train.corpus import Corpus, load_corpus
from bench.train.loop import train
from bench.train.plan import Plan, Run, Settings, load_plan
from bench.train.records import Record, file_of, write_record
from bench.train.training_run import make_training_run
from flexcomm import World


def run_plan(plan: Plan, folder: Path, world: World) -> None:
    """Train all runs of the plan; rank 0 writes a file of records for each run to ``folder``."""
    corpus = load_corpus()
    world.agree({"the corpus, of Python's standard library": corpus.digest})
    warm_up(plan, corpus, world)
    for run in plan.runs:
        with notes_of(run, folder, world) as note:
            train(make_training_run(run, plan.settings, corpus, world), note)


def warm_up(plan: Plan, corpus: Corpus, world: World) -> None:
    """Take a step with every method, so that no run's seconds include work that only the first one does.

    Messages of the step that are still in flight arrive before the first run begins.
    """
    for method in dict.fromkeys(run.method for run in plan.runs):
        # Of a learning rate at which nothing can diverge.
        run = replace(plan.runs[0], method=method, lr=1e-6)
        training = make_training_run(run, plan.settings, corpus, world)
        training.step(0)
        training.evaluate()


def over_links(settings: Settings, world: World) -> World:
    """Return ``world``, or a paced one if the settings ask for paced links."""
    if settings.rate is None or settings.links != "paced":
        return world
    return pace(world, rate_bits_per_s=parse_rate(settings.rate))


@contextmanager
def notes_of(run: Run, folder: Path, world: World) -> Iterator[Callable[[Record], None]]:
    """Yield a function that writes a run's records to a file on rank 0, and does nothing elsewhere."""
    if world.topology.rank != 0:
        yield lambda _: None
        return
    with file_of(run, folder).open("w") as file:
        yield lambda record: write_record(record, file)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plan = load_plan(folder)
    with flexcomm.connect() as world:
        run_plan(plan, folder, over_links(plan.settings, world))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
