"""PyTorch's FSDP2: the model is sharded inside a node, and between nodes only what moves fast travels.

Start it with one of

    mpirun -n 4 python fsdp2.py --route optimizer
    torchrun --nproc-per-node 4 fsdp2.py --route hook --save runs/first
    torchrun --nproc-per-node 4 fsdp2.py --route hook --resume runs/first --save runs/second
"""

import argparse
import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import flexcomm
import flexdemo

WIDTH = 64


def make_batch(world: flexcomm.World, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and what to answer; every rank and step has its own."""
    generator = torch.Generator().manual_seed(world.topology.size * step + world.topology.rank)
    x = torch.randn(32, 8, WIDTH, generator=generator).to(world.device)
    return x, x.flip(1)


def make_model(world: flexcomm.World) -> nn.Module:
    mesh = DeviceMesh(world.device.type, world.topology.members, mesh_dim_names=("replicate", "shard"))["shard"]
    torch.manual_seed(0)  # FSDP2 takes each shard from the rank that holds it: all must draw the same model.
    block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).to(world.device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_replicas(model: nn.Module, world: flexcomm.World) -> None:
    """Return if all nodes hold the same bits, else raise on all ranks."""
    whole = torch.cat([param.full_tensor().detach().flatten() for param in model.parameters()]).cpu()
    world.agree({"parameters": hashlib.sha256(whole.numpy().tobytes()).hexdigest()})


def train(world: flexcomm.World, arguments: argparse.Namespace) -> None:
    model, handle = make_model(world), None
    if arguments.route == "optimizer":
        optimizer = flexdemo.FlexDeMo(model.parameters(), lr=3e-3, compressor=flexcomm.demo(k=32), world=world)
    else:
        handle = flexdemo.attach_to_fsdp(model, flexcomm.demo(k=32), world=world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if arguments.resume:
        flexdemo.load_checkpoint(arguments.resume, model, optimizer, handle)
    begun = handle.step if handle is not None else optimizer.param_groups[0]["step"]
    for step in range(begun, begun + arguments.steps):
        x, target = make_batch(world, step)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.topology.rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if arguments.save:
        flexdemo.save_checkpoint(arguments.save, model, optimizer, handle)
    check_replicas(model, world)
    if world.topology.rank == 0:
        print(f"replicas are equal; nodes sent {world.stats()['compression']:.0f} times less than everything")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--route", choices=["optimizer", "hook"], default="optimizer")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", metavar="FOLDER", help="go on from what --save left there")
    parser.add_argument("--save", metavar="FOLDER", help="a folder that all nodes see")
    arguments = parser.parse_args()
    with flexcomm.connect() as connected:
        train(connected, arguments)
