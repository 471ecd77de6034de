"""PyTorch's own HSDP, unchanged but for one argument: replicas exchange compressed gradients.

Start it with one of

    mpirun -n 4 python native_hsdp.py
    torchrun --nproc-per-node 4 native_hsdp.py
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flexcomm

WIDTH = 64


def train(world: flexcomm.World, steps: int) -> None:
    mesh = init_device_mesh(
        world.device.type,
        (world.topology.nodes, world.topology.local_size),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": ("flexcomm", flexcomm.BackendOptions(flexcomm.dense(values="sign2")))},
    )
    torch.manual_seed(0)  # FSDP2 takes each shard from the rank that holds it: all must draw the same model.
    block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).to(world.device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        generator = torch.Generator().manual_seed(world.topology.size * step + world.topology.rank)
        x = torch.randn(32, 8, WIDTH, generator=generator).to(world.device)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.topology.rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    check_replicas(model, world)
    if world.topology.rank == 0:
        saved = flexcomm.backend_stats(mesh.get_group("replicate"))["compression"]
        print(f"replicas are equal; nodes sent {saved:.0f} times less than everything")


def check_replicas(model: nn.Module, world: flexcomm.World) -> None:
    """Return if all nodes hold the same bits, else raise."""
    own = torch.cat([param.to_local().detach().flatten() for param in model.parameters()])
    if not all(torch.equal(own, other) for other in world.inter.all_gather(own).wait()):
        raise RuntimeError("nodes hold different models")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    with flexcomm.connect() as job:  # starts torch's process group under any launcher
        train(job, parser.parse_args().steps)
