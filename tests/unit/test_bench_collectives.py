"""The collectives benchmark: its options, its inputs, its table. How fast things are is not a test's business."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bench.cli import main
from bench.cluster.links import Link, find_link, read_sent_nbytes, shaper_rate
from bench.collectives import command as collectives
from bench.collectives.arguments import (
    DTYPES,
    RECIPES,
    parse_algorithm,
    parse_compressor,
    parse_size,
    plan_shape,
    plan_sizes,
)
from bench.collectives.command import Findings, Settings, conclude_lines, make_report
from bench.collectives.inputs import count_wrong, expect_average, make_input
from bench.collectives.measure import Case, Row, find_link_share, summarise
from bench.collectives.output import (
    COLUMNS,
    Lines,
    check_plot_possible,
    draw_plot,
    show_ms,
    show_number,
    split_columns,
    write_csv,
)
from bench.errors import UsageError
from bench.tables import show_size
from bench.targets import load_targets
from flexcomm import TensorSpec, Topology, demo, random_k, top_k
from flexcomm.topology import blocks

if TYPE_CHECKING:
    from pathlib import Path

ROW = Row(
    size_nbytes=1 << 20,
    count=1 << 18,
    dtype="fp32",
    compressor="demo:k=32",
    algorithm="gather",
    time_min_s=0.0101,
    time_median_s=0.0125,
    time_p99_s=0.2,
    wire_nbytes=57792.0,
    payload_nbytes=19264.0,
    bits_per_kept=25.08,
    effective_bytes_per_s=83886080.0,
    wire_bytes_per_s=11.5e6,
    link_share=0.92,
    encode_s=0.0025,
    intra_s=0.0,
    inter_s=0.005,
    decode_s=0.00061,
    wrong=0,
    nodes=4,
    ranks_per_node=1,
)
BASELINE = replace(ROW, compressor="all-reduce fp32", algorithm="all-reduce", link_share=0.5, payload_nbytes=2e6)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("65536", 65536), ("64K", 65536), ("16M", 1 << 24), ("1g", 1 << 30), ("8MiB", 1 << 23)]
)
def test_sizes_are_read_as_nccl_tests_reads_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "K", "1.5M", "-4K", "12X"])
def test_what_is_no_size_is_an_error_that_shows_some(text: str) -> None:
    with pytest.raises(UsageError, match="such as 65536, 64K, 16M or 1G"):
        parse_size(text)


def test_sizes_grow_by_the_factor_up_to_the_most() -> None:
    assert plan_sizes(4096, 1 << 20, 8) == [4096, 32768, 262144]
    assert plan_sizes(8, 8, 2) == [8]
    assert plan_sizes(1, 4, 1.0001) == [1, 2, 3, 4]


@pytest.mark.parametrize(("least", "most", "factor"), [(8, 4, 2), (4, 8, 1), (4, 8, 0.5)])
def test_sizes_that_lead_nowhere_are_errors(least: int, most: int, factor: float) -> None:
    with pytest.raises(UsageError):
        plan_sizes(least, most, factor)


@pytest.mark.parametrize(
    ("nbytes", "shape"),
    [
        (1, (1, 1)),
        (4, (1, 1)),
        (1000, (8, 16)),
        (16383, (32, 64)),
        (16384, (64, 64)),
        (5 * 16384, (64, 320)),
        (1 << 20, (512, 512)),
    ],
)
def test_shapes_hold_whole_chunks_and_no_more_than_the_size(nbytes: int, shape: tuple[int, int]) -> None:
    assert plan_shape(nbytes, 4) == shape
    assert shape[0] * shape[1] * 4 <= max(nbytes, 4)


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("demo:k=32", demo(k=32)),
        ("demo:k=8,chunk=32,values=sign", demo(k=8, chunk=32, values="sign")),
        ("top_k:rate=0.03125", top_k(1 / 32)),
        ("random_k:rate=1/32,seed=7", random_k(1 / 32, seed=7)),
        ("threshold:tau=1e-3,capacity=None", RECIPES["threshold"](1e-3, None)),
        ("dense:dtype=bf16", RECIPES["dense"](torch.bfloat16)),
        ("sign", RECIPES["sign"]()),
    ],
)
def test_compressors_are_recipes_with_their_own_arguments(text: str, compressor: object) -> None:
    assert parse_compressor(text).compressor == compressor
    assert parse_compressor(text).name == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip", "needed one of demo, dense, random_k, sign, striding, threshold, top_k"),
        ("demo:q=3", "needed name=value with a name of k, chunk, values"),
        ("demo:k", "needed name=value"),
        ("demo:k=many", "k is 'many'"),
        ("top_k", "rate"),
        ("top_k:rate=1/0", "rate is '1/0'"),
    ],
)
def test_a_compressor_that_cannot_be_is_an_error_that_says_why(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_compressor(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-b", "1Q"], "got the size '1Q'"),
        (["-b", "4M", "-e", "4K"], "above -e"),
        (["-f", "1"], "needed one above 1"),
        (["-n", "0"], "got -n 0, needed 1 or more"),
        (["-w", "-1"], "got -w -1, needed 0 or more"),
        (["-c", "2"], "got -c 2, needed 0 or 1"),
        (["--dtype", "int8"], "needed one of fp32, bf16, fp16"),
        (["--algorithm", "ring"], "needed one of auto, gather, gatherv, reduce, two_phase, dense"),
        (["--compressor", "zip"], "got the compressor 'zip'"),
        (["--link-rate", "fast"], "needed a number with a unit"),
        (["--plot", "/nowhere/at/all.png"], "there is no folder"),
        (["--plot", "table.xyz"], "needed a name that ends in one of"),
    ],
)
def test_bad_arguments_exit_with_2_before_any_rank_is_started(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "start_two_ranks", lambda: pytest.fail("started"))
    assert main(["collectives", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_every_algorithm_between_nodes_can_be_asked_for() -> None:
    assert [parse_algorithm(name) for name in ("auto", "gather", "gatherv", "reduce", "two_phase", "dense")]


def test_a_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[report\]'"):
        check_plot_possible(tmp_path / "plot.png")


def test_a_plot_is_drawn_of_one_row_and_of_many(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    draw_plot([ROW], "one", file)
    draw_plot([replace(one, size_nbytes=size) for one in (ROW, BASELINE) for size in (1, 2, 1 << 30)], "many", file)
    assert file.read_bytes().startswith(b"\x89PNG")


def places(nodes: int, local_size: int) -> list[Topology]:
    return [Topology(rank, blocks(nodes * local_size, local_size), "test") for rank in range(nodes * local_size)]


ASKED = (
    "demo:k=32",
    "demo:k=4,chunk=16,values=sign",
    "demo:k=5,chunk=48",
    "top_k:rate=1/32",
    "top_k:rate=0.1,values=int8",
    "threshold:tau=0.003",
    "threshold:tau=3,capacity=None",
    "random_k:rate=1/32",
    "striding:rate=1/16",
    "sign",
    "dense",
    "dense:values=bf16",
)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("nodes", "local_size"), [(1, 1), (2, 1), (3, 1), (4, 2), (2, 3)])
@pytest.mark.parametrize("text", ASKED)
def test_the_average_of_the_inputs_is_the_one_expected(
    text: str, nodes: int, local_size: int, dtype: torch.dtype
) -> None:
    shape = (64, 128)
    plan = parse_compressor(text).compressor.plan(TensorSpec("0", shape, dtype))
    everywhere = places(nodes, local_size)
    total = sum(make_input(plan, shape, dtype, place).double() for place in everywhere)
    expected = expect_average(plan, shape, everywhere[0])
    # Transformed inputs are rounded to their dtype; all others are whole numbers times a power of two.
    error = float((total / len(everywhere) - expected).abs().max())
    assert error <= (8 * torch.finfo(dtype).eps * max(1, local_size) if plan.transformed else 1e-12)


def wrong_of(text: str, damage: Any, nodes: int = 2) -> int:
    shape, place = (64, 128), places(nodes, 1)[0]
    plan = parse_compressor(text).compressor.plan(TensorSpec("0", shape, torch.float32))
    expected = expect_average(plan, shape, place)
    return count_wrong(damage(expected.float()), expected, plan, place)


def damaged(position: int, value: float) -> Any:
    def damage(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out.view(-1)[position] = value
        return out

    return damage


@pytest.mark.parametrize("text", ["demo:k=32", "top_k:rate=1/32", "sign", "dense"])
def test_what_is_right_counts_none_and_each_damaged_element_counts_once(text: str) -> None:
    assert wrong_of(text, lambda out: out) == 0
    assert wrong_of(text, damaged(17, 99.0)) == 1
    assert wrong_of(text, damaged(17, float("nan"))) == 1
    assert wrong_of(text, lambda out: out * 2) > 0


def test_of_a_shared_selection_unsent_elements_may_be_zero_but_only_as_many_as_were_not_sent() -> None:
    text, kept = "random_k:rate=1/2", 64 * 128 // 2

    def send_first(count: int) -> Any:
        return lambda out: torch.where(torch.arange(out.numel()).view(out.shape) < count, out, 0.0)

    assert wrong_of(text, send_first(kept)) == 0
    assert wrong_of(text, send_first(kept - 3)) == 3
    assert wrong_of(text, lambda out: damaged(0, 99.0)(send_first(kept)(out))) == 1


def test_a_row_takes_the_slowest_rank_of_each_iteration_and_the_median_of_those() -> None:
    case = Case((64, 64), torch.float32, "fp32", iterations=3, warmups=0, checked=True)
    # time, encode, intra, inter, decode, wire, payload, kept; two ranks, three iterations.
    slow_first = [[0.030, 0.010, 0.001, 0.015, 0.004, 1000, 500, 160]] * 3
    fast_then_slow = [[0.020, 0.002, 0.002, 0.022, 0.005, 3000, 700, 160]] * 2 + [
        [0.050, 0.002, 0, 0.022, 0.005, 3000, 700, 160]
    ]
    gathered = torch.tensor([slow_first, fast_then_slow], dtype=torch.float64)
    row = summarise(gathered, "x", "gather", case, places(2, 1)[0], Link(1.6e6, "told"), wrong=7)
    assert (row.time_min_s, row.time_median_s, row.time_p99_s) == (0.030, 0.030, 0.050)
    assert (row.encode_s, row.intra_s, row.decode_s, row.wrong) == (0.010, 0.002, 0.005, 7)
    assert (row.nodes, row.ranks_per_node) == (2, 1)
    # The last rank has encoded after 10 ms, the last has everything after 25.
    assert row.inter_s == pytest.approx(0.015)
    assert (row.wire_nbytes, row.payload_nbytes, row.bits_per_kept) == (2000, 600, 30)
    assert row.effective_bytes_per_s == pytest.approx(64 * 64 * 4 / 0.030)
    assert row.wire_bytes_per_s == pytest.approx(2000 / 0.015)
    assert row.link_share == pytest.approx(8 * 2000 / 0.015 / 1.6e6)


def test_nothing_sent_makes_no_bandwidth() -> None:
    case = Case((1, 1), torch.float32, "fp32", iterations=1, warmups=0, checked=False)
    gathered = torch.tensor([[[0.1, 0, 0, 0, 0, 0, 0, 0]]], dtype=torch.float64)
    row = summarise(gathered, "x", "gather", case, places(1, 1)[0], Link(1e6, "told"), wrong=None)
    assert (row.wire_bytes_per_s, row.link_share, row.bits_per_kept, row.wrong) == (None, None, None, None)


HEADING = (
    "#   size      count  type       compressor   algorithm     min  median     p99        wire   bits   effbw  wirebw"
    "   link  encode   intra   inter  decode  #wrong\n"
    "#  bytes   elements                                         ms      ms      ms  bytes/rank  /kept    MB/s    MB/s"
    "  share      ms      ms      ms      ms"
)
LINE = (
    "      1M     262144  fp32        demo:k=32      gather    10.1    12.5     200       57792   25.1    83.9    11.5"
    "    92%    2.50   0.000    5.00   0.610       0"
)
UNKNOWN = (
    "      1M     262144  fp32  all-reduce fp32  all-reduce    10.1    12.5     200       57792      -    83.9       -"
    "      -    2.50   0.000    5.00   0.610     N/A"
)


def test_the_plain_table_is_this() -> None:
    lines = Lines(["demo:k=32", "all-reduce fp32"])
    unknown = replace(BASELINE, bits_per_kept=None, wire_bytes_per_s=None, link_share=None, wrong=None)
    assert lines.heading() == HEADING
    assert lines.line(ROW) == LINE
    assert lines.line(unknown) == UNKNOWN


def test_numbers_show_three_digits_and_sizes_their_letter() -> None:
    assert [show_number(number) for number in (None, 0.0, 1.234, 12.34, 123.4, 12345.6)] == [
        *("-", "0.00", "1.23", "12.3", "123", "12346")
    ]
    assert [show_ms(second) for second in (0.0, 12e-6, 1.5e-3, 2.0)] == ["0.000", "0.012", "1.50", "2000"]
    assert [show_size(nbytes) for nbytes in (1, 1000, 1024, 3 << 20, 1 << 30)] == ["1", "1000", "1K", "3M", "1G"]


@pytest.mark.parametrize("width", [20, 80, 120, 400])
def test_on_a_terminal_every_column_appears_once_and_every_table_names_its_rows(width: int) -> None:
    groups = split_columns({column.heading: [column.show(ROW)] for column in COLUMNS}, width)
    keys = [column for column in COLUMNS if column.is_key]
    others = [column.heading for group in groups for column in group if not column.is_key]
    assert sorted(others) == sorted(column.heading for column in COLUMNS if not column.is_key)
    assert all(set(keys) < set(group) for group in groups)
    assert (len(groups) == 1) == (width == 400)


def test_csv_holds_all_fields_in_base_units(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    write_csv([ROW, BASELINE], file)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["compressor"] for row in rows] == ["demo:k=32", "all-reduce fp32"]
    assert set(rows[0]) == set(asdict(ROW))
    assert float(rows[0]["time_median_s"]) == ROW.time_median_s
    with pytest.raises(UsageError, match="Give --csv another file"):
        write_csv([ROW], tmp_path / "missing" / "table.csv")


SETTINGS = Settings(((512, 512),), 10, 2, True, (parse_compressor("demo:k=32"),), "auto", "fp32")


def test_the_report_bounds_the_worst_share_of_large_payloads_and_leaves_the_baselines_out() -> None:
    large = replace(ROW, payload_nbytes=1e6)
    rows = [replace(large, link_share=0.93), replace(large, link_share=0.91), BASELINE, replace(ROW, link_share=0.1)]
    report = make_report(Findings(rows), SETTINGS, Link(1e8, "told"))
    assert report.figures["link_share"] == 0.91
    assert report.figures["wrong"] == 0
    assert report.settings["compressors"] == ["demo:k=32"]
    assert set(load_targets("collectives", report.known_figures)) <= report.known_figures
    assert find_link_share([BASELINE], frozenset({"all-reduce fp32"})) is None


def test_what_was_not_measured_says_why() -> None:
    unchecked = replace(SETTINGS, checked=False)
    nowhere = make_report(Findings([ROW]), unchecked, None)
    assert "give --link-rate" in nowhere.unmeasured["link_share"]
    assert "-c 0" in nowhere.unmeasured["wrong"]
    small = make_report(Findings([ROW]), SETTINGS, Link(1e8, "told"))
    assert "give a larger -e" in small.unmeasured["link_share"]


def test_the_footer_says_ok_or_failed_and_what_is_missing() -> None:
    good = conclude_lines(Findings([ROW, BASELINE]), total=2)
    assert good == [
        "Out of bounds values : 0 OK",
        "Avg effective bandwidth, MB/s : demo:k=32 83.9, all-reduce fp32 83.9",
    ]
    bad = conclude_lines(Findings([replace(ROW, wrong=3)], ["sign: cannot"]), total=5)
    assert bad == [
        "skipped sign: cannot",
        "interrupted: 1 of 5 lines were measured",
        "Out of bounds values : 3 FAILED",
        "Avg effective bandwidth, MB/s : demo:k=32 83.9",
    ]
    assert conclude_lines(Findings(), total=5)[-1] == "Avg effective bandwidth, MB/s : nothing measured"


def test_the_rate_of_an_emulated_link_is_its_shapers() -> None:
    text = '[{"kind":"tbf","handle":"8001:","dev":"link0","root":true,"options":{"rate":12500000,"burst":4199}}]'
    assert shaper_rate(text) == 100e6
    assert shaper_rate('[{"kind":"noqueue"}]') is None
    assert shaper_rate("") is None


def test_only_an_emulated_node_counts_bytes(tmp_path: Path) -> None:
    counters = tmp_path / "dev"
    counters.write_text("Inter-| Receive\n lo: 1 2 3 4 5 6 7 8 9 10\nlink0: 11 2 3 4 5 6 7 8 4321 10\n")
    assert read_sent_nbytes(counters) == 4321
    counters.write_text("  eth0: 11 2 3 4 5 6 7 8 4321 10\n")
    assert read_sent_nbytes(counters) is None


def test_a_rate_that_was_told_needs_no_link() -> None:
    assert str(find_link("1gbit")) == "1gbit (--link-rate)"
