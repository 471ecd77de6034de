"""The report of a machine with GPUs: what is planned, run, collected and written, on machines that are described."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from bench.cli import build_app
from bench.cluster.launchers import mpirun_command
from bench.gpu import command
from bench.gpu.laws import LAWS
from bench.gpu.machine import TO_INSTALL, Device, Machine, find_machine
from bench.gpu.one_device import ACTIONS
from bench.gpu.report import exit_code, write_report
from bench.gpu.results import Outcome, Result, emit, find_outcome, read_results, run_section, try_law
from bench.gpu.sections import Section, plan_sections
from bench.gpu.speed import measure_speed
from bench.gpu.steps import count_host_reads
from bench.targets import load_targets
from flexcomm.kernels.cpu import CpuKernels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEVICE = Device("NVIDIA H100 80GB HBM3", "90", 80 << 30)
EVERYTHING = Machine((DEVICE,) * 8, frozenset(TO_INSTALL), ("openmpi", "mpich"), "/opt/compute-sanitizer")
GOOD = "from bench.gpu.results import Result, emit; emit(Result('a law', True)); "


def python(text: str, **options: float) -> Section:
    return Section("section", (sys.executable, "-c", text), **options)  # type: ignore[arg-type]


def ran(section: str, *results: Result, said: str = "", state: str = "ok") -> Outcome:
    return Outcome(section, state, said, 1.0, results)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TO_INSTALL)
def test_what_is_missing_is_named_with_what_to_install(name: str) -> None:
    machine = replace(EVERYTHING, has=EVERYTHING.has - {name})
    assert machine.missing == [f"missing: {name}; install {TO_INSTALL[name]}"]
    assert exit_code(machine, [ran("a")]) == 2
    assert exit_code(EVERYTHING, [ran("a")]) == 0
    assert exit_code(machine, [ran("a"), ran("b", state="failed")]) == 1


def test_a_machine_without_a_device_runs_nothing_and_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_machine", Machine)
    monkeypatch.setattr(command, "run_section", lambda section: pytest.fail(f"{section} was run"))
    result = CliRunner().invoke(build_app(["gpu"]), ["gpu"])
    assert result.exit_code == 2
    for name, what in TO_INSTALL.items():
        assert f"- missing: {name}; install {what}\n" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_this_machine_misses_a_device() -> None:
    machine = find_machine()
    assert machine.devices == ()
    assert "a CUDA device" not in machine.has
    assert machine.versions["torch"] == torch.__version__


def test_a_whole_machine_skips_nothing_and_uses_all_of_its_devices() -> None:
    sections = {one.name: one for one in plan_sections(EVERYTHING)}
    assert not [one for one in sections.values() if one.skipped]
    hooks = sections["fsdp2 hook: 8 ranks"]
    assert (*mpirun_command("torchrun", 8).argv, sys.executable, "-m", "bench.gpu.ranks", "fsdp2_hook") == hooks.command
    assert hooks.env["FLEXCOMM_RANKS_PER_NODE"] == "4"
    assert sections["transport: NCCL"].command[-3:] == ("transport", "nccl", "nccl")
    assert sections["sync: 4 ranks on 1 GPU"].env["CUDA_VISIBLE_DEVICES"] == "0"
    checked = sections["kernels: racecheck"].command
    assert checked[:5] == ("/opt/compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9")
    named = [name for name in sections if "mpi" in name]
    assert len(named) == 8
    assert sections["transport: openmpi, not CUDA-aware"].env["OMPI_MCA_opal_cuda_support"] == "0"


def test_every_section_names_something_that_can_be_run() -> None:
    for one in plan_sections(EVERYTHING):
        program = next(i for i, word in enumerate(one.command) if word.startswith("bench.gpu."))
        module, what = one.command[program : program + 2]
        known = {"bench.gpu.one_device": ACTIONS, "bench.gpu.ranks": (*LAWS, "host_reads", "overlap")}[module]
        assert what in known


def test_an_odd_device_is_left_out() -> None:
    sections = {one.name: one for one in plan_sections(replace(EVERYTHING, devices=(DEVICE,) * 3))}
    assert sections["sync: 2 ranks"].env["FLEXCOMM_RANKS_PER_NODE"] == "1"
    assert sections["transport: NCCL"].command[-2:] == ("nccl", "nccl")


def test_one_device_is_shared_by_two_ranks_without_nccl() -> None:
    sections = {one.name: one for one in plan_sections(replace(EVERYTHING, devices=(DEVICE,)))}
    assert sections["transport: NCCL"].skipped == "NCCL needs a GPU for each rank"
    assert sections["sync: 2 ranks"].env["FLEXCOMM_RANKS_PER_NODE"] == "1"


def test_what_is_not_installed_is_skipped_with_the_reason() -> None:
    bare = Machine((DEVICE,) * 2, frozenset({"a CUDA device"}))
    skipped = {one.name: one.skipped for one in plan_sections(bare) if one.skipped}
    assert skipped["kernels: laws"] == skipped["kernels: memcheck"] == skipped["speed"] == "no CuPy"
    assert skipped["transport: NCCL"] == "no NCCL"
    assert skipped["transport: MPI"] == "no MPI"
    quick = {one.name: one.skipped for one in plan_sections(EVERYTHING, quick=True)}
    assert quick["kernels: memcheck"] == "--quick"


def test_a_section_that_ends_well_is_ok_and_its_results_are_read() -> None:
    outcome = run_section(python(GOOD + "emit(Result('speed', None, '3 GB/s', 3e9))"))
    assert (outcome.state, outcome.said, outcome.output) == ("ok", "holds; 3 GB/s", "")
    assert outcome.results == (Result("a law", holds=True), Result("speed", holds=None, said="3 GB/s", value=3e9))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("emit(Result('other', False, 'AssertionError: 1, not 2'))", "other: AssertionError: 1, not 2"),
        ("raise SystemExit(9)", "exit code 9"),
        ("import os; os.abort()", "ended by signal 6"),
    ],
)
def test_a_section_that_fails_says_how(text: str, said: str) -> None:
    outcome = run_section(python(GOOD + "print('the last line'); " + text))
    assert (outcome.state, outcome.said) == ("failed", said)
    assert "the last line" in outcome.output


def test_a_section_without_results_proves_nothing() -> None:
    assert run_section(python("pass")).said == "ended without a result"
    assert run_section(Section("x", ("/nonexistent",))).said == "cannot start /nonexistent: No such file or directory"
    assert run_section(Section("x", skipped="no MPI")) == Outcome("x", "skipped", "no MPI")


def test_a_section_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run_section(python(text, limit_s=3.0))
    assert (outcome.state, outcome.said) == ("failed", "still running after 3 s")
    with pytest.raises(ProcessLookupError):
        wait_until_gone(int((tmp_path / "pid").read_text()))


def wait_until_gone(process: int) -> None:
    """Raise as soon as there is no such process: its new parent takes a moment to reap it."""
    for _ in range(100):
        os.kill(process, 0)
        time.sleep(0.05)


def test_results_are_found_behind_a_launchers_prefix_and_other_lines_are_not() -> None:
    line = json.dumps({"name": "a", "holds": True, "said": "", "value": None})
    output = f"[1,0]<stdout>:RESULT {line}\nRESULT nonsense\nRESULT 3\nwords\n"
    assert read_results(output) == (Result("a", holds=True),)


def test_a_law_is_told_by_whoever_breaks_it_and_kept_by_who_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ValueError("first line\nsecond line")

    assert try_law("kept", lambda: None)
    assert try_law("quiet", lambda: None, speaks=False)
    assert not try_law("broken", broken, speaks=False)
    told = capsys.readouterr()
    assert [(one.name, one.holds, one.said) for one in read_results(told.out)] == [
        ("kept", True, ""),
        ("broken", False, "ValueError: first line"),
    ]
    assert "second line" in told.err


def test_the_end_of_a_failed_sections_output_is_in_the_report() -> None:
    failed = find_outcome(Section("a | b"), 1, "\n".join(map(str, range(100))) + "\n```", 2.0)
    report = write_report(EVERYTHING, [failed, ran("c", said="holds")])
    assert report.startswith("# flexcomm on GPUs: 1 of 2 sections failed")
    assert "- 8 x NVIDIA H100 80GB HBM3, sm_90, 80 GiB" in report
    assert "| c | ok | 1 | holds |" in report
    assert "\n98\n99\n'''\n```" in report
    assert "\n80\n" not in report


def test_measured_speed_stands_beside_the_estimate() -> None:
    outcomes = [
        ran("instructions, counted", Result("encode_estimate", holds=None, said="encode 63% to 88% of HBM")),
        ran("speed", Result("encode_share", holds=None, said="encode 0.40 ms, 71% of the copy's bandwidth")),
    ]
    line = "| encode 0.40 ms, 71% of the copy's bandwidth | encode 63% to 88% of HBM |"
    assert line in write_report(EVERYTHING, outcomes)


def test_figures_are_written_also_if_a_section_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {
        "speed": ran("speed", Result("encode_share", holds=None, said="", value=0.7)),
        "kernels: laws": ran("kernels: laws", state="failed"),
    }
    monkeypatch.setattr(command, "find_machine", lambda: EVERYTHING)
    monkeypatch.setattr(command, "run_section", lambda section: outcomes.get(section.name, ran(section.name)))
    file = tmp_path / "gpu.json"
    result = CliRunner().invoke(build_app(["gpu"]), ["gpu", "--json", str(file)])
    written = json.loads(file.read_text())
    assert result.exit_code == 1
    assert written["figures"] == {"encode_share": 0.7}
    assert {"decode_share", "host_reads", "overlap", "instructions"} <= set(written["unmeasured"])
    known = frozenset(written["known_figures"])
    assert set(load_targets("gpu", known)) <= known


def test_a_host_read_is_a_copy_and_a_wait() -> None:
    read = ["cudaMemcpyAsync", "Memcpy DtoH (Device -> Pinned)", "cudaStreamSynchronize"]
    assert count_host_reads(["cudaLaunchKernel", *read, "aten::copy_", *read]) == 2
    assert count_host_reads(["cudaEventSynchronize", "cudaDeviceSynchronize"]) == 1
    assert count_host_reads(["Memcpy DtoH (Device -> Pageable)"] * 3) == 3


class CountingClock:
    """A clock by which every piece of work takes a second."""

    def time(self, work: Callable[[], object]) -> float:
        work()
        return 1.0


def test_speed_is_a_share_of_what_a_copy_moves() -> None:
    """Encoding moves three dense bytes where a copy moves two; decoding two; and payloads."""
    results = {one.name: one for one in measure_speed(CpuKernels(), "cpu", CountingClock(), side=64)}
    assert results["copy"].value == 2 * 16 * 64 * 64 * 4
    shares = {name: one.value for name, one in results.items() if name.endswith("_share")}
    assert 1.5 < shares["encode_share"] < 1.53  # type: ignore[operator]
    assert 1.0 < shares["decode_share"] < 1.06  # type: ignore[operator]
    assert re.fullmatch(r"decode 1000\.00 ms, 10\d% of the copy's bandwidth", results["decode_share"].said)


def test_what_is_emitted_is_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result("a", holds=None, said="1 \u00b5s", value=1.5)
    emit(result)
    assert read_results(capsys.readouterr().out) == (result,)
