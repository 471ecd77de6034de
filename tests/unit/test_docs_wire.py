"""The page that specifies the format says what the code does: its example is run and compared."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from pathlib import Path

import pytest

from flexcomm.kernels.layout import HEADER_NBYTES, VERSION

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text()
HEX_LINE = re.compile(r"\s*(?P<offset>\d+)  (?P<bytes>[0-9a-f]{2}(?: [0-9a-f]{2})*)(?:  .*)?")


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def example_bytes() -> bytes:
    """Return the bytes of the page; each line begins where the one before ended."""
    shown = b""
    for line in block("hex").splitlines():
        match = HEX_LINE.fullmatch(line)
        assert match, line
        assert int(match["offset"]) == len(shown)
        shown += bytes.fromhex(match["bytes"])
    return shown


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_the_example_prints_the_bytes_shown(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXCOMM_KERNELS", kernels)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block("python"), "docs/wire.md", "exec", dont_inherit=True), {})  # noqa: S102  (our own page)
    assert bytes.fromhex(printed.getvalue()) == example_bytes()


def test_the_text_shown_is_the_one_that_is_hashed() -> None:
    digest = hashlib.blake2b(block("text").strip().encode(), digest_size=8).digest()
    assert digest == example_bytes()[8:16]


def test_the_checksum_is_the_one_described() -> None:
    shown = example_bytes()
    words = [int.from_bytes(shown[start : start + 4], "little") for start in range(0, len(shown), 4)]
    total = sum(mix(word ^ (place * 0x9E3779B9 & 0xFFFFFFFF)) for place, word in enumerate(words) if place != 12)
    assert total % (1 << 32) == words[12]


def mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16


def test_the_header_table_fills_the_header_without_gaps() -> None:
    header = PAGE[PAGE.index("## Header") : PAGE.index("**Checksum.**")]
    rows = [(int(offset), int(nbytes)) for offset, nbytes in re.findall(r"^\| (\d+) \| (\d+) \|", header, re.MULTILINE)]
    ends = [offset + nbytes for offset, nbytes in rows]
    assert [offset for offset, _ in rows] == [0, *ends[:-1]]
    assert ends[-1] == HEADER_NBYTES


def test_the_page_is_about_this_version() -> None:
    assert PAGE.startswith(f"# The wire format, version {VERSION}\n")
