"""The benchmark of decentralized training: its methods, its pace, its table and its figures."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest
import torch

import flexcomm
from bench.cli import main
from bench.decentralized import KNOWN_FIGURES, check_emulation, make_report, tabulate
from bench.errors import UsageError
from bench.train.comparison import describe, plan_runs, plan_settings, plan_sweep
from bench.train.learning_rates import Choice, choose_rates, save_sweep
from bench.train.methods import ALL_METHODS, ALLREDUCE, DECENTRALIZED_METHODS, METHODS, parse_methods
from bench.train.model import SIZES, build_model, loss_of
from bench.train.plan import Plan, Run, Settings, load_plan, save_plan
from bench.train.records import Ending, Evaluation, History
from bench.train.summary import Summary, draw_plot, summarise
from bench.train.training_run import Pace, straggler_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = Settings(
    "tiny",
    100,
    2,
    25,
    50,
    16,
    shard=False,
    nodes=4,
    ranks_per_node=1,
    launcher="torchrun",
    rate="100mbit",
    compute_ms=200,
    straggler_percent=50,
)


def history(losses: list[float], step_s: float, step_nbytes: float, distance: float | None = None) -> History:
    steps = [50 * number for number in range(len(losses))]
    evaluations = [
        Evaluation(step, loss, step * step_s, step * step_nbytes) for step, loss in zip(steps, losses, strict=True)
    ]
    last = steps[-1]
    ending = Ending(
        last,
        last * step_s,
        10 * last,
        last * step_nbytes,
        7,
        replicas_equal=True,
        compute_s=last * 0.2,
        consensus_distance=distance,
    )
    return History(None, [], evaluations, ending)


HISTORIES = {
    Run(ALLREDUCE, 0.004, 0): history([5.0, 3.0, 2.0], 0.6, 4e6),
    Run("allreduce-ddp", 0.004, 0): history([5.0, 3.0, 2.0], 0.5, 4e6),
    Run("exponential", 0.004, 0): history([5.0, 3.0, 2.1], 0.25, 2.5e6, 0.02),
    Run("aer-accum", 0.004, 0): history([5.0, 3.0, 1.9], 0.23, 1.25e6, 0.0625),
    Run("aer-accum", 0.004, 1): history([5.0, 3.0, 2.1], 0.23, 1.25e6, 0.0875),
    Run("choco", 0.004, 0): history([5.0, 3.0, 2.5], 0.2, 4e5, 1.5),
}


def summaries_of(*methods: str) -> list[Summary]:
    return [one for one in summarise(HISTORIES) if one.method in methods]


def test_no_method_has_the_name_of_another_command_s() -> None:
    assert len(ALL_METHODS) == len(METHODS) + len(DECENTRALIZED_METHODS)
    assert all(name == method.name for name, method in ALL_METHODS.items())


def test_methods_are_found_by_name_in_the_tables_order() -> None:
    assert parse_methods("all", DECENTRALIZED_METHODS) == tuple(DECENTRALIZED_METHODS)
    assert parse_methods("aer, allreduce-adam", DECENTRALIZED_METHODS) == (ALLREDUCE, "aer")
    assert all(list(method.grid) == sorted(method.grid) for method in DECENTRALIZED_METHODS.values())


def test_a_plan_comes_back_from_its_file_with_pace_and_window(tmp_path: Path) -> None:
    plan = Plan(replace(SETTINGS, accumulate=7), plan_sweep(["aer", "choco"], 0.5))
    save_plan(plan, tmp_path)
    assert load_plan(tmp_path) == plan


def test_settings_that_are_not_given_follow_from_size_and_steps() -> None:
    places = {"shard": False, "nodes": 4, "ranks_per_node": 1, "launcher": "torchrun", "rate": None}
    settings = plan_settings("wide", 400, None, None, **places)
    assert (settings.windows, settings.eval_every, settings.log_every) == (SIZES["wide"].windows, 40, 20)
    short, told = (plan_settings("wide", 5, 3, every, **places) for every in (None, 2))
    assert (short.windows, short.eval_every, short.log_every) == (3, 1, 1)
    assert (told.windows, told.eval_every, told.log_every) == (3, 2, 1)


def test_runs_take_the_rates_of_their_sweep(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    save_sweep(SETTINGS, {"aer": {0.001: 3.0, 0.002: 2.5}}, file)
    chosen = choose_rates("tiny", ["aer", "ring"], None, file)
    assert chosen["aer"].lr == 0.002
    assert chosen["ring"] == Choice(DECENTRALIZED_METHODS["ring"].middle, "the middle of its grid: not swept")
    assert [run.method for run in plan_runs(chosen, [0, 1])] == ["aer", "ring", "aer", "ring"]


def test_a_sweep_of_before_there_was_a_pace_was_made_with_the_default(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    plain = replace(SETTINGS, compute_ms=0.0, straggler_percent=0.0)
    save_sweep(plain, {"aer": {0.001: 3.0}}, file)
    said = json.loads(file.read_text())
    for name in ("compute_ms", "straggler_percent", "accumulate"):
        del said["tiny"]["aer"]["settings"][name]
    file.write_text(json.dumps(said))
    assert set(save_sweep(plain, {"aer": {0.002: 2.0}}, file)["aer"].losses) == {0.001, 0.002}
    assert set(save_sweep(SETTINGS, {"aer": {0.004: 2.0}}, file)["aer"].losses) == {0.004}


def test_the_straggler_is_a_function_of_seed_and_step_and_every_node_in_turn() -> None:
    drawn = [straggler_of(0, step, 8) for step in range(800)]
    assert drawn == [straggler_of(0, step, 8) for step in range(800)]
    assert drawn != [straggler_of(1, step, 8) for step in range(800)]
    counts = Counter(drawn)
    assert set(counts) == set(range(8))
    # 100 each, give or take 9: five standard deviations are far, and the draw is fixed.
    assert all(55 < count < 145 for count in counts.values())
    assert {straggler_of(3, step, 1) for step in range(20)} == {0}


@pytest.mark.parametrize(("compute_ms", "percent", "least_s"), [(30.0, 0.0, 0.03), (30.0, 100.0, 0.06), (0.0, 0.0, 0)])
def test_passes_last_as_long_as_they_are_told(compute_ms: float, percent: float, least_s: float) -> None:
    model = build_model(SIZES["tiny"], 0, torch.device("cpu"))
    windows = torch.arange(65).view(1, -1)
    with flexcomm.connect() as world:
        # One node alone is the straggler of every step.
        pace = Pace(replace(SETTINGS, compute_ms=compute_ms, straggler_percent=percent), 0, world)
        pace.attach(model)
        pace.begin(0)
        loss_of(model, windows).backward()
        assert pace.end() >= least_s
        assert all(param.grad is not None for param in model.parameters())


def test_the_table_shows_every_method_beside_all_reduce() -> None:
    table = tabulate(summarise(HISTORIES))
    assert len({len(table.columns), *map(len, table.rows)}) == 1
    cells = {row[0]: row for row in table.rows}
    assert cells[ALLREDUCE] == (ALLREDUCE, "0.004", "2.0000", "-", "1.000", "4", "0.200", "0.600", "1.00x", "-")
    assert cells["aer-accum"][2:5] == ("2.0000", "0.2000", "1.000")
    assert cells["aer-accum"][5:] == ("1.25", "0.200", "0.230", "2.61x", "0.075")


def test_the_table_stands_without_a_baseline() -> None:
    (row,) = tabulate(summaries_of("exponential")).rows
    assert (row[4], row[8]) == ("-", "-")


def test_figures_compare_the_fastest_with_the_fastest_and_the_worst_with_the_bound() -> None:
    report = make_report(summarise(HISTORIES), SETTINGS, quick=False)
    steady = make_report(summarise(HISTORIES), replace(SETTINGS, straggler_percent=0), quick=False)
    assert {*report.figures, *steady.figures} == KNOWN_FIGURES
    assert report.figures["accum_loss_of_allreduce"] == pytest.approx(1.0)
    # choco is faster still, but compressed.
    assert report.figures["straggler_speedup"] == pytest.approx(0.5 / 0.23)
    # Both compute for 0.2 s; the link takes exponential's bytes in 0.2 s, too, and aer's in half of it.
    assert steady.figures["iteration_of_bound"] == pytest.approx(0.25 / 0.2)
    json.dumps(asdict(report)["rows"])


@pytest.mark.parametrize(
    ("methods", "settings", "quick", "figure", "reason"),
    [
        (tuple(DECENTRALIZED_METHODS), SETTINGS, True, "accum_loss_of_allreduce", "--quick"),
        ((ALLREDUCE, "aer"), SETTINGS, False, "accum_loss_of_allreduce", "needs allreduce-adam and a method in -accum"),
        (("aer-accum",), SETTINGS, False, "accum_loss_of_allreduce", "needs allreduce-adam"),
        (("aer-accum",), SETTINGS, False, "straggler_speedup", "needs one of allreduce-adam"),
        ((ALLREDUCE, "choco"), SETTINGS, False, "straggler_speedup", "without compression"),
        (("choco",), SETTINGS, False, "iteration_of_bound", "without compression"),
        ((ALLREDUCE, "exponential"), replace(SETTINGS, compute_ms=0), False, "iteration_of_bound", "--compute-ms"),
        ((ALLREDUCE, "exponential"), replace(SETTINGS, rate=None), False, "iteration_of_bound", "give --rate"),
        ((ALLREDUCE, "exponential"), SETTINGS, False, "iteration_of_bound", "leave out --straggler"),
        (
            (ALLREDUCE, "exponential"),
            replace(SETTINGS, straggler_percent=0),
            False,
            "straggler_speedup",
            "give --straggler",
        ),
    ],
)
def test_figures_that_mean_nothing_say_why(
    methods: tuple[str, ...], settings: Settings, quick: bool, figure: str, reason: str
) -> None:
    report = make_report(summaries_of(*methods), settings, quick=quick)
    assert figure not in report.figures
    assert reason in report.unmeasured[figure]


def test_the_description_tells_of_what_was_slept() -> None:
    assert describe(SETTINGS).endswith("200 ms of computing, one node 50 % slower")
    assert "computing" not in describe(replace(SETTINGS, compute_ms=0.0, straggler_percent=0.0))


def test_the_plot_is_drawn_with_this_command_s_baseline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_plot(summarise(HISTORIES), describe(SETTINGS), tmp_path / "d.png", ALLREDUCE)
    assert (tmp_path / "d.png").stat().st_size > 10_000


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "7b"], "needed one of tiny, demo, small, wide"),
        (["--methods", "adamw"], "needed all, or some of allreduce-adam"),
        (["--steps", "0"], "got --steps 0"),
        (["--seeds", "one"], "got --seeds 'one'"),
        (["--nodes", "1"], "got --nodes 1, needed 2 or more"),
        (["--nodes", "1000"], "got 1000 nodes"),
        (["--window", "0"], "got --window 0"),
        (["--compute-ms", "-1"], "got --compute-ms -1"),
        (["--straggler", "nan"], "got --straggler nan"),
        (["--straggler", "50"], "got --straggler without --compute-ms"),
        (["--rate", "fast"], "needed a number with a unit"),
        (["--launcher", "slurm"], "needed one of openmpi, mpich, torchrun"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why_before_anything_is_written(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decentralized", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_time_does_not_run_backwards() -> None:
    check_emulation(SETTINGS)
    with pytest.raises(UsageError, match="got --straggler inf"):
        check_emulation(replace(SETTINGS, straggler_percent=float("inf")))
