"""Ranks compare what must be equal before data moves, because no backend does it for them.

Unequal sizes make MPI write past buffers and gloo abort; unequal dtypes pass silently as other numbers. So ranks
exchange a fixed-size digest of their settings: one small collective when something is new, none when it was agreed
before. Only when digests differ do the settings themselves travel, to tell people which ranks differ in what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from flexcomm.errors import ConfigMismatchError
from flexcomm.transport import Transport

DIGEST_BYTES = 32
MOST_FIELDS = 1 << 16
REPORT_BYTES = 1 << 16
"""The longest report of a rank's settings, so that no rank allocates what another one asks for."""
VALUE_CHARACTERS = 200
ABSENT = "(not set)"

Settings = dict[str, str]


class ConsistencyCheck:
    """Compares settings among the ranks of ``transport``, and remembers what they agreed on."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._agreed: set[bytes] = set()

    def check(self, fields: Mapping[str, object]) -> None:
        """Return when ``fields`` are equal on every rank; raise ``ConfigMismatchError`` on every rank otherwise.

        Values are compared by their ``str``. Every rank must call it at the same point; values that were agreed before
        are not compared again.
        """
        settings = {name: str(value) for name, value in fields.items()}
        digest = digest_of(settings)
        if digest in self._agreed:
            return
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        if bool((self._transport.all_gather(mine).wait() == mine).all()):
            self._agreed.add(digest)
            return
        raise ConfigMismatchError(describe(self._differences_of_all_ranks(settings)))

    def _differences_of_all_ranks(self, settings: Settings) -> list[Settings]:
        """Return the differing fields of each rank. All ranks call it together: all saw the same digests."""
        fingerprints = {fingerprint(item): item for item in list(settings.items())[:MOST_FIELDS]}
        tables = self._gather(torch.tensor(list(fingerprints), dtype=torch.int64), MOST_FIELDS)
        shared = set.intersection(*(set(table.tolist()) for table in tables))
        differing = dict(item for print_, item in fingerprints.items() if print_ not in shared)
        report = torch.frombuffer(bytearray(encode_report(differing)), dtype=torch.uint8)
        return [decode_report(row) for row in self._gather(report, REPORT_BYTES)]

    def _gather(self, x: Tensor, most: int) -> tuple[Tensor, ...]:
        """Return every rank's ``x``, of unequal lengths; raise if one is longer than ``most``."""
        counts = self._transport.all_gather(torch.tensor(x.numel())).wait().tolist()
        if not all(0 <= count <= most for count in counts):
            raise ConfigMismatchError(
                f"ranks disagree on what must be equal, and cannot tell on what: they announced reports of {counts} "
                f"elements, where {most} is the most. Do all run this version of the library?"
            )
        return self._transport.all_gatherv(x, counts).wait()


def fingerprint(item: tuple[str, str]) -> int:
    digest = hashlib.blake2b(json.dumps(item).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def digest_of(settings: Settings) -> bytes:
    canonical = json.dumps(settings, sort_keys=True).encode()
    return hashlib.blake2b(canonical, digest_size=DIGEST_BYTES).digest()


def encode_report(settings: Settings) -> bytes:
    """Return ``settings`` as JSON of at most ``REPORT_BYTES``: long values cut and marked with their digest."""
    shortened = {name: shorten(value) for name, value in settings.items()}
    text = json.dumps(shortened).encode()
    while len(text) > REPORT_BYTES:
        shortened = dict(list(shortened.items())[: len(shortened) // 2])
        text = json.dumps(shortened).encode()
    return text


def shorten(value: str) -> str:
    if len(value) <= VALUE_CHARACTERS:
        return value
    mark = hashlib.blake2b(value.encode(), digest_size=4).hexdigest()
    return f"{value[: VALUE_CHARACTERS // 2]}... ({len(value)} characters, digest {mark})"


def decode_report(row: Tensor) -> Settings:
    text = row.numpy().tobytes()
    try:
        report = json.loads(text)
    except ValueError:
        report = None
    if not isinstance(report, dict):
        return {"settings": "(unreadable: this rank may run another version of the library)"}
    return {str(name): str(value) for name, value in report.items()}


def describe(settings_of_ranks: Sequence[Settings]) -> str:
    """Return the message that says which ranks have which value of every field that differs."""
    lines = ["ranks disagree on what must be equal, so no data was moved:"]
    for name in dict.fromkeys(name for settings in settings_of_ranks for name in settings):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, settings in enumerate(settings_of_ranks):
            ranks_by_value.setdefault(settings.get(name, ABSENT), []).append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            lines.append(f"  {name}: {values}")
    return "\n".join([*lines, "Make them equal on every rank."])


def name_ranks(ranks: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` becomes ``"ranks 0-2, 5"``."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    ]
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(runs) == 1 and len(runs[0]) == 1 else "ranks ") + ", ".join(spans)
