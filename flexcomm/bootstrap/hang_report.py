"""After a missed deadline: who is silent, who lags behind, and what the last synchronisations were."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flexcomm.bootstrap.consistency import name_ranks
from flexcomm.errors import DeadlineExceededError, TransportError
from flexcomm.transport import Handle

if TYPE_CHECKING:
    from flexcomm.world import World

DUMP_VARIABLE = "FLEXCOMM_DUMP_DIR"
"""Where reports of missed deadlines go; the folder for temporary files, if it is not set."""

_PATIENCE_S = 5.0


def explain_timeout(world: World, error: DeadlineExceededError, sequence: int) -> DeadlineExceededError:
    """Return the error with what the other ranks say, and where the report of the last synchronisations is."""
    reached = ask_all_ranks(world, sequence)
    silent = [rank for rank, number in enumerate(reached) if number is None]
    behind = [rank for rank, number in enumerate(reached) if number is not None and number < sequence]
    if silent:
        found = f"No answer came from {name_ranks(silent)}: look there first."
    elif behind:
        found = (
            f"{name_ranks(behind).capitalize()} had come to fewer calls than this rank: slow, or making other calls."
        )
    else:
        found = "All ranks answer and have come to this call: the link is slower than timeout_s allows, or a rank is."
    explained = DeadlineExceededError(f"{error} {found}{write_report(world, reached)}")
    explained.__cause__ = error
    return explained


def ask_all_ranks(world: World, sequence: int) -> list[int | None]:
    """Return to which bucket each rank has come; None for those that do not answer in time.

    They answer when they ask themselves: all that wait for the missing one miss their deadline, too.
    """
    control, mine = world.control, torch.tensor([sequence])
    answers = torch.full((control.size, 1), -1)
    asked = {}
    for rank in range(control.size):
        if rank != control.rank:
            try:
                asked[rank] = control.send_recv([(rank, mine)], [(rank, answers[rank])])
            except TransportError:
                continue
    answered = {control.rank: sequence}

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
    """Write what is known into a file; return a sentence that says where it is, or nothing if it cannot be written."""
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
