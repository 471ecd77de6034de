"""Methods of ``bench runtime``: each trains a paced model by the library's public calls."""

import time
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from bench.runtime.plan import METHODS, Load
from flexcomm import World, demo
from flexcomm.gossip import ScheduleLike
from flexcomm.transport import Handle
from flexdemo import DecentralizedAdam, FlexDeMo
from flexdemo.runtime import Updates

_LR = 1e-4


class PacedModel:
    """A model that sleeps instead of computing, in torch's own forward and backward pass, so that real hooks run.

    It has one parameter for each bucket, and the same random gradients in every iteration.
    """

    def __init__(self, load: Load, node: int) -> None:
        draw = torch.Generator().manual_seed(node)
        self.load = load
        self.factor = 1.0
        self.parameters = [Parameter(torch.zeros(load.shape)) for _ in range(load.buckets)]
        self.gradients = [torch.randn(load.shape, generator=draw) for _ in range(load.buckets)]

    def run(self) -> None:
        """Run a forward and a backward pass; gradients become ready last parameters first."""
        time.sleep(self.factor * self.load.forward_s)
        backward_s = self.factor * self.load.backward_s / self.load.buckets
        x = torch.zeros((), requires_grad=True)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            x = _Layer.apply(x, parameter, gradient, backward_s)  # type: ignore[no-untyped-call]
        torch.autograd.backward(x)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class _Layer(torch.autograd.Function):
    """Identity whose backward pass sleeps, and gives its parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _parameter: Tensor, gradient: Tensor, backward_s: float) -> Tensor:
        ctx.gradient, ctx.backward_s = gradient, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        # Somebody else holds the gradient, too, so autograd copies it into the parameter's own.
        return grads[0], ctx.gradient, None, None


class Method(Protocol):
    """Trains a paced model."""

    def iterate(self, factor: float) -> None:
        """Compute ``factor`` times as long as planned, communicate, and step."""
        ...

    def finish(self) -> None:
        """Wait for messages that are in flight; all ranks call it."""
        ...


def make_method(method: str, model: PacedModel, world: World) -> Method:
    """Return the method of that name. All ranks call it together."""
    spec = METHODS[method]
    if spec.schedule is not None:
        return DecentralizedTraining(model, world, spec.schedule(world.topology.nodes), spec.updates)
    if spec.family == "flexdemo":
        return FlexDeMoTraining(model, world, overlap=spec.overlap)
    return AllReduceTraining(model, world)


class AllReduceTraining:
    """AdamW on the mean gradient; each bucket is all-reduced once its part of the backward pass is done, as in DDP.

    With ``communicates=False`` nothing is sent: the time of an iteration is then that of this host.
    """

    def __init__(self, model: PacedModel, world: World, *, communicates: bool = True) -> None:
        self._model, self._world, self._communicates = model, world, communicates
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
        """Return at once: nothing is in flight between iterations."""

    def _launch(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.div_(self._world.topology.nodes)
            if self._communicates:
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
        """Return at once: nothing is in flight between iterations."""
