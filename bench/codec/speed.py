"""Speed of encode, and of decode with averaging: ours beside the published operations.

glibc maps every block of more than 32 MiB afresh and gives it back when it is freed, so an operation that returns so
large a tensor pays for finding its pages, about as much as for the arithmetic. Smaller blocks are kept and used again.
A float32 tensor of 8.4 M elements is just above that border; ``keep_freed_memory`` removes it.
"""

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from bench.codec.codecs import CHUNK, FlexcommCodec, PublishedCodec, find_agreement
from bench.errors import BenchError
from flexcomm import demo

_SAME_SELECTION = 0.999
"""Both transforms round differently, so of two nearly equal coefficients either may be sent."""
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_NEVER_TRIM = (1 << 31) - 1


class Seconds(NamedTuple):
    """Medians over rounds. CPU seconds do not include other load on the machine."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Comparison:
    """Seconds of both codecs for one case. ``figure`` is the name of the speedup."""

    figure: str
    case: str
    ours: Seconds
    published: Seconds

    @property
    def speedup(self) -> float:
        return self.published.wall_s / self.ours.wall_s


@dataclass(frozen=True)
class Geometry:
    """A tensor, and how many coefficients of a chunk are sent. Figures end with ``suffix``."""

    case: str
    suffix: str
    shape: tuple[int, ...]
    k: int


def geometries(shape: tuple[int, int]) -> list[Geometry]:
    """Return the matrix in chunks of 64 x 64, and as many elements flat, in chunks of 64."""
    flat = (math.prod(shape),)
    return [
        Geometry("64 x 64, k = 32", "", shape, 32),
        Geometry("flat 64, k = 4", "_flat_k4", flat, 4),
        Geometry("flat 64, k = 8", "_flat_k8", flat, 8),
    ]


def compare_encode(geometry: Geometry, rounds: int) -> Comparison:
    """Time encoding the same gradients by both codecs."""
    gradient = draw_gradient(geometry.shape, seed=0)
    _check_same_selection(geometry, gradient)
    ours, published = FlexcommCodec(geometry.shape, demo(geometry.k, CHUNK)), PublishedCodec(geometry.shape, geometry.k)
    seconds = interleave(
        {"ours": lambda: ours.encode_(gradient), "published": lambda: published.encode_(gradient)}, rounds
    )
    return Comparison(f"encode_speedup{geometry.suffix or '_2d'}", geometry.case, **seconds)


def _check_same_selection(geometry: Geometry, gradient: Tensor) -> None:
    agreement = find_agreement(gradient, geometry.k)
    if agreement < _SAME_SELECTION:
        raise BenchError(
            f"{geometry.case}: only {agreement:.4%} of what ours sends is what the published code sends, so their "
            f"times compare different work. One of the two is wrong."
        )


def compare_decode(geometry: Geometry, nodes: Sequence[int], rounds: int) -> list[Comparison]:
    """Time decoding and averaging the payloads of several nodes, each with a gradient of its own."""
    most = max(nodes)
    gradients = [draw_gradient(geometry.shape, seed) for seed in range(most)]
    ours, published = FlexcommCodec(geometry.shape, demo(geometry.k, CHUNK)), PublishedCodec(geometry.shape, geometry.k)
    buffers = [ours.encode_(gradient).clone() for gradient in gradients]
    sent = [published.encode_(gradient) for gradient in gradients]
    out = torch.empty(geometry.shape).fill_(0.0)

    def compare(count: int) -> Comparison:
        gathered = torch.cat(buffers[:count])
        seconds = interleave(
            {
                "ours": lambda: ours.decode_(out, gathered, count),
                "published": lambda: published.decode(sent[:count]),
            },
            rounds,
        )
        return Comparison(f"decode_speedup{geometry.suffix}_{count}", f"{geometry.case}, {count} nodes", **seconds)

    return [compare(count) for count in nodes]


def draw_gradient(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normally distributed elements; of a matrix or flat, the same for the same seed."""
    return torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(seed)).view(shape)


def interleave(bodies: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Seconds]:
    """Time the bodies one after the other, ``rounds`` times, so that other load on the machine affects all of them.

    One more round comes first and does not count: it compiles, and finds pages.
    """
    measured = [{name: _time_once(body) for name, body in bodies.items()} for _ in range(rounds + 1)][1:]
    return {
        name: Seconds(median(one[name].wall_s for one in measured), median(one[name].cpu_s for one in measured))
        for name in bodies
    }


def _time_once(body: Callable[[], object]) -> Seconds:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    body()
    return Seconds(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def keep_freed_memory() -> bool:
    """Have malloc keep freed memory, however large, until the process ends; return False if this is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))
