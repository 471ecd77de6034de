"""Checkpoints in files: torch's distributed format, with all that training needs to go on bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from flexcomm import InvalidArgumentError
from flexdemo.checkpoint.node_axis import FromOtherNodes, OtherNodes, is_stacked

if TYPE_CHECKING:
    from flexdemo.hooks.handle import HookHandle

_RESIDUALS = "handle.residuals."


def save_checkpoint(
    path: str | PathLike[str], model: Module, optimizer: Optimizer, handle: HookHandle | None = None
) -> None:
    """Save a model, its optimizer and the residuals of its hook into a folder. All ranks call it together.

    Args:
        path: the folder.
        model: plain, or sharded by FSDP2.
        optimizer: one of ours, or torch's.
        handle: what ``attach_to_fsdp`` or ``attach_to_ddp`` returned, if gradients are exchanged by a hook.

    """
    _check_model(model)
    save(_state_of(model, optimizer, handle), checkpoint_id=path)


def load_checkpoint(
    path: str | PathLike[str],
    model: Module,
    optimizer: Optimizer,
    handle: HookHandle | None = None,
    *,
    other_nodes: OtherNodes = "error",
) -> None:
    """Go on from a folder, bit for bit where as many ranks saved it. All ranks call it together.

    Other numbers of ranks per node get their residuals cut anew, exact but for rounding.

    Args:
        path: the folder.
        model: as it was saved.
        optimizer: as it was saved.
        handle: as it was saved.
        other_nodes: what becomes of residuals that another number of nodes saved: an ``"error"``, the ``"mean"`` of
            all for every node, or ``"reset"`` to zero.

    """
    _check_model(model)
    state = _state_of(model, optimizer, handle)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    for holder, key, name in _node_tensors(state):
        found = saved.get(name)
        if isinstance(found, TensorStorageMetadata) and found.size != holder[key].shape:
            holder[key] = torch.empty(found.size, dtype=holder[key].dtype, device=holder[key].device)
    _check_residuals(saved, state)
    load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    if isinstance(optimizer, FromOtherNodes):
        with optimizer.from_other_nodes(other_nodes):
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if handle is not None:
        handle.load_state_dict(state["handle"], other_nodes)


def _check_model(model: Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise InvalidArgumentError(
            "torch cannot save what FSDP1 shards inside nodes in one checkpoint: let every rank torch.save its own "
            "model.state_dict(), optimizer.state_dict() and handle.state_dict(), or shard by FSDP2."
        )


def _state_of(model: Module, optimizer: Optimizer, handle: HookHandle | None) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    if handle is not None:
        state["handle"] = handle.state_dict()
    return state


def _check_residuals(saved: Mapping[str, object], state: Mapping[str, Any]) -> None:
    """Raise if residuals in the files would be left out: torch loads what it is asked for, and no more."""
    asked = state.get("handle", {"residuals": {}})["residuals"]
    left = [name for name in saved if name.startswith(_RESIDUALS) and name.removeprefix(_RESIDUALS) not in asked]
    if left:
        raise InvalidArgumentError(
            f"the files hold {len(left)} residuals that nothing here asks for, such as {left[0]}: pass the handle "
            f"of a model with the same parameter names. A CompressionState without names knows them after one "
            f"backward pass."
        )


def _node_tensors(state: Mapping[str, Any]) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """Return everything with a node axis: what holds it, its key there, and what files call it."""
    for param, kept in state["optimizer"]["state"].items():
        for key in [key for key, value in kept.items() if isinstance(value, Tensor) and is_stacked(value)]:
            yield kept, key, f"optimizer.state.{param}.{key}"
    attached = state.get("handle", {"residuals": {}})
    for param in attached["residuals"]:
        yield attached["residuals"], param, f"{_RESIDUALS}{param}"
    if "owner" in attached:
        yield attached, "owner", "handle.owner"
