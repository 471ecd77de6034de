"""A call under way: its buckets, and what becomes of its outputs and residuals when all of them are verified."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flexcomm.bootstrap.consistency import explain_timeout
from flexcomm.codec import check_numbers
from flexcomm.device import KINDS
from flexcomm.errors import DeadlineExceededError, FlexcommError, NonFiniteError, TransportError
from flexcomm.kernels import LARGEST_MAGNITUDE, STORE, Epilogue, StateUpdate
from flexcomm.stats import SyncRecord
from flexcomm.sync.bucket import BucketContext, sync_bucket
from flexcomm.sync.engine import BucketTask, engine_of
from flexcomm.sync.plan import BucketPlan, Buffers, SyncPlan
from flexcomm.sync.residuals import Residuals
from flexcomm.world import World

T = TypeVar("T", Tensor, list[Tensor])

LEAST_DECAY = 0.5  # with which states are updated in place


class SyncHandle(Generic[T]):
    """A synchronisation under way. Handles of a world are finished in the order they were started."""

    # Outputs are written only when all buckets are verified, here and by those who call :meth:`verify`; until then,
    # what was done to residuals can be rolled back.
    def __init__(
        self,
        world: World,
        plan: SyncPlan,
        tensors: list[Tensor],
        outputs: list[Tensor],
        residuals: Residuals | None,
        step: int | None,
    ) -> None:
        result: Any = outputs  # or its only tensor, by those who were given one
        self.result: T = result
        """Where the averages will be; they are there once :meth:`wait` has returned."""
        self._engine = engine_of(world)
        self._world, self._plan, self._residuals = world, plan, residuals
        self._step = self._engine.calls if step is None else step
        check_numbers(self._step, self._engine.sequence)
        self._outputs = [x.detach() if x.requires_grad else x for x in outputs]
        self._tensors = [x.detach() if x.requires_grad else x for x in tensors]
        if plan.settings.nonfinite == "zero":
            self._tensors = [torch.where(x.abs() < LARGEST_MAGNITUDE, x, 0.0) for x in self._tensors]
        self._lent: list[str] = []
        self._tasks: list[BucketTask[BucketContext]] = []
        self._refusals: list[FlexcommError] = []
        self._error: BaseException | None = None
        self._is_verified = self._is_over = False
        self.skipped = False
        """Whether a rank had nonfinite values, so that all of them skip; known once :meth:`verify` has returned."""

    def wait(self) -> T:
        """Return the averages; calling again returns them again. Raises what went wrong, every time."""
        self.verify()
        self.write()
        return self.result

    def wait_received(self) -> None:
        """Return when comm threads have done what they were given; the rest is done by :meth:`wait`."""
        for task in self._tasks:
            if (handed_back := task.handed_back) is not None:
                handed_back.wait()

    def verify(self) -> None:
        """Wait until all that came is checked; :meth:`write` or :meth:`rollback` follows. Raises what went wrong."""
        if not self._is_verified:
            self._verify()
        if self._error is not None:
            raise self._error

    def write(self, epilogue: Epilogue = STORE) -> None:
        """Write outputs and commit residuals, once; if all ranks skip, outputs become zeros or, with a step, stay.

        Args:
            epilogue: store averages in the outputs, or take a step by them, see :class:`flexcomm.Epilogue`.

        """
        if self._is_over:
            return
        if self.skipped:
            # First: residuals are restored from inputs, which outputs may be.
            self.rollback()
            if epilogue.kind == "store":
                for out in self._outputs:
                    out.zero_()
            return
        try:
            for task in self._tasks:
                task.ctx.epilogue = epilogue
                task.write_outputs()
            if self._residuals is not None:
                self._residuals.commit(self._lent)
        except BaseException as error:
            # An interrupt, or memory that ran out: some outputs may be written, so nothing is taken back.
            self._error = error
            raise
        finally:
            self._end()

    def rollback(self) -> None:
        """Write nothing, and take back what this call did to its residuals; on all ranks. Not after :meth:`write`."""
        if self._is_over:
            return
        self._driver.order_current_stream(self._tasks)
        if self._is_device_stuck:
            # It would not come to this, either. Nobody else gets states that it may still write: they stay claimed.
            return
        for task in self._tasks:
            for restore in task.ctx.rollbacks:
                restore()
        if self._residuals is not None:
            self._residuals.cancel(self._lent)
        self._end()

    @property
    def _is_device_stuck(self) -> bool:
        """Whether a device did not come to the end of what it was given in time."""
        return isinstance(self._error, DeadlineExceededError) and KINDS[self._plan.device.type].has_streams

    def _end(self) -> None:
        self._is_over = True
        self._driver.end_call()
        if self._residuals is not None:
            self._residuals.unclaim(self._plan.names)
        if self._error is not None:
            return
        self._world.add_stats(self.record, sequence=self._engine.sequence, step=self._step)
        # Not those of a call that failed or was not verified: transports may still write them.
        for task, pool in zip(self._tasks if self._is_verified else [], self._plan.pools, strict=False):
            pool.give_back(task.ctx.buffers)

    def done(self) -> bool:
        """Return whether what was sent between nodes has arrived: then ``wait`` has the rest to do."""
        return all(task.has_arrived() for task in self._tasks)

    @property
    def record(self) -> SyncRecord:
        """What it cost so far: the sum over its buckets."""
        total = SyncRecord(syncs=1, dense_bytes=self._plan.dense_bytes, skipped=int(self.skipped))
        for task in self._tasks:
            total.add(task.ctx.record)
        return total

    def start(self) -> None:
        """Start all buckets, once. Driven by the caller, all of them are on their way between nodes when it returns."""
        engine, plan = self._engine, self._plan
        engine.agree(self._world, plan)
        self._driver = engine.sync_driver(self._world, plan)
        engine.calls += 1
        if self._residuals is not None:
            self._residuals.claim(plan.names)
        try:
            # All numbers at once: a rank whose bucket gets stuck must stay in step with those that do not.
            first, engine.sequence = engine.sequence + 1, engine.sequence + len(plan.buckets)
            for sequence, (bucket, pool) in enumerate(zip(plan.buckets, plan.pools, strict=True), first):
                ctx = self._make_context(bucket, pool.take(), sequence)
                self._tasks.append(BucketTask(ctx, sync_bucket(ctx)))
            self._driver.start(self._tasks)
        except DeadlineExceededError as error:
            raise self._cancel(error) from error
        except BaseException as error:
            self._cancel(error)
            raise

    def _make_context(self, bucket: BucketPlan, buffers: Buffers, sequence: int) -> BucketContext:
        plan, residuals = self._plan, self._residuals
        share = 1.0 / plan.local_size
        update = StateUpdate(gain=share) if residuals is None else residuals.update(share)
        ctx = BucketContext(plan, bucket, self._tensors, self._outputs, update, self._step, sequence, buffers)
        if residuals is None:
            return ctx
        # To roll back, what was sent and the inputs must be there: dense sums take the place of the former, and callers
        # that overlap may change the latter. Codecs of one's own write another state. And dividing by a small decay
        # would enlarge what was rounded.
        can_roll_back = bucket.algorithm not in ("dense", "codec") and update.decay >= LEAST_DECAY
        in_place = can_roll_back and not plan.inputs_may_change and not residuals.exact_rollback
        self._lent += [shard.spec.name for shard in ctx.shards]
        try:
            lent = [residuals.lend(one.spec.name, one.plan, plan.device, in_place=in_place) for one in ctx.shards]
        except FlexcommError as refusal:
            # Other ranks may hold no state here and would wait: so this rank goes along, with nothing to send.
            self._refusals.append(refusal)
            ctx.nonfinite = str(refusal)
            return ctx
        ctx.in_place = in_place
        ctx.states, ctx.states_out = [state for state, _ in lent], [state_out for _, state_out in lent]
        return ctx

    def _verify(self) -> None:
        """Take every bucket to where all is verified, once. What goes wrong is kept for those who ask."""
        self._is_verified = True
        try:
            self._driver.finish(self._tasks)
            failures = [*self._refusals, *[task.failure for task in self._tasks if task.failure is not None]]
            if failures:
                # Of several, that of a transport: all others follow from it.
                raise next((one for one in failures if isinstance(one, TransportError)), failures[0])
            senders = dict.fromkeys(sender for task in self._tasks for sender in task.ctx.nonfinite_senders)
            if senders and self._plan.settings.nonfinite == "raise":
                own = "; ".join(problem for task in self._tasks for problem in problems_of(task.ctx))
                raise NonFiniteError(
                    f"{', '.join(senders)} had NaN, infinity or a magnitude of 2**100 or more to send, or residuals "
                    f"that do not fit, and nothing was changed on any rank.{own and f' Here: {own}.'} Skip this step; "
                    f"if that happens often, lower the learning rate or the loss scale, clip, or pass nonfinite='skip'."
                )
            self.skipped = bool(senders)
        except BaseException as error:
            self._cancel(error)
            if not isinstance(error, Exception):
                raise

    def _cancel(self, error: BaseException) -> BaseException:
        """Leave everything as it was, and return the error, explained."""
        if isinstance(error, DeadlineExceededError):
            error = explain_timeout(self._world, error, self._engine.sequence)
        self._error = error
        self.rollback()
        return error


def problems_of(ctx: BucketContext) -> list[str]:
    """Return why this rank had nothing to send, asking its device; empty, if it had something."""
    return [problem for problem in (ctx.nonfinite, *(ask() for ask in ctx.problems)) if problem]
