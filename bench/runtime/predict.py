"""What the model says an iteration takes, from fitted figures alone: nothing measured on the cluster is looked at."""

from bench.runtime.fit import Fitted
from bench.runtime.found import seconds_per_iteration
from bench.runtime.plan import METHODS, Job
from flexcomm.gossip import Schedule
from flexdemo.runtime import (
    Cluster,
    Horizon,
    Timing,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)


def predict(method: str, job: Job, nodes: int, rate_bits_per_s: float, fitted: Fitted) -> float:
    """Return the seconds per iteration, of the same iterations, with the same draws, that are measured."""
    timing = _simulate(method, job, nodes, rate_bits_per_s, fitted)
    return seconds_per_iteration(timing.finished_s, job.warmups, period_of(method, nodes))


def period_of(method: str, nodes: int) -> int:
    """Return after how many iterations a method's exchanges repeat."""
    make_schedule = METHODS[method].schedule
    return 1 if make_schedule is None else make_schedule(nodes).period


def _simulate(method: str, job: Job, nodes: int, rate_bits_per_s: float, fitted: Fitted) -> Timing:
    recipe, load, host = METHODS[method], job.load, fitted.host
    crowd = fitted.crowd(nodes)
    horizon = Horizon(job.steps, job.warmups, load.seed)
    if recipe.schedule is not None:
        schedule = recipe.schedule(nodes)
        cluster = Cluster(nodes, fitted.links_at(rate_bits_per_s, busy_nodes(schedule)))
        # Nodes that wait for few others do not all step at the same time.
        workload = load.workload(fitted.turn_s(host.decentralized_s, load.compute_s, nodes))
        return simulate_decentralized(cluster, workload, schedule, updates=recipe.updates, horizon=horizon)
    cluster = Cluster(nodes, fitted.links_at(rate_bits_per_s, nodes))
    if recipe.family == "all-reduce":
        return simulate_all_reduce(cluster, load.workload(crowd * host.all_reduce_s), horizon)
    workload, compression = load.workload(crowd * host.flexdemo_s), fitted.compression(load, nodes)
    return simulate_flexdemo(cluster, workload, compression, overlap=recipe.overlap, horizon=horizon)


def busy_nodes(schedule: Schedule) -> float:
    """Return how many nodes exchange at a time, on average over the phases in which any do."""
    counts = [sum(bool(phase.peers(node)) for node in range(schedule.nodes)) for phase in schedule.phases]
    busy = [count for count in counts if count]
    return sum(busy) / len(busy) if busy else schedule.nodes
