"""Local steps: nodes step by themselves for some steps, then move together by an outer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from flexcomm import InvalidArgumentError, NonFinitePolicy, World
from flexdemo.gradients import CompressionSettings, GradientSync, bucket_parameters
from flexdemo.parameters import Group, local


@dataclass(frozen=True)
class OuterOptimizer:
    """SGD on the averaged differences of nodes after local steps, as in DiLoCo (arXiv 2311.08105).

    Args:
        lr: the learning rate; 1.0 without momentum is the plain average.
        momentum: of the averaged differences.
        nesterov: whether the momentum is Nesterov's.

    Example:
        >>> import flexdemo
        >>> flexdemo.OuterOptimizer(lr=1.0, momentum=0.0)
        OuterOptimizer(lr=1.0, momentum=0.0, nesterov=True)

    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1):
            raise InvalidArgumentError(f"{self}: lr must be above 0, and momentum at least 0 and below 1.")


class LocalSteps:
    """Outer steps: each node's difference from ``anchors``, the parameters of the last one, is compressed and averaged.

    All nodes move from the anchors by the average, to the same bits. What was not sent is added to the next difference.
    """

    def __init__(
        self, world: World, outer: OuterOptimizer | None, nonfinite: NonFinitePolicy, exact_rollback: bool
    ) -> None:
        self.sync = GradientSync(world, average="nodes", nonfinite=nonfinite, exact_rollback=exact_rollback)
        self.anchors: dict[Parameter, Tensor] = {}
        self.velocities: dict[Parameter, Tensor] = {}
        self._outer = outer

    def refresh(self, groups: list[Group], bucket_bytes: int) -> None:
        """Add parameters that were not trained before, which are equal on all nodes, and plan buckets anew."""
        for param in (param for group in groups for param in group["params"]):
            if param.requires_grad and param not in self.anchors:
                self.anchors[param] = local(param).clone(memory_format=torch.contiguous_format)
                if self._outer is not None:
                    self.velocities[param] = torch.zeros_like(self.anchors[param])
        # Also what is frozen by now: nodes may have gone apart on it before.
        self.sync.set_buckets(bucket_parameters(groups, bucket_bytes, self.anchors.__contains__))

    def outer_step(self, groups: list[Group], number: int) -> None:
        """Move all nodes together, for the ``number``-th time."""
        for bucket in self.sync.buckets:
            anchors = [self.anchors[param] for param in bucket.params]
            moved = list(torch._foreach_sub(anchors, [local(param) for param in bucket.params]))
            self.sync.start(bucket, moved, CompressionSettings(groups[bucket.group]["compressor"]), number)
        for bucket, averages in (self.sync.finish() or {}).items():
            anchors, outer = [self.anchors[param] for param in bucket.params], self._outer
            if outer is None:
                torch._foreach_sub_(anchors, averages)
            else:
                steps = velocities = [self.velocities[param] for param in bucket.params]
                torch._foreach_mul_(velocities, outer.momentum)
                torch._foreach_add_(velocities, averages)
                if outer.nesterov:
                    steps = list(torch._foreach_add(averages, velocities, alpha=outer.momentum))
                torch._foreach_sub_(anchors, steps, alpha=outer.lr)
            torch._foreach_copy_([local(param) for param in bucket.params], anchors)
