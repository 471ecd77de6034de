"""A communication hook for DistributedDataParallel: in full inside a node, compressed between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from flexcomm.sync import BUCKET_BYTES
from flexdemo.hook_handle import HookHandle
from flexdemo.lots import Lot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel

    from flexcomm import Compressor, World
    from flexcomm.kernels import Average
    from flexcomm.sync import NonFinitePolicy

__all__ = ["CompressionState", "attach_to_ddp", "compression_hook"]


class CompressionState(HookHandle):
    """The state of :func:`compression_hook`, for those who register hooks themselves, as Lightning does on GPUs.

    Parameters are called by ``names``; without, by the order in which their gradients first come, and residuals can be
    loaded only after that.
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
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(
            compressor, world, decay=decay, average=average, nonfinite=nonfinite, bucket_bytes=bucket_bytes
        )
        self._names = dict(names or {})
        self._lots: dict[tuple[str, ...], Lot] = {}
        self._leaving: dict[Lot, tuple[GradBucket, torch.futures.Future[Tensor]]] = {}
        if names:
            params = tuple(names)
            # All of them at once: torch fills buckets when it likes, and states must be known before.
            self.remember(Lot(0, False, params, tuple(names.values())), params)
        self.is_active = True
        self.on_remove(lambda: setattr(self, "is_active", False))

    def send(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start a bucket's exchange; with the last of a backward pass, all of them are finished."""
        lot = self._lot_of(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._leaving[lot] = bucket, future
        self.start(lot, bucket.gradients())
        if bucket.is_last():
            self._finish()
        return future

    def _lot_of(self, bucket: GradBucket) -> Lot:
        """Return the bucket's parameters as a lot: torch fills buckets anew after the first step."""
        params = cast("list[Parameter]", bucket.parameters())  # torch says tensors; they are what DDP was given
        names = tuple(self._names.setdefault(param, str(len(self._names))) for param in params)
        if names not in self._lots:
            self._lots[names] = Lot(0, False, tuple(params), names)
            if not self.remembers(names):
                self.remember(self._lots[names], bucket.gradients())
        return self._lots[names]

    def _finish(self) -> None:
        leaving, self._leaving = self._leaving, {}
        received = self.exchange.finish()
        for lot, averages in received or []:
            for gradient, average in zip(leaving[lot][0].gradients(), averages, strict=True):
                gradient.copy_(average)
        for bucket, future in leaving.values():
            if received is None:
                bucket.buffer().zero_()
            future.set_result(bucket.buffer())
        self.step += 1


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
    bucket_bytes: int = BUCKET_BYTES,
) -> HookHandle:
    """Exchange the gradients of ``model``, which spans all ranks, between nodes as far as ``compressor`` sends them.

    Inside a node they are averaged in full. What is not sent now is kept, decayed, and added next time: any optimizer
    can use what arrives. torch knows no way to take a hook back: detached, it averages in full, as torch does.
    """
    names = {param: name for name, param in model.module.named_parameters()}
    state = CompressionState(
        compressor,
        world,
        names=names,
        decay=decay,
        average=average,
        nonfinite=nonfinite,
        bucket_bytes=bucket_bytes,
    )
    model.register_comm_hook(state, compression_hook)
    return state
