"""A communication hook for DistributedDataParallel: in full inside a node, compressed between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from flexcomm import Average, Compressor, NonFinitePolicy, World
from flexcomm.device import is_on_host
from flexdemo.gradients import Bucket, spec_of
from flexdemo.hooks.handle import HookHandle


class CompressionState(HookHandle):
    """The state of :func:`compression_hook`, for those who register hooks themselves, as Lightning does on GPUs.

    Args:
        compressor: what is sent between nodes.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        names: of the parameters; if not given, numbers in the order of their first gradients, after which residuals can
            be loaded.
        decay: the share of the residual that is left after a step.
        average: divide by all ``"nodes"``, or by the ``"contributors"`` of each coefficient.
        nonfinite: what NaN or infinity on any rank does: ``"raise"``, ``"skip"`` (all gradients are zero), ``"zero"``.

    Example:
        ``model.register_comm_hook(CompressionState(flexcomm.demo(k=32)), compression_hook)``

    """

    def __init__(
        self,
        compressor: Compressor,
        world: World | None = None,
        *,
        names: Mapping[Parameter, str] | None = None,
        decay: float = 1.0,
        average: Average = "nodes",
        nonfinite: NonFinitePolicy = "raise",
    ) -> None:
        super().__init__(compressor, world, decay=decay, average=average, nonfinite=nonfinite)
        self._names = dict(names or {})
        self._buckets: dict[tuple[str, ...], Bucket] = {}
        self._futures: dict[Bucket, tuple[GradBucket, torch.futures.Future[Tensor]]] = {}
        if names:
            # All of them at once: torch fills buckets when it likes, and states must be known before.
            self.plan([_bucket_of(list(names), list(names), list(names.values()))])
        self.is_active = True
        self.on_remove.callback(setattr, self, "is_active", False)

    def send(self, grad_bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of one of DDP's buckets; with the last of a backward pass, all of them are finished."""
        params = cast("list[Parameter]", grad_bucket.parameters())  # torch says tensors; they are what DDP was given
        # By the names of its parameters: torch fills buckets anew after the first step.
        names = tuple(self._names.setdefault(param, str(len(self._names))) for param in params)
        gradients = grad_bucket.gradients()
        if names not in self._buckets:
            self._buckets[names] = _bucket_of(params, gradients, names)
            if not self._residual_shards.keys() >= set(names):
                self.plan([self._buckets[names]])
        # A device's future lets the stream of whoever waits for it come behind the stream that completes it. Any: torch
        # takes numbers and names, too.
        devices: list[Any] = [] if is_on_host(gradients[0]) else [gradients[0].device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._futures[self._buckets[names]] = grad_bucket, future
        self.start(self._buckets[names], gradients)
        if grad_bucket.is_last():
            futures, self._futures = self._futures, {}
            self.finish()
            for sent, its_future in futures.values():
                its_future.set_result(sent.buffer())
            self.step += 1
        return future


def _bucket_of(params: Sequence[Parameter], gradients: Sequence[Tensor], names: Sequence[str]) -> Bucket:
    return Bucket(0, False, gradients[0].device, tuple(params), tuple(map(spec_of, gradients, names)))


def compression_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, as far as the state's compressor sends it. The name ``bucket`` is torch's."""
    if not state.is_active:
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]  # a group once torch is started
    return state.send(bucket)


# torch compares the annotations themselves, not what they are called.
compression_hook.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}


def attach_to_ddp(
    model: DistributedDataParallel,
    compressor: Compressor,
    *,
    world: World | None = None,
    decay: float = 1.0,
    average: Average = "nodes",
    nonfinite: NonFinitePolicy = "raise",
) -> HookHandle:
    """Exchange the gradients of a DDP model between nodes, as far as ``compressor`` sends them.

    Inside a node they are averaged in full. What is not sent now is kept, decayed, and added next time. torch cannot
    take a hook back: removed, it averages in full, as torch does.

    Args:
        model: ``DistributedDataParallel`` over all ranks.
        compressor: what is sent between nodes.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        decay: the share of the residual that is left after a step.
        average: divide by all ``"nodes"``, or by the ``"contributors"`` of each coefficient.
        nonfinite: what NaN or infinity on any rank does: ``"raise"``, ``"skip"`` (all gradients are zero), ``"zero"``.

    Returns:
        A handle that is saved beside the model (``state_dict``), and whose ``remove()`` ends the exchange.

    """
    names = {param: name for name, param in model.module.named_parameters()}
    state = CompressionState(compressor, world, names=names, decay=decay, average=average, nonfinite=nonfinite)
    model.register_comm_hook(state, compression_hook)
    return state
