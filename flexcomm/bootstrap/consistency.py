"""What ranks tell each other: their settings before data moves, and how far they are after a missed deadline.

No backend compares what must be equal: unequal sizes make MPI write past buffers and gloo abort; unequal dtypes pass
silently as other numbers. So ranks exchange a digest of their settings when something is new, and only when digests
differ the settings themselves, to tell people which ranks differ in what.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexcomm.errors import ConfigMismatchError, DeadlineExceededError, TransportError
from flexcomm.transport import Handle, Transport

if TYPE_CHECKING:
    from flexcomm.world import World

MOST_FIELDS = 1 << 16
REPORT_BYTES = 1 << 16  # of a rank's settings, so that no rank allocates what another one asks for
VALUE_CHARACTERS = 200
DUMP_VARIABLE = "FLEXCOMM_DUMP_DIR"  # where reports of missed deadlines go; else to the folder for temporary files
_PATIENCE_S = 5.0

Settings = dict[str, str]


class ConsistencyCheck:
    """Compares settings among the ranks of ``transport``, and remembers what they agreed on."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._agreed: set[bytes] = set()

    def check(self, fields: Mapping[str, object]) -> None:
        """Return when ``fields`` are equal on every rank; raise ``ConfigMismatchError`` on every rank otherwise.

        Values are compared by their ``str``. Every rank calls it at the same point.
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
        fingerprints = {
            int.from_bytes(digest_of(item, 8), "little", signed=True): item
            for item in list(settings.items())[:MOST_FIELDS]
        }
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


def digest_of(value: object, nbytes: int = 32) -> bytes:
    """Return a digest of what JSON can write; the order of a dict's items does not matter."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=nbytes).digest()


def encode_report(settings: Settings) -> bytes:
    """Return ``settings`` as JSON of at most ``REPORT_BYTES``: long values cut and marked with their digest."""
    shortened = [(name, shorten(value)) for name, value in settings.items()]
    while len(text := json.dumps(dict(shortened)).encode()) > REPORT_BYTES:
        shortened = shortened[: len(shortened) // 2]
    return text


def shorten(value: str) -> str:
    if len(value) <= VALUE_CHARACTERS:
        return value
    return f"{value[: VALUE_CHARACTERS // 2]}... ({len(value)} characters, digest {digest_of(value, 4).hex()})"


def decode_report(row: Tensor) -> Settings:
    with suppress(ValueError):
        report = json.loads(row.numpy().tobytes())
        if isinstance(report, dict):
            return {str(name): str(value) for name, value in report.items()}
    return {"settings": "(unreadable: this rank may run another version of the library)"}


def describe(settings_of_ranks: Sequence[Settings]) -> str:
    """Return the message that says which ranks have which value of every field that differs."""
    lines = ["ranks disagree on what must be equal, so no data was moved:"]
    for name in dict.fromkeys(name for settings in settings_of_ranks for name in settings):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, settings in enumerate(settings_of_ranks):
            ranks_by_value.setdefault(settings.get(name, "(not set)"), []).append(rank)
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


def explain_timeout(world: World, error: DeadlineExceededError, sequence: int) -> DeadlineExceededError:
    """Return the error with what the other ranks say, and where the report of the last synchronisations is."""
    reached = ask_all_ranks(world, sequence)
    silent = [rank for rank, number in enumerate(reached) if number is None]
    behind = [rank for rank, number in enumerate(reached) if number is not None and number < sequence]
    if silent:
        found = f"No answer came from {name_ranks(silent)}: look there first."
    elif behind:
        found = f"{name_ranks(behind).capitalize()} had come to fewer calls than this rank: slow, or in other calls."
    else:
        found = "All ranks answer and have come to this call: the link is slower than timeout_s allows, or a rank is."
    explained = DeadlineExceededError(f"{error} {found}{write_report(world, reached)}")
    explained.__cause__ = error
    return explained


def ask_all_ranks(world: World, sequence: int) -> list[int | None]:
    """Return to which bucket each rank has come; None for those that do not answer, by asking themselves, in time."""
    control, mine = world.control, torch.tensor([sequence])
    answers = torch.full((control.size, 1), -1)
    answered, asked = {control.rank: sequence}, {}
    for rank in range(control.size):
        if rank != control.rank:
            with suppress(TransportError):
                asked[rank] = control.send_recv([(rank, mine)], [(rank, answers[rank])])

    def listen(rank: int, handle: Handle[object]) -> None:
        with suppress(TransportError):
            handle.wait()
            answered[rank] = int(answers[rank])

    # A thread each, for gloo cannot be asked whether a message has come. One that gets none ends with the process.
    listeners = [threading.Thread(target=listen, args=each, daemon=True) for each in asked.items()]
    for listener in listeners:
        listener.start()
    deadline_s = time.monotonic() + min(_PATIENCE_S, control.timeout_s)
    for listener in listeners:
        listener.join(max(deadline_s - time.monotonic(), 0.0))
    return [answered.get(rank) for rank in range(control.size)]


def write_report(world: World, reached: list[int | None]) -> str:
    """Write what is known into a file; return a sentence that says where it is, if it could be written."""
    folder = Path(os.environ.get(DUMP_VARIABLE, tempfile.gettempdir()))
    path = folder / f"flexcomm-rank{world.topology.rank}-{os.getpid()}.json"
    report = {
        "topology": str(world.topology),
        "intra": world.intra.name,
        "inter": world.inter.name,
        "reached": dict(enumerate(reached)),
        "total": world.stats(),
        "recent": world.recent_syncs(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1))
    except OSError:
        return ""
    return f" The last synchronisations of this rank are in {path}."
