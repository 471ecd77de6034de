"""A model in training with what trains it: how it takes a step, and what it has learnt."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bench.train.all_methods import LINEUP
from bench.train.corpus import Corpus, draw_batch, spread_windows
from bench.train.model import Size, build_model, find_size, loss_of, shard_inside_node_
from bench.train.pace import Pace
from bench.train.plan import INTERVALS, Run, Settings
from bench.train.schedule import Forecast, warm_up_then_cosine
from flexcomm import World
from flexdemo import DecentralizedOptimizer
from flexdemo.parameters import local

_EVAL_WINDOWS_AT_ONCE = 16
_MOST_NORM = 1.0
"""Of this rank's gradient, or of its node's where that is sharded."""


@dataclass(eq=False)
class Trainee:
    """One rank's part of a model in training.

    ``forecast`` is there where a run lasts some seconds; ``gradient_elements`` is what it holds of gradients before a
    step, ``compute_s`` what its passes took so far.
    """

    run: Run
    settings: Settings
    corpus: Corpus
    world: World
    model: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    pace: Pace
    forecast: Forecast | None = None
    gradient_elements: int = 0
    compute_s: float = 0.0

    @property
    def size(self) -> Size:
        return find_size(self.settings.size)

    @property
    def is_decentralized(self) -> bool:
        """Whether replicas differ, because nodes mix them with few others at a time."""
        return isinstance(self.optimizer, DecentralizedOptimizer)

    def step(self, number: int) -> Tensor:
        """Take one step, and return this rank's loss before it."""
        place = {"seed": self.run.seed, "step": number, "rank": self.world.topology.rank}
        batch = draw_batch(self.corpus.training, self.settings.windows, self.size.context, **place)
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
            # Peers would mix NaN in, or, where that is refused, raise: some nodes, while others wait for them.
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

        Replicas that differ are averaged for it. Nodes that stepped alone since they last met hold different models,
        too: then it is the mean of theirs.
        """
        with self.averaged():
            return self._evaluate()

    def _evaluate(self) -> float:
        place = self.world.topology
        share = -(-self.settings.eval_windows // place.size)
        windows = spread_windows(self.corpus.validation, share * place.size, self.size.context)[
            place.rank :: place.size
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


def make_trainee(run: Run, settings: Settings, corpus: Corpus, world: World) -> Trainee:
    """Return a fresh model and its optimizer, functions of the run's seed. All ranks call it together."""
    model = build_model(find_size(settings.size), run.seed, world.device)
    if settings.shard:
        shard_inside_node_(model, world)
    pace = Pace(settings, run.seed, world)
    pace.attach(model)
    trained, optimizer = LINEUP[run.method].make(model, world, run.lr, settings)
    forecast = None
    factor = warm_up_then_cosine(settings.steps)
    if settings.seconds is not None:
        forecast = Forecast(settings.seconds, step_s=settings.seconds / INTERVALS)
        factor = forecast.warm_up_then_cosine
    return Trainee(run, settings, corpus, world, trained, optimizer, LambdaLR(optimizer, factor), pace, forecast)
