"""The contestants of ``bench runtime``: each trains a paced model, by what a user would call."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch.optim import AdamW

from bench.runtime.paced import PacedModel
from bench.runtime.plan import METHODS
from flexcomm import World, demo
from flexcomm.gossip import ScheduleLike
from flexdemo import DecentralizedAdam, FlexDeMo
from flexdemo.runtime import Updates

if TYPE_CHECKING:
    from flexcomm.transport import Handle

_LR = 1e-4


class Contestant(Protocol):
    """A model in training."""

    def iterate(self, factor: float) -> None:
        """Compute for ``factor`` times as long as planned, communicate, and step."""
        ...

    def finish(self) -> None:
        """Let arrive what is under way; all ranks call it."""
        ...


def make_contestant(method: str, model: PacedModel, world: World) -> Contestant:
    """Return the contestant of that name. All ranks call it together."""
    recipe = METHODS[method]
    if recipe.schedule is not None:
        return DecentralizedTraining(model, world, recipe.schedule(world.topology.nodes), recipe.updates)
    if recipe.family == "flexdemo":
        return FlexDeMoTraining(model, world, overlap=recipe.overlap)
    return AllReduceTraining(model, world)


class AllReduceTraining:
    """AdamW on the mean gradient; each bucket is added up from when its part of the backward pass is done, as in DDP.

    With ``talks=False`` nobody meets: what is left is what an iteration costs this host.
    """

    def __init__(self, model: PacedModel, world: World, *, talks: bool = True) -> None:
        self._model, self._world, self._talks = model, world, talks
        self._optimizer = AdamW(model.parameters, _LR)
        self._started: list[Handle[torch.Tensor]] = []
        for parameter in model.parameters:
            parameter.register_post_accumulate_grad_hook(self._launch)  # type: ignore[no-untyped-call]

    def iterate(self, factor: float) -> None:
        self._model.clear()
        self._model.factor = factor
        self._model.run()
        for handle in self._started:
            handle.wait()
        self._started.clear()
        self._optimizer.step()

    def finish(self) -> None:
        """Nothing is under way between iterations."""

    def _launch(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.div_(self._world.topology.nodes)
            if self._talks:
                self._started.append(self._world.inter.all_reduce(parameter.grad))


class DecentralizedTraining:
    """``flexdemo.DecentralizedAdam``."""

    def __init__(self, model: PacedModel, world: World, schedule: ScheduleLike, updates: Updates) -> None:
        self._model = model
        self._optimizer = DecentralizedAdam(
            model.parameters,
            _LR,
            schedule=schedule,
            world=world,
            overlap=updates,
            bucket_bytes=model.load.bucket_nbytes,
        )

    def iterate(self, factor: float) -> None:
        self._model.clear()
        self._model.factor = factor
        self._model.run()
        self._optimizer.step()

    def finish(self) -> None:
        self._optimizer.restart()


class FlexDeMoTraining:
    """``flexdemo.FlexDeMo`` with ``demo(k)``."""

    def __init__(self, model: PacedModel, world: World, *, overlap: bool) -> None:
        self._model = model
        self._optimizer = FlexDeMo(
            model.parameters,
            _LR,
            compressor=demo(model.load.k),
            world=world,
            overlap=overlap,
            bucket_bytes=model.load.bucket_nbytes,
        )

    def iterate(self, factor: float) -> None:
        self._model.factor = factor
        self._optimizer.zero_grad()
        self._model.run()
        self._optimizer.step()

    def finish(self) -> None:
        """Nothing is under way between iterations."""
