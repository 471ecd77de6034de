"""Buckets of parameters that are mixed together: the mix of each that is under way, and the norm of its gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from flexcomm import Compressor, InvalidArgumentError, MixHandle, MixResiduals, MixResult, PushSum, World, start_mix
from flexcomm.gossip import ScheduleLike, complete, plan_mix, round_of
from flexdemo.gradients import Bucket
from flexdemo.parameters import local
from flexdemo.torch_private import version_of


@dataclass(frozen=True)
class MixRule:
    """The schedule, the share ``gamma`` of the way to ``W x``, and the compressor of a mix, if it has one."""

    schedule: ScheduleLike
    gamma: float | None = None
    compressor: Compressor | None = None


class MixBucket:
    """The parameters of one bucket of an optimizer, and their mix under way.

    Whole, contiguous parameters are moved into one flat tensor and sent from there, without a copy: a parameter does
    not change while it is mixed. Others, such as FSDP's shards, are copied when a mix starts.
    """

    def __init__(self, bucket: Bucket, world: World, settings: MixRule, communicator: str) -> None:
        self.params, self.names, self.sharded = list(bucket.params), list(bucket.names), bucket.node_averaged
        self.squared_distance: Tensor | None = None
        """The squared distance by which the last mix moved this rank's parameters."""
        self._world, self._settings = world, settings
        self.tensors = [local(param) for param in self.params]
        """The tensors that are mixed: all elements of this rank's parameters."""
        if not self.sharded and len(self.params) > 1 and all(tensor.is_contiguous() for tensor in self.tensors):
            self.tensors = [_flatten_(self.params)]
        self._addresses = [local(param).data_ptr() for param in self.params]
        self.residuals = None if settings.compressor is None else MixResiduals()
        self.reset_residuals()
        self.push_sum = None if settings.schedule.is_doubly_stochastic else PushSum()
        self._handle: MixHandle[list[Tensor]] | None = None
        self._versions: list[int] = []
        self._start_mix = partial(start_mix, self.tensors, world=world, sharded=self.sharded, communicator=communicator)
        # Here all ranks come in one order; in a backward pass they may not.
        plan_mix(
            self.tensors,
            settings.schedule,
            world=world,
            sharded=self.sharded,
            gamma=settings.gamma,
            has_push_sum=self.push_sum is not None,
            compressor=settings.compressor,
            has_residuals=self.residuals is not None,
            communicator=communicator,
        )

    def reset_residuals(self) -> None:
        """Start the residuals, if there are any, from the current parameters, which must be equal on all replicas."""
        if self.residuals is None:
            return
        topology = self._world.topology
        flat = torch.cat([x.reshape(-1) for x in self.tensors])
        if not self.sharded and topology.local_size > 1:
            # The ranks of a node share the work: each mixes one shard, the last of which may be padded.
            numel = -(-flat.numel() // topology.local_size)
            flat = torch.nn.functional.pad(flat, (0, numel * topology.local_size - flat.numel()))
            flat = flat[topology.local_rank * numel :][:numel]
        self.residuals.begin(flat, round_of(self._settings.schedule.phase(0), topology.node).weight_sum)

    @property
    def is_under_way(self) -> bool:
        return self._handle is not None

    def start(self, step: int, settings: MixRule) -> None:
        """Start to mix the current parameters."""
        self._check_addresses()
        self._versions = [version_of(param) for param in self.params]
        self._handle = self._start_mix(
            settings.schedule,
            step,
            gamma=settings.gamma,
            push_sum=self.push_sum,
            compressor=settings.compressor,
            residuals=None if settings.compressor is None else self.residuals,
            out=self.tensors,
        )

    def finish(self) -> None:
        """Write the result of the mix under way, if there is one, into the parameters."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._check_unchanged()
        self.squared_distance = handle.wait().squared_distance

    def wait_received(self) -> None:
        """Wait until the mix under way no longer reads the parameters; :meth:`finish` writes its result later."""
        if self._handle is not None:
            self._handle.wait_received()

    def cancel(self) -> None:
        """Wait for the messages of the mix under way and ignore them."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel()

    def mean(self) -> MixResult[list[Tensor]]:
        """Return the mean over all nodes and ranks, and this rank's squared distance from it. All ranks call it."""
        # A copy: the mean is read, and the weight of later rounds must not change.
        push_sum = None if self.push_sum is None else PushSum(self.push_sum.weight)
        return self._start_mix(complete(self._world.topology.nodes), 0, push_sum=push_sum).wait()

    def write(self, values: list[Tensor]) -> None:
        """Copy values into the parameters."""
        torch._foreach_copy_(self.tensors, values)
        self.accept_changes()

    def accept_changes(self) -> None:
        """Treat the parameters as unchanged since their mix started: a change was reverted before it was read."""
        self._versions = [version_of(param) for param in self.params]

    def _check_addresses(self) -> None:
        if [local(param).data_ptr() for param in self.params] != self._addresses:
            raise InvalidArgumentError(
                f"parameters such as {self.names[0]} were moved or replaced after this optimizer was made: move the "
                f"model first, then make the optimizer."
            )

    def _check_unchanged(self) -> None:
        changed = [
            name
            for name, param, version in zip(self.names, self.params, self._versions, strict=True)
            if version_of(param) != version
        ]
        if changed:
            raise InvalidArgumentError(
                f"{', '.join(changed[:4])} changed while being mixed: peers received other values than this rank has. "
                f"Call optimizer.restart() on all ranks before you change parameters, or use order='step-then-mix', "
                f"with which nothing is under way between steps."
            )


def _flatten_(params: list[Parameter]) -> Tensor:
    """Move the parameters into one flat tensor, of which they are views from then on, and return it."""
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    parts = torch.split(flat, [param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        param.data = part.view(param.shape)
    return flat


def squared_norm(buckets: Iterable[Bucket], world: World) -> Tensor:
    """Return the squared norm of the replica's gradient: this rank's, plus the shards of all ranks of its node.

    If a bucket is sharded, the ranks of a node call it together.
    """
    whole, shards = torch.zeros(2, dtype=torch.float64, device=world.device)
    has_shards = False
    for bucket in buckets:
        gradients = gradients_of(bucket)
        has_shards |= bucket.node_averaged
        if gradients:
            norms = torch.stack([norm.to(world.device) for norm in torch._foreach_norm(gradients, 2.0, torch.float64)])
            squared = norms.square().sum()
            whole, shards = (whole, shards + squared) if bucket.node_averaged else (whole + squared, shards)
    if has_shards and world.intra.size > 1:
        shards = world.intra.all_reduce(shards.reshape(1)).wait().squeeze(0)
    total: Tensor = whole + shards
    return total


def clip_(buckets: Collection[Bucket], world: World, max_norm: float) -> None:
    """Scale all gradients by one factor, so that the norm of all together is at most ``max_norm``."""
    scale = (max_norm / (squared_norm(buckets, world).sqrt() + 1e-6)).clamp(max=1.0)
    for bucket in buckets:
        gradients = gradients_of(bucket)
        if gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def gradients_of(bucket: Bucket) -> list[Tensor]:
    """Return this rank's gradients of a bucket, of the parameters that have one."""
    return [local(param.grad) for param in bucket.params if param.grad is not None]


# Any: the owners are optimizers, of which only their lifetimes matter here.
_owners: WeakKeyDictionary[World, list[ref[Any]]] = WeakKeyDictionary()


def take_communicator(owner: object, world: World) -> str:
    """Return a communicator that no living optimizer of this world uses, on any rank. All ranks call it together.

    Ranks make optimizers in one order, but may step them in any, so each needs its own. A communicator has process
    groups and a thread: one whose owner is gone on all ranks is used again.
    """
    owners = _owners.setdefault(world, [])
    taken = torch.tensor([one() is not None for one in owners] + [False], dtype=torch.uint8)
    number = world.control.all_gather(taken).wait().amax(dim=0).tolist().index(0)
    if number == len(owners):
        owners.append(ref(owner))
    else:
        owners[number] = ref(owner)
    return f"optimizer {number}"
