"""The data of ``bench train``: the bytes of the Python standard library's sources, the same on every rank.

Nothing is downloaded, and every machine has it; two machines with other versions of Python have other corpora, so
the record of a run holds its digest.
"""

import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.errors import UsageError

_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
_ONE_IN = 10
"""One file in so many is for validation."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation bytes, from different files; ``digest`` identifies all of them."""

    training: Tensor
    validation: Tensor
    digest: str

    def describe(self) -> dict[str, object]:
        """Return the sizes and the digest, by which runs on different data are told apart."""
        sizes = {"training_nbytes": self.training.numel(), "validation_nbytes": self.validation.numel()}
        return {**sizes, "digest": self.digest}


def load_corpus(root: Path | None = None) -> Corpus:
    """Return the sources below ``root``, the standard library's if none is given, split by file."""
    folder = Path(os.__file__).parent if root is None else root
    halves = {True: bytearray(), False: bytearray()}
    digest = hashlib.blake2b(digest_size=8)
    for name in list_sources(folder):
        text = (folder / name).read_bytes()
        digest.update(name.encode() + b"\0" + text)
        halves[is_validation(name)] += text
    if not all(halves.values()):
        raise UsageError(
            f"got {len(halves[False])} bytes to train on and {len(halves[True])} to validate from the .py files in "
            f"{folder}, needed both: install the sources of Python's standard library."
        )
    return Corpus(_as_tensor(halves[False]), _as_tensor(halves[True]), digest.hexdigest())


def list_sources(folder: Path) -> list[str]:
    """Return the relative paths of all sources that count, sorted, with ``/`` on every system."""
    found = []
    for current, folders, files in os.walk(folder):
        # What is excluded is not even entered: site-packages may hold more files than all the rest.
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        here = Path(current).relative_to(folder)
        found += [(here / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def is_validation(name: str) -> bool:
    """Return whether the file of that relative path is for validation: a function of its name alone."""
    return zlib.crc32(name.encode()) % _ONE_IN == 0


def draw_batch(data: Tensor, windows: int, context: int, *, seed: int, step: int, rank: int) -> Tensor:
    """Return ``[windows, context + 1]`` bytes from random places, a function of ``(seed, step, rank)``."""
    key = hashlib.blake2b(f"train {seed} {step} {rank}".encode(), digest_size=8).digest()
    draw = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
    starts = torch.randint(len(data) - context, (windows,), generator=draw)
    return _windows_at(data, starts, context)


def spread_windows(data: Tensor, windows: int, context: int) -> Tensor:
    """Return ``[windows, context + 1]`` bytes from places that are as far from each other as can be, and fixed."""
    starts = torch.linspace(0, len(data) - context - 1, windows, dtype=torch.float64).long()
    return _windows_at(data, starts, context)


def _windows_at(data: Tensor, starts: Tensor, context: int) -> Tensor:
    return data[starts[:, None] + torch.arange(context + 1)].long()


def _as_tensor(text: bytearray) -> Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)
