"""The laws of FSDP and DDP: hooks and optimizers on sharded models. Over torch's groups, in worlds of every shape."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn import GELU, LayerNorm, Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import flexcomm
from flexcomm import InvalidArgumentError, NonFiniteError, TopologyError, World
from flexdemo import FlexDeMo, FlexDeMoAdamW, attach_to_ddp, attach_to_fsdp
from flexdemo.parameters import local
from tests.ranks.sync_laws import require_same_everywhere

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HIDDEN = 40, 75
"""Not multiples of anything: shards are uneven."""
COMPRESSOR = flexcomm.demo(k=4, chunk=16, values="fp32")
"""So sparse that among four nodes, too, no bucket is better sent in full: each would choose for itself."""
EVERYTHING = flexcomm.dense(torch.float32)


class Block(Module):
    """A residual block, some of whose parameters may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNorm(WIDTH)
        self.body = Sequential(Linear(WIDTH, HIDDEN), GELU(), Linear(HIDDEN, WIDTH))
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale[0] * self.body(self.norm(x))
        return out


def make_model(seed: int = 0) -> Sequential:
    torch.manual_seed(seed)
    return Sequential(Block(), Block(), Linear(WIDTH, 7))


def batch(world: World, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + world.topology.rank)
    return torch.randn(4, WIDTH, generator=generator)


@cache
def mesh_of(world: World) -> DeviceMesh:
    """Return the ranks of this node. All ranks make the mesh of all, once: its groups stay as long as the process."""
    mesh = DeviceMesh(torch.get_default_device().type, world.topology.members, mesh_dim_names=("replicate", "shard"))
    return mesh["shard"]


def sharded(world: World, model: Module | None = None, **options: Any) -> Module:
    model, mesh = model or make_model(), mesh_of(world)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def flat_sharded(world: World, **options: Any) -> FullyShardedDataParallel:
    model, group = make_model(), mesh_of(world).get_group()
    for number in (0, 1):
        model[number] = FullyShardedDataParallel(
            model[number], process_group=group, device_id=torch.get_default_device(), **options
        )
    return FullyShardedDataParallel(model, process_group=group, device_id=torch.get_default_device(), **options)


def backward(model: Module, world: World, step: int) -> None:
    model(batch(world, step)).square().mean().backward()


def train(model: Module, optimizer: torch.optim.Optimizer, world: World, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, world, step)
        optimizer.step()


def values_of(model: Module) -> list[Tensor]:
    return [local(param).clone() for param in model.parameters()]


def require_replicas(world: World, model: Module, law: str) -> None:
    """Raise unless ranks of equal local rank hold the same bits."""
    flat = torch.cat([value.reshape(-1) for value in values_of(model)])
    everybodys = world.inter.all_gather(flat).wait()
    assert all(torch.equal(other, flat) for other in everybodys), law


def require_equal(one: Module, other: Module, law: str) -> None:
    for (name, x), y in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(x), local(y)), f"{law}, but {name} is not"


def plain_twin(world: World, steps: range, lr: float) -> Module:
    """Return the model trained in one process on the batches of all ranks."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr)
    for step in steps:
        optimizer.zero_grad()
        for rank in range(world.topology.size):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
            (loss / world.topology.size).backward()
        optimizer.step()
    return model


def require_close(model: Module, twin: Module, world: World, law: str) -> None:
    """Sums of float32 in another order: each element is rounded some ten times, to 2**-24 of the largest."""
    for (name, x), y in zip(model.named_parameters(), twin.parameters(), strict=True):
        whole = _gathered(x, y.shape, world)
        assert float((whole - y.detach()).abs().max()) <= 2.0**-20 * max(1.0, float(y.detach().abs().max())), (
            f"{law}: {name}"
        )


def _gathered(x: Tensor, shape: torch.Size, world: World) -> Tensor:
    """Return the whole of a parameter that is sharded in its rows."""
    here = local(x)
    if here.shape == shape and world.topology.local_size == 1:
        return here
    if not hasattr(x, "device_mesh"):
        return here
    rows = -(-shape[0] // world.topology.local_size)
    padded = torch.zeros(rows, *shape[1:])
    padded[: here.shape[0]] = here
    return world.intra.all_gather(padded).wait().reshape(-1, *shape[1:])[: shape[0]]


def everything_sent_is_plain_training(world: World, attach: Callable[[World], Module]) -> None:
    model = attach(world)
    train(model, SGD(model.parameters(), 0.25), world, range(3))
    require_close(model, plain_twin(world, range(3), 0.25), world, "sending all is training on all batches")


def with_fsdp2(world: World) -> Module:
    model = sharded(world)
    attach_to_fsdp(model, EVERYTHING, world=world)
    return model


def with_ddp(world: World) -> Module:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
    attach_to_ddp(model, EVERYTHING, world=world)
    return model


def fsdp2_sends_all(world: World) -> None:
    everything_sent_is_plain_training(world, with_fsdp2)


def ddp_sends_all(world: World) -> None:
    everything_sent_is_plain_training(world, with_ddp)


def fsdp1_sends_all(world: World) -> None:
    model = flat_sharded(world, use_orig_params=True)
    attach_to_fsdp(model, EVERYTHING, world=world)
    train(model, SGD(model.parameters(), 0.25), world, range(3))
    twin = plain_twin(world, range(3), 0.25)
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, x), y in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert float((x.detach() - y[1].detach()).abs().max()) <= 2.0**-20, f"sending all is plain: {name}"


def replicas_follow_an_fsdp2_hook(world: World) -> None:
    model = sharded(world, make_model(seed=world.topology.node))
    attach_to_fsdp(model, COMPRESSOR, world=world)
    require_replicas(world, model, "replicas begin alike")
    train(model, torch.optim.AdamW(model.parameters(), 0.01), world, range(4))
    require_replicas(world, model, "replicas stay alike")


def replicas_follow_an_fsdp1_hook(world: World) -> None:
    for options in ({}, {"use_orig_params": True}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}):
        model = flat_sharded(world, **options)
        attach_to_fsdp(model, flexcomm.demo(k=8, chunk=64), world=world)
        train(model, torch.optim.AdamW(model.parameters(), 0.01), world, range(3))
        require_replicas(world, model, f"replicas stay alike with {options}")


def replicas_follow_a_ddp_hook(world: World) -> None:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
    attach_to_ddp(model, COMPRESSOR, world=world)
    train(model, torch.optim.AdamW(model.parameters(), 0.01), world, range(4))
    require_same_everywhere(world, values_of(model), "replicas stay alike")


def unused_parameters_of_ddp_keep_their_residuals(world: World) -> None:
    """Which ones are unused differs from rank to rank; torch counts them as zero."""

    class Choosy(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.other = make_model(), Linear(WIDTH, 7)

        def forward(self, x: Tensor) -> Tensor:
            uses = world.topology.rank == 0
            return self.model(x) + (self.other(x) if uses else 0.0)

    model = DistributedDataParallel(Choosy(), bucket_cap_mb=0.01, find_unused_parameters=True)
    before = model.module.other.weight.detach().clone()
    attach_to_ddp(model, COMPRESSOR, world=world)
    train(model, SGD(model.parameters(), 0.25), world, range(3))
    assert not torch.equal(before, model.module.other.weight), "what one rank uses, all train"
    require_same_everywhere(world, values_of(model), "replicas stay alike")


def frozen_and_unused_parameters_of_a_unit_are_no_obstacle(world: World) -> None:
    """What is frozen stays, also if it is frozen later; what a rank does not use counts as zero."""

    class Choosy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return self.spare(out) if world.topology.node == 0 else out

    torch.manual_seed(0)
    model = sharded(world, Sequential(Choosy(), Linear(WIDTH, 7)))
    model[0].norm.weight.requires_grad_(False)  # type: ignore[index]
    frozen, unused = local(model[0].norm.weight).clone(), local(model[0].spare.weight).clone()  # type: ignore[index]
    attach_to_fsdp(model, COMPRESSOR, world=world)
    train(model, SGD(model.parameters(), 0.25), world, range(2))
    model[0].body[0].bias.requires_grad_(False)  # type: ignore[index]
    train(model, SGD([p for p in model.parameters() if p.requires_grad], 0.25), world, range(2, 4))
    require_replicas(world, model, "replicas stay alike")
    assert torch.equal(frozen, local(model[0].norm.weight)), "what is frozen stays"  # type: ignore[index]
    assert not torch.equal(unused, local(model[0].spare.weight)), "what one node uses, all train"  # type: ignore[index]


def a_hook_survives_a_nan_wherever_it_waits(world: World) -> None:
    """Reduced as bfloat16, every unit waits for its exchange inside of FSDP's own code."""
    model = sharded(world, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    handle = attach_to_fsdp(model, COMPRESSOR, world=world)
    optimizer = SGD(model.parameters(), 0.25)
    for step in range(4):
        optimizer.zero_grad()
        inputs = batch(world, step)
        if step == 1 and world.topology.rank == 0:
            inputs[0, 0] = math.nan
        loss = model(inputs).square().mean()
        if step == 1:
            with pytest.raises((NonFiniteError, flexcomm.SyncError)):
                loss.backward()
            continue
        loss.backward()
        before = values_of(model)
        optimizer.step()
        assert not any(torch.equal(x, y) for x, y in zip(before, values_of(model), strict=True) if x.numel() > 3)
    assert handle.step == 4, "every pass is counted"
    require_replicas(world, model, "replicas stay alike")


def a_model_has_one_hook_and_another_after_its_removal(world: World) -> None:
    model = sharded(world)
    handle = attach_to_fsdp(model, COMPRESSOR, world=world)
    with pytest.raises(InvalidArgumentError, match="remove"):
        attach_to_fsdp(model, COMPRESSOR, world=world)
    handle.remove()
    attach_to_fsdp(model, COMPRESSOR, world=world)
    train(model, SGD(model.parameters(), 0.25), world, range(2))
    require_replicas(world, model, "replicas stay alike")


def a_backward_that_died_leaves_nothing_behind(world: World) -> None:
    """FSDP2 does not go on after that; what was under way is let go when another model's turn comes."""
    models = [sharded(world), sharded(world)]
    handles = [attach_to_fsdp(model, flexcomm.random_k(1 / 4), world=world) for model in models]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError(f"died with {len(gradients)} gradients of {ctx}")

    inputs = batch(world, 0).requires_grad_()
    with pytest.raises(RuntimeError, match="died"):
        models[0](Fails.apply(inputs)).square().mean().backward()
    handles[0].remove()
    train(models[1], SGD(models[1].parameters(), 0.25), world, range(2))
    assert handles[1].step == 2
    require_replicas(world, models[1], "replicas stay alike")


def the_fsdp2_hook_is_the_optimizers_exchange(world: World) -> None:
    """SGD on what the hook brings takes the plain steps of FlexDeMo: to the bit, for a power of two as rate."""
    hooked, other = sharded(world), sharded(world)
    attach_to_fsdp(hooked, COMPRESSOR, world=world, decay=0.875, average="contributors")
    train(hooked, SGD(hooked.parameters(), 0.25), world, range(4))
    flexdemo = FlexDeMo(other.named_parameters(), 0.25, compressor=COMPRESSOR, world=world, decay=0.875, update="plain")
    train(other, flexdemo, world, range(4))
    require_equal(hooked, other, "the hook does what the optimizer does")


def the_ddp_hook_is_the_optimizers_exchange(world: World) -> None:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
    attach_to_ddp(model, COMPRESSOR, world=world, decay=0.875, average="contributors")
    train(model, SGD(model.parameters(), 0.25), world, range(4))
    other = make_model()
    flexdemo = FlexDeMo(other.named_parameters(), 0.25, compressor=COMPRESSOR, world=world, decay=0.875, update="plain")
    train(other, flexdemo, world, range(4))
    require_equal(model.module, other, "the hook does what the optimizer does")


def optimizers_take_shards(world: World) -> None:
    """Sharded models stay sharded, overlap changes nothing, and nobody holds more gradients than its shard."""
    makes: list[Callable[..., torch.optim.Optimizer]] = [FlexDeMo, FlexDeMoAdamW]
    for make in makes:
        models = [sharded(world), sharded(world)]
        for model, overlap in zip(models, (True, False), strict=True):
            optimizer = make(
                model.named_parameters(), compressor=COMPRESSOR, world=world, overlap=overlap, bucket_bytes=10_000
            )
            train(model, optimizer, world, range(3))
            held = sum(local(param.grad).numel() for param in model.parameters() if param.grad is not None)
            shards = sum(local(param).numel() for param in model.parameters())
            assert held == shards, f"{held} gradient elements are held of {shards} in the shard"
            require_replicas(world, model, "replicas stay alike")
        require_equal(*models, "overlap changes nothing")


def flat_parameters_are_trained(world: World) -> None:
    model = flat_sharded(world)
    optimizer = FlexDeMo(model.parameters(), compressor=flexcomm.demo(k=8), world=world, overlap=True)
    before = values_of(model)
    train(model, optimizer, world, range(3))
    require_replicas(world, model, "replicas stay alike")
    assert not any(torch.equal(x, y) for x, y in zip(before, values_of(model), strict=True)), "all are trained"


def original_parameters_are_trained(world: World) -> None:
    """Views of FSDP1's shards do not say what they are: the user does."""
    model = flat_sharded(world, use_orig_params=True)
    optimizer = FlexDeMo(
        model.parameters(), compressor=flexcomm.demo(k=8), world=world, node_averaged=True, update="plain"
    )
    train(model, optimizer, world, range(3))
    require_replicas(world, model, "replicas stay alike")


def mixed_precision_is_exchanged_as_reduced(world: World) -> None:
    for reduced in (torch.float32, torch.bfloat16, None):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        model = sharded(world, mp_policy=policy)
        attach_to_fsdp(model, COMPRESSOR, world=world)
        train(model, torch.optim.AdamW(model.parameters(), 0.01), world, range(3))
        require_replicas(world, model, f"replicas stay alike, reduced as {reduced}")


def float16_reduction_is_refused(world: World) -> None:
    model = sharded(world, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    with pytest.raises(InvalidArgumentError, match="float16"):
        attach_to_fsdp(model, COMPRESSOR, world=world)


def gradients_of_another_dtype_than_the_parameter_are_refused(world: World) -> None:
    model = sharded(world)
    model.get_parameter("0.norm.bias").grad_dtype = torch.bfloat16
    with pytest.raises(InvalidArgumentError, match=r"0\.norm\.bias .* grad_dtype"):
        attach_to_fsdp(model, COMPRESSOR, world=world)


def float16_reduction_of_flat_units_is_refused(world: World) -> None:
    flat = flat_sharded(world, mixed_precision=MixedPrecision(reduce_dtype=torch.float16))
    with pytest.raises(InvalidArgumentError, match="float16"):
        attach_to_fsdp(flat, COMPRESSOR, world=world)


def micro_batches_are_exchanged_once(world: World) -> None:
    """With FSDP's own switch one exchange a step; without it every backward is exchanged, and added up."""
    model = sharded(world)
    handle = attach_to_fsdp(model, EVERYTHING, world=world)
    twin = plain_twin(world, range(0), 0.25)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]  # an FSDPModule
    backward(model, world, 0)
    assert handle.step == 0, "nothing is exchanged before"
    model.set_requires_gradient_sync(True)  # type: ignore[operator]  # an FSDPModule
    backward(model, world, 1)
    assert handle.step == 1, "one exchange"
    backward(model, world, 2)
    for rank in range(world.topology.size):
        for step in range(3):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            loss = twin(torch.randn(4, WIDTH, generator=generator)).square().mean()
            (loss / world.topology.size).backward()
    for (name, x), y in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert x.grad is not None
        assert y.grad is not None
        whole = _gathered(x.grad, y.shape, world)
        assert float((whole - y.grad).abs().max()) <= 2.0**-20, f"gradients are added up: {name}"


def detaching_gives_the_model_back(world: World) -> None:
    model, twin = sharded(world), sharded(world)
    handle = attach_to_fsdp(model, EVERYTHING, world=world)
    train(model, SGD(model.parameters(), 0.0), world, range(1))
    handle.remove()
    handle.remove()
    model.zero_grad()
    backward(model, world, 1)
    backward(twin, world, 1)
    for x, y in zip(model.parameters(), twin.parameters(), strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(local(x.grad), local(y.grad)), "gradients are the node's alone"
    ddp = DistributedDataParallel(make_model())
    attach_to_ddp(ddp, flexcomm.demo(k=1), world=world).remove()
    train(ddp, SGD(ddp.parameters(), 0.25), world, range(2))
    require_close(ddp.module, plain_twin(world, range(2), 0.25), world, "detached, DDP averages in full")


def a_nan_leaves_residuals_alone(world: World) -> None:
    model = sharded(world)
    handle = attach_to_fsdp(model, COMPRESSOR, world=world)
    optimizer = SGD(model.parameters(), 0.25)
    train(model, optimizer, world, range(2))
    kept = {name: state.clone() for name, state in handle.sync.residuals[0].state_dict().items()}
    optimizer.zero_grad()
    inputs = batch(world, 2)
    if world.topology.rank == 0:
        inputs[0, 0] = math.nan
    with pytest.raises((NonFiniteError, flexcomm.SyncError)):
        model(inputs).square().mean().backward()
    after = handle.sync.residuals[0].state_dict()
    assert all(torch.equal(kept[name], state) for name, state in after.items()), "residuals are as they were"


def a_skipped_step_has_zero_gradients(world: World) -> None:
    models = [sharded(world), DistributedDataParallel(make_model())]
    attach_to_fsdp(models[0], COMPRESSOR, world=world, nonfinite="skip")
    attach_to_ddp(models[1], COMPRESSOR, world=world, nonfinite="skip")  # type: ignore[arg-type]
    for model in models:
        for step in range(2):
            inputs = batch(world, step)
            if world.topology.rank == 0 and step == 0:
                inputs[0, 0] = math.nan
            model.zero_grad()
            model(inputs).square().mean().backward()
            gradients = [local(param.grad) for param in model.parameters() if param.grad is not None]
            assert any(bool(gradient.any()) for gradient in gradients) == (step == 1), "zeros, then gradients"


def models_that_cannot_be_exchanged_are_refused(world: World) -> None:
    with pytest.raises(InvalidArgumentError, match="is not sharded"):
        attach_to_fsdp(make_model(), COMPRESSOR, world=world)
    partly = make_model()
    fully_shard(partly[0], mesh=mesh_of(world))
    with pytest.raises(InvalidArgumentError, match="belong to no unit"):
        attach_to_fsdp(partly, COMPRESSOR, world=world)
    if world.topology.local_size > 1:
        alone = DeviceMesh(
            torch.get_default_device().type,
            [[rank] for rank in range(world.topology.size)],
            mesh_dim_names=("all", "one"),
        )
        model = make_model()
        fully_shard(model, mesh=alone["one"])
        with pytest.raises(TopologyError, match="but this node has"):
            attach_to_fsdp(model, COMPRESSOR, world=world)
    if world.topology.nodes > 1:
        mesh = DeviceMesh(
            torch.get_default_device().type, world.topology.members, mesh_dim_names=("replicate", "shard")
        )
        model = make_model()
        fully_shard(model, mesh=mesh)
        with pytest.raises(TopologyError, match="mesh\\['shard'\\]"):
            attach_to_fsdp(model, COMPRESSOR, world=world)
        with pytest.raises(TopologyError, match="but this node has"):
            FlexDeMo(model.parameters(), world=world)


LAWS: list[Callable[[World], None]] = [
    fsdp2_sends_all,
    ddp_sends_all,
    replicas_follow_an_fsdp2_hook,
    replicas_follow_a_ddp_hook,
    the_fsdp2_hook_is_the_optimizers_exchange,
    the_ddp_hook_is_the_optimizers_exchange,
    optimizers_take_shards,
    mixed_precision_is_exchanged_as_reduced,
    float16_reduction_is_refused,
    gradients_of_another_dtype_than_the_parameter_are_refused,
    micro_batches_are_exchanged_once,
    detaching_gives_the_model_back,
    a_nan_leaves_residuals_alone,
    a_skipped_step_has_zero_gradients,
    models_that_cannot_be_exchanged_are_refused,
    frozen_and_unused_parameters_of_a_unit_are_no_obstacle,
    a_hook_survives_a_nan_wherever_it_waits,
    a_model_has_one_hook_and_another_after_its_removal,
    a_backward_that_died_leaves_nothing_behind,
]

UNUSED_LAWS: list[Callable[[World], None]] = [unused_parameters_of_ddp_keep_their_residuals]
"""torch warns where nothing is unused: for more than one rank."""

FLAT_LAWS: list[Callable[[World], None]] = [
    fsdp1_sends_all,
    replicas_follow_an_fsdp1_hook,
    flat_parameters_are_trained,
    original_parameters_are_trained,
    float16_reduction_of_flat_units_is_refused,
]
"""FSDP1 shards over more than one rank, or not at all."""


def laws_for(ranks: int, ranks_per_node: int) -> list[Callable[[World], None]]:
    """Return the laws that a world of this shape can keep."""
    return [*LAWS, *(UNUSED_LAWS if ranks > 1 else []), *(FLAT_LAWS if ranks_per_node > 1 else [])]
