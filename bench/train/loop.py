"""The training loop of every rank: steps, with records at intervals.

All ranks decide from numbers that all of them hold, so none is left waiting when a method diverges.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from bench.train.methods import ALL_METHODS
from bench.train.plan import EVALUATIONS, INTERVALS, Settings
from bench.train.records import Ending, Evaluation, Interval, Record, Start
from bench.train.training_run import Forecast, TrainingRun
from bench.world import describe_world, hold_same_bits
from flexcomm import NonFiniteError, SyncError, Topology, World

_FP32_NBYTES = 4


class DivergedError(Exception):
    """A loss or a gradient is not finite; raised by all ranks together."""


class Seen(NamedTuple):
    """Measurements of an interval of steps, of one rank or over all ranks."""

    loss: float
    train_s: float
    waiting_s: float
    codec_s: float
    sent_nbytes: float
    compute_s: float


@dataclass
class Totals:
    """Totals of training so far: steps, seconds of the slowest rank, bytes a node sent, a mean rank's computation."""

    step: int = 0
    train_s: float = 0.0
    sent_nbytes: float = 0.0
    compute_s: float = 0.0


def train(training: TrainingRun, note: Callable[[Record], None]) -> None:
    """Train to the last step, or until it diverges; ``note`` gets the same records on every rank."""
    totals, diverged = Totals(), ""
    note(_start(training))
    try:
        _train_to_the_end(training, totals, note)
    except DivergedError as error:
        diverged = str(error)
    note(_ending(training, totals, diverged))


def _train_to_the_end(training: TrainingRun, totals: Totals, note: Callable[[Record], None]) -> None:
    note(_evaluate(training, totals))
    stops = (
        _stops_by_step(training.settings) if training.forecast is None else _stops_by_time(training, training.forecast)
    )
    for end, evaluates in stops:
        begin, seen = totals.step, train_between(training, totals.step, end)
        totals.step, totals.train_s = end, totals.train_s + seen.train_s
        totals.sent_nbytes += seen.sent_nbytes
        totals.compute_s += seen.compute_s
        if training.forecast is not None:
            training.forecast.update(end, totals.train_s)
        if evaluates():
            note(_evaluate(training, totals))
        note(_interval(training, seen, begin, end))


def _stops_by_step(settings: Settings) -> Iterator[tuple[int, Callable[[], bool]]]:
    """Yield the steps at which intervals end, each with a function that tells whether to evaluate there."""
    for end in settings.stops()[1:]:
        yield end, partial(settings.evaluates_at, end)


def _stops_by_time(training: TrainingRun, forecast: Forecast) -> Iterator[tuple[int, Callable[[], bool]]]:
    """Yield the same for a run of fixed duration, from the forecast that the caller updates."""
    rounds = ALL_METHODS[training.run.method].sync_every
    evaluated_s = 0.0

    def is_over() -> bool:
        return forecast.steps_left(forecast.seconds) < rounds / 2

    def evaluates() -> bool:
        return is_over() or forecast.train_s >= evaluated_s + forecast.seconds / EVALUATIONS

    while not is_over():
        steps = rounds * max(1, round(forecast.steps_left(forecast.seconds / INTERVALS) / rounds))
        yield forecast.step + steps, evaluates
        if evaluates():
            evaluated_s = forecast.train_s


def train_between(training: TrainingRun, begin: int, end: int) -> Seen:
    """Take the steps from ``begin`` to ``end``, and return the measurements over all ranks."""
    world = training.world
    world.control.barrier().wait()
    before, compute_before_s, begin_s = world.stats(), training.compute_s, time.perf_counter()
    loss = torch.zeros((), device=world.device)
    try:
        for number in range(begin, end):
            loss += training.step(number)
    except (NonFiniteError, SyncError) as error:
        if training.is_decentralized:
            # Only the nodes that were to receive it raise. The others wait for them until the job ends.
            raise
        raise DivergedError(f"before step {end}: NaN, infinity or too large a number was to be sent") from error
    train_s, after = time.perf_counter() - begin_s, world.stats()
    took = {name: after[name] - before[name] for name in before}
    own = Seen(
        loss=float(loss) / (end - begin),
        train_s=train_s,
        waiting_s=took["waiting_s"],
        codec_s=took["encode_s"] + took["decode_s"],
        sent_nbytes=took["inter_sent_bytes"],
        compute_s=training.compute_s - compute_before_s,
    )
    seen = over_all_ranks(own, world)
    if not math.isfinite(seen.loss):
        raise DivergedError(f"before step {end}: the training loss is {seen.loss}")
    return seen


def over_all_ranks(own: Seen, world: World) -> Seen:
    """Return the mean loss and computation, seconds of the slowest rank, and the bytes of a node: the mean of nodes."""
    rows = world.control.all_gather(torch.tensor(own, dtype=torch.float64)).wait()
    mean, slowest, total = (Seen(*row.tolist()) for row in (rows.mean(dim=0), rows.amax(dim=0), rows.sum(dim=0)))
    sent_nbytes = total.sent_nbytes / world.topology.nodes
    return slowest._replace(loss=mean.loss, sent_nbytes=sent_nbytes, compute_s=mean.compute_s)


def tokens_per_step(training: TrainingRun) -> int:
    return training.settings.windows * training.size.context * training.world.topology.size


def allreduce_nbytes(numel: int, topology: Topology) -> float:
    """Return the bytes a node sends in an all-reduce of ``numel`` fp32 numbers over a ring of nodes."""
    return 2 * (topology.nodes - 1) / topology.nodes * numel * _FP32_NBYTES


def _start(training: TrainingRun) -> Start:
    run, world = training.run, training.world
    return Start(
        method=run.method,
        lr=run.lr,
        seed=run.seed,
        parameters=training.parameter_count(),
        parameters_per_rank=training.parameters_per_rank(),
        allreduce_nbytes=allreduce_nbytes(training.parameter_count(), world.topology),
        world=describe_world(world),
        corpus=training.corpus.describe(),
    )


def _interval(training: TrainingRun, seen: Seen, begin: int, end: int) -> Interval:
    steps = end - begin
    sent = seen.sent_nbytes / steps
    dense = allreduce_nbytes(training.parameter_count(), training.world.topology)
    return Interval(
        step=end,
        loss=seen.loss,
        step_s=seen.train_s / steps,
        tokens_per_s=steps * tokens_per_step(training) / seen.train_s,
        waiting_s=seen.waiting_s / steps,
        codec_s=seen.codec_s / steps,
        sent_nbytes=sent,
        fewer=dense / sent if sent else None,
        compute_s=seen.compute_s / steps,
    )


def _ending(training: TrainingRun, totals: Totals, diverged: str) -> Ending:
    with training.averaged():
        equal = hold_same_bits(training.whole_parameters(), training.world)
    return Ending(
        steps=totals.step,
        train_s=totals.train_s,
        tokens=totals.step * tokens_per_step(training),
        sent_nbytes=totals.sent_nbytes,
        gradient_elements=training.gradient_elements,
        replicas_equal=equal,
        diverged=diverged,
        compute_s=totals.compute_s,
        # Replicas that hold NaN have none.
        consensus_distance=None if diverged else training.consensus_distance(),
    )


def _evaluate(training: TrainingRun, totals: Totals) -> Evaluation:
    loss = training.evaluate()
    if not math.isfinite(loss):
        raise DivergedError(f"at step {totals.step}: the validation loss is {loss}")
    return Evaluation(totals.step, loss, totals.train_s, totals.sent_nbytes)
