"""``python -m bench report``: measure the tables of docs/benchmarks.md, and write them there.

Above every table are the command that makes it again, and the day it was measured.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bench.cluster.launchers import shell_code
from bench.cluster.netns import check_available
from bench.errors import BenchError, UsageError

_PAGE = Path("docs/benchmarks.md")
_PLOT = Path("docs/collectives.png")
_MARK = "<!-- Everything below is written by `make bench`. -->\n"
_BENCH = ("-m", "bench")
_FOUR_NODES = ("cluster", "--nodes", "4", "--rate", "100mbit", "--launcher", "torchrun", "--")


@dataclass(frozen=True)
class Section:
    """A heading, a remark on the table, and the arguments of ``python -m bench`` that make it.

    ``inner`` is the subcommand that the ranks of a cluster run.
    """

    title: str
    remark: str
    outer: tuple[str, ...]
    inner: tuple[str, ...] = ()
    picture: Path | None = None

    def argv(self, python: str) -> list[str]:
        ranks = [python, *_BENCH, *self.inner] if self.inner else []
        return [python, *_BENCH, *self.outer, *ranks]


SECTIONS = (
    Section(
        "Tensors, 4 nodes at 100 Mbit/s",
        "Averaging one tensor, over gloo.",
        _FOUR_NODES,
        ("collectives", "-b", "64K", "-e", "16M", "-f", "4", "-n", "5", "--plot", str(_PLOT)),
        _PLOT,
    ),
    Section(
        "One step of 23 M parameters, 4 nodes at 100 Mbit/s",
        "Four ranks share two cores, so every processor second of a rank is half a second of everybody's.",
        _FOUR_NODES,
        ("step", "-n", "3"),
    ),
    Section(
        "Beside the bytes, 2 nodes at 100 Mbit/s",
        "What a small call costs, what computation does not hide, memory, and why buckets are as large as they are.",
        ("cluster", "--nodes", "2", "--rate", "100mbit", "--launcher", "torchrun", "--"),
        ("sync",),
    ),
    Section(
        "Full links, 4 nodes",
        "Payload bytes alone; 95 to 96 % is what TCP leaves for them.",
        ("sweep", "--nodes", "4"),
    ),
    Section(
        "More nodes, 100 Mbit/s",
        "The last column stays level where the cost is linear in the number of peers.",
        ("sweep", "--nodes", "2,4,8", "--rates", "100mbit", "--launchers", "torchrun"),
    ),
)


def report(
    only: Annotated[str | None, typer.Option(metavar="WORD", help="Only sections whose title has this word.")] = None,
) -> None:
    """Run the benchmarks that docs/benchmarks.md shows, about ten minutes, and write each table there.

    Needs root, as every emulated cluster does. A table whose command fails stays as it was.
    """
    chosen = [section for section in SECTIONS if only is None or only.lower() in section.title.lower()]
    if not chosen:
        raise UsageError(f"got --only {only!r}, needed a word of: {'; '.join(section.title for section in SECTIONS)}.")
    if not _PAGE.is_file() or _MARK not in _PAGE.read_text():
        raise UsageError(f"there is no {_PAGE} with the line {_MARK.strip()} here: run it where the repository is.")
    check_available()
    for section in chosen:
        write(section, render(section, run(section), datetime.now(UTC).strftime("%Y-%m-%d")))
        print(f"written to {_PAGE}", file=sys.stderr)


def run(section: Section) -> str:
    """Run a section's command and return its output, which is also printed as it comes."""
    print(f"\n== {section.title}", flush=True)
    argv = section.argv(sys.executable)
    lines = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None, "it was asked for"  # noqa: S101  (our own invariant)
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if running.returncode:
        raise BenchError(f"`{shlex.join(argv)}` ended with {shell_code(running.returncode)}; its table is as it was.")
    return "\n".join(lines)


def render(section: Section, output: str, day: str) -> str:
    """Return a section of the page."""
    command = shlex.join(section.argv(".venv/bin/python"))
    picture = f"\n![{section.title}]({section.picture.name})\n" if section.picture else ""
    return f"### {section.title}\n{section.remark} {day}:\n```\nsudo {command}\n```\n```\n{output}\n```\n{picture}"


def write(section: Section, text: str) -> None:
    """Replace a section of the page, or add it at the end."""
    above, _, below = _PAGE.read_text().partition(_MARK)
    texts = {one.partition("\n")[0]: f"### {one.rstrip()}\n" for one in f"\n{below}".split("\n### ")[1:]}
    texts[section.title] = text
    _PAGE.write_text(above + _MARK + "\n" + "\n".join(texts.values()))
