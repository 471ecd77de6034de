"""Figures of training steps on devices: how often the host reads, and what an exchange adds to a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import torch
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

import flexcomm
from bench.gpu.laws import make_model, shard, train
from bench.gpu.results import Result
from flexcomm import World
from flexdemo import FlexDeMo, attach_to_fsdp

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
_COPY = "Memcpy DtoH"
_STEPS = 5
_WARM_UP = range(2)
_WIDTH, _BLOCKS = 2048, 6
_HOST_WIDTH = 64
_BUCKET_BYTES = 20_000


def count_host_reads(names: Iterable[str]) -> int:
    """Return how often the host waited for a device or copied from it, of events as torch.profiler names them.

    A read is both, a copy and a wait for it: the larger number counts.
    """
    listed = list(names)
    waits = sum(name in WAITS for name in listed)
    return max(waits, sum(name.startswith(_COPY) for name in listed))


def measure_host_reads(world: World) -> list[Result]:
    """Profile a step of FlexDeMo that has several buckets: it reads once a bucket, and no more.

    Over a host's transport payloads are copied to the host, too: then the number is shown, and is no law.
    """
    model = make_model(world)
    compressor = flexcomm.demo(k=4, chunk=16)
    optimizer = FlexDeMo(model.named_parameters(), 0.25, compressor=compressor, world=world, bucket_bytes=_BUCKET_BYTES)
    train(model, optimizer, world, _WARM_UP)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    _synchronize(world)
    before = world.stats()["inter_collectives"]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        optimizer.step()
    _synchronize(world)
    buckets = int(world.stats()["inter_collectives"] - before)
    reads = count_host_reads(event.name for event in profiler.events() or ())
    said = f"{reads} host reads in a step of {buckets} buckets, over {world.inter.name}"
    results = [Result("host_reads", holds=None, said=said, value=float(reads))]
    if world.device.type == "cpu" or world.inter.name == "nccl":
        results.append(Result("the host reads once a bucket", holds=reads <= buckets, said=said))
    return results


def measure_overlap(world: World) -> list[Result]:
    """Time a step of a model that FSDP2 shards, with the hook's exchange and without."""
    width = _WIDTH if world.device.type == "cuda" else _HOST_WIDTH
    seconds = {}
    for name, compressor in (("alone", None), ("hook", flexcomm.demo(k=32))):
        model = shard(make_model(world, width=width, blocks=_BLOCKS), world)
        if compressor is not None:
            attach_to_fsdp(model, compressor, world=world)
        optimizer = SGD(model.parameters(), 1e-4)
        train(model, optimizer, world, _WARM_UP, width)
        seconds[name] = time_steps(partial(train, model, optimizer, world, range(1), width), world)
    ratio = seconds["hook"] / seconds["alone"]
    with_hook, alone = (f"{seconds[name] * 1e3:.1f} ms" for name in ("hook", "alone"))
    said = f"a step takes {with_hook} with the hook, {alone} without: {ratio:.2f}x"
    return [Result("overlap", holds=None, said=said, value=ratio)]


def time_steps(step: Callable[[], object], world: World) -> float:
    """Return the median over steps of the slowest rank's seconds."""
    seconds = torch.zeros(_STEPS, dtype=torch.float64)
    for number in range(_STEPS):
        _synchronize(world)
        world.control.barrier().wait()
        start_s = time.perf_counter()
        step()
        _synchronize(world)
        seconds[number] = time.perf_counter() - start_s
    slowest: list[float] = world.control.all_gather(seconds).wait().amax(dim=0).tolist()
    return median(slowest)


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
