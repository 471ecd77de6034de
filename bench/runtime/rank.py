"""What every rank of ``bench runtime`` does: calibrates, if asked to, and trains a paced model by every method.

``python -m bench.runtime.rank FOLDER``, under a launcher; the jobs lie in the folder, and rank 0 writes what was found.
"""

import sys
import time
from pathlib import Path

import torch

import flexcomm
from bench.runtime.calibrate import measure_host, measure_links
from bench.runtime.found import Found, write_found
from bench.runtime.methods import make_contestant
from bench.runtime.paced import PacedModel
from bench.runtime.plan import Job, read_jobs
from flexcomm import World


def run_job(job: Job, world: World) -> Found:
    """Return what was found, the same on every rank. All ranks call it together."""
    tables = tuple(measure_links(job.load, world, job.rounds)) if job.rounds else ()
    costs = measure_host(job.load, world, job.rounds) if job.rounds else None
    return Found(tables, costs, {method: measure_iterations(method, job, world) for method in job.methods})


def measure_iterations(method: str, job: Job, world: World) -> list[float]:
    """Return when the last rank had finished each iteration, in seconds since all began. All ranks call it together."""
    place, load = world.topology, job.load
    contestant = make_contestant(method, PacedModel(load, place.node), world)
    workload = load.workload()
    factors = [float(workload.draw(place.nodes, step, load.seed)[place.node]) for step in range(job.steps)]
    ends_s = []
    world.control.barrier().wait()
    begin_s = time.perf_counter()
    for factor in factors:
        contestant.iterate(factor)
        ends_s.append(time.perf_counter() - begin_s)
    contestant.finish()
    gathered = world.control.all_gather(torch.tensor(ends_s, dtype=torch.float64)).wait()
    finished_s: list[float] = gathered.amax(dim=0).tolist()
    return finished_s


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with flexcomm.connect() as world:
        found = [run_job(job, world) for job in read_jobs(folder)]
        if world.topology.rank == 0:
            write_found(found, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
