"""Regions of a kernel's text: brace-blocks in which ``COUNT(name)`` stands.

On a device the macro is nothing. On the host it counts how many warps pass, so a region's instructions times its passes
are what warps issue there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from bench.errors import UsageError


class Region(NamedTuple):
    """Lines ``first`` to ``last`` of a text; ``loop``: they are the body of a loop, and its condition."""

    name: str
    file: str
    first: int
    last: int
    loop: bool


_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|^[ \t]*#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE)
"""Comments, strings and lines of the preprocessor, whose braces are none of the program's."""
_MARK = re.compile(r"\bCOUNT\((\w+)\)")
_LOOP = re.compile(r"(ROLLED\s+)?(for|while|do)\b")
_FILE = re.compile(r'^#line 1 "([^"]+)"\n', re.MULTILINE)


def find_all_regions(file: str, text: str) -> list[Region]:
    """Return the regions of a text, which may say by ``#line`` of which files it was made."""
    before, *parts = _FILE.split(text)
    named = [(file, before), *zip(parts[::2], parts[1::2], strict=True)]
    return [region for name, part in named for region in find_regions(name, part)]


def find_regions(file: str, text: str) -> list[Region]:
    """Return the regions of one file, outer before inner ones."""
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    blocks = list(_find_blocks(code))
    regions: dict[tuple[int, int], Region] = {}
    for mark in _MARK.finditer(code):
        around = [block for block in blocks if block[0] < mark.start() < block[1]]
        if not around:
            raise UsageError(f"{file}: COUNT({mark[1]}) stands outside of all braces; put it into a block.")
        begin, end = max(around)
        if (begin, end) in regions:
            raise UsageError(f"{file}: {regions[begin, end].name} and {mark[1]} mark the same block; remove one COUNT.")
        header = _find_header(code, begin)
        loop = _LOOP.match(code, header) is not None
        # The condition of an `if` is part of what is around it; that of a loop is looked at in every round.
        first = _line(code, header) if loop else _line(code, begin) + (_line(code, mark.start()) > _line(code, begin))
        regions[begin, end] = Region(mark[1], file, first, _line(code, end), loop)
    return [region for _, region in sorted(regions.items(), key=lambda item: (item[0][0], -item[0][1]))]


def _find_blocks(code: str) -> Iterator[tuple[int, int]]:
    """Yield where brace-blocks begin and end."""
    begins: list[int] = []
    for match in re.finditer(r"[{}]", code):
        if match[0] == "{":
            begins.append(match.start())
        elif begins:
            yield begins.pop(), match.start()


def _find_header(code: str, brace: int) -> int:
    """Return where the statement begins that the block belongs to."""
    at, depth = brace, 0
    while at > 0 and (depth or code[at - 1] not in ";{}"):
        at -= 1
        depth += {")": 1, "(": -1}.get(code[at], 0)
    while code[at].isspace():
        at += 1
    return at


def _line(code: str, at: int) -> int:
    return code.count("\n", 0, at) + 1
