"""Laws of ranks on devices: short, with exact inputs. All ranks of a world call a law together.

On a machine without devices they hold on the host, which is how they are tested.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import GELU, Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import flexcomm
from bench.world import hold_same_bits
from flexcomm import World, gossip
from flexcomm.testing import check_transport
from flexcomm.testing.cases import require, require_equal
from flexdemo import FlexDeMo, attach_to_ddp, attach_to_fsdp
from flexdemo.parameters import local

_SHAPES = ((128, 96), (70, 33), (1000,))
_STEPS = range(3)
_SPARSE = flexcomm.demo(k=4, chunk=16, values="fp32")
"""So sparse that among few nodes no bucket is better sent in full."""
_COMPRESSORS = (
    _SPARSE,
    flexcomm.demo(k=4, chunk=16, values="sign"),
    flexcomm.top_k(1 / 32),
    flexcomm.random_k(1 / 32),
    flexcomm.dense(torch.float32),
)
_WIDTH, _HIDDEN, _OUTPUTS = 40, 75, 7
"""Not multiples of anything: shards are uneven."""
_EIGHTHS = 8.0


def carries_device_memory(world: World) -> None:
    """Both transports keep every law of a transport with this rank's device."""
    for transport in (world.intra, world.inter):
        check_transport(transport, world.device.type)


def sync_gives_the_bits_of_the_host(world: World) -> None:
    """What is synchronised on devices is what is synchronised on hosts, and the same on all ranks."""
    sync = partial(flexcomm.hierarchical_sync, world=world, names=["a", "b", "c"])
    for compressor in _COMPRESSORS:
        here, there = flexcomm.Residuals(), flexcomm.Residuals()
        for step in _STEPS:
            xs = [_eighths(world, step, shape) for shape in _SHAPES]
            on_device = sync([x.to(world.device) for x in xs], compressor, residuals=here, step=step)
            on_host = sync(xs, compressor, residuals=there, step=step)
            for got, expected in zip(on_device, on_host, strict=True):
                require(world, got.device == world.device, f"{compressor} leaves tensors on their device")
                require_equal(world, got.cpu(), expected, f"{compressor}, step {step}: devices do what hosts do")
            require(world, hold_same_bits(on_device, world), f"{compressor}: all ranks hold the same bits")


def everything_sent_is_the_exact_mean(world: World) -> None:
    """Sums of eighths are exact, so that no order of adding matters."""
    x = _eighths(world, 0, _SHAPES[0])
    out = flexcomm.hierarchical_sync(x.to(world.device), flexcomm.dense(torch.float32), world=world)
    of_all_ranks = torch.stack([_eighths(world, 0, _SHAPES[0], rank) for rank in range(world.topology.size)])
    torch.testing.assert_close(out.cpu(), of_all_ranks.mean(dim=0), rtol=2.0**-22, atol=0)


def mixing_gives_the_bits_of_the_host(world: World) -> None:
    nodes = world.topology.nodes
    for schedule in (gossip.complete(nodes), gossip.alternating_exponential_ring(nodes), gossip.ring(nodes)):
        for step in _STEPS:
            x = _eighths(world, step, _SHAPES[0])
            on_device = flexcomm.mix(x.to(world.device), schedule, step, world=world).tensors
            on_host = flexcomm.mix(x, schedule, step, world=world).tensors
            require_equal(world, on_device.cpu(), on_host, f"{schedule}, step {step}: devices mix as hosts do")


def the_fsdp2_hook_is_the_optimizers_exchange(world: World) -> None:
    """SGD on what the hook brings takes the plain steps of FlexDeMo: to the bit, for a power of two as rate."""
    hooked, other = shard(make_model(world), world), shard(make_model(world), world)
    attach_to_fsdp(hooked, _SPARSE, world=world, decay=0.875, average="contributors")
    train(hooked, SGD(hooked.parameters(), 0.25), world, _STEPS)
    flexdemo = FlexDeMo(other.named_parameters(), 0.25, compressor=_SPARSE, world=world, decay=0.875, update="plain")
    train(other, flexdemo, world, _STEPS)
    _require_equal_models(world, hooked, other, "the hook does what the optimizer does")


def replicas_follow_the_ddp_hook(world: World) -> None:
    # DDP sends its parameters over its own group, and NCCL refuses ranks that share a device.
    group = torch.distributed.new_group(backend="gloo") if shares_devices(world) else None
    model = DistributedDataParallel(make_model(world), process_group=group, bucket_cap_mb=0.01)
    before = [one.detach().clone() for one in model.parameters()]
    attach_to_ddp(model, _SPARSE, world=world)
    train(model, torch.optim.AdamW(model.parameters(), 0.01), world, _STEPS)
    after = [one.detach() for one in model.parameters()]
    require(world, hold_same_bits(after, world), "replicas stay alike")
    require(world, not any(map(torch.equal, before, after)), "every parameter is trained")


def a_checkpoint_read_to_the_host_goes_on(world: World) -> None:
    """``map_location="cpu"`` puts states on the host; loading brings them back to their device."""
    model, other = make_model(world), make_model(world, seed=5)
    optimizer, resumed = (
        FlexDeMo(one.named_parameters(), 0.25, compressor=_SPARSE, world=world) for one in (model, other)
    )
    train(model, optimizer, world, _STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, world, range(3, 5))
    _require_equal_models(world, model, other, "a run goes on as if it had not stopped")


LAWS: Mapping[str, tuple[Callable[[World], None], ...]] = {
    "transport": (carries_device_memory,),
    "sync": (sync_gives_the_bits_of_the_host, everything_sent_is_the_exact_mean),
    "mixing": (mixing_gives_the_bits_of_the_host,),
    "fsdp2_hook": (the_fsdp2_hook_is_the_optimizers_exchange,),
    "ddp_hook": (replicas_follow_the_ddp_hook,),
    "checkpoint": (a_checkpoint_read_to_the_host_goes_on,),
}


def shares_devices(world: World) -> bool:
    """Return whether this host has more ranks than devices."""
    return world.device.type != "cpu" and world.topology.size > torch.accelerator.device_count()


def make_model(world: World, seed: int = 0, width: int = _WIDTH, blocks: int = 2) -> Sequential:
    """Return a model whose parameters are the same on every rank."""
    torch.manual_seed(seed)
    hidden = _HIDDEN * width // _WIDTH
    layers = [Sequential(Linear(width, hidden), GELU(), Linear(hidden, width)) for _ in range(blocks)]
    return Sequential(*layers, Linear(width, _OUTPUTS)).to(world.device)


def shard(model: Sequential, world: World) -> Sequential:
    """Shard a model inside each node, as FSDP2 does. All ranks make the groups, so all call it together."""
    mesh = DeviceMesh(world.device.type, world.topology.members, mesh_dim_names=("replicate", "shard"))["shard"]
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: Module, optimizer: torch.optim.Optimizer, world: World, steps: range, width: int = _WIDTH) -> None:
    """Take steps on batches that follow from step and rank."""
    for step in steps:
        draw = torch.Generator().manual_seed(1000 * step + world.topology.rank)
        batch = torch.randn(4, width, generator=draw).to(world.device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _eighths(world: World, step: int, shape: tuple[int, ...], rank: int | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + (world.topology.rank if rank is None else rank))
    return torch.randint(-64, 64, shape, generator=draw) / _EIGHTHS


def _require_equal_models(world: World, one: Module, other: Module, law: str) -> None:
    for (name, x), y in zip(one.named_parameters(), other.parameters(), strict=True):
        require_equal(world, local(x).detach(), local(y).detach(), f"{law}: {name}")
