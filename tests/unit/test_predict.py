"""The prediction: which method takes how long, from when on it pays, and which one is recommended."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from flexcomm import BUCKET_BYTES, InvalidArgumentError, gossip
from flexdemo.__main__ import main, parse_bits_per_s, parse_count, parse_straggler
from flexdemo.predict import (
    DDP_BUCKET_BYTES,
    SCHEDULES,
    AllReduceMethod,
    Curve,
    DecentralizedMethod,
    FlexDemoMethod,
    Method,
    MethodPrediction,
    Scenario,
    given_compute,
    plan_methods,
    plan_scenario,
    predict_methods,
    predict_over_bandwidth,
    predict_over_nodes,
)
from flexdemo.predict.calibration import Calibration
from flexdemo.predict.report import (
    check_plot_possible,
    describe_scenario,
    draw_plot,
    format_bits_per_s,
    format_number,
    format_rates,
    merge_curves,
    recommend,
    write_table,
)
from flexdemo.runtime import AlphaBeta, BreakEven, Compression, Horizon, Straggler, plan_workload

ROOT = Path(__file__).resolve().parents[2]
GPT = plan_workload(496_000_000, bucket_nbytes=DDP_BUCKET_BYTES, forward_s=0.1, backward_s=0.2, optimizer_s=0.01)
QUICK = Horizon(iterations=30, warmup=10)
FREE = Compression(k=32)
"""FlexDeMo on a device whose encoding costs nothing."""


def scenario(gbit: float, nodes: int = 8) -> Scenario:
    links = AlphaBeta(gbit * 1e9 / 8, 5e-5)
    return Scenario(nodes=nodes, links=links, workload=GPT, all_reduce_workload=GPT, horizon=QUICK)


def methods(*names: str) -> list[Method]:
    return [*(DecentralizedMethod(name) for name in names or ("complete", "one-peer-exp", "aer")), FlexDemoMethod(FREE)]


# Arguments


@pytest.mark.parametrize(("text", "bits"), [("100mbit", 1e8), ("2.5 Gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates_are_read_as_tc_reads_them(text: str, bits: float) -> None:
    assert parse_bits_per_s(text) == bits


@pytest.mark.parametrize("text", ["", "100", "0mbit", "-1gbit", "1tbit", "mbit"])
def test_what_is_no_rate_is_an_error_that_shows_some(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Write for example 100mbit"):
        parse_bits_per_s(text)


@pytest.mark.parametrize(("text", "count"), [("65000000", 65_000_000), ("124M", 124_000_000), ("1.3b", 1_300_000_000)])
def test_parameters_are_counted(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "many", "-3M", "1.5T"])
def test_what_is_no_count_is_an_error(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="such as 65000000, 124M"):
        parse_count(text)


def test_stragglers_are_a_probability_and_percent() -> None:
    assert parse_straggler("0.01:50") == parse_straggler("0.01:50%") == Straggler(0.01, 0.5)
    for text in ("0.5", "1:2:3", "x:1", "2:50"):
        with pytest.raises(InvalidArgumentError, match="got --straggler"):
            parse_straggler(text)


def test_numbers_are_written_in_three_digits() -> None:
    assert [format_number(number) for number in (0.1234, 12.34, 99.96, 1234.5)] == ["0.123", "12.3", "100", "1234"]
    assert [format_bits_per_s(bits) for bits in (1e8, 0.99999e9, 2.5e10, 5e4)] == [
        "100mbit",
        "1gbit",
        "25gbit",
        "50kbit",
    ]


# Methods


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_one_the_runtime_model_can_follow(name: str) -> None:
    here = scenario(1.0)
    method = DecentralizedMethod(name)
    assert method.seconds(here) >= GPT.compute_s - 1e-9
    assert method.sent_nbytes(here) > 0
    assert method.averaging(here)


def test_bytes_are_counted_as_they_cross() -> None:
    here, size = scenario(1.0), GPT.nbytes
    sent = {name: DecentralizedMethod(name).sent_nbytes(here) / size for name in SCHEDULES}
    assert sent["complete"] == pytest.approx(2 * 7 / 8)
    assert sent["one-peer-exp"] == sent["ring"] == sent["random-matching"] == sent["directed-exp"] == 1.0
    assert sent["aer"] == 0.5
    assert sent["static-exp"] == 3.0
    assert FlexDemoMethod(FREE).sent_nbytes(here) == pytest.approx(7 * FREE.payload_nbytes(size))
    assert AllReduceMethod().sent_nbytes(here) == pytest.approx(2 * 7 / 8 * size)


def test_schedules_that_cannot_be_are_left_out_with_the_reason() -> None:
    possible, skipped = plan_methods(6, schedules=("ring", "one-peer-exp"))
    assert possible == [DecentralizedMethod("ring")]
    assert "needs a power of two" in skipped["one-peer-exp"]
    with pytest.raises(InvalidArgumentError, match="got --schedule 'star', needed one of complete"):
        plan_methods(6, schedules=("star",))


# What is recommended


def test_on_endless_links_nothing_beats_all_reduce() -> None:
    rows = predict_methods(scenario(1e6), methods("one-peer-exp", "aer"))
    assert recommend(rows)[0] == "all-reduce"
    assert all(row.speedup <= 1 + GPT.forward_s / GPT.compute_s for row in rows)
    assert "Stay with all-reduce" in recommend(rows)[1]


def test_on_slow_links_flexdemo_wins_by_the_bytes_it_does_not_send() -> None:
    rows = predict_methods(scenario(0.1), methods("one-peer-exp"))
    best, sentence = recommend(rows)
    assert best == "flexdemo k=32"
    assert "a node sends" in sentence
    assert {row.method: row.speedup for row in rows}["flexdemo k=32"] > 10


def test_where_compute_varies_and_encoding_is_dear_decentralized_training_wins() -> None:
    slow_encoder = replace(FREE, encode_s_per_element=1e-8)
    noisy = replace(GPT, sigma=0.3)
    varying = replace(scenario(100.0), workload=noisy, all_reduce_workload=noisy)
    rows = predict_methods(varying, [DecentralizedMethod("one-peer-exp"), FlexDemoMethod(slow_encoder)])
    best, sentence = recommend(rows)
    assert best == "one-peer-exp"
    assert "not for the slowest of all" in sentence


def test_of_methods_that_take_the_same_time_the_first_is_recommended() -> None:
    def row(method: str, seconds: float) -> MethodPrediction:
        return MethodPrediction(method, "flexdemo", seconds, 1 / seconds, 1e6, "")

    assert recommend([row("all-reduce", 1.0), row("a", 0.51), row("b", 0.5)])[0] == "a"
    assert recommend([row("all-reduce", 1.0), row("a", 0.60), row("b", 0.5)])[0] == "b"
    assert recommend([row("all-reduce", 1.0), row("a", 0.96)])[0] == "all-reduce"
    assert recommend([row("all-reduce", 1.0), row("a", 2.0)])[0] == "all-reduce"


def test_break_even_lies_between_where_it_pays_and_where_not() -> None:
    dear = FlexDemoMethod(replace(FREE, encode_s_per_element=2e-9, decode_s_per_element=2e-9))
    row = predict_methods(scenario(1.0), [dear])[1]
    (crossing,) = row.break_evens
    assert crossing.faster_side == "below"
    rate = crossing.bytes_per_s
    below, above = (scenario(8 * factor * rate / 1e9) for factor in (0.8, 1.25))
    assert dear.seconds(below) < AllReduceMethod().seconds(below)
    assert dear.seconds(above) > AllReduceMethod().seconds(above)
    assert row.min_speedup_break_evens[-1].bytes_per_s < rate


def test_factors_are_told_of_decentralized_methods_only() -> None:
    rows = predict_methods(scenario(1.0), methods("one-peer-exp"))
    assert [row.factors is None for row in rows] == [True, False, True]
    assert rows[1].factors is not None
    assert math.prod(vars(rows[1].factors).values()) == pytest.approx(rows[1].speedup)


# Sweeps


def test_curves_pass_through_what_is_predicted_here() -> None:
    here = scenario(1.0)
    over_bandwidth = predict_over_bandwidth(here, methods("ring"))
    over_nodes = predict_over_nodes(here, methods("ring"), 16)
    for curve, method in zip(over_bandwidth, [AllReduceMethod(), *methods("ring")], strict=True):
        assert curve.seconds[8] == pytest.approx(method.seconds(here))
        assert list(curve.seconds) == sorted(curve.seconds, reverse=True)
    assert over_nodes[0].xs == (2, 4, 8, 16)
    assert over_nodes[1].seconds[2] == pytest.approx(DecentralizedMethod("ring").seconds(here))


def test_numbers_of_nodes_that_a_schedule_cannot_have_are_left_out() -> None:
    _, curve = predict_over_nodes(scenario(1.0), [DecentralizedMethod("one-peer-exp")], 12)
    assert curve.xs == (2, 4, 8)


# Scenarios


def test_a_scenario_needs_compute_links_and_nodes() -> None:
    compute = given_compute(1_000_000, forward_ms=100)
    assert plan_scenario(Calibration(), compute, nodes=4, bits_per_s=1e9).workload.backward_s[0] == pytest.approx(0.2)
    for changes, message in (
        ({"nodes": None}, "give --nodes"),
        ({"nodes": 1}, "got 1 nodes, needed 2 or more"),
        ({"bits_per_s": None}, "no links: give --bandwidth"),
        ({"compute": None}, "no compute times: give --parameters"),
        ({"sigma": -1.0}, "sigma = -1.0"),
        ({"bucket_mb": 0.0}, "bucket_nbytes = 0"),
        ({"ranks_per_node": -1}, "ranks_per_node = -1"),
        ({"latency_us": -1e6}, "latency_s = -1.0"),
    ):
        lacking: dict[str, Any] = {"compute": compute, "nodes": 4, "bits_per_s": 1e9} | changes
        with pytest.raises(InvalidArgumentError, match=message):
            plan_scenario(Calibration(), **lacking)
    with pytest.raises(InvalidArgumentError, match="without --parameters"):
        given_compute(None, forward_ms=100)
    with pytest.raises(InvalidArgumentError, match="without --forward-ms"):
        given_compute(1_000_000, None, backward_ms=1000)


def test_buckets_are_flexdemos_and_for_all_reduce_ddps_unless_given() -> None:
    compute = given_compute(124_000_000, forward_ms=100)
    found = plan_scenario(Calibration(), compute, nodes=4, bits_per_s=1e9)
    assert max(found.workload.bucket_nbytes) <= BUCKET_BYTES
    assert BUCKET_BYTES < max(found.all_reduce_workload.bucket_nbytes) <= DDP_BUCKET_BYTES
    assert "496 MB in 30 buckets (all-reduce: 19)" in describe_scenario(found, Calibration())[0]
    given = plan_scenario(Calibration(), compute, nodes=4, bits_per_s=1e9, bucket_mb=1.0)
    assert given.workload == given.all_reduce_workload
    assert len(given.workload.bucket_nbytes) == 474


def test_assumptions_are_printed() -> None:
    compute = given_compute(1_000_000, forward_ms=100)
    assumed = plan_scenario(Calibration(), compute, nodes=4, bits_per_s=1e9, straggler=Straggler(0.01, 0.5))
    lines = "\n".join(describe_scenario(assumed, Calibration()))
    assert "4 nodes x 1 ranks, 1gbit each way between nodes (assumed); 4 MB in 1 buckets" in lines
    assert "forward + backward + optimizer: 100 + 200 + 0 ms" in lines
    assert "in 1 % of its iterations a node is 50 % slower" in lines
    assert "3 ns to encode an element, 1.5 ns to decode one and 50 ns for each coefficient received" in lines


def test_methods_come_in_the_order_of_how_well_they_average() -> None:
    found, skipped = plan_methods(8, schedules=("ring", "aer"), ks=(8, 64))
    assert [one.name for one in found] == ["ring", "aer", "flexdemo k=64", "flexdemo k=8"]
    assert not skipped
    for k in (0, 5000):
        with pytest.raises(InvalidArgumentError, match=f"got k = {k}, needed a number between 1 and 4096"):
            plan_methods(8, ks=(k,))


# What people see


def test_rates_at_which_it_pays_are_told_in_words() -> None:
    low, high = 125e5, 125e7
    assert format_rates((), faster=True) == "always"
    assert format_rates((), faster=False) == "never"
    assert format_rates((BreakEven(low, "below"),), faster=True) == "below 100mbit"
    assert format_rates((BreakEven(low, "above"),), faster=True) == "above 100mbit"
    assert format_rates((BreakEven(low, "above"), BreakEven(high, "below")), faster=True) == "100mbit to 10gbit"
    both = (BreakEven(low, "below"), BreakEven(high, "above"))
    assert format_rates(both, faster=True) == "below 100mbit, above 10gbit"


def test_the_plain_table_has_a_line_for_each_method() -> None:
    rows = predict_methods(scenario(1.0), methods("ring"))
    stream = StringIO()
    write_table(rows, stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    columns = (
        "method",
        "ms/iteration",
        "speedup",
        "MB sent/node",
        "faster",
        "overlap x links x variation",
        "averaging",
    )
    assert all(column in lines[0] for column in columns)
    assert [line.split()[0] for line in lines[1:]] == ["all-reduce", "ring", "flexdemo"]


def test_methods_that_take_the_same_time_share_a_curve_of_the_plot() -> None:
    a = Curve("a", "decentralized", (1.0, 2.0), (3.0, 4.0))
    b = replace(a, method="b", xs=(1.0, 2.0, 3.0), seconds=(3.0, 4.0, 5.0))
    c = replace(a, method="c", seconds=(3.0, 4.1))
    packed = replace(a, method="d", family="flexdemo")
    lines = merge_curves([a, b, c, packed], [a, b, c, packed])
    assert [label for label, _ in lines] == ["a, b", "c", "d"]
    assert lines[0][1] == (b, b)


def test_the_plot_is_a_picture_of_both_sweeps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    here, file = scenario(1.0), tmp_path / "plot.png"
    check_plot_possible(file)
    over_nodes = predict_over_nodes(here, methods("ring"), 12)
    draw_plot(here, predict_over_bandwidth(here, methods("ring")), over_nodes, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgumentError, match="needed a name that ends in one of"):
        check_plot_possible(tmp_path / "plot.doc")
    with pytest.raises(InvalidArgumentError, match="there is no folder"):
        check_plot_possible(tmp_path / "nowhere" / "plot.png")


def run(*arguments: str) -> int:
    try:
        return main(["predict", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


FLAGS = ("--bandwidth", "100mbit", "--nodes", "6", "--parameters", "10M", "--forward-ms", "20")


def test_the_command_prints_a_table_and_a_recommendation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prediction.json"
    code = run(
        *FLAGS, "--k", "32", "--schedule", "ring", "--schedule", "one-peer-exp", "--json", str(file), "--max-nodes", "8"
    )
    assert code == 0
    shown = capsys.readouterr().out
    assert "skipped one-peer-exp: one_peer_exponential was asked for 6 nodes" in shown
    assert "Use flexdemo k=32" in shown
    assert "all-reduce" in shown
    report = json.loads(file.read_text())
    assert report["schema"] == "flexdemo-prediction"
    assert [row["method"] for row in report["predictions"]] == ["all-reduce", "ring", "flexdemo k=32"]
    assert report["recommendation"]["method"] == "flexdemo k=32"
    assert report["scenario"]["links"]["intra_bytes_per_s"] is None
    assert [curve["method"] for curve in report["over_nodes"]] == ["all-reduce", "ring", "flexdemo k=32"]
    assert report["over_nodes"][0]["xs"] == [2, 4, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "4"), "no compute times"),
        (("--workload", "a:b"), "--workload is timed by --calibrate FILE"),
        (("--calibration", "a", "--collectives", "b"), "needed one of them at most"),
        (("--calibration", "/nowhere.json"), "cannot read /nowhere.json"),
        (("--calibrate", "/nowhere/a.json"), "there is no folder /nowhere"),
        (("--bandwidth", "fast"), "got the rate 'fast'"),
        ((*FLAGS, "--updates", "never"), "'never' is not one of 'backward', 'step'"),
    ],
)
def test_mistakes_end_with_a_sentence_and_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_without_typer_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; import runpy; runpy.run_module('flexdemo', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'flexcomm[cli]'" in done.stderr


def test_without_matplotlib_only_the_plot_is_refused() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None; from flexdemo.__main__ import main; "
        "sys.exit(main(['predict', '--plot', 'a.png']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'flexcomm[report]'" in done.stderr


def test_gossip_offers_what_the_command_names() -> None:
    assert {schedule(4).nodes for schedule in SCHEDULES.values()} == {4}
    assert gossip.alternating_exponential_ring(8).period == 6
