"""A model that sleeps instead of computing, in torch's own forward and backward pass, so that real hooks run."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.runtime.plan import Load


class PacedModel:
    """One parameter for each bucket. A pass sleeps, and leaves the same random gradients every time."""

    def __init__(self, load: Load, node: int) -> None:
        draw = torch.Generator().manual_seed(node)
        self.load = load
        self.factor = 1.0
        self.parameters = [Parameter(torch.zeros(load.shape)) for _ in range(load.buckets)]
        self.gradients = [torch.randn(load.shape, generator=draw) for _ in range(load.buckets)]

    def run(self) -> None:
        """Take a forward and a backward pass, in which all gradients come, last parameters first."""
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
    """Hands on what it is given; its backward pass lasts a while, and leaves a gradient in its parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _parameter: Tensor, gradient: Tensor, backward_s: float) -> Tensor:
        ctx.gradient, ctx.backward_s = gradient, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        # Somebody else holds the gradient, too, so autograd copies it into the parameter's own.
        return grads[0], ctx.gradient, None, None
