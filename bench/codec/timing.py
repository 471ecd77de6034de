"""Seconds of several bodies, measured in one run and in turns."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple


class Seconds(NamedTuple):
    """Medians over rounds. CPU seconds do not count what others on the machine took."""

    wall_s: float
    cpu_s: float


def take_turns(bodies: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Seconds]:
    """Time the bodies one after the other, ``rounds`` times, so that whatever else the machine does falls on all alike.

    One more round comes first and does not count: it compiles, and finds pages.
    """
    measured = [{name: _time(body) for name, body in bodies.items()} for _ in range(rounds + 1)][1:]
    return {
        name: Seconds(median(one[name].wall_s for one in measured), median(one[name].cpu_s for one in measured))
        for name in bodies
    }


def _time(body: Callable[[], object]) -> Seconds:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    body()
    return Seconds(time.perf_counter() - wall_s, time.process_time() - cpu_s)
