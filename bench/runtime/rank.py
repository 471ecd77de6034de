"""Ranks of ``bench runtime``: calibration, where a job asks for it, and training of a paced model by every method.

``python -m bench.runtime.rank FOLDER``, under a launcher; the jobs are in the folder, and rank 0 writes their results.
Calibration measures computing and communicating apart: the time of each collective by size, one at a time, and the time
of an iteration on the host, without sleep and without waiting for others.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import flexcomm
from bench.runtime.methods import (
    AllReduceTraining,
    DecentralizedTraining,
    FlexDeMoTraining,
    Method,
    PacedModel,
    make_method,
)
from bench.runtime.plan import ELEMENT_NBYTES, HostCosts, Job, JobResult, Load, read_jobs, write_results
from flexcomm import World, gossip, start_mix
from flexcomm.gossip import Phase, Schedule
from flexdemo.runtime import LinkTable

_BUCKET_SHARES = (0.25, 1.0, 2.0)
_PAYLOAD_SHARES = (1 / 256, 1 / 64, 1 / 16)
_PAIR = 2
_WARMUP_ROUNDS = 2


def measure_links(load: Load, world: World, rounds: int) -> list[LinkTable]:
    """Return the times of all collectives that methods on this cluster use. All ranks call it together."""
    nodes, inter = world.topology.nodes, world.inter
    buckets = [int(share * load.bucket_nbytes) for share in _BUCKET_SHARES]
    payloads = [int(share * load.bucket_nbytes) for share in _PAYLOAD_SHARES]
    collectives: list[tuple[str, int, list[int], Callable[[Tensor], object]]] = [
        ("group", _PAIR, buckets, lambda x: _swap(x, gossip.ring(nodes), world)),
        ("all-reduce", nodes, buckets, lambda x: inter.all_reduce(x).wait()),
        ("gather", nodes, payloads, lambda x: inter.all_gather(x).wait()),
    ]
    if nodes > _PAIR:
        collectives.append(("group", nodes, buckets, lambda x: _swap(x, gossip.complete(nodes), world)))
    return [_measure_link(*one, world, rounds) for one in collectives]


def _swap(x: Tensor, schedule: Schedule, world: World) -> None:
    """Return when everything has arrived; averaging is the host's work, and measured there."""
    start_mix(x, schedule, 0, world=world, out=x).wait_received()


def _measure_link(
    link: str, k: int, sizes: Sequence[int], collective: Callable[[Tensor], object], world: World, rounds: int
) -> LinkTable:
    tensors = [torch.zeros(size // ELEMENT_NBYTES) for size in sizes]
    seconds = [_slowest_s(partial(collective, x), world, rounds) for x in tensors]
    return LinkTable(link, k, tuple(x.nbytes for x in tensors), tuple(seconds))


def measure_host(load: Load, world: World, rounds: int) -> HostCosts:
    """Return the costs of iterations on the host. All ranks call it together."""
    idle, nodes = replace(load, forward_s=0.0, backward_s=0.0), world.topology.nodes
    model = partial(PacedModel, idle, world.topology.node)
    alone = DecentralizedTraining(model(), world, _silent(nodes, _WARMUP_ROUNDS + rounds), "step")
    flexdemo = partial(_flexdemo_costs, FlexDeMoTraining(model(), world, overlap=False), idle.buckets, world)
    encode_s, decode_s, rest_s, payload_nbytes = _medians(_gather(flexdemo, world, rounds).mean(dim=0))
    (mix_s,) = _medians(_gather(partial(_mix_costs, idle, world), world, rounds).mean(dim=0))
    all_reduce = AllReduceTraining(model(), world, communicates=False)
    return HostCosts(
        all_reduce_s=_slowest_s(partial(all_reduce.iterate, 1.0), world, rounds),
        decentralized_s=_slowest_s(partial(alone.iterate, 1.0), world, rounds),
        mix_s=idle.buckets * mix_s,
        encode_s=encode_s,
        decode_s=decode_s,
        flexdemo_s=rest_s,
        payload_nbytes=payload_nbytes,
    )


def _silent(nodes: int, steps: int) -> Schedule:
    """Return a schedule without messages for ``steps`` steps; one without any message at all would be refused."""
    return Schedule("silent", nodes, (Phase(),) * (steps + 1) + gossip.complete(nodes).phases)


def _mix_costs(load: Load, world: World) -> list[float]:
    # Not zeros, whose pages would be there only once they are written, while the clock runs.
    x = torch.ones(load.bucket_nbytes // ELEMENT_NBYTES)
    handle = start_mix(x, gossip.ring(world.topology.nodes), 0, world=world, out=x)
    handle.wait_received()
    return [_seconds_of(handle.wait)]


def _flexdemo_costs(method: Method, buckets: int, world: World) -> list[float]:
    """Return the seconds of an iteration by phase, and a bucket's payload bytes."""
    total_s = _seconds_of(lambda: method.iterate(1.0))
    records = world.recent_syncs()[-buckets:]
    encode_s, decode_s, waiting_s = (
        sum(record[name] for record in records) for name in ("encode_s", "decode_s", "waiting_s")
    )
    return [encode_s, decode_s, total_s - encode_s - decode_s - waiting_s, records[0]["payload_bytes"]]


def _slowest_s(call: Callable[[], object], world: World, rounds: int) -> float:
    """Return the median, over rounds, of the seconds that the slowest rank took."""
    (seconds,) = _medians(_gather(lambda: [_seconds_of(call)], world, rounds).amax(dim=0))
    return seconds


def _gather(measure: Callable[[], list[float]], world: World, rounds: int) -> Tensor:
    """Return the measurements of all ranks, ``[ranks, rounds, numbers]``; they begin a round together."""
    seen = []
    for _ in range(_WARMUP_ROUNDS + rounds):
        world.control.barrier().wait()
        seen.append(measure())
    return world.control.all_gather(torch.tensor(seen[_WARMUP_ROUNDS:], dtype=torch.float64)).wait()


def _medians(numbers: Tensor) -> list[float]:
    """Return the median of each column of ``[rounds, numbers]``."""
    return [median(column) for column in numbers.T.tolist()]


def _seconds_of(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def run_job(job: Job, world: World) -> JobResult:
    """Return the results of a job, the same on every rank. All ranks call it together."""
    tables = tuple(measure_links(job.load, world, job.rounds)) if job.rounds else ()
    costs = measure_host(job.load, world, job.rounds) if job.rounds else None
    return JobResult(tables, costs, {method: measure_iterations(method, job, world) for method in job.methods})


def measure_iterations(method: str, job: Job, world: World) -> list[float]:
    """Return the end of each iteration on the last rank, in seconds since the start. All ranks call it together."""
    topology, load = world.topology, job.load
    trained = make_method(method, PacedModel(load, topology.node), world)
    workload = load.workload()
    factors = [float(workload.draw(topology.nodes, step, load.seed)[topology.node]) for step in range(job.steps)]
    ends_s = []
    world.control.barrier().wait()
    begin_s = time.perf_counter()
    for factor in factors:
        trained.iterate(factor)
        ends_s.append(time.perf_counter() - begin_s)
    trained.finish()
    gathered = world.control.all_gather(torch.tensor(ends_s, dtype=torch.float64)).wait()
    finished_s: list[float] = gathered.amax(dim=0).tolist()
    return finished_s


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with flexcomm.connect() as world:
        found = [run_job(job, world) for job in read_jobs(folder)]
        if world.topology.rank == 0:
            write_results(found, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
