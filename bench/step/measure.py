"""One line of ``bench step``: seconds, processor seconds and bytes of a method, over all ranks."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cluster.node_link import read_sent_nbytes
from bench.step.methods import Method
from flexcomm import World


@dataclass(frozen=True)
class Row:
    """What one method took for a step: of the slowest rank, medians over steps.

    ``counted_nbytes`` are those of the emulated cable's counters, if there is one, shared among a node's ranks;
    ``own_nbytes`` those the method counts itself.
    """

    method: str
    cable: str
    step_s: float
    main_cpu_s: float
    process_cpu_s: float
    own_nbytes: float
    counted_nbytes: float | None
    replicas_equal: bool

    @property
    def counted(self) -> bool:
        return self.counted_nbytes is not None

    @property
    def sent(self) -> float:
        """Bytes a rank sent for a step: counted, if they could be."""
        return self.own_nbytes if self.counted_nbytes is None else self.counted_nbytes


def measure(name: str, method: Method, iterations: int, warmups: int, world: World) -> Row:
    """Return the same line on every rank. All ranks call it together."""
    for _ in range(warmups):
        method.prepare()
        method.step()
    world.control.barrier().wait()
    before = read_sent_nbytes()
    seen = torch.zeros(iterations, 3, dtype=torch.float64)
    for iteration in range(iterations):
        method.prepare()
        world.control.barrier().wait()
        seen[iteration] = torch.tensor(_time(method), dtype=torch.float64)
    world.control.barrier().wait()
    after = read_sent_nbytes()
    wall_s, main_s, process_s = world.control.all_gather(seen).wait().amax(dim=0).median(dim=0).values.tolist()
    counted = -1.0 if before is None or after is None else (after - before) / iterations / world.topology.local_size
    own, counted = _average([method.sent_nbytes(), counted], world)
    equal = hold_same_bits(method.results(), world)
    return Row(name, method.cable, wall_s, main_s, process_s, own, counted if counted >= 0 else None, equal)


def _time(method: Method) -> tuple[float, float, float]:
    """Return seconds, processor seconds of this thread, and of all threads."""
    begin = (time.perf_counter(), time.thread_time(), time.process_time())
    method.step()
    end = (time.perf_counter(), time.thread_time(), time.process_time())
    wall_s, main_s, process_s = (then - now for now, then in zip(begin, end, strict=True))
    return wall_s, main_s, process_s


def _average(numbers: Sequence[float], world: World) -> list[float]:
    total: Tensor = world.control.all_reduce(torch.tensor(numbers, dtype=torch.float64)).wait()
    means: list[float] = (total / world.topology.size).tolist()
    return means


def hold_same_bits(tensors: Sequence[Tensor], world: World) -> bool:
    """Return whether these are equal on all ranks, bit by bit. Only digests travel."""
    digest = hashlib.blake2b(digest_size=8)
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digests = world.control.all_gather(torch.tensor(list(digest.digest()), dtype=torch.uint8)).wait()
    return bool((digests == digests[0]).all())
