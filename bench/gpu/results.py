"""Results that the processes of a section print, and what becomes of a section that fails, hangs or crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bench.gpu.sections import Section

_MARK = "RESULT "
_LAST_LINES = 15
_GRACE_S = 60.0
"""torchrun has its ranks in sessions of their own, and takes 30 s to end those that hang."""


@dataclass(frozen=True)
class Result:
    """A law that holds or not, or a figure (``holds`` is None); ``said`` is what the report shows of it."""

    name: str
    holds: bool | None
    said: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a section; ``output`` is the end of what it printed, if it is not ``"ok"``."""

    section: str
    state: Literal["ok", "failed", "skipped"]
    said: str = ""
    seconds: float = 0.0
    results: tuple[Result, ...] = ()
    output: str = ""


def emit(result: Result) -> None:
    """Print a result, for the process that started this one."""
    # In one piece: the ranks of a launcher share a pipe.
    sys.stdout.write(f"\n{_MARK}{json.dumps(asdict(result))}\n")
    sys.stdout.flush()


def try_law(name: str, law: Callable[[], object], *, speaks: bool = True) -> bool:
    """Call a law; emit whether it holds, if it fails or this rank speaks for all. Return whether it holds."""
    try:
        law()
    except Exception as error:
        traceback.print_exc()
        emit(
            Result(
                name, holds=False, said=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        )
        return False
    if speaks:
        emit(Result(name, holds=True))
    return True


def read_results(output: str) -> tuple[Result, ...]:
    """Return the results among a section's lines. Launchers may put the rank before a line."""
    found = []
    for line in output.splitlines():
        _, mark, text = line.partition(_MARK)
        if mark:
            try:
                found.append(Result(**json.loads(text)))
            except (ValueError, TypeError):
                continue
    return tuple(found)


def run_section(section: Section) -> Outcome:
    """Run a section to its end, or to its time limit; it leaves no process behind."""
    if section.skipped:
        return Outcome(section.name, "skipped", section.skipped)
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as file:
        try:
            process = subprocess.Popen(
                list(section.command),
                env={**os.environ, **section.env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # A group of its own, so that the ranks of a launcher end with it.
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(section.name, "failed", f"cannot start {section.command[0]}: {error.strerror}")
        code = _wait(process, section.limit_s)
        file.seek(0)
        output = file.read()
    return find_outcome(section, code, output, time.monotonic() - start_s)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code; None if the time limit came first."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def find_outcome(section: Section, code: int | None, output: str, seconds: float) -> Outcome:
    """Return what an exit code and an output mean."""
    results = read_results(output)
    broken = [one for one in results if one.holds is False]
    if code is None:
        said = f"still running after {section.limit_s:.0f} s"
    elif broken:
        said = "; ".join(dict.fromkeys(f"{one.name}: {one.said}" for one in broken))
    elif code != 0:
        said = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    elif not results:
        said = "ended without a result"
    else:
        return Outcome(section.name, "ok", _summary(results), seconds, results)
    return Outcome(section.name, "failed", said, seconds, results, "\n".join(_last_lines(output)))


def _summary(results: Iterable[Result]) -> str:
    laws = sum(one.holds is True for one in results)
    figures = [one.said for one in results if one.holds is None]
    return "; ".join([*([f"{laws} laws hold" if laws > 1 else "holds"] if laws else []), *figures])


def _last_lines(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if line.strip() and _MARK not in line]
    return lines[-_LAST_LINES:]
