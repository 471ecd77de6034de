"""What flexdemo reads of torch's private attributes is what torch does; a name that is gone is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Linear, Parameter

from flexcomm import TorchVersionError
from flexdemo import torch_private
from flexdemo.torch_private import has_post_accumulate_grad_hooks, param_groups_of, queue_callback, version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def unit_with(policy: MixedPrecisionPolicy) -> FSDPModule:
    return fully_shard(Linear(5, 3), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, None])
def test_gradients_are_reduced_in_the_dtype_that_was_read(
    computed: torch.dtype | None, reduced: torch.dtype | None
) -> None:
    unit = unit_with(MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced))
    (group,) = param_groups_of(unit)
    seen: list[Tensor] = []
    unit.set_all_reduce_hook(seen.append)
    unit(torch.ones(2, 5)).sum().backward()
    assert [flat.dtype for flat in seen] == [group.reduce_dtype]
    assert [flat.numel() for flat in seen] == [sum(group.params.values())]
    assert list(group.params) == list(unit.parameters())


@pytest.mark.usefixtures("_one_rank")
def test_what_was_set_on_a_unit_is_read() -> None:
    unit = unit_with(MixedPrecisionPolicy())
    (group,) = param_groups_of(unit)
    assert (group.has_all_reduce_hook, group.scales_gradients, group.reduces_unused) == (False, False, False)
    unit.set_all_reduce_hook(lambda _: None)
    unit.set_gradient_divide_factor(2.0)
    unit.set_reduce_scatter_unused_params(True)
    (group,) = param_groups_of(unit)
    assert (group.has_all_reduce_hook, group.scales_gradients, group.reduces_unused) == (True, True, True)


def fsdp2_unit_without(missing: str) -> Any:
    """Return a stand-in for an FSDPModule of a torch that has renamed one attribute."""

    def without(**attributes: object) -> SimpleNamespace:
        return SimpleNamespace(**{name: value for name, value in attributes.items() if name != missing})

    param = without(
        sharded_param=Parameter(torch.zeros(3)),
        padded_sharded_param_size=torch.Size([4]),
        mp_policy=MixedPrecisionPolicy(),
    )
    group = without(
        fsdp_params=[param],
        device=torch.device("cpu"),
        _all_reduce_hook=None,
        gradient_divide_factor=None,
        force_sum_reduction_for_comms=False,
        reduce_scatter_unused_params=False,
    )
    return without(_get_fsdp_state=lambda: without(_fsdp_param_groups=[group]))


def test_the_stand_in_is_read_if_nothing_is_missing() -> None:
    (group,) = param_groups_of(fsdp2_unit_without("nothing"))
    assert list(group.params.values()) == [4]


@pytest.mark.parametrize(
    "name",
    [
        "_get_fsdp_state",
        "_fsdp_param_groups",
        "fsdp_params",
        "device",
        "sharded_param",
        "padded_sharded_param_size",
        "mp_policy",
        "_all_reduce_hook",
        "gradient_divide_factor",
        "force_sum_reduction_for_comms",
        "reduce_scatter_unused_params",
    ],
)
def test_a_name_that_fsdp2_no_longer_has_is_an_error_with_the_version(name: str) -> None:
    with pytest.raises(TorchVersionError, match=rf"^torch {torch.__version__.split('+')[0]}.* has no \w+\.{name}, "):
        param_groups_of(fsdp2_unit_without(name))


@pytest.mark.parametrize("name", ["_handle", "_comm_hook_state", "_comm_hook"])
def test_a_name_that_fsdp1_no_longer_has_is_an_error(name: str) -> None:
    used: dict[str, Any] = {
        "_handle": torch_private.flat_param_of,
        "_comm_hook_state": lambda unit: torch_private.set_comm_hook_state(unit, None),
        "_comm_hook": torch_private.remove_comm_hook,
    }
    with pytest.raises(TorchVersionError, match=f"has no SimpleNamespace.{name}, "):
        used[name](SimpleNamespace())


def test_an_fsdp1_that_saves_gradients_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "FlatParameter", type("FlatParameter", (), {"__annotations__": {}}))
    with pytest.raises(TorchVersionError, match=r"has no FlatParameter\._saved_grad_shard"):
        torch_private.set_comm_hook_state(SimpleNamespace(_comm_hook_state=None), None)  # type: ignore[arg-type]


def test_a_mesh_that_always_makes_groups_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "DeviceMesh", lambda kind, ranks, *, mesh_dim_names: None)  # noqa: ARG005
    with pytest.raises(TorchVersionError, match="_init_backend"):
        torch_private.mesh_without_groups("cpu", [[0]], ("node", "local_rank"))


def test_a_callback_is_called_when_the_backward_pass_ends() -> None:
    happened: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: queue_callback(lambda: happened.append("end")))
    x.register_post_accumulate_grad_hook(lambda _: happened.append("gradient"))
    y.sum().backward()
    assert happened == ["gradient", "end"]


def test_a_version_counts_changes_in_place() -> None:
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) == before + 1


def test_post_accumulate_grad_hooks_are_seen() -> None:
    param = Parameter(torch.zeros(1))
    assert not has_post_accumulate_grad_hooks(param)
    hook = param.register_post_accumulate_grad_hook(lambda _: None)
    assert has_post_accumulate_grad_hooks(param)
    hook.remove()
    assert not has_post_accumulate_grad_hooks(param)
