"""The checkout is what the README says it is."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt",
    "flexcomm", "flexdemo", "bench", "tests", "ci", "docs", ".ci", ".gitignore",
}  # fmt: skip


def tracked_files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split("\n")[:-1]


def test_the_top_level_holds_exactly_what_it_should() -> None:
    assert {Path(name).parts[0] for name in tracked_files()} == TOP_LEVEL


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[<>=~! ]", name)[0].lower() for name in wanted} - {"flexcomm"}
    assert names - pinned == set()


def test_the_extras_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"mpi", "openmpi", "mpich", "cuda12", "cuda13", "cli", "report", "examples", "peers", "test"}
    assert set(project["optional-dependencies"]) == extras


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
