"""A machine has GPUs, and trains on its CPU: laws are kept by tensors of the host in a world whose device is another.

There may be fewer GPUs than ranks, so nothing at all may be put on them that the model has not put there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from tests.ranks import checkpoint_laws, decentralized_laws, hook_laws, mixing_laws
from tests.ranks.laws import keep
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World

LAWS: dict[str, Callable[[World], object]] = {
    "replicas_follow_an_fsdp2_hook": hook_laws.replicas_follow_an_fsdp2_hook,
    "a_nan_leaves_residuals_alone": hook_laws.a_nan_leaves_residuals_alone,
    "communicators_need_no_common_order": mixing_laws.communicators_need_no_common_order,
    "clipping_sees_the_whole_gradient": decentralized_laws.clipping_sees_the_whole_gradient,
    **{
        name: partial(checkpoint_laws.files_go_on, name=name.removeprefix("files_go_on, "))
        for name in ("files_go_on, FlexDeMo, replicas", "files_go_on, local steps, FSDP2", "files_go_on, hook, FSDP2")
    },
    **{
        name: decentralized_laws.TORCH_LAWS[name]
        for name in ("sharded_models_are_replicas_of_nodes", "a checkpoint goes on, compressed")
    },
}


def elsewhere(law: Callable[[World], object], world: World) -> None:
    mesh_of = hook_laws.mesh_of
    with pytest.MonkeyPatch.context() as patch:
        # FSDP puts what it shards on the type of device of its mesh.
        patch.setattr(hook_laws, "mesh_of", lambda _: mesh_of(world))
        # A device that this machine need not have: whatever was put there would raise.
        law(replace(world, device=torch.device("cuda", 17)))


@pytest.mark.parametrize("law", LAWS)
def test_a_model_on_the_host_needs_no_device(law: str) -> None:
    keep(partial(elsewhere, LAWS[law]), Shape(2, 2), limit_s=60)
