"""Makes the stand-in a device type of this process, and a kind of device of the library."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import flexcomm.kernels
import flexcomm.kernels.gpu.kernels
from flexcomm.device import KINDS, DeviceKind
from tests.stand_in.build import load
from tests.stand_in.collectives import make_backend
from tests.stand_in.kernels import StandInLauncher
from tests.stand_in.threads import watch_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "standin"
BACKEND = "standin_ccl"


def install(device_library: Path, kernel_library: Path, devices: int) -> Any:
    """Have torch and the library know the stand-in, with so many devices; return its extension module."""
    native = load(device_library)
    native.set_device_count(devices)
    native.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, make_module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, make_backend(native, BACKEND, identify), extended_api=True, devices=[NAME])
    KINDS[NAME] = DeviceKind(
        NAME,
        kernels="gpu",
        backend=BACKEND,
        has_streams=True,
        has_pinned_memory=True,
        uuid=lambda device: identify(device.index),
    )
    # The device's own kernels, launched without CuPy.
    flexcomm.kernels._SETS["gpu"] = ("torch", "GpuKernels")
    flexcomm.kernels.gpu.kernels.CupyLauncher = partial(StandInLauncher, kernel_library, native)
    watch_threads(native)
    return native


def identify(index: int) -> str:
    """Return what no other device has; each node has its own."""
    return f"stand-in {index} of node {os.environ.get('GROUP_RANK', 0)}"


class Stream(torch.Stream):
    """What ``torch.cuda.Stream`` is to CUDA."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        made: Stream = super().__new__(cls, device or torch.device(NAME, current_device()), priority=priority)
        return made


class Event(torch.Event):
    """What ``torch.cuda.Event`` is to CUDA."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made: Event = super().__new__(
            cls, torch.device(NAME), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )
        return made


def current_device() -> int:
    return int(torch.accelerator.current_device_index())


@contextmanager
def use_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextmanager
def use_device(device: torch.device | int | str) -> Iterator[None]:
    before = current_device()
    torch.accelerator.set_device_index(device if isinstance(device, int) else torch.device(device).index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def make_module(native: Any) -> ModuleType:
    """Return ``torch.standin``: what torch's own code asks of a device's module."""
    module = ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        native=native,
        Stream=Stream,
        Event=Event,
        device=use_device,
        stream=use_stream,
        current_stream=torch.accelerator.current_stream,
        set_stream=torch.accelerator.set_stream,
        device_count=native.device_count,
        is_available=lambda: native.device_count() > 0,
        is_initialized=lambda: True,
        current_device=current_device,
        set_device=torch.accelerator.set_device_index,
        synchronize=lambda device=None: native.synchronize(),  # noqa: ARG005  (torch passes one)
        manual_seed_all=lambda seed: None,  # noqa: ARG005  (it draws from the host's generator)
        _is_in_bad_fork=lambda: False,
        get_rng_state=lambda device=None: torch.get_rng_state(),  # noqa: ARG005
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),  # noqa: ARG005
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module
