"""Encode, verify and decode against the bandwidth of the device's memory, both measured in one run."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

from bench.gpu.results import Result
from flexcomm import Epilogue, TensorSpec, demo
from flexcomm.codec import plan_buffer
from flexcomm.kernels import Kernels, Region, StateUpdate

_SIDE, _TENSORS, _SENDERS = 2048, 16, 2
"""64 Mi elements."""
_ROUNDS, _WARM_UP = 9, 2
_UPDATE = StateUpdate(decay=0.95)
_SIGN_STEP = Epilogue("sign_step", lr=1e-3, keep=0.999)


class Clock(Protocol):
    """Times work of a device."""

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that the work takes."""


class DeviceClock:
    """CUDA events on the current stream."""

    def time(self, work: Callable[[], object]) -> float:
        begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measure_speed(kernels: Kernels, device: str, clock: Clock, side: int = _SIDE) -> list[Result]:
    """Return the seconds of each verb on a bucket of 16 matrices, and its share of a copy's bandwidth."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(side, side, generator=draw).to(device) for _ in range(_TENSORS)]
    states, outputs = [torch.zeros_like(x) for x in xs], [torch.zeros_like(x) for x in xs]
    dense_nbytes = sum(x.nbytes for x in xs)
    plan = plan_buffer([TensorSpec(f"x{i}", (side, side), torch.float32) for i in range(_TENSORS)], demo(k=32))
    states = [state.view(one.state_shape) for state, one in zip(states, plan.plans, strict=True)]
    words = torch.zeros(_SENDERS * plan.nwords, dtype=torch.int32, device=device)
    encoder = kernels.encoder(plan, words[: plan.nwords])
    regions = [Region(f"node {i}", i * plan.nwords, plan.nwords) for i in range(_SENDERS)]
    decoder = kernels.decoder(plan, words, regions)
    source, target = (torch.empty(dense_nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def encode() -> object:
        return encoder.encode_(xs, states, states, _UPDATE, step=0, sequence=0)

    copied_s = _median_s(clock, lambda: target.copy_(source))
    bandwidth = 2 * dense_nbytes / copied_s
    encoded_s = _median_s(clock, encode)
    for other in range(1, _SENDERS):
        words[other * plan.nwords :][: plan.nwords] = words[: plan.nwords]
    payloads = _SENDERS * plan.nbytes
    timed = {
        "encode": (encoded_s, 3 * dense_nbytes + plan.nbytes),
        "verify": (_median_s(clock, lambda: decoder.verify(step=0, sequence=0)), payloads),
        "decode": (
            _median_s(clock, lambda: decoder.decode_(outputs, step=0, average="nodes", epilogue=_SIGN_STEP)),
            2 * dense_nbytes + payloads,
        ),
    }
    results = [Result("copy", holds=None, said=f"a copy moves {bandwidth / 1e9:.0f} GB/s", value=bandwidth)]
    for verb, (seconds, nbytes) in timed.items():
        share = nbytes / seconds / bandwidth
        said = f"{verb} {seconds * 1e3:.2f} ms, {share:.0%} of the copy's bandwidth"
        results.append(Result(f"{verb}_share", holds=None, said=said, value=share))
    return results


def _median_s(clock: Clock, work: Callable[[], object]) -> float:
    for _ in range(_WARM_UP):
        work()
    return median(clock.time(work) for _ in range(_ROUNDS))
