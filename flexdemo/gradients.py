"""Gradients between nodes: buckets of parameters, when each is started, and what all nodes received.

The path of a step, with ``overlap=True``:

1. During backward, in autograd's thread, :class:`ReadyBuckets` counts gradients by a hook of each parameter. It starts
   a bucket when all of its gradients are there and all buckets before it are started, so that every rank starts
   collectives in one order. From then on flexcomm's comm threads encode and exchange it, where the world has them.
2. ``NodeOptimizer.step``, in the caller's thread, starts the buckets that are left, in the same order; parameters
   without a gradient send zeros.
3. :meth:`BucketExchange.finish` waits until all buckets are verified. Then all of them write their outputs, which may
   be the parameters themselves, and commit their momentum; or, if one failed or is to be skipped on any rank, all of
   them are rolled back to the momentum before the step.

Without overlap, step 1 is left out. Hooks and local steps use :class:`BucketExchange` as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from flexcomm import (
    AlgorithmOption,
    Average,
    Compressor,
    ConfigMismatchError,
    Epilogue,
    FlexcommError,
    InvalidArgumentError,
    NonFinitePolicy,
    Residuals,
    SyncError,
    SyncHandle,
    SyncPlan,
    TensorShard,
    TensorSpec,
    TransportError,
    World,
    choose_algorithms,
    fill_buckets,
    plan_sync,
    shards_held,
    start_planned,
)
from flexdemo.parameters import Group, is_sharded, local, names_of
from flexdemo.torch_private import version_of


@dataclass(frozen=True)
class CompressionSettings:
    """Compress ``decay * residual + gain * gradient``, and take ``alpha`` of what was sent out of the residual."""

    compressor: Compressor
    decay: float = 1.0
    gain: float = 1.0
    alpha: float = 1.0


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose gradients travel together: of parameter group number ``group``, one dtype and one device.

    ``node_averaged`` says whether gradients are averaged inside the node before the optimizer sees them.
    """

    group: int
    node_averaged: bool
    params: tuple[Parameter, ...]
    names: tuple[str, ...]


Averages = dict[Bucket, list[Tensor]]
"""The averages of each bucket's tensors, equal on all nodes; the next exchange overwrites them."""


def bucket_parameters(groups: list[Group], bucket_bytes: int, wanted: Callable[[Parameter], bool]) -> list[Bucket]:
    """Put all wanted parameters into buckets of up to so many bytes, the last parameters first.

    That is the order in which a backward pass makes gradients ready. Buckets follow from the parameters alone, not from
    whether they are sent early: results must not depend on it.
    """
    alike: dict[tuple[int, bool, torch.device], list[tuple[Parameter, str]]] = {}
    for number, (group, names) in reversed(list(enumerate(zip(groups, names_of(groups), strict=True)))):
        told: bool | None = group.get("node_averaged")
        for param, name in zip(reversed(group["params"]), reversed(names), strict=True):
            if wanted(param):
                averaged = is_sharded(param) if told is None else told
                alike.setdefault((number, averaged, param.device), []).append((param, name))
    return [
        Bucket(number, averaged, *zip(*(named[member] for member in members), strict=True))
        for (number, averaged, _), named in alike.items()
        for members in fill_buckets([spec_of(local(param), name) for param, name in named], bucket_bytes)
    ]


def spec_of(tensor: Tensor, name: str) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def check_same_buckets(buckets: Iterable[Bucket], world: World) -> None:
    """Raise on all ranks unless all of them train the same parameters, in the same order.

    Also if they agreed before: a rank that has other buckets now would wait in another collective than the rest.
    """
    names = repr([(bucket.group, bucket.node_averaged, bucket.names) for bucket in buckets])
    digest = hashlib.blake2b(names.encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    digests = world.control.all_gather(mine).wait().view(-1).tolist()
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise ConfigMismatchError(
            f"ranks {odd} train other parameters than rank 0: freeze, unfreeze and add the same ones on all ranks. "
            f"This rank has {names}."
        )


class ReadyBuckets:
    """Calls ``launch`` with every bucket, in their order, each as soon as its gradients are ready.

    All ranks must start collectives in one order, but gradients become ready in any order, and some never. So a bucket
    waits for those before it, and :meth:`take_rest` returns what backward did not launch.
    """

    def __init__(self, launch: Callable[..., None]) -> None:
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
        known, self._buckets = self._buckets, list(buckets)
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
        if self._buckets[: len(known)] == known:
            # Buckets were added, perhaps in the middle of an iteration: what was launched stays launched.
            self._missing += [len(bucket.params) for bucket in self._buckets[len(known) :]]
        else:
            self.reset()

    def reset(self) -> None:
        """Begin to count anew, for the next step."""
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._missing = [len(bucket.params) for bucket in self._buckets]
        self._launched = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing: gradients are still being accumulated."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def has_launched(self) -> bool:
        """Whether some buckets of this step are launched, and others may not be."""
        return self._launched > 0

    def take_rest(self) -> list[Bucket]:
        """Return the buckets that are left to launch, in order, whether or not their gradients are there."""
        rest, self._launched = self._buckets[self._launched :], len(self._buckets)
        return rest

    def check_unchanged(self) -> None:
        """Raise if a gradient was changed after its bucket was launched."""
        for param, version in self._versions.items():
            if self._bucket_of[param] >= self._launched:
                continue
            if param.grad is None or _version_of(param.grad) != version:
                raise InvalidArgumentError(
                    "a gradient was changed after its exchange had begun. With overlap=True, or 'backward', gradients "
                    "leave during backward(): use overlap=False, or 'step', to clip or unscale them, and no_sync() to "
                    "accumulate them."
                )

    def _count(self, param: Tensor) -> None:
        """Count a gradient that backward has made, and launch what is ready now; autograd calls this, in its thread."""
        if self._paused or param.grad is None:
            return
        if param in self._versions:
            raise InvalidArgumentError(
                "backward() ran twice before step(), and gradients are on their way since the first. Accumulate in "
                "`with optimizer.no_sync():` and leave it for the last backward(), or use overlap=False, or 'step'."
            )
        self._versions[param] = _version_of(param.grad)
        self._missing[self._bucket_of[param]] -= 1
        while self._launched < len(self._buckets) and self._missing[self._launched] == 0:
            self._launched += 1
            self._launch(self._buckets[self._launched - 1])


def _version_of(gradient: Tensor) -> tuple[int, int]:
    """Return where a gradient lies, and how often it was changed there."""
    return local(gradient).data_ptr(), version_of(local(gradient))


def _store(bucket: Bucket) -> Epilogue:
    del bucket
    return Epilogue()


class BucketExchange:
    """Buckets under way between nodes, and the residuals of what was not sent of them.

    ``residuals[group]`` are kept by the number of the parameter group; none at all without ``has_residuals``. In an
    optimizer they are the momentum.
    """

    def __init__(
        self,
        world: World,
        *,
        average: Average,
        nonfinite: NonFinitePolicy,
        has_residuals: bool,
        in_background: bool,
        exact_rollback: bool = False,
    ) -> None:
        self.world = world
        self._exact_rollback = exact_rollback
        self.buckets: list[Bucket] = []
        self.residuals: dict[int, Residuals] = {}
        self._nonfinite, self._has_residuals = nonfinite, has_residuals
        self._average, self._in_background = average, in_background
        self._outputs: dict[Bucket, list[Tensor]] = {}
        self._plans: dict[tuple[Bucket, Compressor, AlgorithmOption, NonFinitePolicy], SyncPlan] = {}
        self._algorithms: dict[Hashable, AlgorithmOption] = {}
        self._started: list[_Started] = []
        self._failures: list[FlexcommError] = []
        self._has_shards = False

    def residuals_of(self, bucket: Bucket) -> Residuals | None:
        if not self._has_residuals:
            return None
        return self.residuals.setdefault(bucket.group, Residuals(exact_rollback=self._exact_rollback))

    def shards_of(self, bucket: Bucket, tensors: list[Tensor], compressor: Compressor) -> list[TensorShard | None]:
        """Return, for each tensor, the shard whose residual this rank keeps; None if it keeps none."""
        return shards_held(self._plan_for(bucket, tensors, compressor, "auto", self._nonfinite))

    def start(
        self,
        bucket: Bucket,
        tensors: list[Tensor],
        settings: CompressionSettings,
        step: int,
        *,
        algorithm: AlgorithmOption | None = None,
        nonfinite: NonFinitePolicy | None = None,
        out: list[Tensor] | None = None,
    ) -> None:
        """Start the exchange of a bucket's tensors.

        ``algorithm`` is one for all ``buckets`` like this one, if not given; ``nonfinite`` that of the exchange;
        ``out`` memory of the exchange.
        """
        residuals = self.residuals_of(bucket)
        if residuals is not None:
            residuals.decay, residuals.gain, residuals.alpha = settings.decay, settings.gain, settings.alpha
        if out is None:
            if bucket not in self._outputs:
                self._outputs[bucket] = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
            out = self._outputs[bucket]
        self._has_shards |= bucket.node_averaged
        algorithm = algorithm or self._algorithm_of(bucket, settings.compressor)
        plan = self._plan_for(bucket, tensors, settings.compressor, algorithm, nonfinite or self._nonfinite)
        try:
            handle = start_planned(plan, tensors, world=self.world, residuals=residuals, step=step, out=out)
        except TransportError:
            self.cancel()
            raise
        except FlexcommError as failure:
            # Kept until the end: the other ranks of this node wait there, and learn of it.
            self._failures.append(failure)
        else:
            self._started.append((bucket, handle))

    def finish(self, epilogue_of: Callable[[Bucket], Epilogue] = _store) -> Averages | None:
        """Wait for all buckets, do with their averages what their epilogues say, and return the outputs.

        Outputs are written and momentum is committed for all buckets, or for none if this raises, or if all ranks skip
        them and this returns None.
        """
        started, failures = self._started, self._failures
        self._started, self._failures = [], []
        try:
            for _, handle in started:
                try:
                    handle.verify()
                except TransportError:
                    raise
                except FlexcommError as failure:
                    failures.append(failure)
            skipped = any(handle.skipped for _, handle in started)
            failed_ranks, skipped = self._share_outcome(failed=bool(failures), skipped=skipped)
        except BaseException:
            _roll_back(started)
            raise
        if failed_ranks or skipped:
            _roll_back(started)
        if failures:
            raise failures[0]
        if failed_ranks:
            raise SyncError(
                f"{failed_ranks} other ranks of this node could not exchange their shards, and nothing was changed; "
                f"their own errors say why. Skip this step."
            )
        if skipped:
            return None
        try:
            for bucket, handle in started:
                handle.write(epilogue_of(bucket))
        finally:
            # Does nothing where all is written, and after an interrupt to what is not.
            _roll_back(started)
        return {bucket: handle.result for bucket, handle in started}

    def cancel(self) -> None:
        """Wait for what is under way, and roll it back."""
        started, self._started, self._failures = self._started, [], []
        for _, handle in started:
            with suppress(FlexcommError):
                handle.verify()
        _roll_back(started)

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Exchange these buckets from now on, and free the memory of those before."""
        self.buckets = buckets
        self._outputs.clear()
        self._plans.clear()
        self._algorithms.clear()

    def _algorithm_of(self, bucket: Bucket, compressor: Compressor) -> AlgorithmOption:
        """Return one algorithm for all buckets of this one's parameter group, dtype and device.

        For all of them, because the size of buckets must not change what is sent.
        """
        key = compressor, *_alike(bucket)
        if key not in self._algorithms:
            alike = [other for other in self.buckets if _alike(other) == _alike(bucket)]
            specs = [spec_of(local(x), name) for one in alike for x, name in zip(one.params, one.names, strict=True)]
            (chosen,) = choose_algorithms(specs, compressor, self.world.inter.size).values()
            self._algorithms[key] = chosen.algorithm
        return self._algorithms[key]

    def _plan_for(
        self,
        bucket: Bucket,
        tensors: list[Tensor],
        compressor: Compressor,
        algorithm: AlgorithmOption,
        nonfinite: NonFinitePolicy,
    ) -> SyncPlan:
        """Return the plan of one bucket, which is never cut again."""
        key = bucket, compressor, algorithm, nonfinite
        if key not in self._plans:
            self._plans[key] = plan_sync(
                tensors,
                compressor,
                world=self.world,
                all_ranks=not bucket.node_averaged,
                in_background=self._in_background,
                names=bucket.names,
                average=self._average,
                algorithm=algorithm,
                nonfinite=nonfinite,
                bucket_bytes=None,
                has_residuals=self._has_residuals,
            )
        return self._plans[key]

    def _share_outcome(self, *, failed: bool, skipped: bool) -> tuple[int, bool]:
        """Return how many ranks of this node failed, and whether any skips.

        Ranks of one local rank exchange shards, so the others of the node do not know; of whole tensors, all know.
        """
        intra = self.world.intra
        if intra.size == 1 or not self._has_shards:
            return int(failed), skipped
        outcome = torch.tensor([failed, skipped], dtype=torch.int32, device=self.world.device)
        failures, skips = intra.all_reduce(outcome).wait().tolist()
        return failures, bool(skips)


_Started = tuple[Bucket, SyncHandle[list[Tensor]]]


def _roll_back(started: list[_Started]) -> None:
    for _, handle in started:
        handle.rollback()


def _alike(bucket: Bucket) -> tuple[Hashable, ...]:
    first = bucket.params[0]
    return bucket.group, bucket.node_averaged, first.dtype, first.device
