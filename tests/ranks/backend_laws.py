"""The laws of the backend of torch.distributed: what every group keeps, and training through FSDP2, FSDP1 and DDP."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import flexcomm
from flexcomm import BackendOptions, ConfigMismatchError, InvalidArgumentError, NonFiniteError, World
from flexcomm.backend.group import CompressingProcessGroup
from flexdemo.parameters import local
from tests.ranks.sync_laws import require_same_everywhere

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXACT = flexcomm.dense()
EVERYTHING = flexcomm.top_k(1.0, values="fp32")
FEW = flexcomm.demo(k=4, chunk=16)
STEPS = 4


def group_of(world: World, options: BackendOptions | None, name: str = "flexcomm") -> ProcessGroup:
    """Return a group of all ranks."""
    del world
    made: Any = dist.new_group(backend=name, pg_options=options)  # torch's stubs allow that it is none
    return made


def always(compressor: flexcomm.Compressor, **options: Any) -> BackendOptions:  # whatever BackendOptions takes
    """Return options that compress from the first call on, however small."""
    return BackendOptions(compressor, min_bytes=0, start_step=0, **options)


# --- verbs ------------------------------------------------------------------------------------------------------------


def numbers(rank: int, *shape: int) -> Tensor:
    """Return small integers, whose sums are exact."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) % 7 + rank


def _all_reduce(x: Tensor, group: ProcessGroup, **options: Any) -> Tensor:  # of dist.all_reduce
    work = dist.all_reduce(x, group=group, **options)
    if work is not None:
        work.wait()
    return x


def _coalesced(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    xs = [x, x * 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has not yet what it recommends instead
        dist.all_reduce_coalesced(xs, group=group)
    return xs


def _functional(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    return [functional.all_reduce(x, op, group) + 0 for op in ("sum", "avg")]


def _compiled(x: Tensor, group: ProcessGroup) -> Tensor:
    def doubled(x: Tensor) -> Tensor:
        return functional.all_reduce(x * 2, "sum", group).relu()

    out: Tensor = torch.compile(doubled, backend="aot_eager")(x)
    return out


def _gathered(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    out = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(out, x, group=group)
    return out


def _gathered_into_one(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.numel())
    dist.all_gather_single(out, x.view(-1), group=group)
    return out


def _scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.numel())
    dist.reduce_scatter_single(out, x.view(-1).repeat(group.size()), group=group)
    return out


def _broadcast(x: Tensor, group: ProcessGroup) -> Tensor:
    dist.broadcast(x, group=group, group_src=1)
    return x


def _exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(group.size(), 2)
    dist.all_to_all_single(out, x.view(-1)[: 2 * group.size()].view(-1, 2).contiguous(), group=group)
    return out


def _passed_round(x: Tensor, group: ProcessGroup) -> Tensor:
    out, rank, size = torch.empty_like(x), group.rank(), group.size()
    sends = dist.isend(x, group=group, group_dst=(rank + 1) % size)
    dist.recv(out, group=group, group_src=(rank - 1) % size)
    assert sends is not None
    sends.wait()
    return out


def _reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    dist.reduce(x, group=group, group_dst=1)
    return x if group.rank() == 1 else x.new_zeros(1)


def _gathered_by_one(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    out = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(x, out, group=group, group_dst=0)
    return out or []


def _dealt(x: Tensor, group: ProcessGroup) -> Tensor:
    out = torch.empty_like(x)
    dist.scatter(out, [x + 1] * group.size() if group.rank() == 0 else None, group=group, group_src=0)
    return out


def _met(x: Tensor, group: ProcessGroup) -> Tensor:
    dist.barrier(group=group)
    return x


VERBS: dict[str, Callable[[Tensor, ProcessGroup], object]] = {
    "all_reduce": _all_reduce,
    "all_reduce of the largest": lambda x, group: _all_reduce(x, group, op=dist.ReduceOp.MAX),
    "all_reduce of averages": lambda x, group: _all_reduce(x, group, op=dist.ReduceOp.AVG),
    "all_reduce of integers": lambda x, group: _all_reduce(x.to(torch.int64), group),
    "all_reduce, asynchronous": lambda x, group: _all_reduce(x, group, async_op=True),
    "all_reduce of a list": _coalesced,
    "all_reduce, functional": _functional,
    "all_reduce, compiled": _compiled,
    "all_gather": _gathered,
    "all_gather_single": _gathered_into_one,
    "reduce_scatter_single": _scattered,
    "broadcast": _broadcast,
    "all_to_all_single": _exchanged,
    "send and recv": _passed_round,
    "reduce": _reduced,
    "gather": _gathered_by_one,
    "scatter": _dealt,
    "barrier": _met,
}


def every_verb_gives_what_gloo_gives(world: World) -> None:
    """Where all-reduces are compressed, all is sent, so that sums of integers are exact."""
    gloo, exact, everything = (
        group_of(world, None, "gloo"),
        group_of(world, BackendOptions()),
        group_of(world, always(EVERYTHING)),
    )
    for name, verb in VERBS.items():
        expected = verb(numbers(dist.get_rank(), 5, 8), gloo)
        for group in (exact, everything):
            torch.testing.assert_close(
                verb(numbers(dist.get_rank(), 5, 8), group), expected, rtol=0, atol=0, msg=f"{name} of {group}"
            )


def names_and_ranks_are_torchs(world: World) -> None:
    group = group_of(world, BackendOptions())
    assert dist.get_backend(group) == "flexcomm"
    assert (group.rank(), group.size()) == (dist.get_rank(), dist.get_world_size())
    assert dist.get_process_group_ranks(group) == list(range(dist.get_world_size()))
    assert group.group_name


# --- what is compressed -----------------------------------------------------------------------------------------------


def gradients_alone_are_compressed(world: World) -> None:
    group = group_of(world, BackendOptions(FEW, min_bytes=256, start_step=0))
    x = numbers(dist.get_rank(), 64)
    _all_reduce(x.clone(), group)
    for exact in (x[:63].clone(), x.to(torch.int32), x.view(8, 8).clone().t()):
        expected = _all_reduce(exact.clone(), group_of(world, None, "gloo"))
        assert torch.equal(_all_reduce(exact, group), expected)
    with flexcomm.exact():
        assert torch.equal(_all_reduce(x.clone(), group), _all_reduce(x.clone(), group_of(world, None, "gloo")))
    counts = flexcomm.backend_stats(group)
    assert {name: counts[name] for name in ("compressed", "small", "not dense floating tensors", "exact()")} == {
        "compressed": 1,
        "small": 1,
        "not dense floating tensors": 1,
        "exact()": 1,
    }
    assert counts["compressed bytes"] == 256
    assert 0 < counts["payload_bytes"] < 256


def nothing_is_lost(world: World) -> None:
    """Over 30 steps of changing calls, sums and averages alike: what came out and what is kept is what went in."""
    group = group_of(world, always(flexcomm.top_k(1 / 8, values="fp32")))
    assert isinstance(group, CompressingProcessGroup)
    optimizer = SGD([torch.ones(1, requires_grad=True)])
    size, given, got = group.size(), torch.zeros(()), torch.zeros(())
    for step in range(30):
        for numel in (64, 64, 640)[: 1 + step % 3]:
            x = numbers(dist.get_rank() + step, numel)
            given += x.sum()
            op = dist.ReduceOp.AVG if step % 2 else dist.ReduceOp.SUM
            got += _all_reduce(x, group, op=op).sum() * (1 if step % 2 == 0 else size)
        optimizer.step()
    # Ranks of a node hold the residuals of shards of their mean.
    kept = sum(state.sum() for state in group.residuals.state_dict().values()) * world.topology.local_size
    everywhere = torch.stack([given, torch.as_tensor(kept)])
    dist.all_reduce(everywhere)
    torch.testing.assert_close(got + everywhere[1], everywhere[0], rtol=1e-5, atol=0)


def calls_of_one_shape_have_residuals_of_their_own(world: World) -> None:
    group = group_of(world, always(flexcomm.top_k(1 / 8, values="fp32")))
    optimizer = SGD([torch.ones(1, requires_grad=True)])
    for x in (torch.zeros(64), numbers(0, 64)):
        _all_reduce(x, group)
    optimizer.step()
    assert not _all_reduce(torch.zeros(64), group).any(), "the first call got what the second one kept"
    assert _all_reduce(torch.zeros(64), group).any()


def an_exact_call_leaves_the_numbers_of_others_alone(world: World) -> None:
    group = group_of(world, always(flexcomm.top_k(1 / 8, values="fp32")))
    optimizer = SGD([torch.ones(1, requires_grad=True)])
    for x in (torch.zeros(64), numbers(0, 64)):
        _all_reduce(x, group)
    optimizer.step()
    with flexcomm.exact():
        _all_reduce(torch.zeros(64), group)
    assert _all_reduce(torch.zeros(64), group).any(), "what the second call kept is not in the second call"


def what_is_not_finite_is_so_on_all_ranks(world: World) -> None:
    for policy, expected in (("nan", [True] * 64), ("zero", [False] * 64)):
        group = group_of(world, always(EVERYTHING, nonfinite=policy))
        x = numbers(dist.get_rank(), 64)
        if dist.get_rank() == 1:
            x[3] = torch.inf
        assert _all_reduce(x, group).isnan().tolist() == expected
        finite = _all_reduce(numbers(dist.get_rank(), 64), group)
        assert torch.equal(finite, _all_reduce(numbers(dist.get_rank(), 64), group_of(world, None, "gloo")))
    group = group_of(world, always(EVERYTHING, nonfinite="raise"))
    with pytest.raises(NonFiniteError):
        _all_reduce(torch.full((64,), torch.nan), group)


def other_options_on_one_rank_are_an_error_on_all(world: World) -> None:
    for mine, others in ((always(FEW), always(EVERYTHING)), (always(EXACT), BackendOptions(min_bytes=1))):
        with pytest.raises(ConfigMismatchError, match=r"rank 0 has .* but rank 1 has"):
            group_of(world, others if dist.get_rank() else mine)


def a_group_inside_one_node_is_exact_and_says_so_once(world: World) -> None:
    said = _Said()
    logging.getLogger("flexcomm.backend.group").addHandler(said)
    try:
        ranks = world.topology.members[world.topology.node]
        groups = [
            dist.new_group(list(members), backend="flexcomm", pg_options=always(FEW))
            for members in world.topology.members
        ]
        own: Any = groups[world.topology.node]
        for _ in range(2):
            x = numbers(dist.get_rank(), 64)
            expected = torch.stack([numbers(rank, 64) for rank in ranks]).sum(0)
            assert torch.equal(_all_reduce(x, own), expected)
        assert flexcomm.backend_stats(own)["one node"] == 2
        assert sum("one node" in text for text in said.texts) == int(world.topology.local_rank == 0)
    finally:
        logging.getLogger("flexcomm.backend.group").removeHandler(said)


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def statistics_are_of_this_backend_alone(world: World) -> None:
    with pytest.raises(InvalidArgumentError, match="flexcomm"):
        flexcomm.backend_stats(group_of(world, None, "gloo"))


# --- training ---------------------------------------------------------------------------------------------------------


def make_model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(40, 75), ReLU(), Linear(75, 30), ReLU(), Linear(30, 7))


def mesh_of(world: World, options: BackendOptions | None) -> DeviceMesh:
    """Return the mesh of a native HSDP script; with options, by the one argument that changes."""
    shape, names = (world.topology.nodes, world.topology.local_size), ("replicate", "shard")
    if options is None:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={"replicate": ("flexcomm", options)})


def fsdp2(world: World, options: BackendOptions | None) -> Module:
    return sharded(mesh_of(world, options))


def sharded(mesh: DeviceMesh) -> Module:
    model = make_model()
    for layer in model:
        if isinstance(layer, Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(world: World, options: BackendOptions | None) -> Module:
    mesh = mesh_of(world, options)
    return FullyShardedDataParallel(
        make_model(),
        process_group=(mesh.get_group("shard"), mesh.get_group("replicate")),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def ddp(world: World, options: BackendOptions | None) -> Module:
    group = group_of(world, options, "gloo" if options is None else "flexcomm")
    return DistributedDataParallel(make_model(), process_group=group, bucket_cap_mb=0.01)


def wrappers(world: World) -> list[Callable[[World, BackendOptions | None], Module]]:
    """Return what trains here: FSDP1 takes another strategy where nothing is sharded."""
    return [fsdp2, ddp] if world.topology.local_size == 1 else [fsdp2, fsdp1, ddp]


def trained(world: World, model: Module, *, accumulate: int = 1) -> list[Tensor]:
    """Return this rank's part of the parameters after some steps of AdamW."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(1000 * step + 100 * part + dist.get_rank())
            x = torch.randn(8, 40, generator=generator)
            (model(x) - x[:, :7].sin()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    del world
    return [local(param).detach().clone() for param in model.parameters()]


def training_in_full_is_bit_equal_to_the_inner_backend(world: World) -> None:
    for wrap in wrappers(world):
        expected = trained(world, wrap(world, None))
        got = trained(world, wrap(world, always(EXACT)))
        assert all(map(torch.equal, got, expected)), f"{wrap.__name__} is trained otherwise"


def training_with_everything_sent_equals_it_to_rounding(world: World) -> None:
    for wrap in wrappers(world):
        expected = trained(world, wrap(world, None))
        got = trained(world, wrap(world, always(EVERYTHING)))
        # Of gradients near zero AdamW makes steps of up to its learning rate.
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


def replicas_hold_the_same_bits(world: World) -> None:
    """Accumulated gradients, too: each backward pass is a step of its own."""
    for wrap in wrappers(world):
        for accumulate in (1, 2):
            parts = trained(world, wrap(world, always(FEW)), accumulate=accumulate)
            flat = torch.cat([part.reshape(-1) for part in parts])
            for other in world.inter.all_gather(flat).wait():
                assert torch.equal(other, flat), f"{wrap.__name__}, {accumulate} passes: replicas differ"
            if wrap is ddp:
                require_same_everywhere(world, [flat], "replicas are equal")


def every_call_of_a_step_keeps_its_residual(world: World) -> None:
    mesh = mesh_of(world, always(FEW))
    trained(world, sharded(mesh))
    group = mesh.get_group("replicate")
    assert isinstance(group, CompressingProcessGroup)
    assert len(group.residuals.names()) == 3
    assert flexcomm.backend_stats(group)["compressed"] == 3 * STEPS


LAWS: list[Callable[[World], None]] = [
    every_verb_gives_what_gloo_gives,
    names_and_ranks_are_torchs,
    gradients_alone_are_compressed,
    nothing_is_lost,
    calls_of_one_shape_have_residuals_of_their_own,
    an_exact_call_leaves_the_numbers_of_others_alone,
    what_is_not_finite_is_so_on_all_ranks,
    other_options_on_one_rank_are_an_error_on_all,
    a_group_inside_one_node_is_exact_and_says_so_once,
    statistics_are_of_this_backend_alone,
    training_in_full_is_bit_equal_to_the_inner_backend,
    training_with_everything_sent_equals_it_to_rounding,
    replicas_hold_the_same_bits,
    every_call_of_a_step_keeps_its_residual,
]
