"""The clusters of ``bench runtime``: what each is opened for, and what its ranks found there."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.cluster import ClusterSpec, open_cluster
from bench.cluster.launchers import Launcher
from bench.cluster.links import parse_rate
from bench.errors import UsageError
from bench.runtime.fit import Calibration
from bench.runtime.plan import Found, Job, Load, read_found, write_jobs

FIGURE_METHODS = ("all-reduce", "exponential")
FIGURE_STRAGGLER = 0.2
_TIMEOUT_S = 1800.0


class Place(NamedTuple):
    """So many nodes on cables of a rate."""

    nodes: int
    rate: str

    @property
    def rate_bits_per_s(self) -> int:
        return parse_rate(self.rate)

    def is_like(self, other: "Place") -> bool:
        return (self.nodes, self.rate_bits_per_s) == (other.nodes, other.rate_bits_per_s)

    def is_among(self, others: Sequence["Place"]) -> bool:
        return any(self.is_like(other) for other in others)


FIGURE_PLACE = Place(4, "100mbit")


def parse_places(option: str, words: Sequence[str]) -> list[Place]:
    """Return the places that words such as ``4:100mbit`` name."""
    places = []
    for word in words:
        nodes, _, rate = word.partition(":")
        if not nodes.isdecimal() or not rate:
            raise UsageError(f"got {option} {word!r}, needed nodes and a rate, as in 4:100mbit.")
        places.append(Place(int(nodes), rate))
    return places


@dataclass(frozen=True)
class Visit:
    """A cluster, and the jobs of its ranks; the first of them calibrates, if it is not held out."""

    place: Place
    jobs: tuple[Job, ...]
    held_out: bool


@dataclass(frozen=True)
class Visited:
    """What the jobs of a visit found, in their order."""

    visit: Visit
    found: tuple[Found, ...]

    def calibration(self) -> Calibration | None:
        """Return what predictions may be made from; None of a place that is held out."""
        first = self.found[0]
        if self.visit.held_out or first.costs is None:
            return None
        place = self.visit.place
        return Calibration(place.nodes, place.rate_bits_per_s, first.tables, first.costs)


def plan_visits(places: Sequence[Place], calibrated: Sequence[Place], job: Job, rounds: int) -> list[Visit]:
    """Return the clusters to open: those to calibrate on first, then all others, which are held out."""
    first = [Visit(place, _jobs_at(place, places, job, rounds), held_out=False) for place in calibrated]
    others = [place for place in places if not place.is_among(calibrated)]
    return first + [Visit(place, _jobs_at(place, places, job, 0), held_out=True) for place in others]


def _jobs_at(place: Place, places: Sequence[Place], job: Job, rounds: int) -> tuple[Job, ...]:
    if not place.is_among(places):
        return (replace(job, methods=(), rounds=rounds),)
    jobs = figure_jobs(job) if place.is_like(FIGURE_PLACE) else ()
    return (replace(job, rounds=rounds), *jobs)


def figure_jobs(job: Job) -> tuple[Job, Job]:
    """Return what the figures need beside: computing lasts as long as an exchange, and one node is slower, or none."""
    whole_s = exchange_s(job.load, FIGURE_PLACE)
    steady = replace(job.load, forward_s=whole_s / 3, backward_s=whole_s * 2 / 3, straggler=0.0, sigma=0.0)
    slower = replace(steady, straggler=FIGURE_STRAGGLER)
    return replace(job, load=steady, methods=FIGURE_METHODS[1:]), replace(job, load=slower, methods=FIGURE_METHODS)


def exchange_s(load: Load, place: Place) -> float:
    """Return what it takes at the cable's full rate to swap the whole model with another node."""
    return 8 * load.nbytes / place.rate_bits_per_s


def make_visits(visits: Sequence[Visit], launcher: Launcher) -> Iterator[Visited]:
    """Yield what was found on each cluster, one after the other."""
    for visit in visits:
        kind = "held out" if visit.held_out else "calibrates"
        print(f"{visit.place.nodes} nodes, {visit.place.rate} ({kind}) ...", file=sys.stderr, flush=True)
        yield Visited(visit, tuple(_run(visit, launcher)))


def _run(visit: Visit, launcher: Launcher) -> list[Found]:
    with (
        open_cluster(ClusterSpec(visit.place.nodes, 1, visit.place.rate)) as cluster,
        TemporaryDirectory(prefix="flexcomm-runtime-") as name,
    ):
        folder = Path(name)
        write_jobs(visit.jobs, folder)
        command = [sys.executable, "-m", "bench.runtime.rank", name]
        cluster.run_to_end(command, launcher=launcher, timeout_s=_TIMEOUT_S)
        return read_found(folder)
