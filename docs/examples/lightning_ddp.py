"""Lightning: DDP over all ranks, whose gradients are compressed between nodes.

Start it with one of

    mpirun -n 4 python lightning_ddp.py
    torchrun --nproc-per-node 4 lightning_ddp.py
"""

import argparse
import hashlib

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flexcomm
import flexdemo

WIDTH, BATCH = 64, 32


class Connected(LightningEnvironment):
    """Lightning's place in the job is flexcomm's: by itself it asks each launcher in another way, and knows hosts."""

    creates_processes_externally = True

    def __init__(self, topology: flexcomm.Topology) -> None:
        super().__init__()
        self.topology = topology

    def node_rank(self) -> int:
        return self.topology.node

    def local_rank(self) -> int:
        return self.topology.local_rank

    def global_rank(self) -> int:
        return self.topology.rank


class Model(LightningModule):
    """A small network that learns to mirror what it sees."""

    def __init__(self, world: flexcomm.World) -> None:
        super().__init__()
        self.world = world
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def on_fit_start(self) -> None:
        # Not by DDPStrategy(ddp_comm_hook=...): Lightning registers that on CUDA, and on a CPU silently does not.
        flexdemo.attach_to_ddp(self.trainer.strategy.model, flexcomm.demo(k=32), world=self.world)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
        if self.global_rank == 0:
            print(f"step {batch_idx} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def check_replicas(model: nn.Module, world: flexcomm.World) -> None:
    """Return if all ranks hold the same bits, else raise on all of them."""
    whole = torch.cat([param.detach().flatten() for param in model.parameters()]).cpu()
    world.agree({"parameters": hashlib.sha256(whole.numpy().tobytes()).hexdigest()})


def train(world: flexcomm.World, steps: int) -> None:
    x = torch.randn(steps * world.topology.size * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        accelerator=world.device.type,
        devices=world.topology.local_size,
        num_nodes=world.topology.nodes,
        strategy=DDPStrategy(cluster_environment=Connected(world.topology)),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Model(world)
    trainer.fit(model, DataLoader(TensorDataset(x, x.flip(1).tanh()), BATCH, shuffle=True))
    check_replicas(model, world)
    if world.topology.rank == 0:
        print(f"replicas are equal; nodes sent {world.stats()['compression']:.0f} times less than everything")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    with flexcomm.connect() as connected:
        train(connected, arguments.steps)
