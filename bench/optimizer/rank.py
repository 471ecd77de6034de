"""Ranks of ``bench optimizer``: a GPT sharded by FSDP1 inside its node, stepped by both optimizers.

FSDP1, because that is what ``detonation`` 0.5.2 takes; both then see the same flat shards.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

import flexcomm
from bench.step.peers import PEERS_COMMAND
from bench.train.model import build_model, find_size, loss_of
from flexcomm import World
from flexdemo import FlexDeMo

_K, _CHUNK, _DECAY, _LR = 4, 64, 0.999, 1e-3
_WARMUPS = 2
_SIZE = "wide"


class Method(NamedTuple):
    """A sharded model and its optimizer; ``context`` wraps its backward pass, ``sent`` returns a step's bytes."""

    model: FullyShardedDataParallel
    optimizer: Optimizer
    context: Callable[[], AbstractContextManager[None]]
    sent: Callable[[], float]


def main(result: Path, steps: int) -> None:
    """Measure both; rank 0 writes the values of the slowest rank to ``result``."""
    torch.set_num_threads(1)
    with flexcomm.connect(timeout_s=120) as world:
        mesh = DeviceMesh("cpu", world.topology.members, mesh_dim_names=("node", "shard"))
        rows, missing = {"FlexDeMo": _measure(_ours(world, mesh), world, steps)}, ""
        try:
            rows["detonation"] = _measure(_detonation(mesh), world, steps)
        except ModuleNotFoundError as error:
            missing = f"no module {error.name}: `{PEERS_COMMAND}` in the checkout"
        if world.topology.rank == 0:
            result.write_text(json.dumps({"rows": rows, "missing": missing}))


def _measure(method: Method, world: World, steps: int) -> dict[str, float]:
    """Return medians over steps, the maximum over ranks."""
    size, seen = find_size(_SIZE), []
    generator = torch.Generator().manual_seed(world.topology.rank)
    for number in range(_WARMUPS + steps):
        method.optimizer.zero_grad()
        with method.context():
            windows = torch.randint(256, (1, size.context + 1), generator=generator)
            torch.autograd.backward(loss_of(method.model, windows))
        held = sum(p.grad.numel() for p in method.model.parameters() if p.grad is not None)
        world.control.barrier().wait()
        main_s, all_s = time.thread_time(), time.process_time()
        method.optimizer.step()
        main_s, all_s = time.thread_time() - main_s, time.process_time() - all_s
        if number >= _WARMUPS:
            seen.append((main_s, all_s, method.sent(), float(held)))
    shard = sum(p.numel() for p in method.model.parameters())
    main_s, all_s, sent, held = (statistics.median(column) for column in zip(*seen, strict=True))
    own = torch.tensor([main_s, all_s, sent, held / shard], dtype=torch.float64)
    most = world.control.all_gather(own).wait().amax(dim=0).tolist()
    return dict(zip(("main_cpu_s", "all_cpu_s", "sent_nbytes", "gradients_of_shard"), most, strict=True))


def _sharded(group: Any, strategy: ShardingStrategy) -> FullyShardedDataParallel:  # a group, or a pair of them
    options = {"process_group": group, "sharding_strategy": strategy, "device_id": torch.device("cpu")}
    model = build_model(find_size(_SIZE), 0, torch.device("cpu"))
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def _ours(world: World, mesh: DeviceMesh) -> Method:
    model = _sharded(mesh.get_group("shard"), ShardingStrategy.FULL_SHARD)
    compressor = flexcomm.demo(_K, _CHUNK)
    optimizer = FlexDeMo(model.parameters(), _LR, compressor=compressor, decay=_DECAY, world=world)
    return Method(model, optimizer, nullcontext, lambda: world.recent_syncs()[-1]["inter_sent_bytes"])


def _detonation(mesh: DeviceMesh) -> Method:
    """Return its own optimizer, on HYBRID_SHARD without FSDP's reduction, as its documentation has it."""
    detonation = import_module("detonation")
    groups = mesh.get_group("shard"), mesh.get_group("node")
    model = _sharded(groups, ShardingStrategy.HYBRID_SHARD)
    replicator = detonation.DeMoReplicator(_DECAY, compression_topk=_K, compression_chunk=_CHUNK)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # It prints the chunks it found.
        optimizer = detonation.DeToSGD(
            model.parameters(),
            lr=_LR,
            replicator=replicator,
            sharding_parallel_group=groups[0],
            replication_parallel_group=groups[1],
        )
    others = dist.get_world_size(groups[1]) - 1
    return Method(model, optimizer, model.no_sync, lambda: others * float(replicator.data_transmitted[-1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
