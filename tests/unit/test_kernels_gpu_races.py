"""Races of the GPU's kernels: their text run on the host under GCC's thread sanitizer, as it is and with mistakes.

What the sanitizer takes for ordered is in ``bench/gpu/cuda_on_host.h``. Each mistake is one that it must report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.gpu.cuda_on_host import compile_for_host
from flexcomm.kernels.gpu import kernel_text, source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REPORTED = 66
FOLDER = Path(source.__file__).parent
ROOT = Path(__file__).parents[2]
WATCHED = ("-fsanitize=thread", "-g")
SQUARES, REFUSED, SHAPES = "squares_are_exchanged", "squares_are_refused", "every_selection_is_exchanged"
THRESHOLDS, DAMAGE, MIX = "thresholds_are_exchanged", "damage_of_many_senders_is_found", "vectors_are_mixed"
BARRIER, WARP_BARRIER, FENCE = "__syncthreads();", "__syncwarp();", "__threadfence();"


class Mistake(NamedTuple):
    """What stands ``behind`` something in the kernels' text becomes something else, and in some case that is a race."""

    name: str
    case: str
    behind: str
    old: str
    new: str = ""

    def make(self, text: str) -> str:
        """Return the text with the mistake in it."""
        # Only ends of statements may lie between: else another barrier, far behind, could be taken for this one.
        pattern = f"({re.escape(self.behind)}[\\s}});]*){re.escape(self.old)}"
        mistaken, places = re.subn(pattern, lambda found: found[1] + self.new, text)
        assert places == 1, f"the kernels' text has changed, and {self} is at {places} places: find one for it again"
        return mistaken


MISTAKES = [
    # bits.cuh
    Mistake("bits put by a store", SQUARES, "if ((u32)spread)", "atomicOr(word, (u32)spread)", "*word |= (u32)spread"),
    # tiles.cuh
    Mistake("a chunk read before it is turned", SQUARES, "tile[i * PITCH + thread] = v[OUT[i]]", BARRIER),
    Mistake("two counts in one place", SQUARES, "tile[2u * turn + 1u];", "turn ^= 1u;"),
    Mistake("a list written while it is read", SQUARES, "u32 all_kept = __ballot_sync(ALL, kept)", WARP_BARRIER),
    Mistake("a payload cleared while it is begun", SQUARES, "image[word] = 0u", WARP_BARRIER),
    Mistake("a payload copied while it is made", SQUARES, "job.stays * (value - unsent)", WARP_BARRIER),
    Mistake("maxima read before they are there", SQUARES, "shared_words[LARGEST_AT + warp] = largest", BARRIER),
    Mistake("a bound read before it is there", SQUARES, "shared_words[FLOOR_AT] = low", BARRIER),
    Mistake("candidates read before all are there", SQUARES, "scan(v, low, shared_words, warp, lane)", BARRIER),
    Mistake(
        "a word of two chunks made by stores",
        SQUARES,
        "u64 before =",
        " atomicAdd(job.open + at, ((u64)mine << 32) | *content);",
        " job.open[at]; job.open[at] += ((u64)mine << 32) | *content;",
    ),
    Mistake("a tile cleared while sums are added", SQUARES, "= {0u, 0u, 0u, 0u}", WARP_BARRIER),
    Mistake("two senders added at once", SQUARES, "magnitude_of(watched) - LEAST >= LARGE - LEAST)", WARP_BARRIER),
    Mistake("a code's bits read before all are there", SQUARES, "count += __popc(word)", WARP_BARRIER),
    Mistake("a code's bits written over", SQUARES, "get(words, bit + entry * low, low), entry)", WARP_BARRIER),
    Mistake("sums read before they are there", SQUARES, "shared_words[EXTREME_AT] = is_extreme", BARRIER),
    # blocks.cuh
    Mistake(
        "a counter cleared while it is read",
        SHAPES,
        "tally[turn == 0u ? 2u : turn - 1u] = 0u",
        "turn = turn == 2u ? 0u : turn + 1u",
        "turn ^= 1u",
    ),
    Mistake(
        "marks set by stores", SHAPES, "} else {", "atomicOr(&block.mark_word(i >> 5),", "block.mark_word(i >> 5) |= ("
    ),
    Mistake("sums scanned in place", SHAPES, "- distance]", "source = size - source;"),
    Mistake("two levels of a transform at once", SHAPES, "rows + step.j * pitch + lane", BARRIER),
    Mistake("a chunk used before its team is done", SHAPES, "work(first + block.lane)", BARRIER),
    Mistake("a word that two blocks write", SHAPES, "t.unit * t.unit, end = min(unit + t.unit", ",", " + 1u,"),
    # bucket.cuh
    Mistake("the last block without a fence", SHAPES, "before = __shfl_sync(ALL, before, 0)", FENCE),
    Mistake("the other blocks without a fence", SHAPES, "u32 before = 0u;", FENCE),
    Mistake(
        "blocks counted by a store",
        SHAPES,
        "before =",
        " atomicInc(&job.tally->blocks, gridDim.x - 1u)",
        "job.tally->blocks++",
    ),
    Mistake("a tally cleared while it is read", SHAPES, "sum = add_lanes(sum)", WARP_BARRIER),
    Mistake(
        "a checksum added by a store",
        SHAPES,
        "if (lane == 0u)",
        " atomicAdd(&job.tally->checksum, sum)",
        "job.tally->checksum += sum",
    ),
    # verify.cuh
    Mistake("a verdict before all warps are done", DAMAGE, "t.number << 8) | problem", BARRIER),
    Mistake("tallies cleared while they are read", DAMAGE, "if (is_first) found = other", WARP_BARRIER),
    Mistake("a problem left by a store", DAMAGE, "if (problem)", "atomicMin(&tally.problem,", "tally.problem = ("),
    # variable.cuh
    Mistake("sums written over while they are read", THRESHOLDS, "before_lane(mine, lane)", BARRIER),
    Mistake("sums of warps read before they are there", THRESHOLDS, "shared_words[warp] = before + mine", BARRIER),
    Mistake("two thresholds at once", THRESHOLDS, "job.variables + t.variable] = is_raised", BARRIER),
    Mistake(
        "a bin counted by a store",
        THRESHOLDS,
        "if (bin > low >> BIN_SHIFT)",
        "atomicAdd(bins + bin, 1u)",
        "bins[bin]++",
    ),
    Mistake(
        "a buffer closed before all warps are done", THRESHOLDS, "atomicAdd(&job.tally->checksum, sum);\n    }", BARRIER
    ),
    # mixing.cuh
    Mistake("two halves added at once", MIX, "sums[threadIdx.x + upper]", BARRIER),
    Mistake("distances added before they are there", MIX, "sums[threadIdx.x] = mine", BARRIER),
]


def run_cases(library: Path, *arguments: str, sanitizer: str = "") -> subprocess.CompletedProcess[str]:
    """Run cases in a process of their own; a sanitizer must be loaded first, and knows few addresses for memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if sanitizer:
        options = f"exitcode={REPORTED} halt_on_error=1 ignore_noninstrumented_modules=1"
        environment |= {"LD_PRELOAD": sanitizer, "TSAN_OPTIONS": options}
    command = ["setarch", "-R", sys.executable, "-m", "tests.unit.race_cases", str(library), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=800)


@pytest.fixture(scope="module")
def sanitizer() -> str:
    found = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True, timeout=60
    )
    path = Path(found.stdout.strip())
    if not path.is_absolute() or shutil.which("setarch") is None:
        pytest.fail(
            "the GPU kernels are searched for races by GCC's libtsan, under setarch (util-linux). Install them."
        )
    return str(path.resolve())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_for_host(tmp_path_factory.mktemp("watched"), *WATCHED)


@pytest.mark.parametrize("seed", ["0", "11"])
def test_kernels_have_no_race(seed: str, library: Path, sanitizer: str) -> None:
    run = run_cases(library, seed, sanitizer=sanitizer)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_race_is_reported(mistake: Mistake, tmp_path: Path, sanitizer: str) -> None:
    library = compile_for_host(tmp_path, *WATCHED, "-Wno-error", text=mistake.make(kernel_text()))
    run = run_cases(library, "0", mistake.case, sanitizer=sanitizer)
    assert run.returncode == REPORTED, run.stderr
    assert "WARNING: ThreadSanitizer: data race" in run.stderr


def test_cases_run_every_line_of_the_kernels(tmp_path: Path) -> None:
    """What is not run is not watched. Counted by gcov."""
    run = run_cases(compile_for_host(tmp_path, "--coverage"), "0")
    assert run.returncode == 0, run.stderr
    (counts,) = tmp_path.glob("*.gcda")
    command = ["gcov", "--stdout", "--json-format", counts.name]
    read = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    lines: Counter[tuple[str, int]] = Counter()
    for file in json.loads(read.stdout)["files"]:
        # A line of a template is there once for each that was made of it.
        for line in file["lines"]:
            lines[file["file"], line["line_number"]] += line["count"]
    own = {place: count for place, count in lines.items() if place[0].endswith((".cuh", ".cu"))}
    assert {file for file, _ in own} == {path.name for path in FOLDER.glob("*.cu*")} - {
        "warp.cuh"
    }  # it is CUDA's alone
    assert [place for place, count in own.items() if count == 0] == []
