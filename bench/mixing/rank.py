"""Ranks of ``bench mixing``: the same model, trained by every method, interleaved."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import flexcomm
from bench.step.peers import PEERS_COMMAND
from flexcomm import World, gossip
from flexdemo import DecentralizedAdam

_STEPS = 4
"""Steps of a method in each round."""
_WARMUPS = 2
_BATCH = 4
_BUCKET_MB = 25
_SETTLE_S = 0.15
"""Pause after the steps of a method, for its messages to arrive: their cost counts for the method that sent them."""

Step = Callable[[], object]


class Spent(NamedTuple):
    """Processor seconds of a step: of all threads, and of the main one."""

    all_s: float
    main_s: float


def main(result: Path, rounds: int, width: int) -> None:
    """Run all methods, interleaved; rank 0 writes their processor times to ``result``."""
    torch.set_num_threads(1)
    with flexcomm.connect(timeout_s=120) as world:
        methods: dict[str, Step] = {
            "AdamW": trained(width, world, None),
            "sent to peers": trained(width, world, PeersOnly),
            "sent to all": trained(width, world, AllReduceOnly),
            "DecentralizedAdam": ours(width, world),
        }
        missing = ""
        try:
            methods["decent-dp"] = decent_dp(width)
        except ModuleNotFoundError as error:
            missing = f"no module {error.name}: `{PEERS_COMMAND}` in the checkout"
        spent = {name: mean_over_ranks(seen, world) for name, seen in interleave(methods, rounds, world).items()}
        numel = sum(param.numel() for param in build(width).parameters())
        if world.topology.rank == 0:
            found = {"rows": rows_of(spent), "missing": missing, "parameters": numel}
            result.write_text(json.dumps(found))


def rows_of(spent: dict[str, Spent]) -> dict[str, dict[str, float]]:
    """Return the processor time of each method and, of the two compared, the overhead over training and sending."""
    rows = {name: {"all_s": one.all_s, "main_s": one.main_s} for name, one in spent.items()}
    for name, sent in {"DecentralizedAdam": "sent to peers", "decent-dp": "sent to all"}.items():
        if name in rows:
            rows[name]["sent_s"] = spent[sent].all_s
            rows[name]["overhead_s"] = spent[name].all_s - spent[sent].all_s
            rows[name]["main_overhead_s"] = spent[name].main_s - spent[sent].main_s
    return rows


def interleave(methods: dict[str, Step], rounds: int, world: World) -> dict[str, Spent]:
    seen: dict[str, list[Spent]] = {name: [] for name in methods}
    for number in range(_WARMUPS + rounds):
        for name, step in methods.items():
            world.control.barrier().wait()
            before = Spent(time.process_time(), time.thread_time())
            for _ in range(_STEPS):
                step()
            main_s = time.thread_time()
            time.sleep(_SETTLE_S)
            if number >= _WARMUPS:
                all_s = time.process_time() - before.all_s
                seen[name].append(Spent(all_s / _STEPS, (main_s - before.main_s) / _STEPS))
    return {
        name: Spent(*(statistics.median(column) for column in zip(*one, strict=True))) for name, one in seen.items()
    }


def mean_over_ranks(spent: Spent, world: World) -> Spent:
    """Return the mean over ranks: work that one rank saves another may do."""
    gathered = world.control.all_gather(torch.tensor(spent, dtype=torch.float64)).wait()
    return Spent(*gathered.mean(dim=0).tolist())


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(2) for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    ]
    return nn.Sequential(*layers)


def batch(width: int) -> Tensor:
    return torch.randn(_BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))


def trained(width: int, world: World, make: Callable[[nn.Module], Any] | None) -> Step:
    """Return a step of AdamW, after which the sender that ``make(model)`` returns, if any, sends as many bytes."""
    model, x = build(width), batch(width)
    optimizer, sender = AdamW(model.parameters(), fused=True), make(model) if make else None

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if sender is not None:
            sender.wait()
        optimizer.step()
        if sender is not None:
            sender.send(world)

    return step


class AllReduceOnly:
    """Sums buffers as large as the model, and does nothing with them: the communication of ``decent-dp``."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = flat_buckets(model)
        self._works: list[Any] = []

    def send(self, world: World) -> None:
        del world
        self._works = [dist.all_reduce(buffer, async_op=True) for buffer in self._buffers]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class PeersOnly:
    """Swaps buffers as large as the model with one peer, and does nothing with them: the communication of mixing."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = flat_buckets(model)
        self._receive_buffers = [torch.empty_like(buffer) for buffer in self._buffers]
        self._works: list[Any] = []
        self._step = 0

    def send(self, world: World) -> None:
        schedule = gossip.base(world.topology.nodes)
        peer = gossip.round_of(schedule.phase(self._step), world.topology.node).sends_to[0]
        self._step += 1
        for buffer, received in zip(self._buffers, self._receive_buffers, strict=True):
            messages = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, buffer, peer)]
            self._works += dist.batch_isend_irecv(messages)

    def wait(self) -> None:
        while self._works:
            self._works.pop().wait()


def flat_buckets(model: nn.Module) -> list[Tensor]:
    """Return buffers of the lengths that buckets of whole parameters have."""
    buckets, numel = [], 0
    for param in reversed(list(model.parameters())):
        numel += param.numel()
        if 4 * numel >= _BUCKET_MB << 20:
            buckets.append(numel)
            numel = 0
    return [torch.randn(length) for length in (*buckets, numel) if length]


def ours(width: int, world: World) -> Step:
    model, x = build(width), batch(width)
    optimizer = DecentralizedAdam(
        model.parameters(),
        weight_decay=1e-2,
        schedule=gossip.base(world.topology.nodes),
        world=world,
        overlap="backward",
        bucket_bytes=_BUCKET_MB << 20,
        fused=True,
    )

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def decent_dp(width: int) -> Step:
    """Return a step of the peer, with the same optimizer; its topologies of pairs want a power of two."""
    peer = import_module("decent_dp.ddp")
    topology = "complete" if dist.get_world_size() == 2 else "one-peer-exp"
    x = batch(width)
    model = peer.DecentralizedDataParallel(
        build(width),
        lambda named: AdamW([param for _, param in named], fused=True),
        topology=topology,
        bucket_size_in_mb=_BUCKET_MB,
        _local_world_size=1,
    )

    def step() -> None:
        model(x).square().mean().backward()

    return step


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
