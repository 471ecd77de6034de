"""A device mesh that only says where ranks are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh

from flexcomm.torch_versions import missing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["mesh_without_groups"]


def mesh_without_groups(device_type: str, ranks: Sequence[Sequence[int]], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of ``ranks`` with axes ``names``, without the process groups that all ranks would have to make."""
    try:
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
    except TypeError as error:
        raise missing("DeviceMesh(_init_backend=...)") from error
