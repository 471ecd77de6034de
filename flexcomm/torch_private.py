"""All that flexcomm uses of torch and torch keeps private."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from flexcomm.versions import missing, private

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, PrefixStore, Work
else:
    try:
        from torch._C._distributed_c10d import Backend, Work
    except ImportError as error:
        raise missing("torch._C._distributed_c10d.Backend and Work") from error

GroupOptions = Backend.Options
"""The base of what ``pg_options`` and ``backend_override`` take."""
BaseWork = Work
"""The base of what a collective returns."""
NO_PASS = -1
"""What :func:`backward_pass` returns outside of backward passes."""


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that is running ends without an error."""
    # Public since torch 2.15.
    public = getattr(torch.autograd.graph, "queue_callback", None)
    (public or private(Variable, "_execution_engine", "queue_callback"))(callback)


def backward_pass() -> int:
    """Return the number of the backward pass that this thread works for."""
    return int(private(torch, "_C", "_current_graph_task_id")())


def code_of_backward() -> tuple[CodeType, CodeType]:
    """Return the code that starts a backward pass, and the code that calls a function of Python in one."""
    return private(torch.autograd.graph, "_engine_run_backward").__code__, BackwardCFunction.apply.__code__


# Any: torch's enumeration of kinds has no name in its stubs.
def add_backend(group: dist.ProcessGroup, device_type: str, kind: Any, backend: Backend) -> None:
    """Let a group use a backend for one type of device; ``kind`` is one of ``ProcessGroup.BackendType``."""
    private(group, "_register_backend")(torch.device(device_type), kind, backend)
    private(backend, "_set_sequence_number_for_group")()


def set_default_backend(group: dist.ProcessGroup, kind: Any) -> None:
    private(group, "_set_default_backend")(kind)


# Any: torch's stubs know no verbs of a backend.
def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what carries a group's tensors on a device."""
    return private(group, "_get_backend")(device)


def nccl_backend(store: PrefixStore, rank: int, size: int, timeout: timedelta, ranks: list[int]) -> Backend:
    options: Any = dist.ProcessGroupNCCL.Options()
    private(options, "_timeout")
    options._timeout, options.global_ranks_in_group = timeout, ranks  # noqa: SLF001
    return dist.ProcessGroupNCCL(store, rank, size, options)


def creator_of(name: str) -> tuple[Callable[..., Backend], bool]:
    """Return what makes a backend that was registered with torch, and whether it takes all options as one argument."""
    plugin = private(dist.Backend, "_plugins")[name.upper()]
    return plugin.creator_fn, plugin.extended_api
