"""Buckets of parameters that are mixed together: the mix under way, the norm of gradients, and what is saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from flexcomm import Compressor, InvalidArgumentError, MixHandle, MixResiduals, MixResult, PushSum, World, start_mix
from flexcomm.gossip import ScheduleLike, complete, plan_mix, round_of
from flexdemo.checkpoint import NodeAxis, OtherNodes, longest_on_node, required
from flexdemo.gradients import Bucket
from flexdemo.parameters import local
from flexdemo.torch_private import version_of

HERE, OWNER, PUSH_WEIGHT = "here", "owner", "push_weight"
"""The keys of a parameter's value on this replica, of the replica's owner, and of its push-sum weight."""


class MixBucket(Bucket):
    """A bucket of an optimizer, and its mix under way.

    Whole, contiguous parameters are moved into one flat tensor and sent from there, without a copy: a parameter does
    not change while it is mixed. Others, such as FSDP's shards, are copied when a mix starts.
    """

    def __init__(
        self,
        bucket: Bucket,
        world: World,
        schedule: ScheduleLike,
        gamma: float | None,
        compressor: Compressor | None,
        communicator: str,
    ) -> None:
        super().__init__(bucket.group, bucket.node_averaged, bucket.device, bucket.params, bucket.specs)
        self.squared_distance: Tensor | None = None
        """The squared distance by which the last mix moved this rank's parameters."""
        self.tensors = [local(param) for param in self.params]
        """The tensors that are mixed: all elements of this rank's parameters."""
        if not self.node_averaged and len(self.params) > 1 and all(tensor.is_contiguous() for tensor in self.tensors):
            flat = torch.cat([tensor.view(-1) for tensor in self.tensors])
            parts = torch.split(flat, [param.numel() for param in self.params])
            for param, part in zip(self.params, parts, strict=True):
                param.data = part.view(param.shape)
            self.tensors = [flat]
        self._addresses = [local(param).data_ptr() for param in self.params]
        self._versions: list[int] = []
        self._topology, self._round = world.topology, round_of(schedule.phase(0), world.topology.node)
        self.push_sum = None if schedule.is_doubly_stochastic else PushSum()
        self.residuals = None if compressor is None else MixResiduals()
        self.reset_mix_state()
        saved = [*map(local, self.params), *self.mix_state().values()]
        self.lengths = longest_on_node(map(Tensor.numel, saved), world)
        """The elements of each parameter, and of the mixing state, on the rank of this node that has most."""
        self._handle: MixHandle[list[Tensor]] | None = None
        start = partial(start_mix, self.tensors, world=world, sharded=self.node_averaged, communicator=communicator)
        self._start_complete = partial(start, complete(world.topology.nodes))
        self._start_scheduled = partial(start, schedule, gamma=gamma, compressor=compressor, residuals=self.residuals)
        # Here all ranks come in one order; in a backward pass they may not.
        plan_mix(
            self.tensors,
            schedule,
            world=world,
            sharded=self.node_averaged,
            gamma=gamma,
            has_push_sum=self.push_sum is not None,
            compressor=compressor,
            has_residuals=self.residuals is not None,
            communicator=communicator,
        )

    def mix_state(self) -> dict[str, Tensor]:
        """Return the residuals and the push-sum weight, if there are any; saved with the first of the parameters."""
        state = {} if self.residuals is None else self.residuals.state_dict()
        if self.push_sum is not None:
            state[PUSH_WEIGHT] = torch.tensor([self.push_sum.weight], dtype=torch.float64)
        return state

    def load_mix_state(self, state: dict[str, Tensor]) -> None:
        if self.push_sum is not None:
            self.push_sum.load_state_dict({"weight": float(state[PUSH_WEIGHT])})
        if self.residuals is not None:
            self.residuals.load_state_dict(state)

    def reset_mix_state(self) -> None:
        """Start from the current parameters, which must be equal on all replicas."""
        if self.push_sum is not None:
            self.push_sum.weight = 1.0
        if self.residuals is None:
            return
        flat, ranks = torch.cat([x.reshape(-1) for x in self.tensors]), self._topology.local_size
        if not self.node_averaged and ranks > 1:
            # The ranks of a node share the work: each mixes one shard, the last of which may be padded.
            numel = -(-flat.numel() // ranks)
            flat = torch.nn.functional.pad(flat, (0, numel * ranks - flat.numel()))
            flat = flat[self._topology.local_rank * numel :][:numel]
        self.residuals.begin(flat, self._round.weight_sum)

    def start(self, step: int, *, with_all: bool) -> None:
        """Start to mix the current parameters, by the schedule or ``with_all`` nodes; nothing if a mix is under way."""
        if self._handle is not None:
            return
        if [local(param).data_ptr() for param in self.params] != self._addresses:
            raise InvalidArgumentError(
                f"parameters such as {self.names[0]} were moved or replaced after this optimizer was made: move the "
                f"model first, then make the optimizer."
            )
        self.accept_changes()
        start = self._start_complete if with_all else self._start_scheduled
        self._handle = start(step, push_sum=self.push_sum, out=self.tensors)

    def finish(self) -> None:
        """Write the result of the mix under way, if there is one, into the parameters."""
        if self._handle is None:
            return
        versions = zip(self.names, self.params, self._versions, strict=True)
        changed = [name for name, param, version in versions if version_of(param) != version]
        if changed:
            raise InvalidArgumentError(
                f"{', '.join(changed[:4])} changed while being mixed: peers received other values than this rank has. "
                f"Call optimizer.restart() on all ranks before you change parameters, or use order='step-then-mix'."
            )
        handle, self._handle = self._handle, None
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
        return self._start_complete(0, push_sum=push_sum).wait()

    def accept_changes(self) -> None:
        """Treat the parameters as unchanged since their mix started: a change was reverted."""
        self._versions = [version_of(param) for param in self.params]

    def save_(self, states: dict[Any, dict[str, Any]], keys: dict[Parameter, Any], axis: NodeAxis) -> None:
        """Add parameters, residuals and push-sum weight to states of torch's state dict, all with a node axis."""
        lengths = iter(self.lengths)
        for param, length in zip(self.params, lengths, strict=False):
            here = {HERE: axis.stacked(local(param), length), OWNER: axis.owner()}
            states[keys[param]] = axis.stacked_state(states.get(keys[param], {}), length) | here
        for (name, state), length in zip(self.mix_state().items(), lengths, strict=True):
            states[keys[self.params[0]]][name] = axis.stacked(state, length)

    def load(
        self, states: dict[Any, dict[str, Any]], keys: dict[Parameter, Any], axis: NodeAxis, other_nodes: OtherNodes
    ) -> list[Callable[[], object]]:
        """Take what :meth:`save_` added out of the states; return functions that load it, once nothing can fail."""
        mix_state, first = self.mix_state(), states[keys[self.params[0]]]
        saved_mix = {name: required(first, name) for name in mix_state} if first else {}
        commits: list[Callable[[], object]] = []
        for param in self.params:
            saved = states[keys[param]]
            if not saved:
                continue
            axis.check_owner(required(saved, OWNER))
            here, value = local(param), required(saved, HERE)
            # Reset, new replicas start from the parameters that the model has.
            if other_nodes != "reset" or axis.is_own(value):
                commits.append(partial(here.copy_, axis.taken(value, here.shape, HERE, other_nodes)))
            axis.take_state_(saved, param, other_nodes)
        if not all(map(axis.is_own, saved_mix.values())):
            # Of another number of nodes: then all replicas start from equal parameters.
            commits.append(self.reset_mix_state)
        elif saved_mix:
            own = {name: axis.taken(value, mix_state[name].shape, name, "error") for name, value in saved_mix.items()}
            commits.append(partial(self.load_mix_state, own))
        return commits


def squared_norm(buckets: Collection[Bucket], world: World) -> Tensor:
    """Return the squared norm of the replica's gradient; if a bucket is sharded, ranks of a node call it together."""
    devices = {bucket.device for bucket in buckets}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    unsharded, shards = torch.zeros(2, 1, dtype=torch.float64, device=device)
    for bucket in buckets:
        gradients = gradients_of(bucket)
        if gradients:
            norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(gradients, 2.0, torch.float64)])
            (shards if bucket.node_averaged else unsharded).add_(norms.square().sum())
    if world.intra.size > 1 and any(bucket.node_averaged for bucket in buckets):
        shards = (world.intra_control if shards.is_cpu else world.intra).all_reduce(shards).wait()
    total: Tensor = unsharded + shards
    return total.squeeze(0)


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

    Ranks may step optimizers in any order, so each needs its own. It has process groups and a thread: one whose owner
    is gone on all ranks is used again.
    """
    owners = _owners.setdefault(world, [])
    taken = torch.tensor([one() is not None for one in owners] + [False], dtype=torch.uint8)
    number = world.control.all_gather(taken).wait().amax(dim=0).tolist().index(0)
    owners[number : number + 1] = [ref(owner)]
    return f"optimizer {number}"
