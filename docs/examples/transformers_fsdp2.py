"""Hugging Face transformers: GPT-2 or T5, sharded inside a node by FSDP2 and trained between nodes by FlexDeMo.

Start it with one of

    mpirun -n 4 python transformers_fsdp2.py --model gpt2
    torchrun --nproc-per-node 4 transformers_fsdp2.py --model t5
"""

import argparse
import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, T5Config, T5ForConditionalGeneration

import flexcomm
import flexdemo

VOCABULARY = 64


def make_gpt2() -> tuple[PreTrainedModel, list[nn.Module]]:
    """Return a small GPT-2, and its blocks."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    return model, [*model.transformer.h]


def make_t5() -> tuple[PreTrainedModel, list[nn.Module]]:
    """Return a small T5, and the blocks of its encoder and its decoder."""
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    return model, [*model.encoder.block, *model.decoder.block]


def make_tokens(world: flexcomm.World, step: int) -> Tensor:
    """Return lines that count up from anywhere; every rank and step has its own."""
    generator = torch.Generator().manual_seed(world.topology.size * step + world.topology.rank)
    first = torch.randint(VOCABULARY, (16, 1), generator=generator)
    return ((first + torch.arange(16)) % VOCABULARY).to(world.device)


def group_parameters(model: nn.Module) -> list[dict[str, object]]:
    """Return two groups: matrices, and embeddings and norms, of which the largest elements travel as they are.

    The rows of an embedding are in no order, so DeMo's cosine transform has no waves to find there.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) or "Norm" in type(m).__name__]
    apart = {param for module in tables for param in module.parameters()}
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if param not in apart], "compressor": flexcomm.demo(k=32)},
        {"params": [(name, param) for name, param in named if param in apart], "compressor": flexcomm.top_k(1 / 8)},
    ]


def check_replicas(model: nn.Module, world: flexcomm.World) -> None:
    """Return if all nodes hold the same bits, else raise on all ranks."""
    whole = torch.cat([param.full_tensor().detach().flatten() for param in model.parameters()]).cpu()
    world.agree({"parameters": hashlib.sha256(whole.numpy().tobytes()).hexdigest()})


def train(world: flexcomm.World, name: str, steps: int) -> None:
    torch.manual_seed(0)  # FSDP2 takes each shard from the rank that holds it: all must draw the same model.
    model, blocks = make_gpt2() if name == "gpt2" else make_t5()
    model.to(world.device)
    mesh = DeviceMesh(world.device.type, world.topology.members, mesh_dim_names=("replicate", "shard"))["shard"]
    for module in [*blocks, model]:  # Last the model itself: embeddings and head share one tensor, so one unit.
        fully_shard(module, mesh=mesh)
    optimizer = flexdemo.FlexDeMo(group_parameters(model), lr=3e-3, world=world)
    for step in range(steps):
        tokens = make_tokens(world, step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.topology.rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    check_replicas(model, world)
    if world.topology.rank == 0:
        print(f"replicas are equal; nodes sent {world.stats()['compression']:.0f} times less than everything")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["gpt2", "t5"], default="gpt2")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    with flexcomm.connect() as connected:
        train(connected, arguments.model, arguments.steps)
