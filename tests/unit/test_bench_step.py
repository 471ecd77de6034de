"""The step benchmark: its models, buckets, ratios and peers. How fast things are is not a test's business."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
import torch

from bench.cli import main
from bench.cluster.links import Link
from bench.errors import UsageError
from bench.step import command as step
from bench.step.command import (
    METHODS,
    Findings,
    Row,
    Settings,
    StepPhases,
    find_phases,
    format_rows,
    make_report,
    parse_methods,
    print_findings,
)
from bench.step.methods import fill_buckets
from bench.step.models import MODELS, find_model
from bench.step.peers import PeerMissingError, import_detonation
from bench.targets import load_targets
from flexcomm import Topology
from flexcomm.topology import blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

PHASES = StepPhases(0.0625, 0.03125, 0.375, 0.03125, 2.0, 1.0)
OURS = Row("demo", "gloo", 0.5, 0.2, 0.25, 1.5e6, 1.6e6, replicas_equal=True, phases=PHASES)
SIGN = Row("demo-sign", "gloo", 0.4, 0.2, 0.25, 0.6e6, 0.64e6, replicas_equal=True)
BF16 = Row("all-reduce-bf16", "gloo", 6.0, 0.1, 1.0, 70e6, 74e6, replicas_equal=True)
POWER = Row("powersgd-1", "gloo", 0.55, 0.1, 0.3, 0.6e6, 0.7e6, replicas_equal=False)
PEER = Row("detonation", "gloo", 3.4, 1.0, 1.2, 5.0e6, 4.8e6, replicas_equal=True)
SETTINGS = Settings("23m", tuple(METHODS), 5, 1)
FOUR = Topology(0, blocks(4, 1), "test")


def findings(rows: Sequence[Row], skipped: dict[str, str] | None = None) -> Findings:
    return Findings({row.method: row for row in rows}, skipped or {})


@pytest.mark.parametrize(
    ("name", "numel", "tensors"), [("tiny", 120_576, 28), ("23m", 23_427_072, 76), ("124m", 124_439_808, 148)]
)
def test_models_have_the_parameters_they_are_named_after(name: str, numel: int, tensors: int) -> None:
    model = find_model(name)
    names = [name for name, _ in model.shapes()]
    assert (model.numel, len(names)) == (numel, tensors)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "7b"], "needed one of tiny, 23m, 124m"),
        (["--methods", "demo,zip"], "needed all, or some of demo, demo-sign"),
        (["--methods", ","], "needed all"),
        (["-n", "0"], "got -n 0"),
        (["-w", "-1"], "got -w -1"),
        (["--link-rate", "fast"], "needed a number with a unit"),
    ],
)
def test_bad_arguments_exit_with_2_before_any_rank_is_started(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "start_two_ranks", lambda: pytest.fail("started"))
    assert main(["step", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_methods_come_in_the_tables_order_whatever_the_order_asked_for() -> None:
    assert parse_methods("all") == tuple(METHODS)
    assert parse_methods("detonation, demo") == ("demo", "detonation")
    with pytest.raises(UsageError):
        parse_methods("")


def test_buckets_are_those_of_ddp() -> None:
    mib = 1 << 20
    sizes_mib = [20, 10, 3, 30, 0.5, 0.6]
    tensors = [torch.empty(int(size * mib / 4), device="meta") for size in sizes_mib]
    buckets = [[x.nbytes / mib for x in bucket] for bucket in fill_buckets(tensors)]
    # Last parameters first; 1 MiB, then 25 MiB; a bucket is closed once it is full.
    assert [[round(size, 1) for size in bucket] for bucket in buckets] == [[0.6, 0.5], [30], [3, 10, 20]]


def test_buckets_hold_every_parameter_once() -> None:
    tensors = [torch.empty(shape, device="meta") for _, shape in MODELS["23m"].shapes()]
    bucketed = [x for bucket in fill_buckets(tensors) for x in bucket]
    assert [id(x) for x in bucketed] == [id(x) for x in reversed(tensors)]


def test_ratios_are_to_the_first_line() -> None:
    assert format_rows([OURS, POWER]) == [
        *[(METHODS["demo"], "gloo", "0.500", "1.00x", "0.200", "1.00x", "0.250", "1.6", "1.00x", "same")],
        *[(METHODS["powersgd-1"], "gloo", "0.550", "1.10x", "0.100", "0.50x", "0.300", "0.7", "0.44x", "DIFFER")],
    ]


PRINTED = """\
slowest rank, median; ratios to the first line
method                     transport  s/step  ratio  main CPU s  ratio  all CPU s  MB sent/rank  ratio    bits
flexcomm demo(k=32), bf16       gloo   0.500  1.00x       0.200  1.00x      0.250           1.6  1.00x    same
torch PowerSGD rank 1           gloo   0.550  1.10x       0.100  0.50x      0.300           0.7  0.44x  DIFFER
# MB sent: the link's counters, headers included; bits: whether all ranks hold the same
where the time goes: slowest rank of the median step
method                     encode s  ns/element  verify + decode s  ns/element  waiting s  rest s  s/step
flexcomm demo(k=32), bf16    0.0625        2.00             0.0312        1.00     0.3750  0.0312  0.5000
# waiting: blocked by collectives; ns: per element that the rank encodes and decodes
# skipped detonation DeMo, k=32: no module detonation
# interrupted: 2 of 9 methods were measured
"""


def test_what_was_measured_before_an_interrupt_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(findings([OURS, POWER], {"detonation": "no module detonation"}), wanted=9)
    assert capsys.readouterr().out == PRINTED


def test_phases_are_those_of_the_slowest_rank_of_the_median_step() -> None:
    # Of each rank and step: three times, seconds of encode, decode and waiting, and bytes of 2**20 elements.
    gathered = torch.zeros(2, 3, 7, dtype=torch.float64)
    gathered[:, :, 0] = torch.tensor([[1.0, 4.0, 2.0], [3.0, 0.5, 1.0]])
    gathered[1, 0, 3:] = torch.tensor([0.5, 0.25, 2.0, 4.0 * 2**20])
    found = find_phases(gathered)
    assert found == StepPhases(0.5, 0.25, 2.0, 0.25, 0.5e9 / 2**20, 0.25e9 / 2**20)
    assert found.encode_s + found.decode_s + found.waiting_s + found.rest_s == 3.0


def test_methods_of_others_have_no_phases() -> None:
    assert find_phases(torch.ones(2, 3, 7, dtype=torch.float64) * torch.tensor([1, 1, 1, 0, 0, 0, 0])) is None


def test_the_rows_of_the_report_hold_the_phases() -> None:
    report = make_report(findings([OURS, BF16]), SETTINGS, FOUR, None)
    assert [row["phases"] for row in report.rows] == [asdict(PHASES), None]


def test_the_report_holds_the_ratios_that_targets_bound() -> None:
    report = make_report(findings([OURS, SIGN, BF16, POWER, PEER]), SETTINGS, FOUR, Link(100e6, "told"))
    assert report.figures == pytest.approx(
        {
            "cpu_of_detonation": 0.2,
            "bytes_saved_bf16": 3.0,
            "bytes_saved_sign": 7.5,
            "speedup_over_bf16": 12.0,
            "speedup_over_powersgd_1": 1.1,
        }
    )
    assert set(load_targets("step", report.known_figures)) == set(report.figures)
    assert (report.settings["parameters"], report.settings["tensors"]) == (23_427_072, 76)


@pytest.mark.parametrize(
    ("place", "link"), [(FOUR, None), (FOUR, Link(1e9, "told")), (Topology(0, blocks(2, 1), "test"), Link(1e8, "told"))]
)
def test_speedups_of_another_link_are_held_to_no_target(place: Topology, link: Link | None) -> None:
    report = make_report(findings([OURS, SIGN, BF16, POWER, PEER]), SETTINGS, place, link)
    assert set(report.unmeasured) == {"speedup_over_bf16", "speedup_over_powersgd_1"}
    assert "bench cluster --nodes 4 --rate 100mbit" in report.unmeasured["speedup_over_bf16"]


def test_a_missing_peer_is_no_miss_but_says_what_to_install() -> None:
    report = make_report(findings([OURS, SIGN], {"detonation": "pip install"}), SETTINGS, FOUR, Link(1e8, "told"))
    assert report.unmeasured["cpu_of_detonation"] == "detonation: pip install"
    assert report.unmeasured["speedup_over_bf16"] == "all-reduce-bf16: not among --methods"


@pytest.mark.parametrize("absent", ["detonation", "mltiming"])
def test_the_peer_that_cannot_be_imported_names_the_command(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("detonation", absent)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(PeerMissingError, match=r"pip install '\.\[peers\]'"):
        import_detonation()
