"""What ``demo(k)`` costs on this rank's device: encoding, and decoding few payloads and many.

No network takes part. All ranks measure at once, as they encode at once in training, and the slowest counts.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from flexcomm import TensorSpec, demo
from flexcomm.codec import decode_bucket_, encode_bucket_, plan_buffer, regions_of
from flexcomm.kernels import Momentum, choose_kernels
from flexdemo.predict.codec import Decoding, fit_decoding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from flexcomm import World
    from flexdemo.runtime import Compression

__all__ = ["KS", "measure_codec"]

KS = (8, 32, 128)
_CHUNK = 64
_SIDE = 1024
_FEW = 2
_MANY = 16
_REPEATS = 7


class _Bench:
    """One tensor with its momentum, and as many copies of its payload as nodes would send."""

    def __init__(self, x: Tensor, k: int) -> None:
        self.x, self.out = x, torch.empty_like(x)
        self.plan = plan_buffer((TensorSpec("x", tuple(x.shape), x.dtype),), demo(k, _CHUNK))
        self.kernels = choose_kernels(x.device)
        state = torch.zeros(self.plan.plans[0].state_shape, device=x.device)
        self.momenta = [Momentum(state, state, 0.999)]
        self.buffer = torch.zeros(self.plan.nbytes, dtype=torch.uint8, device=x.device)

    def encode(self) -> None:
        encode_bucket_(self.plan, [self.x], self.buffer, step=0, sequence=0, kernels=self.kernels, momenta=self.momenta)

    def decode(self, nodes: int) -> Callable[[], None]:
        """Return what decodes the payloads of ``nodes``; they are equal, which costs what unequal ones cost."""
        gathered = self.buffer.repeat(nodes)
        regions = regions_of([f"node {node}" for node in range(nodes)], [self.plan.nbytes] * nodes)
        return lambda: decode_bucket_(
            self.plan, gathered, regions, [self.out], step=0, sequence=0, kernels=self.kernels, average="contributors"
        )


def measure_codec(world: World, ks: Sequence[int] = KS) -> tuple[Compression, ...]:
    """Return the costs for each k, on a shard of a million elements; the same on every rank."""
    draw = torch.Generator().manual_seed(world.topology.rank)
    shard = torch.randn(_SIDE, _SIDE, generator=draw).to(world.device)
    return tuple(_measure(world, shard, k) for k in ks)


def _measure(world: World, shard: Tensor, k: int) -> Compression:
    bench = _Bench(shard, k)
    encode_s = _time(bench.encode, world)
    few_s, many_s = (_time(bench.decode(nodes), world) for nodes in (_FEW, _MANY))
    decoding = Decoding(k, _CHUNK, shard.numel(), bench.plan.nbytes, encode_s, (_FEW, few_s), (_MANY, many_s))
    return fit_decoding(decoding)


def _time(call: Callable[[], None], world: World) -> float:
    """Return the median over calls of the slowest rank's time; the first call may compile."""
    taken_s = torch.zeros(_REPEATS + 1, dtype=torch.float64)
    for repeat in range(_REPEATS + 1):
        begin_s = time.perf_counter()
        call()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        taken_s[repeat] = time.perf_counter() - begin_s
    slowest_s: list[float] = world.control.all_gather(taken_s).wait().amax(dim=0).tolist()
    return median(slowest_s[1:])
