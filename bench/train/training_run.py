"""One run of one method on one rank: model, optimizer, learning-rate schedule and pace; its steps and validations."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bench.train.corpus import Corpus, draw_batch, spread_windows
from bench.train.methods import ALL_METHODS
from bench.train.model import ByteGpt, Size, build_model, find_size, loss_of, shard_inside_node_
from bench.train.plan import INTERVALS, Run, Settings
from flexcomm import World
from flexdemo import DecentralizedOptimizer
from flexdemo.parameters import local

_EVAL_WINDOWS_AT_ONCE = 16
_WARM_UP = 0.2
_LAST = 0.1
_FINE = 10_000
_FORWARD = 1 / 3
"""The share of a step that the forward pass takes: a backward pass computes about twice as much."""
_MOST_NORM = 1.0
"""Largest norm of this rank's gradient, or of its node's where that is sharded."""


@dataclass(eq=False)
class TrainingRun:
    """The state of a run on one rank.

    ``forecast`` is set for runs of fixed duration; ``gradient_elements`` is the number of gradient elements held before
    a step, ``compute_s`` the seconds of all forward and backward passes so far.
    """

    run: Run
    settings: Settings
    corpus: Corpus
    world: World
    model: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    pace: "Pace"
    forecast: "Forecast | None" = None
    gradient_elements: int = 0
    compute_s: float = 0.0

    @property
    def size(self) -> Size:
        return find_size(self.settings.size)

    @property
    def is_decentralized(self) -> bool:
        """True if replicas differ, because nodes mix them with few others at a time."""
        return isinstance(self.optimizer, DecentralizedOptimizer)

    def step(self, number: int) -> Tensor:
        """Take one step, and return this rank's loss before it."""
        key = {"seed": self.run.seed, "step": number, "rank": self.world.topology.rank}
        batch = draw_batch(self.corpus.training, self.settings.windows, self.size.context, **key)
        self.pace.begin(number)
        loss = loss_of(self.model, batch.to(self.world.device))
        torch.autograd.backward(loss)
        self.compute_s += self.pace.end()
        if not self.gradient_elements:
            gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
            self.gradient_elements = sum(local(gradient).numel() for gradient in gradients)
        norm = clip_grad_norm_(self.model.parameters(), _MOST_NORM)
        diverged = self.is_decentralized and not norm.isfinite()
        if diverged:
            # Peers would mix NaN in or, where that is refused, raise on some nodes while others wait for them.
            self.optimizer.zero_grad()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach() if not diverged else torch.full_like(loss.detach(), torch.nan)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of all replicas in the model, if its optimizer lets them differ. All ranks call it together."""
        optimizer = self.optimizer
        with torch.no_grad(), optimizer.average() if isinstance(optimizer, DecentralizedOptimizer) else nullcontext():
            yield

    def consensus_distance(self) -> float | None:
        """Return how far replicas are from their mean; None if they are equal. All ranks call it together."""
        return self.optimizer.consensus_distance() if isinstance(self.optimizer, DecentralizedOptimizer) else None

    def evaluate(self) -> float:
        """Return the mean loss on validation bytes, the same on all ranks, of which each reads its share.

        Replicas that differ are averaged for it. Between synchronisations of local steps, nodes hold different models,
        too: then it is the mean of their losses.
        """
        with self.averaged():
            return self._evaluate()

    def _evaluate(self) -> float:
        topology = self.world.topology
        share = -(-self.settings.eval_windows // topology.size)
        windows = spread_windows(self.corpus.validation, share * topology.size, self.size.context)[
            topology.rank :: topology.size
        ]
        parts = torch.split(windows.to(self.world.device), _EVAL_WINDOWS_AT_ONCE)
        losses = [loss_of(self.model, part) * len(part) for part in parts]
        own = (torch.stack(losses).sum() / share).double().cpu()
        return float(self.world.control.all_gather(own.view(1)).wait().mean())

    def whole_parameters(self) -> list[Tensor]:
        """Return all parameters, those that are sharded put together. All ranks call it together."""
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters())
        return [tensor.detach() for tensor in whole]

    def parameter_count(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def parameters_per_rank(self) -> int:
        return sum(local(param).numel() for param in self.model.parameters())


def make_training_run(run: Run, settings: Settings, corpus: Corpus, world: World) -> TrainingRun:
    """Return a fresh model and its optimizer, functions of the run's seed. All ranks call it together."""
    model = build_model(find_size(settings.size), run.seed, world.device)
    if settings.shard:
        shard_inside_node_(model, world)
    pace = Pace(settings, run.seed, world)
    pace.attach(model)
    trained, optimizer = ALL_METHODS[run.method].make(model, world, run.lr, settings)
    forecast = None
    factor = warm_up_then_cosine(settings.steps)
    if settings.seconds is not None:
        forecast = Forecast(settings.seconds, step_s=settings.seconds / INTERVALS)
        factor = forecast.warm_up_then_cosine
    return TrainingRun(run, settings, corpus, world, trained, optimizer, LambdaLR(optimizer, factor), pace, forecast)


def warm_up_then_cosine(steps: int) -> Callable[[int], float]:
    """Return the factor for each step: rising to 1 in a fifth of them, then falling to a tenth at the last."""
    warm = max(1, round(_WARM_UP * steps))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm + 1) / max(1, steps - warm))
        return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * done)) / 2

    return factor


@dataclass
class Forecast:
    """Forecast of the steps in a run that lasts ``seconds``, the same on all ranks, from numbers they agreed on.

    After ``step`` steps, ``train_s`` had passed; the last steps took ``step_s`` each.
    """

    seconds: float
    step_s: float
    step: int = 0
    train_s: float = 0.0

    def update(self, step: int, train_s: float) -> None:
        """Record that ``step`` steps took ``train_s``."""
        self.step_s = (train_s - self.train_s) / (step - self.step)
        self.step, self.train_s = step, train_s

    def steps_left(self, within_s: float) -> float:
        """Return how many steps fit into the next ``within_s``, and into the run."""
        return min(within_s, self.seconds - self.train_s) / self.step_s

    def warm_up_then_cosine(self, step: int) -> float:
        """Return the factor of a step by the share of the run that is over when it ends."""
        done = (self.train_s + (step + 1 - self.step) * self.step_s) / self.seconds
        return _BY_SHARE(max(0, math.ceil(_FINE * done) - 1))


_BY_SHARE = warm_up_then_cosine(_FINE)


def straggler_of(seed: int, step: int, nodes: int) -> int:
    """Return the node that is slower in a step: any of them, a function of ``(seed, step)``."""
    key = hashlib.blake2b(f"straggler {seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "big") % nodes


class Pace:
    """Makes the forward and backward passes of a model last ``compute_ms``, by sleeping after each block.

    All nodes of an emulated cluster share the cores of one machine, where real computation would measure how they slow
    each other down. Passes that mostly sleep are those of an accelerator, which leaves the host's cores idle. On the
    node that is the straggler of a step, they take ``straggler_percent`` longer.
    """

    def __init__(self, settings: Settings, seed: int, world: World) -> None:
        self._usual_s, self._slower = settings.compute_ms / 1e3, settings.straggler_percent / 100
        self._seed, self._world = seed, world
        self._wanted_s, self._begin_s, self._waited_before_s = 0.0, 0.0, 0.0

    def attach(self, model: ByteGpt) -> None:
        """Register hooks that pace the model's blocks during a step."""
        parts = len(model.blocks) + 1
        for number, block in enumerate(model.blocks, start=1):
            if self._usual_s:
                block.register_forward_hook(partial(self._reach, _FORWARD * number / parts))
                block.register_full_backward_hook(partial(self._reach, 1 - (1 - _FORWARD) * number / parts))

    def begin(self, step: int) -> None:
        """Start the clock of a step's passes."""
        topology = self._world.topology
        is_slow = straggler_of(self._seed, step, topology.nodes) == topology.node
        self._wanted_s = self._usual_s * (1 + self._slower if is_slow else 1)
        self._waited_before_s, self._begin_s = self._waited_s(), time.perf_counter()

    def end(self) -> float:
        """Sleep for the rest of the passes, and return their seconds without those of waiting for messages."""
        self._reach(1.0)
        self._wanted_s = 0.0
        return time.perf_counter() - self._begin_s - (self._waited_s() - self._waited_before_s)

    def _reach(self, share: float, *_: object) -> None:
        """Sleep until ``share`` of a step's time has passed; return at once between steps, as in validations."""
        left_s = self._begin_s + share * self._wanted_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def _waited_s(self) -> float:
        waited_s: float = self._world.stats()["waiting_s"]
        return waited_s
