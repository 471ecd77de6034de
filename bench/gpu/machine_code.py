"""Instructions of a compiled kernel, in basic blocks: SASS where ``nvdisasm`` is installed, else PTX.

Every instruction knows the line of the text it was made of, and the lines that called what holds that line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

Frame = tuple[str, int]
"""A file's name and a line of it."""


class Instruction(NamedTuple):
    """One instruction; ``frames`` are its line, the line that called that one, and so on outwards."""

    opcode: str
    text: str
    frames: tuple[Frame, ...]


@dataclass
class BasicBlock:
    """Instructions that all execute as often as the first does; ``calls`` names the subroutine the last one calls."""

    labels: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    successors: set[int] = field(default_factory=set)
    calls: str = ""


def find_nvdisasm() -> Path | None:
    """Return the disassembler: of the package nvidia-cuda-nvdisasm, else of the PATH."""
    try:
        listed = files("nvidia-cuda-nvdisasm") or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            return Path(str(file.locate()))
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


def disassemble(nvdisasm: Path, cubin: bytes) -> str:
    """Return the SASS of a cubin, with lines."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvdisasm), "-c", "-g", "-gi", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_SASS_LINE = re.compile(r'"([^"]*)", line (\d+)')
_SASS_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*);")
_LABEL = re.compile(r"^\s*([.$]\w[\w$.]*):")
_TARGET = re.compile(r"`\(([^)]+)\)")
_BRANCH_TARGETS = re.compile(r"\.L_x_\d+")


def parse_sass(text: str, kernel: str) -> list[BasicBlock]:
    """Return the blocks of a kernel; the first one is where it begins."""
    blocks, frames, fresh, inside = [BasicBlock()], list[Frame](), True, False
    for line in text.splitlines():
        if line.startswith(("\t.section", "//----")):
            inside = False
        if line.startswith(f".text.{kernel}:"):
            inside = True
        elif not inside:
            continue
        elif label := _LABEL.match(line):
            _begin_block(blocks)
            blocks[-1].labels.append(label[1])
        elif "//## File" in line:
            frames = [*([] if fresh else frames), _frame(*_SASS_LINE.findall(line)[0])]
            fresh = False
        elif found := _SASS_INSTRUCTION.match(line):
            fresh = True
            blocks[-1].instructions.append(Instruction(found[2], found[1].strip(), tuple(frames)))
            if found[2].split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP", "CALL", "BSYNC"):
                _begin_block(blocks)
    if not blocks[-1].instructions:
        blocks.pop()
    _link_sass(blocks)
    return blocks


def _begin_block(blocks: list[BasicBlock]) -> None:
    if blocks[-1].instructions:
        blocks.append(BasicBlock())


def _frame(file: str, line: str) -> Frame:
    return Path(file).name, int(line)


def _link_sass(blocks: Sequence[BasicBlock]) -> None:
    """Find what may follow each block. Warps are taken to be converged wherever the compiler asks whether they are."""
    at = {label: number for number, block in enumerate(blocks) for label in block.labels}
    meets: dict[str, str] = {}
    for number, block in enumerate(blocks):
        for one in block.instructions:
            if one.opcode.startswith("BSSY"):
                meets[one.text.split()[1].rstrip(",")] = _TARGET.findall(one.text)[0]
        if not block.instructions:
            targets, falls_through = list[str](), True
        else:
            targets, falls_through = _successors(block.instructions[-1], meets)
        if block.instructions and block.instructions[-1].opcode.startswith("CALL"):
            block.calls, targets = targets[0] if targets else "", []
        block.successors = {at[target] for target in targets if target in at}
        if falls_through and number + 1 < len(blocks):
            block.successors.add(number + 1)


def _successors(last: Instruction, meets: dict[str, str]) -> tuple[list[str], bool]:
    """Return the labels an instruction may go to, and whether the next one may follow."""
    name, conditional = last.opcode, last.text.startswith("@")
    targets = _TARGET.findall(last.text) or _BRANCH_TARGETS.findall(last.text)
    if name == "BRA.DIV":
        return [], True
    if name == "BRA.CONV":
        return targets, False
    if name.startswith("BSYNC"):
        return [meets[register] for register in last.text.split()[-1:] if register in meets], True
    if name.startswith(("EXIT", "RET")):
        return [], conditional
    if name.startswith(("BRA", "BRX", "JMP")):
        # `BRA P0, target` and `BRA.U !UP0, target` have their condition among the operands.
        return targets, conditional or re.match(r"\S+\s+!?U?P\d", last.text) is not None
    return targets, True


_PTX_LOC = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name [^,]+, inlined_at (\d+) (\d+) (\d+))?")
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]*)"', re.MULTILINE)
_PTX_INSTRUCTION = re.compile(r"^\s*((?:@!?%p\d+\s+)?([a-z][\w.:]*)\b[^;]*);")


def parse_ptx(text: str, kernel: str) -> list[BasicBlock]:
    """Return the blocks of a kernel of PTX; the first one is where it begins."""
    names = {number: Path(path).name for number, path in _PTX_FILE.findall(text)}
    body = re.split(rf"\.entry\s+{kernel}\(", text, maxsplit=1)[1]
    callers: dict[tuple[str, str, str], tuple[Frame, ...]] = {}
    blocks, frames = [BasicBlock()], tuple[Frame, ...]()
    for line in body[body.index("\n{") :].splitlines():
        if line.startswith("}"):
            break
        if loc := _PTX_LOC.search(line):
            outer = callers.get((loc[4], loc[5], loc[6]), ((names[loc[4]], int(loc[5])),)) if loc[4] else ()
            # Line 0 is what the compiler made of its own.
            frames = ((names[loc[1]], int(loc[2])), *outer) if int(loc[2]) else ()
            callers[loc[1], loc[2], loc[3]] = frames
        elif label := re.match(r"^(\$\w+):", line):
            _begin_block(blocks)
            blocks[-1].labels.append(label[1])
        elif found := _PTX_INSTRUCTION.match(line):
            blocks[-1].instructions.append(Instruction(found[2], found[1].strip(), frames))
            if found[2].split(".")[0] in ("bra", "ret", "exit"):
                _begin_block(blocks)
    at = {label: number for number, block in enumerate(blocks) for label in block.labels}
    for number, block in enumerate(blocks):
        last = block.instructions[-1].text if block.instructions else ""
        block.successors = {at[target] for target in re.findall(r"\$\w+", last) if target in at}
        if number + 1 < len(blocks) and not re.match(r"(bra|ret|exit)\b", last):
            block.successors.add(number + 1)
    return blocks


def find_reached(blocks: Sequence[BasicBlock], start: int = 0) -> set[int]:
    """Return the blocks that follow from one, by number; subroutines are not followed."""
    reached, ahead = set[int](), [start]
    while ahead:
        number = ahead.pop()
        if number not in reached:
            reached.add(number)
            ahead.extend(blocks[number].successors)
    return reached


def find_loops(blocks: Sequence[BasicBlock], among: Iterable[int]) -> Iterator[tuple[int, set[int]]]:
    """Yield every loop: how many loops it is in, itself included, and its blocks; outer before inner ones."""
    yield from _find_loops({one: set(blocks[one].successors) for one in among}, depth=1)


def _find_loops(graph: dict[int, set[int]], depth: int) -> Iterator[tuple[int, set[int]]]:
    for component in _find_components(graph):
        inner = {one: graph[one] & component for one in component}
        if not any(inner.values()):
            continue
        yield depth, component
        entered = {next_ for one, all_next in graph.items() if one not in component for next_ in all_next}
        heads = (entered & component) or {min(component)}
        # Without the edges back to where it is entered, what still goes round is a loop inside.
        yield from _find_loops({one: all_next - heads for one, all_next in inner.items()}, depth + 1)


def _find_components(graph: dict[int, set[int]]) -> list[set[int]]:
    """Return the strongly connected components (Kosaraju's algorithm)."""
    order, seen = list[int](), set[int]()
    for start in graph:
        path = [(start, iter(graph[start]))] if start not in seen else []
        seen.add(start)
        while path:
            following = next((one for one in path[-1][1] if one in graph and one not in seen), None)
            if following is None:
                order.append(path.pop()[0])
            else:
                seen.add(following)
                path.append((following, iter(graph[following])))
    before: dict[int, set[int]] = {one: set() for one in graph}
    for one, all_next in graph.items():
        for following in all_next & graph.keys():
            before[following].add(one)
    components, taken = [], set[int]()
    for start in reversed(order):
        component, ahead = set[int](), [start]
        while ahead:
            one = ahead.pop()
            if one not in taken:
                taken.add(one)
                component.add(one)
                ahead.extend(before[one])
        if component:
            components.append(component)
    return components
