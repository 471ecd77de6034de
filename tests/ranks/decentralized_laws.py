"""The laws of decentralized training, over gloo and MPI, in worlds of every shape."""

from __future__ import annotations

import copy
import gc
import tempfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import flexcomm
from flexcomm import InvalidArgumentError, gossip
from flexdemo import (
    AccumAdam,
    ConsensusControl,
    DecentralizedAdam,
    DecentralizedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from flexdemo.decentralized.consensus import update_consensus_
from flexdemo.parameters import local
from tests.ranks import hook_laws
from tests.ranks.mixing_laws import directed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

    from flexcomm import World
    from flexcomm.gossip import ScheduleLike

LR, DECAY = 1e-2, 0.01
BUCKET_BYTES = 3000
BEFORE, AFTER = range(4), range(4, 8)
Make = "Callable[[Iterable[nn.Parameter]], Optimizer]"


class Net(nn.Module):
    """In float64, so that a reference in another order of sums agrees; ``spare`` is used by odd ranks at odd steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3))
        self.spare = nn.Parameter(torch.ones(5))
        self.never = nn.Parameter(torch.full((4,), 2.0))
        self.double()


def loss_of(net: Net, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (20, 3))
    loss: Tensor = (net.body(x) - y).square().mean()
    return loss + (net.spare * (rank + 1)).square().sum() if rank % 2 and step % 2 else loss


def flat(net: nn.Module) -> Tensor:
    return torch.cat([local(param).reshape(-1).clone() for param in net.parameters()])


def train(net: Net, optimizer: Optimizer, world: World, steps: range) -> Tensor:
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, world.topology.rank, step).backward()
        optimizer.step()
    return flat(net)


def adam(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, LR, weight_decay=DECAY)


def made(net: Net, world: World, schedule: ScheduleLike | None = None, **options: Any) -> DecentralizedAdam:
    options = {"bucket_bytes": BUCKET_BYTES, "weight_decay": DECAY, **options}
    return DecentralizedAdam(net.named_parameters(), LR, schedule=schedule, world=world, **options)


def over_ranks(world: World, schedule: ScheduleLike, number: int) -> Tensor:
    inside = np.full((world.topology.local_size,) * 2, 1.0 / world.topology.local_size)
    return torch.from_numpy(np.kron(schedule.phase(number).matrix(world.topology.nodes), inside))


def mix_all(nets: list[Net], weights: Tensor) -> None:
    with torch.no_grad():
        for params in zip(*(net.parameters() for net in nets), strict=True):
            stacked = torch.stack([param.detach().clone() for param in params])
            mixed = torch.einsum("ij,j...->i...", weights.to(stacked.device), stacked)
            for param, value in zip(params, mixed, strict=True):
                param.copy_(value)


def reference(
    world: World,
    schedule: ScheduleLike,
    steps: int,
    *,
    make: Callable[[Iterable[nn.Parameter]], Optimizer] = adam,
    step_then_mix: bool = False,
    most_norm: float | None = None,
) -> Tensor:
    """D-PSGD by the book, all replicas in one process, in the order of nodes; return this rank's parameters."""
    order = [rank for node in world.topology.members for rank in node]
    nets = [Net() for _ in order]
    optimizers = [make(net.parameters()) for net in nets]
    for step in range(steps):
        for rank, net, optimizer in zip(order, nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            if most_norm is not None:
                clip_grad_norm_(net.parameters(), most_norm)
        if step and not step_then_mix:
            mix_all(nets, over_ranks(world, schedule, step - 1))
        for optimizer in optimizers:
            optimizer.step()
        if step_then_mix:
            mix_all(nets, over_ranks(world, schedule, step))
    return flat(nets[order.index(world.topology.rank)])


def fifty_steps_are_those_of_a_reference(world: World, recipe: Callable[[int], gossip.Schedule]) -> None:
    schedule = recipe(world.topology.nodes)
    got = train(net := Net(), made(net, world, schedule), world, range(50))
    # Fused and unfused Adam, and sums of three weights, round differently; fifty steps amplify that.
    torch.testing.assert_close(got, reference(world, schedule, 50), rtol=0, atol=1e-9)


def stepping_before_mixing_is_the_other_reference(world: World) -> None:
    schedule = gossip.base(world.topology.nodes)
    got = train(net := Net(), made(net, world, schedule, order="step-then-mix"), world, range(12))
    torch.testing.assert_close(got, reference(world, schedule, 12, step_then_mix=True), rtol=0, atol=1e-9)


def overlap_gives_the_same_bits(world: World) -> None:
    schedule = gossip.alternating_exponential_ring(world.topology.nodes)
    for order in ("mix-then-step", "step-then-mix"):
        kinds = [{"overlap": overlap} for overlap in ("step", "backward", "none")]
        kinds += [{"bucket_bytes": 1 << 24}, {"bucket_bytes": 1}]
        ends = []
        for kind in kinds:
            ends.append(train(net := Net(), made(net, world, schedule, order=order, **kind), world, range(6)))
            gc.collect()  # The next optimizer takes the communicator of this one.
        assert all(torch.equal(end, ends[0]) for end in ends), order


def any_optimizer_can_be_decentralized(world: World) -> None:
    schedule = gossip.ring(world.topology.nodes)
    makes: list[Callable[[Iterable[nn.Parameter]], Optimizer]] = [
        lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
        lambda params: AccumAdam(params, LR, window=4),
        lambda params: torch.optim.RMSprop(params, 1e-3),
    ]
    for make in makes:
        net = Net()
        got = train(net, DecentralizedOptimizer(make(net.parameters()), schedule, world=world), world, range(7))
        torch.testing.assert_close(got, reference(world, schedule, 7, make=make), rtol=0, atol=1e-9)


def accumulation_is_accum_adam_on_every_replica(world: World) -> None:
    schedule = gossip.base(world.topology.nodes)
    got = train(net := Net(), made(net, world, schedule, accumulate=4), world, range(9))

    def accumulated(params: Iterable[nn.Parameter]) -> Optimizer:
        return AccumAdam(params, LR, weight_decay=DECAY, window=4)

    torch.testing.assert_close(got, reference(world, schedule, 9, make=accumulated), rtol=0, atol=1e-9)


def unused_parameters_are_neither_skipped_nor_lost(world: World) -> None:
    """``spare`` has a gradient on odd ranks only, and every replica receives its changes."""
    schedule = gossip.complete(world.topology.nodes)
    for overlap in ("step", "backward"):
        train(net := Net(), made(net, world, schedule, overlap=overlap), world, range(6))
        assert torch.equal(net.never.detach(), torch.full((4,), 2.0, dtype=torch.float64))
        has_moved = bool((net.spare.detach() != 1.0).all())
        assert has_moved == (world.topology.size > 1)


def late_parameters_join(world: World) -> None:
    """Frozen first, or added later: from then on they are mixed like all others, on every rank."""
    net = Net()
    net.body[0].weight.requires_grad_(False)
    late = nn.Parameter(torch.ones(6, dtype=torch.float64) * (1 + world.topology.rank))
    optimizer = made(net, world, gossip.complete(world.topology.nodes))
    train(net, optimizer, world, range(3))
    before = net.body[0].weight.detach().clone()
    net.body[0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [late], "param_names": ["late"]})
    assert late.tolist() == [1.0] * 6
    for step in range(3, 9):
        optimizer.zero_grad()
        loss = loss_of(net, world.topology.rank, step) + (world.topology.rank + 1) * late.square().sum()
        loss.backward()
        optimizer.step()
    assert not torch.equal(net.body[0].weight.detach(), before)
    optimizer.average_()
    ends = torch.cat([flat(net), late.detach()])
    assert all(torch.equal(ends, other) for other in world.control.all_gather(ends).wait())


def parameters_of_two_dtypes_are_mixed(world: World) -> None:
    params = [nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (torch.float64, torch.float32, torch.float64)]
    sgd, schedule = torch.optim.SGD(params, 0.25), gossip.complete(world.topology.nodes)
    optimizer = DecentralizedOptimizer(sgd, schedule, world=world, order="step-then-mix")
    sum((world.topology.rank + 1) * param.sum() for param in params).backward()
    optimizer.step()
    want = 1.0 - 0.25 * (world.topology.size + 1) / 2
    for param, dtype in zip(params, (torch.float64, torch.float32, torch.float64), strict=True):
        assert param.dtype == dtype
        # Weights such as 1/3 are rounded.
        torch.testing.assert_close(param.detach(), torch.full((5,), want, dtype=dtype), rtol=0, atol=1e-6)


def joining_takes_no_step_twice(world: World) -> None:
    """A parameter that is unfrozen, or added between ``backward()`` and ``step()``, leaves the others' steps alone."""
    ends = []
    for overlap in ("step", "backward", "none"):
        net = Net()
        net.body[2].bias.requires_grad_(False)
        late = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = made(net, world, gossip.base(world.topology.nodes), overlap=overlap)
        for step in range(6):
            optimizer.zero_grad()
            if step == 3:
                net.body[2].bias.requires_grad_(True)
            loss_of(net, world.topology.rank, step).backward()
            if step == 4:
                optimizer.add_param_group({"params": [late], "param_names": ["late"]})
            optimizer.step()
        steps = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
        assert steps <= {3, 6, 1, 2, 5}, steps
        assert optimizer.state[net.body[0].weight]["step"] == 6
        ends.append(flat(net))
    assert all(torch.equal(end, ends[0]) for end in ends)


def two_optimizers_do_not_mix_with_each_other(world: World) -> None:
    """Also where ranks use their parameters in another order, in the same backward pass."""
    nets = [Net(), Net()]
    with torch.no_grad():
        for param in nets[1].parameters():
            param.add_(100.0)
    optimizers = [made(net, world, gossip.complete(world.topology.nodes), overlap="backward") for net in nets]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = nets if world.topology.rank % 2 else nets[::-1]
        sum(loss_of(net, world.topology.rank, step) for net in order).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert float(flat(nets[0]).mean()) < 10
    assert float(flat(nets[1]).mean()) > 90


def an_overflow_does_not_end_control(world: World) -> None:
    control = ConsensusControl(bound=1e-6, every=1, most_rounds=3)
    optimizer = made(net := Net(), world, gossip.base(world.topology.nodes), control=control)
    train(net, optimizer, world, range(2))
    update_consensus_(optimizer.param_groups[0], control, world, squared_distance=np.nan, squared_norm=np.inf)
    train(net, optimizer, world, range(2, 5))
    assert np.isfinite(optimizer.param_groups[0]["consensus_norm"])


def a_half_taken_step_is_not_saved(world: World) -> None:
    optimizer = made(net := Net(), world, gossip.base(world.topology.nodes), overlap="backward")
    train(net, optimizer, world, range(2))
    loss_of(net, world.topology.rank, 3).backward()
    with pytest.raises(InvalidArgumentError, match=r"between backward\(\) and step\(\)"):
        optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()
    with pytest.raises(InvalidArgumentError, match="cannot be copied"):
        copy.deepcopy(optimizer)


def clipping_sees_the_whole_gradient(world: World) -> None:
    schedule = gossip.base(world.topology.nodes)
    got = train(net := Net(), made(net, world, schedule, max_norm=0.05), world, range(5))
    torch.testing.assert_close(got, reference(world, schedule, 5, most_norm=0.05), rtol=0, atol=1e-9)


def averaging_leaves_no_trace(world: World) -> None:
    schedule, size = gossip.base(world.topology.nodes), world.topology.size
    undisturbed = train(net := Net(), made(net, world, schedule), world, range(8))
    net = Net()
    optimizer = made(net, world, schedule)
    train(net, optimizer, world, range(5))
    before = flat(net)
    of_all_ranks = world.control.all_gather(before).wait()
    buffers = [torch.tensor([float(world.topology.rank), 4.0]), torch.tensor(world.topology.rank)]
    with optimizer.average(buffers):
        inside = flat(net)
        assert buffers[0].tolist() == pytest.approx([(size - 1) / 2, 4.0])
    assert buffers[0].tolist() == [world.topology.rank, 4.0]
    assert buffers[1].item() == world.topology.rank
    assert torch.equal(flat(net), before)
    torch.testing.assert_close(inside, of_all_ranks.mean(dim=0), rtol=0, atol=1e-12)
    assert all(torch.equal(inside, other) for other in world.control.all_gather(inside).wait())
    apart = (of_all_ranks - of_all_ranks.mean(dim=0)).square().sum(dim=1).mean().sqrt()
    assert optimizer.consensus_distance() == pytest.approx(float(apart), rel=1e-9, abs=1e-12)
    assert size == 1 or optimizer.consensus_distance() > 0
    assert torch.equal(train(net, optimizer, world, range(5, 8)), undisturbed)


def averaging_for_good_ends_what_is_under_way(world: World) -> None:
    optimizer = made(net := Net(), world, gossip.base(world.topology.nodes))
    mean = world.control.all_gather(train(net, optimizer, world, range(5))).wait().mean(dim=0)
    optimizer.average_()
    torch.testing.assert_close(flat(net), mean, rtol=0, atol=1e-12)
    assert optimizer.consensus_distance() < 1e-12  # A mean of three equal numbers is rounded.
    train(net, optimizer, world, range(5, 7))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in the backward pass": {"overlap": "backward"},
    "step first": {"order": "step-then-mix"},
    "accumulated": {"accumulate": 4},
    "compressed": {"schedule": gossip.complete, "compressor": flexcomm.top_k(0.25), "gamma": 0.3},
    "directed": {"schedule": directed},
    "rounds": {"control": ConsensusControl(bound=1e-6, every=3)},
    # Decides just before it is saved: the mix under way was started by the decision before.
    "complete": {"control": ConsensusControl(bound=1e-6, action="complete", every=len(BEFORE))},
}


def made_of_kind(net: Net, world: World, kind: str) -> DecentralizedAdam:
    options = dict(KINDS[kind])
    make = options.pop("schedule", gossip.alternating_exponential_ring)
    nodes = world.topology.nodes
    schedule = make(nodes) if make is not directed or nodes > 2 else gossip.base(nodes)
    return made(net, world, schedule, **options)


def a_saved_run_goes_on_with_what_was_under_way(world: World, kind: str) -> None:
    net, other = Net(), Net()
    optimizer = made_of_kind(net, world, kind)
    train(net, optimizer, world, BEFORE)
    saved = copy.deepcopy(optimizer.state_dict())
    ended = train(net, optimizer, world, AFTER)
    resumed = made_of_kind(other, world, kind)
    resumed.load_state_dict(saved)
    assert torch.equal(train(other, resumed, world, AFTER), ended), kind


def a_checkpoint_keeps_replicas_apart(world: World, kind: str) -> None:
    """Torch's format takes tensors of one name on several ranks for copies; these are not."""
    net, other = Net(), Net()
    optimizer = made_of_kind(net, world, kind)
    train(net, optimizer, world, BEFORE)
    name = tempfile.mkdtemp() if world.topology.rank == 0 else ""
    path = shared_text(world, name)
    save_checkpoint(path, net, optimizer)
    ended = train(net, optimizer, world, AFTER)
    resumed = made_of_kind(other, world, kind)
    load_checkpoint(path, other, resumed)
    assert torch.equal(train(other, resumed, world, AFTER), ended), kind


def shared_text(world: World, text: str) -> str:
    """Return what rank 0 says."""
    row = torch.zeros(256, dtype=torch.uint8)
    row[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return bytes(world.control.broadcast(row).wait().tolist()).rstrip(b"\0").decode()


def replicas_stay_close_under_control(world: World) -> None:
    """Where nodes would drift apart, more rounds, or complete averaging, hold them together."""
    nodes = world.topology.nodes
    if nodes < 3:
        return
    distances = {}
    for kind in ("rounds", "complete"):
        control = ConsensusControl(bound=1e-6, action=kind, every=2, most_rounds=3)
        optimizer = made(net := Net(), world, gossip.ring(nodes), control=control)
        train(net, optimizer, world, range(12))
        distances[kind] = optimizer.consensus_distance()
        assert optimizer.rounds == (3 if kind == "rounds" else 1)
    free = made(net := Net(), world, gossip.ring(nodes))
    train(net, free, world, range(12))
    assert max(distances.values()) < free.consensus_distance()
    content = made(net := Net(), world, gossip.ring(nodes), control=ConsensusControl(bound=1e6, every=2))
    train(net, content, world, range(12))
    assert content.rounds == 1


def a_change_under_way_is_refused(world: World) -> None:
    for kind in ("plain", "compressed"):
        optimizer = made_of_kind(net := Net(), world, kind)
        train(net, optimizer, world, range(2))
        with torch.no_grad():
            net.spare.mul_(0.5)
        with pytest.raises(InvalidArgumentError, match=r"spare.*changed while being mixed.*restart"):
            train(net, optimizer, world, range(2, 3))
        optimizer.restart()
        train(net, optimizer, world, range(2, 4))


def a_replica_that_skips_a_step_is_still_mixed(world: World) -> None:
    """A replica whose scaled gradients overflow skips its step, and its peers do not hang."""
    net = Net()
    optimizer = made(net, world, gossip.complete(world.topology.nodes))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(net, world.topology.rank, step))
        loss.backward()
        if step == 2 and world.topology.rank == 0:
            net.spare.grad = torch.full_like(net.spare, float("inf"))
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(flat(net)).all()
    optimizer.average_()


def what_cannot_be_is_refused(world: World) -> None:
    net, nodes = Net(), world.topology.nodes
    refused = {
        "max_norm needs the whole gradient": {"max_norm": 1.0, "overlap": "backward"},
        "order is 'mix'": {"order": "mix"},
        "overlap is True": {"overlap": True},
        "max_norm is 0": {"max_norm": 0.0},
    }
    for words, options in refused.items():
        with pytest.raises(InvalidArgumentError, match=words):
            made(net, world, gossip.base(nodes), **options)
    with pytest.raises(InvalidArgumentError, match="bound is 0"):
        ConsensusControl(bound=0)


def node_reference(world: World, schedule: ScheduleLike, steps: int, most_norm: float | None) -> nn.Module:
    """Replicas of nodes: each steps on the mean gradient of its ranks. Return this node's."""
    models = [hook_laws.make_model() for _ in range(world.topology.nodes)]
    optimizers = [adam(model.parameters()) for model in models]
    for step in range(steps):
        for model, optimizer, ranks in zip(models, optimizers, world.topology.members, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                generator = torch.Generator().manual_seed(1000 * step + rank)
                x = torch.randn(4, hook_laws.WIDTH, generator=generator)
                (model(x).square().mean() / len(ranks)).backward()
            if most_norm is not None:
                clip_grad_norm_(model.parameters(), most_norm)
        if step:
            mix_all(models, torch.from_numpy(schedule.phase(step - 1).matrix(len(models))).float())
        for optimizer in optimizers:
            optimizer.step()
    return models[world.topology.node]


def sharded_models_are_replicas_of_nodes(world: World) -> None:
    schedule = gossip.base(world.topology.nodes)
    for most_norm in (None, 0.1):
        model = hook_laws.sharded(world)
        optimizer = DecentralizedAdam(
            model.named_parameters(), LR, weight_decay=DECAY, schedule=schedule, world=world, max_norm=most_norm
        )
        hook_laws.train(model, optimizer, world, range(5))
        want = node_reference(world, schedule, 5, most_norm)
        for param, other in zip(model.parameters(), want.parameters(), strict=True):
            # FSDP adds the ranks' gradients in another order, and Adam divides by small numbers.
            torch.testing.assert_close(param.full_tensor(), other.detach(), rtol=0, atol=2e-4)


def a_shard_that_overflows_skips_the_step_of_its_replica(world: World) -> None:
    """The ranks of a node tell each other without their transport for data, which may be one for devices alone."""
    optimizer = DecentralizedAdam(hook_laws.sharded(world).named_parameters(), LR, world=world)
    size_alone: Any = SimpleNamespace(size=world.intra.size)
    optimizer._world = replace(world, intra=size_alone)
    # Set by torch's GradScaler for the time of a step.
    optimizer.found_inf = torch.tensor(float(world.topology.rank == 0))  # type: ignore[attr-defined]
    optimizer._prepare_gradients()
    assert optimizer._skips == (world.topology.node == 0)


def flat_parameters_are_refused(world: World) -> None:
    if world.topology.local_size == 1:
        return
    model = hook_laws.flat_sharded(world)
    with pytest.raises(InvalidArgumentError, match="FSDP2"):
        DecentralizedAdam(model.parameters(), LR, world=world)


def empty_shards_are_mixed_as_far_as_the_others(world: World) -> None:
    """One rank of a node has nothing of a parameter, and must not hold back, or leave behind, what it has of others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))
    mesh = hook_laws.mesh_of(world)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    schedule = gossip.complete(world.topology.nodes)
    optimizer = DecentralizedAdam(
        model.named_parameters(), LR, schedule=schedule, world=world, compressor=flexcomm.dense(torch.float32)
    )
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + world.topology.rank)
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    assert optimizer.last_moved() > 0 or world.topology.nodes == 1


def sharded_runs_go_on(world: World) -> None:
    def make(model: nn.Module) -> DecentralizedAdam:
        return DecentralizedAdam(
            model.named_parameters(), LR, schedule=gossip.base(world.topology.nodes), world=world, accumulate=2
        )

    model = hook_laws.sharded(world)
    optimizer = make(model)
    hook_laws.train(model, optimizer, world, BEFORE)
    with optimizer.average():
        hook_laws.require_replicas(world, model, "averaged shards are the same on all nodes")
    path = shared_text(world, tempfile.mkdtemp() if world.topology.rank == 0 else "")
    save_checkpoint(path, model, optimizer)
    hook_laws.train(model, optimizer, world, AFTER)
    other = hook_laws.sharded(world, hook_laws.make_model(seed=3))
    resumed = make(other)
    load_checkpoint(path, other, resumed)
    hook_laws.train(other, resumed, world, AFTER)
    hook_laws.require_equal(model, other, "a sharded run goes on")


LAWS: dict[str, Callable[[World], object]] = {
    law.__name__: law
    for law in (
        stepping_before_mixing_is_the_other_reference,
        overlap_gives_the_same_bits,
        any_optimizer_can_be_decentralized,
        accumulation_is_accum_adam_on_every_replica,
        unused_parameters_are_neither_skipped_nor_lost,
        late_parameters_join,
        parameters_of_two_dtypes_are_mixed,
        joining_takes_no_step_twice,
        two_optimizers_do_not_mix_with_each_other,
        an_overflow_does_not_end_control,
        a_half_taken_step_is_not_saved,
        clipping_sees_the_whole_gradient,
        averaging_leaves_no_trace,
        averaging_for_good_ends_what_is_under_way,
        replicas_stay_close_under_control,
        a_change_under_way_is_refused,
        a_replica_that_skips_a_step_is_still_mixed,
        what_cannot_be_is_refused,
    )
}
LAWS |= {
    f"{fifty_steps_are_those_of_a_reference.__name__}, {recipe.__name__}": partial(
        fifty_steps_are_those_of_a_reference, recipe=recipe
    )
    for recipe in (gossip.ring, gossip.complete, gossip.base, gossip.directed_exponential)
}
LAWS |= {f"a run goes on, {kind}": partial(a_saved_run_goes_on_with_what_was_under_way, kind=kind) for kind in KINDS}
CORE = (
    "fifty_steps_are_those_of_a_reference, ring",
    "overlap_gives_the_same_bits",
    "unused_parameters_are_neither_skipped_nor_lost",
    "averaging_leaves_no_trace",
    "a run goes on, plain",
)
"""Laws that are also held over MPI."""
TORCH_LAWS: dict[str, Callable[[World], object]] = {
    "sharded_models_are_replicas_of_nodes": sharded_models_are_replicas_of_nodes,
    "sharded_runs_go_on": sharded_runs_go_on,
    "a_shard_that_overflows_skips_the_step_of_its_replica": a_shard_that_overflows_skips_the_step_of_its_replica,
    "flat_parameters_are_refused": flat_parameters_are_refused,
    "empty_shards_are_mixed_as_far_as_the_others": empty_shards_are_mixed_as_far_as_the_others,
    **{
        f"a checkpoint goes on, {kind}": partial(a_checkpoint_keeps_replicas_apart, kind=kind)
        for kind in ("plain", "compressed", "directed", "complete")
    },
}
"""Laws that need torch's own groups beside flexcomm's."""
