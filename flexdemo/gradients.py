"""Gradients between nodes: buckets of parameters, when each is started, and what all nodes received.

The path of a step:

1. With ``overlap=True``, :class:`ReadyBuckets` starts a bucket during backward, in autograd's thread, when all of its
   gradients are there and all buckets before it are started. Comm threads encode and send it, where the world has them.
2. ``NodeOptimizer.step`` starts the other buckets, in the same order; parameters without a gradient send zeros.
3. :meth:`GradientSync.finish` waits until all buckets are verified. Then all of them write their outputs and commit
   their residuals; or, if one failed or is to be skipped on any rank, all of them are rolled back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FlatParameter
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

import flexcomm
from flexcomm.bootstrap.consistency import ConsistencyCheck
from flexdemo.parameters import Group, is_sharded, local, names_of
from flexdemo.torch_private import version_of


@dataclass(frozen=True)
class CompressionSettings:
    """Compress ``decay * residual + gain * gradient``, and take ``alpha`` of what was sent out of the residual."""

    compressor: flexcomm.Compressor
    decay: float = 1.0
    gain: float = 1.0
    alpha: float = 1.0


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one parameter group and device whose gradients, which are as ``specs`` say, travel together."""

    group: int
    node_averaged: bool
    """Whether gradients are averaged inside the node before the optimizer sees them."""
    device: torch.device
    params: tuple[Parameter, ...]
    specs: tuple[flexcomm.TensorSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    @property
    def kind(self) -> tuple[int, bool, torch.device]:
        return self.group, self.node_averaged, self.device


Averages = dict[Bucket, list[Tensor]]
"""The averages of each bucket's tensors, equal on all nodes: the gradients themselves, if they were contiguous."""
FusedStep = tuple[list[Tensor], flexcomm.Epilogue]
"""Tensors that kernels step by the averages while they decode them, and how."""


def bucket_parameters(groups: list[Group], bucket_bytes: int, wanted: Callable[[Parameter], bool]) -> list[Bucket]:
    """Put all wanted parameters into buckets of up to so many bytes, the last first, as backward makes them ready."""
    alike: dict[tuple[int, bool, torch.device], list[tuple[Parameter, flexcomm.TensorSpec]]] = {}
    for number, (group, names) in reversed(list(enumerate(zip(groups, names_of(groups), strict=True)))):
        told: bool | None = group.get("node_averaged")
        for param, name in zip(reversed(group["params"]), reversed(names), strict=True):
            if wanted(param):
                averaged = is_sharded(param) if told is None else told
                alike.setdefault((number, averaged, param.device), []).append((param, spec_of(local(param), name)))
    return [
        Bucket(*kind, *zip(*(found[member] for member in members), strict=True))
        for kind, found in alike.items()
        for members in flexcomm.fill_buckets([spec for _, spec in found], bucket_bytes)
    ]


def spec_of(tensor: Tensor, name: str) -> flexcomm.TensorSpec:
    return flexcomm.TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def check_same_buckets(buckets: Iterable[Bucket], world: flexcomm.World) -> None:
    """Raise on all ranks unless all train the same parameters, in the same order, also if they agreed before."""
    numbered = enumerate((bucket.group, bucket.node_averaged, bucket.names) for bucket in buckets)
    ConsistencyCheck(world.control).check({f"trained parameters, bucket {number}": one for number, one in numbered})


class ReadyBuckets:
    """Calls ``launch`` with every bucket, in their order, each as soon as its gradients are ready.

    All ranks must start collectives in one order, but gradients become ready in any order, and some never. So a bucket
    waits for those before it, and :meth:`launch_rest` launches what backward did not.
    """

    def __init__(self, launch: Callable[[Any], None]) -> None:  # Any: a Bucket, of the kind that is watched
        self._launch = launch
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._paused = False
        self.reset()

    def watch(self, buckets: list[Bucket], *, early: bool) -> None:
        """Count these buckets' gradients from now on; without ``early``, nothing is launched early."""
        for hook in self._hooks:
            hook.remove()
        self._buckets = list(buckets)
        self._bucket_of = {param: number for number, bucket in enumerate(buckets) for param in bucket.params}
        # A flat parameter of FSDP1 holds the whole unit's gradient when its hooks run.
        watched = [param for param in self._bucket_of if early and not isinstance(param, FlatParameter)]
        # Weak: hooks of parameters must not keep a forgotten optimizer sending.
        weak_count = WeakMethod(self._count)

        def count_if_alive(param: Tensor) -> None:
            count = weak_count()
            if count is not None:
                count(param)

        self._hooks = [param.register_post_accumulate_grad_hook(count_if_alive) for param in watched]  # type: ignore[no-untyped-call]
        # Buckets may be added in the middle of an iteration: what was counted and launched stays so.
        self._missing = [sum(param not in self._versions for param in bucket.params) for bucket in buckets]

    def reset(self) -> None:
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._missing = [len(bucket.params) for bucket in self._buckets]
        self.launched = 0
        """How many buckets of this step are launched."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing: gradients are still being accumulated."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def launch_rest(self) -> None:
        """Launch what is left, whether or not its gradients are there; raise if one that left before was changed."""
        try:
            for param, version in self._versions.items():
                changed = param.grad is None or _version_of(param.grad) != version
                if changed and self._bucket_of[param] < self.launched:
                    raise flexcomm.InvalidArgumentError(
                        "a gradient was changed after its exchange began, during backward(). To clip or unscale "
                        "gradients use overlap=False, or 'step'; to accumulate them, no_sync()."
                    )
            for bucket in self._buckets[self.launched :]:
                self._launch(bucket)
        finally:
            self.reset()

    def _count(self, param: Tensor) -> None:
        """Count a gradient, and launch what is ready now; autograd calls this, in its thread."""
        if self._paused or param.grad is None:
            return
        if param in self._versions:
            raise flexcomm.InvalidArgumentError(
                "backward() ran twice before step(), and gradients are on their way since the first. Accumulate in "
                "`with optimizer.no_sync():` and leave it for the last backward(), or use overlap=False, or 'step'."
            )
        self._versions[param] = _version_of(param.grad)
        self._missing[self._bucket_of[param]] -= 1
        while self.launched < len(self._buckets) and self._missing[self.launched] == 0:
            self.launched += 1
            self._launch(self._buckets[self.launched - 1])


def _version_of(gradient: Tensor) -> tuple[int, int]:
    """Return where a gradient lies, and how often it was changed there."""
    return local(gradient).data_ptr(), version_of(local(gradient))


class GradientSync:
    """The syncs of the buckets of a step, all of which are written or none, and the residuals of what was not sent.

    ``residuals[group]``, by the number of the parameter group, are an optimizer's momentum.
    """

    def __init__(
        self,
        world: flexcomm.World,
        *,
        average: flexcomm.Average,
        nonfinite: flexcomm.NonFinitePolicy,
        has_residuals: bool = True,
        in_background: bool = False,
        exact_rollback: bool = False,
    ) -> None:
        self.world = world
        self.buckets: list[Bucket] = []
        self.residuals: dict[int, flexcomm.Residuals] = {}
        self._nonfinite, self._has_residuals, self._exact_rollback = nonfinite, has_residuals, exact_rollback
        # A bucket is never cut again.
        self._plan_sync = partial(
            flexcomm.plan_sync,
            world=world,
            in_background=in_background,
            average=average,
            bucket_bytes=None,
            has_residuals=has_residuals,
        )
        self._plans: dict[Hashable, flexcomm.SyncPlan] = {}
        self._algorithms: dict[Hashable, flexcomm.AlgorithmOption] = {}
        self._started: list[tuple[Bucket, flexcomm.SyncHandle[list[Tensor]], flexcomm.Epilogue | None]] = []
        self._failures: list[flexcomm.FlexcommError] = []
        self._overwritten: set[int] = set()  # addresses of what was started, and gets its average

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Start these buckets from now on."""
        self.buckets = buckets
        self._plans.clear()
        self._algorithms.clear()

    def residuals_of(self, bucket: Bucket) -> flexcomm.Residuals | None:
        if not self._has_residuals:
            return None
        return self.residuals.setdefault(bucket.group, flexcomm.Residuals(exact_rollback=self._exact_rollback))

    def shards_of(self, bucket: Bucket, compressor: flexcomm.Compressor) -> list[flexcomm.TensorShard | None]:
        """Return, for each tensor, the shard whose residual this rank keeps; None if it keeps none."""
        # For a plan only shapes, dtypes and the device matter.
        like = [torch.empty((), dtype=spec.dtype, device=bucket.device).expand(spec.shape) for spec in bucket.specs]
        plan = self._plan_sync(like, compressor, names=bucket.names, all_ranks=not bucket.node_averaged)
        return flexcomm.shards_held(plan)

    def start(
        self,
        bucket: Bucket,
        tensors: list[Tensor],
        settings: CompressionSettings,
        step: int,
        *,
        nonfinite: flexcomm.NonFinitePolicy | None = None,
        fused_step: FusedStep | None = None,
    ) -> None:
        """Start to average a bucket's tensors.

        Without a fused step, averages are written over the tensors, if those are contiguous. ``nonfinite`` is that of
        all steps, if not given.
        """
        compressor, residuals = settings.compressor, self.residuals_of(bucket)
        if residuals is not None:
            residuals.decay, residuals.gain, residuals.alpha = settings.decay, settings.gain, settings.alpha
        if fused_step is None:
            out, epilogue = self._outputs_for(tensors), None
        else:
            out, epilogue = fused_step
        nonfinite = nonfinite or self._nonfinite
        plan = self._plans.get((bucket, compressor, nonfinite))
        if plan is None:
            plan = self._plans[bucket, compressor, nonfinite] = self._plan_sync(
                tensors,
                compressor,
                names=bucket.names,
                all_ranks=not bucket.node_averaged,
                algorithm=self._algorithm_of(bucket, compressor),
                nonfinite=nonfinite,
            )
        try:
            handle = flexcomm.start_planned(plan, tensors, world=self.world, residuals=residuals, step=step, out=out)
        except flexcomm.TransportError:
            self.cancel()
            raise
        except flexcomm.FlexcommError as failure:
            # Kept until the end: the other ranks of this node wait there, and learn of it.
            self._failures.append(failure)
        else:
            self._started.append((bucket, handle, epilogue))

    def _outputs_for(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors themselves; memory for averages of those that have gaps, or that parameters share."""
        places = [x.data_ptr() for x in tensors]
        once = {place for place, times in Counter(places).items() if times == 1} - self._overwritten
        self._overwritten.update(places)
        return [
            x if place in once and x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x, place in zip(tensors, places, strict=True)
        ]

    def finish(self) -> Averages | None:
        """Wait for all buckets, and return the averages of those without a fused step; None if all ranks skip.

        Outputs are written and residuals committed for all buckets; for none if this raises or returns None.
        """
        started, failures = self._started, self._failures
        self._started, self._failures = [], []
        self._overwritten.clear()
        averages: Averages = {}
        try:
            for _, handle, _ in started:
                try:
                    handle.verify()
                except flexcomm.TransportError:
                    raise
                except flexcomm.FlexcommError as failure:
                    failures.append(failure)
            skipped = any(handle.skipped for _, handle, _ in started)
            if self._is_skipped_on_node(failures, skipped):
                return None
            for bucket, handle, epilogue in started:
                handle.write(epilogue or flexcomm.Epilogue())
                if epilogue is None:
                    averages[bucket] = handle.result
                # Kernels know nothing of autograd, which looks whether what it saved is still what it was.
                increment_version(handle.result if epilogue is None else bucket.params)
        finally:
            # Does nothing to what is written.
            for _, handle, _ in started:
                handle.rollback()
        return averages

    def cancel(self) -> None:
        """Wait for what is under way, and roll it back."""
        started, self._started, self._failures = self._started, [], []
        self._overwritten.clear()
        for _, handle, _ in started:
            with suppress(flexcomm.FlexcommError):
                handle.verify()
            handle.rollback()

    def _is_skipped_on_node(self, failures: list[flexcomm.FlexcommError], skipped: bool) -> bool:
        """Return whether any rank of this node skips; raise if one failed."""
        failed_ranks, intra = len(failures), self.world.intra_control
        # Shards are exchanged by ranks of one local rank, and the others of the node do not know; else all know.
        if intra.size > 1 and any(bucket.node_averaged for bucket in self.buckets):
            outcome = torch.tensor([bool(failures), skipped], dtype=torch.int32)
            failed_ranks, skipped = intra.all_reduce(outcome).wait().tolist()
        if failures:
            raise failures[0]
        if failed_ranks:
            raise flexcomm.SyncError(
                f"{failed_ranks} other ranks of this node could not exchange their shards (their errors say why), and "
                f"nothing was changed. Skip this step."
            )
        return bool(skipped)

    def _algorithm_of(self, bucket: Bucket, compressor: flexcomm.Compressor) -> flexcomm.AlgorithmOption:
        """Return one algorithm for all buckets of this kind and dtype: their size must not change what is sent."""
        dtype = bucket.specs[0].dtype
        key = compressor, dtype, *bucket.kind
        if key not in self._algorithms:
            alike = [one for one in self.buckets if one.kind == bucket.kind]
            specs = [spec for one in alike for spec in one.specs if spec.dtype == dtype] or bucket.specs
            chosen = flexcomm.choose_algorithms(specs, compressor, self.world.inter.size)
            self._algorithms[key] = chosen[dtype].algorithm
        return self._algorithms[key]
