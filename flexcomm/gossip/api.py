"""The verbs: ``x`` becomes ``W x``, where ``W`` holds the weights of one phase of a schedule over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flexcomm.bootstrap.consistency import explain_timeout
from flexcomm.codec import check_numbers
from flexcomm.compress import Compressor
from flexcomm.errors import DeadlineExceededError, InvalidArgumentError, InvalidTensorError
from flexcomm.gossip.mix import MixContext, MixResiduals, PushSum, mix_bucket
from flexcomm.gossip.phase import round_of
from flexcomm.gossip.plan import MixSettings, plan_for
from flexcomm.gossip.schedule import ScheduleLike
from flexcomm.stats import SyncRecord
from flexcomm.sync.engine import BucketTask
from flexcomm.world import World, default_world

T = TypeVar("T", Tensor, list[Tensor])


class MixResult(NamedTuple, Generic[T]):
    """The mixed tensors, and their squared distance ``|W x - x|^2`` from this rank's input, a float64 scalar."""

    tensors: T
    squared_distance: Tensor


def mix(
    tensors: T,
    schedule: ScheduleLike,
    step: int,
    *,
    world: World | None = None,
    sharded: bool = False,
    gamma: float | None = None,
    push_sum: PushSum | None = None,
    compressor: Compressor | None = None,
    residuals: MixResiduals | None = None,
    communicator: str = "",
    out: Tensor | Sequence[Tensor] | None = None,
) -> MixResult[T]:
    """Return ``W x`` for every tensor, where ``W`` holds the weights of the schedule's phase at ``step``.

    All ranks call it with equal shapes and arguments. A call that raises changes nothing.

    Args:
        tensors: a tensor, or a list of them of one dtype and device.
        schedule: the phase of every step, such as ``flexcomm.gossip.base(world.topology.nodes)``.
        step: selects the phase of the schedule.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        sharded: True if the tensors are shards, as FSDP's are: the ranks of a node do not average them.
        gamma: the share of the way from ``x`` to ``W x``; if None, 1 or, with a compressor, one that converges.
        push_sum: this node's push-sum weight, needed if the schedule is not doubly stochastic; one object for each set
            of tensors, kept from step to step.
        compressor: sends compressed changes of the tensors; needs a fixed schedule, and ``residuals``.
        residuals: the state of compressed mixing; one object for each set of tensors, kept from step to step.
        communicator: names the process groups that carry the mix. Ranks start the mixes of one communicator in the same
            order; those of different ones need no common order, unless NCCL carries them.
        out: where the mixed tensors are written, instead of new tensors; may be ``tensors``.

    Raises:
        ConfigMismatchError: ranks passed different tensors or arguments; it names them.
        InvalidArgumentError: the arguments do not go together, or would diverge.
        NonFiniteError: a node had NaN, infinity or a magnitude of 2**100 or more to compress.
        TransportError: a rank is gone or did not answer within the world's ``timeout_s``.

    Example:
        >>> import torch, flexcomm
        >>> with flexcomm.connect() as world:
        ...     flexcomm.mix(torch.ones(3), flexcomm.gossip.base(world.topology.nodes), 0, world=world).tensors
        tensor([1., 1., 1.])

    """
    return start_mix(
        tensors,
        schedule,
        step,
        world=world,
        sharded=sharded,
        gamma=gamma,
        push_sum=push_sum,
        compressor=compressor,
        residuals=residuals,
        communicator=communicator,
        out=out,
    ).wait()


def start_mix(
    tensors: T,
    schedule: ScheduleLike,
    step: int,
    *,
    world: World | None = None,
    sharded: bool = False,
    gamma: float | None = None,
    push_sum: PushSum | None = None,
    compressor: Compressor | None = None,
    residuals: MixResiduals | None = None,
    communicator: str = "",
    out: Tensor | Sequence[Tensor] | None = None,
) -> MixHandle[T]:
    """Start :func:`mix`, which explains the arguments, and return a handle at once.

    Until the handle is waited for, the tensors may be read, but not changed.

    Example:
        >>> import torch, flexcomm
        >>> with flexcomm.connect() as world:
        ...     handle = flexcomm.start_mix(torch.ones(3), flexcomm.gossip.base(world.topology.nodes), 0, world=world)
        ...     handle.wait().tensors
        tensor([1., 1., 1.])

    """
    world = world or default_world()
    single = isinstance(tensors, Tensor)
    xs = cast("list[Tensor]", [tensors] if single else list(tensors))
    settings = MixSettings(sharded, gamma, compressor, communicator, push_sum is not None, residuals is not None)
    plan = plan_for(world, xs, schedule, settings)
    check_numbers(step, 0)
    if out is None:
        outputs = [torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False) for x in xs]
    else:
        outputs = [out] if isinstance(out, Tensor) else list(out)
        if [(x.shape, x.dtype, x.device) for x in outputs] != [(x.shape, x.dtype, x.device) for x in xs]:
            raise InvalidTensorError(
                f"out has {[list(x.shape) for x in outputs]} for tensors of {[list(x.shape) for x in xs]}: pass one "
                f"for each, of the same shape, dtype and device; the tensors themselves will do."
            )
    node, buffers = world.topology.node, plan.pool.take()
    if len(xs) == 1 and xs[0].is_contiguous():
        x = xs[0].detach().view(-1)
    else:
        parts = [one.detach().reshape(-1) for one in xs] or [torch.empty(0, device=world.device)]
        numel, dtype = sum(map(Tensor.numel, parts)), parts[0].dtype
        x = torch.cat(parts, out=buffers.get("input", lambda: buffers.allocate(numel, dtype=dtype)))
    if residuals is not None:
        residuals.claim()
    # Compressed payloads cannot be added on the way.
    round_ = round_of(schedule.phase(step), node, reduces=compressor is None)
    # Nodes without a peer count, too: the headers of all nodes carry the number of the call.
    sequence = plan.driver.next_sequence()
    record = SyncRecord(syncs=1, dense_bytes=x.nbytes)
    ctx = MixContext(plan, x, outputs, node, round_, step, sequence, push_sum, residuals, buffers, record)
    tasks = [BucketTask(ctx, mix_bucket(ctx))]
    handle: MixHandle[T] = MixHandle(world, tasks, cast("T", outputs[0] if single else outputs))
    if round_.is_idle and plan.ranks == 1 and residuals is None:
        tasks[0].resume(None)  # It sends nothing, and waits for no mix that does.
    else:
        handle.start()
    return handle


def plan_mix(
    tensors: list[Tensor],
    schedule: ScheduleLike,
    *,
    world: World | None = None,
    sharded: bool = False,
    gamma: float | None = None,
    has_push_sum: bool = False,
    compressor: Compressor | None = None,
    has_residuals: bool = False,
    communicator: str = "",
) -> None:
    """Agree on a mix and make its process groups, without sending any tensor. All ranks call it together.

    Later calls of :func:`start_mix`, which has the same arguments, need no agreement, so they can be made where ranks
    come in different orders, such as in the hooks of a backward pass. Of ``tensors`` only shapes, dtypes and the device
    matter; ``has_push_sum`` and ``has_residuals`` say whether the calls will pass ``push_sum`` and ``residuals``.
    """
    settings = MixSettings(sharded, gamma, compressor, communicator, has_push_sum, has_residuals)
    plan_for(world or default_world(), tensors, schedule, settings)


class MixHandle(Generic[T]):
    """A mix under way. Handles may be waited for in any order."""

    def __init__(self, world: World, tasks: list[BucketTask[MixContext]], result: T) -> None:
        self._world, self._tasks, self._is_explained = world, tasks, False
        self._task, self._driver = tasks[0], tasks[0].ctx.plan.driver
        self._is_cancelled = False
        self._has_claim = self._task.ctx.residuals is not None
        self._result: T = result
        self.record = self._task.ctx.record
        """The bytes and seconds of this mix so far."""

    def start(self) -> None:
        """Start the mix, once."""
        try:
            self._driver.start(self._tasks)
            if self._driver.threads is None and not self._driver.enqueues:
                # Ranks may wait for handles in different orders, but their messages must come in one.
                self._driver.finish(self._tasks)
        except BaseException:
            self._unclaim()
            raise

    def wait(self) -> MixResult[T]:
        """Return the mixed tensors. Further calls return them again, or raise the same error again."""
        ctx = self._task.ctx
        if ctx.squared_distance is None:
            self.wait_received()
            self._task.write_outputs()
            self._unclaim()
            self._world.add_stats(ctx.record, step=ctx.step)
            self._end()
        assert ctx.squared_distance is not None, "outputs are written"  # noqa: S101  (our own invariant)
        return MixResult(self._result, ctx.squared_distance)

    def wait_received(self) -> None:
        """Return when all messages were received and the inputs are no longer read. Outputs are written by `wait`."""
        self._driver.finish(self._tasks)
        failure = self._task.failure
        if failure is not None:
            self._unclaim()
            if isinstance(failure, DeadlineExceededError) and not self._is_explained:
                failure = self._task.failure = explain_timeout(self._world, failure, self._task.ctx.sequence)
                self._is_explained = True
            raise failure

    def cancel(self) -> None:
        """Wait for the messages and ignore them: tensors, residuals and push-sum weight do not change."""
        if self._task.ctx.squared_distance is None and not self._is_cancelled:
            # Peers count on their messages being received.
            self.wait_received()
            self._is_cancelled = True
            self._task.failure = InvalidArgumentError("this mix was cancelled, and changed nothing: start another one.")
            self._unclaim()
            self._end()

    def done(self) -> bool:
        """Return whether all messages were received, so that ``wait`` does not block."""
        return self._task.has_arrived()

    def _end(self) -> None:
        self._driver.end_call()
        self._task.ctx.plan.pool.give_back(self._task.ctx.buffers)

    def _unclaim(self) -> None:
        # Once: by then, another mix may have the claim.
        if self._has_claim and self._task.ctx.residuals is not None:
            self._has_claim = False
            self._task.ctx.residuals.unclaim()
