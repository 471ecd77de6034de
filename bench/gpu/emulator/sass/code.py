"""A compiled kernel's instructions of SASS, by ``nvdisasm``, and its constants."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction; ``labels`` of its text, and of the line it stands in, are where it may jump to."""

    guard: str
    opcode: str
    operands: tuple[str, ...]
    offset: int


class MachineCode(NamedTuple):
    """A kernel: its instructions, and where labels stand among them."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]

    @property
    def numbers(self) -> dict[int, int]:
        """Instructions by where they are in memory."""
        return {one.offset: number for number, one in enumerate(self.instructions)}


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
    """Return the SASS of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(nvdisasm), "-c", file.name], capture_output=True, text=True, check=True).stdout


_LABEL = re.compile(r"^\s*([.$][\w$.]+):")
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_NOTE = re.compile(r"\(\*.*?\*\)|\.reuse\b")


def parse_sass(text: str, kernel: str) -> MachineCode:
    """Return a kernel's code."""
    instructions, labels, inside = list[Instruction](), dict[str, int](), False
    for line in text.splitlines():
        if line.startswith(("\t.section", "//----")):
            inside = False
        if line.startswith(f".text.{kernel}:"):
            inside = True
        if not inside:
            continue
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            operands = _NOTE.sub("", found[4]).strip()
            split = tuple(re.split(r"\s*,\s*", operands)) if operands else ()
            instructions.append(Instruction(found[2] or "", found[3], split, int(found[1], 16)))
    return MachineCode(tuple(instructions), labels)


def read_constants(cubin: bytes, kernel: str) -> dict[int, bytes]:
    """Return a kernel's banks of constants, by number; that of its arguments is zero."""
    prefix, suffix = ".nv.constant", f".{kernel}"
    return {
        int(name[len(prefix) : -len(suffix)]): content
        for name, content in _read_sections(cubin)
        if name.startswith(prefix) and name.endswith(suffix)
    }


def _read_sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the sections of a 64-bit ELF file."""
    (begin,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_number = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, begin + number * size) for number in range(count)]
    names_at = headers[names_number][4]
    for name, kind, _, _, at, nbytes in headers:
        first = names_at + name
        no_bits = 8
        content = bytes(nbytes) if kind == no_bits else elf[at : at + nbytes]
        yield elf[first : elf.index(b"\0", first)].decode(), content
