"""Parameters: the settings of their groups, their names, local tensors and gradients, and checks of all that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flexcomm import InvalidArgumentError, InvalidTensorError, Topology, TopologyError, World

Group = dict[str, Any]
"""One of torch's ``param_groups``: torch itself types their values as Any."""

Rule = tuple[Callable[[Any], bool], str]
"""A test of a setting, and what the error says that it must be."""

AT_LEAST_0: Rule = (lambda value: value >= 0, "at least 0")
FROM_0_TO_1: Rule = (lambda value: 0 <= value <= 1, "from 0 to 1")
ABOVE_0_TO_1: Rule = (lambda value: 0 < value <= 1, "above 0, at most 1")
COUNT: Rule = (lambda value: isinstance(value, int) and value >= 1, "a whole number, at least 1")

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def one_of(choices: tuple[str, ...]) -> Rule:
    return choices.__contains__, f"one of {', '.join(choices)}"


def check_settings(settings: Group, rules: dict[str, Rule]) -> None:
    wrong = [
        f"{name} is {settings[name]!r}, but must be {needed}"
        for name, (allows, needed) in rules.items()
        if name in settings and not allows(settings[name])
    ]
    if wrong:
        raise InvalidArgumentError(f"{'; '.join(wrong)}.")


def names_of(groups: list[Group]) -> list[list[str]]:
    """Return the names of each group's parameters: the user's, or numbers that count through all groups, as torch's."""
    numbers = map(str, count())
    numbered = [list(islice(numbers, len(group["params"]))) for group in groups]
    return [list(group.get("param_names", names)) for group, names in zip(groups, numbered, strict=True)]


def is_sharded(param: Tensor) -> bool:
    """Return whether FSDP shards it, and so averages its gradient inside the node before an optimizer sees it."""
    return isinstance(param, DTensor | FlatParameter)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the same memory, outside of autograd."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach() if own.requires_grad else own


def move_steps_to_host_(optimizer: Optimizer) -> None:
    """Move counts of steps to the host, where optimizers read them, parameter by parameter, in every step.

    Called after a state was loaded: torch leaves counts where they were in it, and to read one from a device is to wait
    for that device. Of ``capturable`` and ``fused`` optimizers they belong on the device.
    """
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for state in (optimizer.state[param] for param in group["params"] if param in optimizer.state):
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()


def gradient_of(param: Tensor) -> Tensor:
    """Return this rank's gradient; zeros if there is none, because other ranks may have one."""
    if param.grad is None:
        return torch.zeros_like(local(param), memory_format=torch.contiguous_format)
    if param.grad.layout is not torch.strided:
        raise InvalidTensorError(
            f"a gradient of {list(param.shape)} is {param.grad.layout}: make it dense, as by Embedding(sparse=False)."
        )
    return local(param.grad)


def wrapped_like(tensor: Tensor, param: Tensor) -> Tensor:
    """Return a local tensor in the form of a gradient of ``param``: a DTensor, if ``param`` is one."""
    if not isinstance(param, DTensor):
        return tensor
    return DTensor.from_local(
        tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def check_parameter(param: Tensor, name: str, topology: Topology) -> None:
    """Raise unless a parameter can be exchanged between nodes."""
    if param.dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"{name} is {param.dtype}, but only {', '.join(map(str, _DTYPES))} can be exchanged: leave it out."
        )
    if isinstance(param, DTensor):
        check_sharded_ranks(param.device_mesh.mesh.flatten().tolist(), name, topology)
        if any(placement.is_partial() for placement in param.placements):
            raise InvalidArgumentError(f"{name} holds partial sums ({param.placements}): redistribute it first.")


def check_sharded_ranks(ranks: list[int], name: str, topology: Topology) -> None:
    node = topology.members[topology.node]
    if sorted(ranks) != sorted(node):
        raise TopologyError(
            f"{name} is spread over ranks {sorted(ranks)}, but this node has {list(node)}. Shard over all of these and "
            f"no others: by fully_shard(model, mesh=mesh['shard']) with a mesh axis whose ranks share a node, or by "
            f"FSDP1 with the process_group of the node's ranks."
        )


def broadcast_parameters_(tensors: Iterable[Tensor], world: World, *, are_shards: bool | None = None) -> None:
    """Copy every shard from the same local rank of node 0, and every other tensor from its first rank."""
    for tensor in tensors:
        here, is_shard = local(tensor), is_sharded(tensor) if are_shards is None else are_shards
        if world.inter.size > 1:
            world.inter.broadcast(here).wait()
        if world.intra.size > 1 and not is_shard:
            world.intra.broadcast(here).wait()
