"""Buckets of parameters that are mixed together: the mix of each that is under way, its gradient's norm, its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from flexcomm import Compressor, InvalidArgumentError, MixHandle, MixResiduals, MixResult, PushSum, World, start_mix
from flexcomm.gossip import ScheduleLike, complete, plan_mix, round_of
from flexdemo.checkpoint import NodeAxis, OtherNodes, check_sizes, longest_on_node, required
from flexdemo.gradients import Bucket
from flexdemo.parameters import Group, local
from flexdemo.torch_private import version_of

HERE, OWNER, PUSH_WEIGHT = "here", "owner", "push_weight"
"""The keys of a parameter's value on this replica, of the replica's owner, and of its push-sum weight."""
RESIDUALS = ("public", "public_sum")
"""The keys of a bucket's residuals, saved with the first of its parameters."""


class MixBucket:
    """The parameters of one bucket of an optimizer, and their mix under way.

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
        self.params, self.names, self.sharded = bucket.params, bucket.names, bucket.node_averaged
        self.squared_distance: Tensor | None = None
        """The squared distance by which the last mix moved this rank's parameters."""
        self.tensors = [local(param) for param in self.params]
        """The tensors that are mixed: all elements of this rank's parameters."""
        if not self.sharded and len(self.params) > 1 and all(tensor.is_contiguous() for tensor in self.tensors):
            self.tensors = [_flatten_(self.params)]
        self._addresses = [local(param).data_ptr() for param in self.params]
        self._topology, self._schedule, self._gamma, self._compressor = world.topology, schedule, gamma, compressor
        self._complete = complete(world.topology.nodes)
        self.push_sum = None if schedule.is_doubly_stochastic else PushSum()
        self.residuals = None if compressor is None else MixResiduals()
        self.reset_residuals()
        residual = 0 if self.residuals is None else self.residuals.state_dict()[RESIDUALS[0]].numel()
        *self.lengths, self.residual_length = longest_on_node(
            [*(local(param).numel() for param in self.params), residual], world
        )
        """The elements of each parameter, and of the residuals, on the rank of this node that has most."""
        self._handle: MixHandle[list[Tensor]] | None = None
        self._versions: list[int] = []
        self._start_mix = partial(start_mix, self.tensors, world=world, sharded=self.sharded, communicator=communicator)
        # Here all ranks come in one order; in a backward pass they may not.
        plan_mix(
            self.tensors,
            schedule,
            world=world,
            sharded=self.sharded,
            gamma=gamma,
            has_push_sum=self.push_sum is not None,
            compressor=compressor,
            has_residuals=self.residuals is not None,
            communicator=communicator,
        )

    def reset_residuals(self) -> None:
        """Start the residuals, if there are any, from the current parameters, which must be equal on all replicas."""
        if self.residuals is None:
            return
        flat, ranks = torch.cat([x.reshape(-1) for x in self.tensors]), self._topology.local_size
        if not self.sharded and ranks > 1:
            # The ranks of a node share the work: each mixes one shard, the last of which may be padded.
            numel = -(-flat.numel() // ranks)
            flat = torch.nn.functional.pad(flat, (0, numel * ranks - flat.numel()))
            flat = flat[self._topology.local_rank * numel :][:numel]
        self.residuals.begin(flat, round_of(self._schedule.phase(0), self._topology.node).weight_sum)

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
        self._handle = self._start_mix(
            self._complete if with_all else self._schedule,
            step,
            gamma=None if with_all else self._gamma,
            push_sum=self.push_sum,
            compressor=None if with_all else self._compressor,
            residuals=None if with_all else self.residuals,
            out=self.tensors,
        )

    def finish(self) -> None:
        """Write the result of the mix under way, if there is one, into the parameters."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        versions = zip(self.names, self.params, self._versions, strict=True)
        changed = [name for name, param, version in versions if version_of(param) != version]
        if changed:
            raise InvalidArgumentError(
                f"{', '.join(changed[:4])} changed while being mixed: peers received other values than this rank has. "
                f"Call optimizer.restart() on all ranks before you change parameters, or use order='step-then-mix', "
                f"with which nothing is under way between steps."
            )
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
        return self._start_mix(self._complete, 0, push_sum=push_sum).wait()

    def accept_changes(self) -> None:
        """Treat the parameters as unchanged since their mix started: a change was reverted before it was read."""
        self._versions = [version_of(param) for param in self.params]


def _flatten_(params: Sequence[Parameter]) -> Tensor:
    """Move the parameters into one flat tensor, of which they are views from then on, and return it."""
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    parts = torch.split(flat, [param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        param.data = part.view(param.shape)
    return flat


def squared_norm(buckets: Collection[Bucket], world: World) -> Tensor:
    """Return the squared norm of the replica's gradient: this rank's, plus the shards of all ranks of its node.

    If a bucket is sharded, the ranks of a node call it together.
    """
    unsharded, shards = torch.zeros(2, 1, dtype=torch.float64, device=world.device)
    for bucket in buckets:
        gradients = gradients_of(bucket)
        if gradients:
            norms = torch.stack([norm.to(world.device) for norm in torch._foreach_norm(gradients, 2.0, torch.float64)])
            (shards if bucket.node_averaged else unsharded).add_(norms.square().sum())
    if world.intra.size > 1 and any(bucket.node_averaged for bucket in buckets):
        shards = world.intra.all_reduce(shards).wait()
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

    Ranks make optimizers in one order, but may step them in any, so each needs its own. A communicator has process
    groups and a thread: one whose owner is gone on all ranks is used again.
    """
    owners = _owners.setdefault(world, [])
    taken = torch.tensor([one() is not None for one in owners] + [False], dtype=torch.uint8)
    number = world.control.all_gather(taken).wait().amax(dim=0).tolist().index(0)
    owners[number : number + 1] = [ref(owner)]
    return f"optimizer {number}"


def save_replica_(
    state_dict: dict[str, Any], groups: list[Group], buckets: Collection[MixBucket], axis: NodeAxis
) -> None:
    """Add parameters, residuals and push-sum weights to torch's state dict, with a node axis in every tensor."""
    states, numbers = state_dict["state"], _numbers_of(state_dict, groups)
    for bucket in buckets:
        for param, length in zip(bucket.params, bucket.lengths, strict=True):
            here = {HERE: axis.stacked(local(param), length), OWNER: axis.owner()}
            states[numbers[param]] = axis.stacked_state(states.get(numbers[param], {}), length) | here
        first = states[numbers[bucket.params[0]]]
        if bucket.residuals is not None:
            residuals = bucket.residuals.state_dict()
            first |= {key: axis.stacked(residuals[key], bucket.residual_length) for key in RESIDUALS}
        if bucket.push_sum is not None:
            first[PUSH_WEIGHT] = axis.stacked(torch.tensor([bucket.push_sum.weight], dtype=torch.float64), 1)


def load_replica_(
    state_dict: dict[str, Any],
    groups: list[Group],
    buckets: Collection[MixBucket],
    axis: NodeAxis,
    other_nodes: OtherNodes,
) -> dict[str, Any]:
    """Load what :func:`save_replica_` saved, and return the rest for torch to load. Nothing changes if this raises."""
    check_sizes(state_dict["param_groups"], groups)
    if not any(state_dict["state"].values()) and buckets:
        raise InvalidArgumentError("the state to be loaded holds no replica: it was saved by another optimizer.")
    numbers = _numbers_of(state_dict, groups)
    states = {number: dict(state_dict["state"].get(number, {})) for number in numbers.values()}
    commits: list[Callable[[], object]] = []
    for bucket in buckets:
        first = states[numbers[bucket.params[0]]]
        commits_of_bucket = _load_bucket(bucket, first, axis) if first else []
        for param in bucket.params:
            saved = states[numbers[param]]
            if not saved:
                continue
            axis.check_owner(required(saved, OWNER))
            here, value = local(param), required(saved, HERE)
            # Reset, new replicas start from the parameters that the model has.
            if other_nodes != "reset" or axis.is_own(value):
                commits.append(partial(here.copy_, axis.taken(value, here.shape, HERE, other_nodes)))
            axis.take_state_(saved, param, other_nodes)
        commits += commits_of_bucket
    with torch.no_grad():
        for commit in commits:
            commit()
    return {"state": states, "param_groups": state_dict["param_groups"]}


def _load_bucket(bucket: MixBucket, saved: dict[str, Any], axis: NodeAxis) -> list[Callable[[], object]]:
    """Return functions that load the residuals and the push-sum weight of a bucket, once nothing can fail any more.

    If they were saved by another number of nodes they are reset: then all replicas start from equal parameters.
    """
    commits: list[Callable[[], object]] = []
    if bucket.residuals is not None:
        states = {key: required(saved, key) for key in RESIDUALS}
        shape = bucket.residuals.state_dict()[RESIDUALS[0]].shape
        if all(axis.is_own(state) for state in states.values()):
            own = {key: axis.taken(state, shape, key, "error") for key, state in states.items()}
            commits.append(partial(bucket.residuals.load_state_dict, own))
        else:
            commits.append(bucket.reset_residuals)
    if bucket.push_sum is not None:
        pushed = required(saved, PUSH_WEIGHT)
        weight = float(axis.taken(pushed, (), PUSH_WEIGHT, "error")) if axis.is_own(pushed) else 1.0
        commits.append(partial(bucket.push_sum.load_state_dict, {"weight": weight}))
    return commits


def _numbers_of(state_dict: dict[str, Any], groups: list[Group]) -> dict[Parameter, Any]:
    """Return the keys of parameters in a state dict of torch."""
    pairs = zip(state_dict["param_groups"], groups, strict=True)
    return {param: key for packed, group in pairs for param, key in zip(group["params"], packed["params"], strict=True)}
