"""Hugging Face accelerate: DDP over all ranks, whose gradients are compressed between nodes.

Start it with one of

    mpirun -n 4 python accelerate_ddp.py
    torchrun --nproc-per-node 4 accelerate_ddp.py
"""

import argparse
import hashlib
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexcomm
import flexdemo

WIDTH, BATCH = 64, 32


def announce(topology: flexcomm.Topology) -> None:
    """Set what torchrun sets and mpirun does not: accelerate looks for its place there, and for GPUs there only."""
    place = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.size,
        "LOCAL_RANK": topology.local_rank,
        "LOCAL_WORLD_SIZE": topology.local_size,
        "MASTER_ADDR": "localhost",  # Asked for, but not used: torch's process group is there already.
    }
    for name, value in place.items():
        os.environ.setdefault(name, str(value))


def check_replicas(model: nn.Module, world: flexcomm.World) -> None:
    """Return if all ranks hold the same bits, else raise on all of them."""
    whole = torch.cat([param.detach().flatten() for param in model.parameters()]).cpu()
    world.agree({"parameters": hashlib.sha256(whole.numpy().tobytes()).hexdigest()})


def train(world: flexcomm.World, steps: int) -> None:
    announce(world.topology)
    accelerator = Accelerator(cpu=world.device.type == "cpu")
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(steps * world.topology.size * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.flip(1).tanh()), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Here, and not by accelerate's DistributedDataParallelKwargs: those know torch's own hooks only.
    flexdemo.attach_to_ddp(model, flexcomm.demo(k=32), world=world)
    for step, (x, target) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    check_replicas(model, world)
    if accelerator.is_main_process:
        print(f"replicas are equal; nodes sent {world.stats()['compression']:.0f} times less than everything")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    with flexcomm.connect() as connected:
        train(connected, arguments.steps)
