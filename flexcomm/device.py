"""Kinds of devices: a table with a row for each, and what the rest of the library asks about them.

A new kind is a new row: with the kernels that it has, or with ``staged``, which copies to the host and uses the CPU's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexcomm.errors import DeadlineExceededError


@dataclass(frozen=True)
class DeviceKind:
    """The properties of a kind of device."""

    name: str  # torch's device type
    kernels: str  # the name of its kernel set, see flexcomm.kernels
    backend: str | None  # of torch.distributed, for its memory; None: its tensors travel through the host
    has_streams: bool  # work on it is queued, so that the host must wait before it reads
    has_pinned_memory: bool  # copies to and from pinned host memory are queued, too
    profiler_range: Callable[[str], AbstractContextManager[object]] | None = None  # shown by the vendor's profiler
    extra: str = ""  # what installs the library of its kernels, if the default install has not got it
    uuid: Callable[[torch.device], str] | None = None  # of a device; None: its index tells it apart on its host


HOST = DeviceKind("cpu", kernels="cpu", backend="gloo", has_streams=False, has_pinned_memory=False)
CUDA = DeviceKind(
    "cuda",
    kernels="gpu",
    backend="nccl",
    has_streams=True,
    has_pinned_memory=True,
    profiler_range=torch.cuda.nvtx.range,
    extra="flexcomm[cuda13], or flexcomm[cuda12] for a driver of CUDA 12",
    uuid=lambda device: str(torch.cuda.get_device_properties(device).uuid),
)
_LARGEST_REUSED = 32 << 20  # bytes that malloc may hold for another time; what is larger is mapped anew
_SPIN_S = 0.002  # a wait for a device only yields between its questions for so long; then it sleeps
_LONGEST_SLEEP_S = 0.0005
KINDS = {kind.name: kind for kind in (HOST, CUDA)}


def accelerator() -> DeviceKind | None:
    """Return the kind of this machine's accelerator, if it has one that is in the table."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else KINDS.get(found.type)


def native_backend() -> str | None:
    """Return the backend that carries the accelerator's memory, if this torch was built with it."""
    backend = getattr(accelerator(), "backend", None)
    return backend if backend is not None and dist.is_backend_available(backend) else None


def backend_for(device_type: str) -> str:
    """Return the backend for tensors on this type of device: its own, else the host's, through which they travel."""
    return KINDS.get(device_type, HOST).backend or str(HOST.backend)


def backends_of_default_group() -> str:
    """Return the backends of torch's default process group, in torch's words: one for each type of device there is."""
    kind, native = accelerator(), native_backend()
    return f"{HOST.name}:{HOST.backend},{kind.name}:{native}" if kind and native else str(HOST.backend)


def is_on_host(x: Tensor) -> bool:
    return x.device.type == HOST.name


def find_native(backend: str) -> DeviceKind | None:
    return next((kind for kind in KINDS.values() if kind.backend == backend), None)


def own_device(local_rank: int) -> torch.device:
    """Return the device of this rank, made current: NCCL takes what is current, and all ranks start with the first."""
    kind = accelerator()
    if kind is None:
        return torch.device(HOST.name)
    device = torch.device(kind.name, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def enter_device(device: torch.device) -> None:
    """Make a device current in this thread, also for libraries that look for a context of the driver."""
    if KINDS[device.type].has_streams:
        torch.accelerator.set_device_index(device.index)
        # In a new thread the first device is current, so that this did nothing there, but its context is not entered
        # before something is asked of it.
        torch.accelerator.current_stream(device).query()


def identify(device: torch.device) -> str:
    """Return what no other device has, of this host or another; indices depend on which ones a process may see."""
    uuid = KINDS[device.type].uuid
    return f"{device.type} {device.index if uuid is None else uuid(device)} on {socket.gethostname()}"


def current_device(device_type: str) -> torch.device:
    """Return the device of this type that is current; the host, if the type is none of an accelerator in the table."""
    if device_type == HOST.name or device_type not in KINDS:
        return torch.device(HOST.name)
    return torch.device(device_type, torch.accelerator.current_device_index())


def empty_like(x: Tensor) -> Tensor:
    """Return contiguous memory for a tensor like this one; of the host's, if it is large, in huge pages.

    Memory above 32 MiB is new to the process every time, and to hand it out in small pages takes the system longer
    than kernels take to fill it: 1.4 ns an element instead of 0.3 (on a virtual machine, Linux 6).
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.device.type == HOST.name and out.nbytes > _LARGEST_REUSED and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = out.data_ptr() + out.nbytes - begin
        # Advice only: where it is not taken, pages are small.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)
    return out


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor in a device's memory, without waiting for what the device has to do before."""
    # From pinned memory a copy is queued; from any other, the host would wait for all that is queued before it.
    return (x.pin_memory() if KINDS[device.type].has_pinned_memory else x).to(device, non_blocking=True)


def copy_to_host(x: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Return a copy in the host's memory, and the event after which it is there, see :func:`synchronize_event`."""
    # By its name: torch's default device may be another.
    copy = torch.empty(x.shape, dtype=x.dtype, device=HOST.name, pin_memory=may_pin_for(x)).copy_(x, non_blocking=True)
    return copy, record_event(x.device)


def may_pin_for(x: Tensor) -> bool:
    return KINDS[x.device.type].has_pinned_memory


def synchronize_stream(device: torch.device, timeout_s: float) -> None:
    """Do as :func:`synchronize_event` does, of all that the device's current stream was given to do."""
    synchronize_event(record_event(device), timeout_s)


def synchronize_event(event: torch.Event | None, timeout_s: float) -> None:
    """Return when the device has come to ``event``; at once, if that is None, as of devices without streams.

    The event's own ``synchronize`` blocks for ever where a collective before it waits for a rank that is gone.

    Raises:
        DeadlineExceededError: it has not after ``timeout_s``. Its work is still under way.

    """
    if event is None:
        return
    start_s = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            raise DeadlineExceededError(
                f"the device did not finish: waited {timeout_s:g} s for what was enqueued on it, such as a collective. "
                f"A rank is slow, stopped, or in another call; its own output tells which. Or pass a larger timeout_s "
                f"to flexcomm.connect."
            )
        if waited_s < _SPIN_S:
            os.sched_yield()  # Not `time.sleep(0)`, which the kernel's timer slack makes 50 us long.
        else:
            time.sleep(min(_LONGEST_SLEEP_S, waited_s / 10))


def make_stream(device: torch.device) -> torch.Stream | None:
    return torch.Stream(device) if KINDS[device.type].has_streams else None


def record_event(device: torch.device) -> torch.Event | None:
    """Return an event behind all that the device's current stream was given to do; None, if it has no streams."""
    return torch.accelerator.current_stream(device).record_event() if KINDS[device.type].has_streams else None


def record_stream(x: Tensor) -> None:
    """Once it is freed, keep the memory of ``x`` from being used anew before the current stream has come to there."""
    if KINDS[x.device.type].has_streams:
        x.record_stream(torch.accelerator.current_stream(x.device))


def order_current_stream(device: torch.device, after: torch.Event | None) -> None:
    """Let the device's current stream wait for an event."""
    if after is not None:
        torch.accelerator.current_stream(device).wait_event(after)


def order_stream(stream: torch.Stream | None) -> None:
    """Let a stream wait for what its device's current stream was given to do so far."""
    if stream is not None:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))


def switch_stream(stream: torch.Stream | None, after: torch.Event | None = None) -> torch.Stream | None:
    """Make ``stream`` current, ordered behind ``after``, and return the one that was; without a stream, do nothing."""
    if stream is None:
        return None
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    if after is not None:
        stream.wait_event(after)
    return before
