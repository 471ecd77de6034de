"""A process group that answers all-reduces of gradients by compressed exchanges, and leaves all else to torch.

The group holds backends of torch, as any other does: gloo for host tensors, NCCL or another for an accelerator's. Every
verb but the two of all-reduce goes to them as it is.

[Note: verbs passed on] Verbs that torch asks Python groups for are passed on here, to the backend itself, though torch
would do that, too: it holds the GIL meanwhile (``WORK_OVERRIDE`` in PyProcessGroup.hpp, torch 2.13). A thread of gloo
that frees a tensor of Python's waits for the GIL while it holds the lock of gloo's queue, for which the caller waits.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch exports it without saying so
    AllreduceCoalescedOptions,
    AllreduceOptions,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    Store,
)

from flexcomm.backend.options import NAME, BackendSettings, is_exact_region, settings_for
from flexcomm.backend.steps import Call, StepCounter
from flexcomm.backend.work import FinishedWork, PendingWork, WorkThread
from flexcomm.bootstrap.consistency import digest_of
from flexcomm.compress import DTYPES, dense
from flexcomm.device import HOST, native_backend
from flexcomm.device import accelerator as find_accelerator
from flexcomm.errors import ConfigMismatchError, FlexcommError, InvalidArgumentError
from flexcomm.sync.api import plan_sync, start_planned
from flexcomm.sync.call import SyncHandle
from flexcomm.sync.engine import legs_of_threads
from flexcomm.sync.plan import NonFinitePolicy, SyncPlan
from flexcomm.sync.residuals import Residuals
from flexcomm.topology import Members, Topology, group_by_node, place_of
from flexcomm.torch_private import (
    BaseWork,
    add_backend,
    backend_of,
    creator_of,
    nccl_backend,
    set_default_backend,
)
from flexcomm.world import World, join_groups

log = logging.getLogger(__name__)

_MOST_PLANS = 4096
_POLICIES: dict[str, NonFinitePolicy] = {"nan": "skip", "raise": "raise", "zero": "zero"}


class CompressingProcessGroup(ProcessGroup):
    """A group of the backend ``"flexcomm"``; torch makes it, of :class:`flexcomm.BackendOptions`.

    Its ranks are one of each node, as those that hold replicas of a shard, or all ranks of some nodes, as DDP's: then
    tensors are averaged in full inside nodes.
    """

    def __init__(self, created: Any, settings: BackendSettings) -> None:
        super().__init__(created.group_rank, created.group_size)  # type: ignore[call-arg]  # as for Python's groups
        self.settings = settings
        self.residuals = Residuals(settings.decay, alpha=settings.alpha)
        self.counts: Counter[str] = Counter()
        """How many all-reduces were compressed, and how many were exact, by the reason; and their bytes."""
        self._ranks = list(created.global_ranks_in_group) or list(range(created.group_size))
        self._timeout_s = created.timeout.total_seconds()
        self._steps = StepCounter(self._end_step)
        self._plans: dict[object, SyncPlan] = {}
        self._pending: WeakValueDictionary[Call, PendingWork] = WeakValueDictionary()  # done ones may be forgotten
        self._why_exact = ""
        self._lock = threading.Lock()
        """Held while calls are started and finished, which different threads may do."""
        self._make_backends(created)
        self._check_settings(created.store)

    def _check_settings(self, store: Store) -> None:
        """Raise on all ranks unless they have equal settings: one that passes on what others compress would wait."""
        own = repr(self.settings)
        store.set(f"settings of {self.rank()}", own)
        digests = self._gather(torch.frombuffer(bytearray(digest_of(own)), dtype=torch.uint8))
        odd = next((rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])), None)
        if odd is not None:
            passed = [f"rank {self._ranks[one]} has {store.get(f'settings of {one}').decode()}" for one in (0, odd)]
            raise ConfigMismatchError(
                f"ranks gave a group of the backend {NAME!r} different options: {', but '.join(passed)}. Pass equal "
                f"ones on every rank, or set FLEXCOMM_COMPRESSOR alike on all nodes."
            )

    def _gather(self, x: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(x) for _ in range(self.size())]
        backend_of(self, x.device).allgather([rows], [x]).wait()
        return rows

    def _make_backends(self, created: Any) -> None:
        kinds, rank, size = ProcessGroup.BackendType, created.group_rank, created.group_size
        self._own_device = torch.device(HOST.name)
        store = PrefixStore("cpu/", created.store)
        add_backend(self, HOST.name, kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout=created.timeout))
        set_default_backend(self, kinds.GLOO)
        accelerator, name = find_accelerator(), native_backend()
        if accelerator is None or name is None:
            return
        store = PrefixStore(f"{accelerator.name}/", created.store)
        if name == "nccl":
            backend, kind = nccl_backend(store, rank, size, created.timeout, self._ranks), kinds.NCCL
        else:
            create, takes_options = creator_of(name)
            created.store = store
            backend = create(created, None) if takes_options else create(store, rank, size, created.timeout)
            kind = kinds.CUSTOM
        add_backend(self, accelerator.name, kind, backend)
        set_default_backend(self, kind)
        self._own_device = torch.device(accelerator.name)

    # --- torch's verbs -----------------------------------------------------------------------------------------------

    def allreduce(  # type: ignore[override]  # of torch's three signatures
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: AllreduceOptions | ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        op: ReduceOp | None = None,
    ) -> BaseWork:
        """Reduce tensors in place, compressed if they are gradients; torch calls it."""
        xs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not isinstance(opts, AllreduceOptions):
            given, opts = op if opts is None else opts, AllreduceOptions()
            if given is not None:
                opts.reduceOp = given
            if timeout is not None:
                opts.timeout = timeout
        work = self._reduce(xs, opts)
        return backend_of(self, xs[0].device).allreduce(xs, opts) if work is None else work

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None) -> BaseWork:
        """Reduce tensors in place, together; torch calls it."""
        xs = list(tensors)
        opts = AllreduceCoalescedOptions() if opts is None else opts
        work = self._reduce(xs, opts)
        return backend_of(self, xs[0].device).allreduce_coalesced(xs, opts) if work is None else work

    # See [Note: verbs passed on]. Any: torch's overloads, and C++ calls by position.
    def allgather(self, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        first = inputs if isinstance(inputs, Tensor) else inputs[0]
        return backend_of(self, first.device).allgather(outputs, inputs, *rest, **options)

    def broadcast(self, tensors: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        return backend_of(self, first.device).broadcast(tensors, *rest, **options)

    def reduce_scatter(self, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        return backend_of(self, first.device).reduce_scatter(outputs, inputs, *rest, **options)

    def alltoall_base(self, output: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        return backend_of(self, output.device).alltoall_base(output, *rest, **options)

    def all_to_all_single(self, output: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        return self.alltoall_base(output, *rest, **options)

    def send(self, tensors: Any, *rest: Any, **options: Any) -> Any:
        return backend_of(self, tensors[0].device).send(tensors, *rest, **options)

    def recv(self, tensors: Any, *rest: Any, **options: Any) -> Any:
        return backend_of(self, tensors[0].device).recv(tensors, *rest, **options)

    def barrier(self, *rest: Any, **options: Any) -> Any:
        return backend_of(self, self._own_device).barrier(*rest, **options)

    # --- compression -------------------------------------------------------------------------------------------------

    # Any: torch's stubs take its operations for numbers that cannot be compared.
    def _reduce(self, xs: list[Tensor], opts: Any) -> BaseWork | None:
        """Start a compressed all-reduce; return None where it must be exact."""
        nbytes, op = sum(x.nbytes for x in xs), opts.reduceOp
        reason = self._reason_to_be_exact(xs, nbytes, op)
        call, world = Call("outside", 0), None
        if not reason:
            # Also where it will be exact: its number is that of its residual in other steps.
            call = self._steps.next_call()
            if is_exact_region():
                reason = "exact()"
            elif self._steps.step < self.settings.start_step:
                reason = "before start_step"
            elif (world := self._world) is None:
                reason = self._why_exact
        self.counts[reason or "compressed"] += 1
        self.counts["exact bytes" if reason else "compressed bytes"] += nbytes
        if world is None:
            return None
        scale = None if op == ReduceOp.AVG else float(self.size())
        in_background = opts.asyncOp and self._can_have_threads(world, xs)
        if (before := self._pending.pop(call, None)) is not None:
            # Of a step that nobody waited for. It has the residual, on some ranks perhaps no longer.
            with suppress(FlexcommError):
                before.wait()
        with self._lock:
            handle = self._start(world, xs, call, in_background)
        finish = partial(self._finish, handle, xs, scale)
        if not in_background:
            finish()
            return FinishedWork(xs)
        work = self._pending[call] = PendingWork(xs)
        self._finishing.submit(partial(work.finish, finish, self._completing))
        return work

    def _start(self, world: World, xs: list[Tensor], call: Call, in_background: bool) -> SyncHandle[list[Tensor]]:
        settings = self.settings
        shapes = ["x".join(map(str, x.shape)) for x in xs]
        place = f"{call.made} {call.number}"
        names = tuple([f"{place}.{part}, {x.dtype} {shapes[part]}" for part, x in enumerate(xs)])
        key = names, xs[0].device, in_background
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = plan_sync(
                xs,
                settings.compressor,
                world=world,
                in_background=in_background,
                names=names,
                average=settings.average,
                nonfinite=_POLICIES[settings.nonfinite],
                bucket_bytes=settings.bucket_bytes,
                has_residuals=True,
            )
        return start_planned(plan, xs, world=world, residuals=self.residuals, step=self._steps.step, out=xs)

    def _finish(self, handle: SyncHandle[list[Tensor]], xs: list[Tensor], scale: float | None) -> None:
        handle.wait_received()
        with self._lock, torch.no_grad():
            handle.wait()
            if handle.skipped:
                for x in xs:
                    x.fill_(torch.nan)
            elif scale is not None:
                torch._foreach_mul_(xs, scale)

    def _reason_to_be_exact(self, xs: list[Tensor], nbytes: int, op: Any) -> str:
        """Return why these tensors are none to compress, if they are not."""
        settings = self.settings
        if nbytes < settings.min_bytes:
            return "small"
        if not (op == ReduceOp.SUM or op == ReduceOp.AVG):  # torch's comparison: no hashes, no `in`
            return "not a sum or an average"
        first = xs[0]
        if any(x.dtype not in DTYPES or x.layout is not torch.strided for x in xs):
            return "not dense floating tensors"
        if any(x.device != first.device or not x.is_contiguous() for x in xs):
            return "not contiguous, or on several devices"
        return "dense()" if settings.compressor == dense() else ""

    def stats(self) -> dict[str, float]:
        """Return what was done on this rank, see :func:`backend_stats`."""
        world = self.__dict__.get("_world")
        return {**self.counts, **(world.stats() if world is not None else {})}

    # --- ranks -------------------------------------------------------------------------------------------------------

    @cached_property
    def _world(self) -> World | None:
        """The world of the group's ranks; None, if nothing between them can be compressed. All ranks ask together."""
        members = self._find_members()
        counts = {len(ranks) for ranks in members}
        if len(members) == 1:
            self._why_exact = "one node"
        elif len(counts) > 1:
            self._why_exact = "unequal nodes"
        if self._why_exact:
            if self.rank() == 0:
                log.warning(
                    "all-reduces of the group of ranks %s are exact, because it has %s: nodes are %s. Where one "
                    "machine is to play several nodes, set FLEXCOMM_RANKS_PER_NODE.",
                    self._ranks,
                    self._why_exact,
                    members,
                )
            return None
        topology = Topology(self.rank(), members, "group")
        accelerator = find_accelerator()
        device_type = HOST.name if accelerator is None else accelerator.name
        return join_groups(topology, self._ranks, device_type, self._timeout_s)

    def _find_members(self) -> Members:
        host = int.from_bytes(digest_of(socket.gethostname())[:7], "little")
        own = torch.tensor([*place_of(self._ranks[self.rank()], os.environ), host])
        return group_by_node([tuple(row.tolist()) for row in self._gather(own)])

    def _can_have_threads(self, world: World, xs: list[Tensor]) -> bool:
        # Other threads may not write inference tensors.
        is_writable = xs[0].device.type == HOST.name and not any(x.is_inference() for x in xs)
        return is_writable and legs_of_threads(world, xs[0].device) != ()

    @cached_property
    def _finishing(self) -> WorkThread:
        return WorkThread("finish")

    @cached_property
    def _completing(self) -> WorkThread:
        return WorkThread("complete")

    def _end_step(self) -> None:
        """Say once what was compressed."""
        if self._steps.step == self.settings.start_step + 1 and self.rank() == 0:
            log.info("backend %s, ranks %s, %s: %s", NAME, self._ranks, self.settings.compressor, dict(self.counts))


def backend_stats(group: ProcessGroup) -> dict[str, float]:
    """Return what a group of the backend ``"flexcomm"`` did on this rank: calls by kind, and bytes.

    ``compressed`` and the reasons for which calls were exact count calls; ``compressed bytes`` and ``exact bytes`` are
    those of tensors; all others are as :meth:`flexcomm.World.stats` has them, of what travelled compressed.

    Args:
        group: what torch made of ``backend="flexcomm"``, such as ``mesh.get_group("replicate")``.

    Raises:
        InvalidArgumentError: it is a group of another backend.

    """
    if not isinstance(group, CompressingProcessGroup):
        raise InvalidArgumentError(f"got a group of {type(group).__name__}, needed one of the backend {NAME!r}.")
    return group.stats()


def create_group(created: Any, options: object) -> CompressingProcessGroup:
    """Make a group for torch."""
    return CompressingProcessGroup(created, settings_for(options))
