"""What ``bench demo`` makes of its runs, and how a run that lasts some seconds is divided; no rank is started."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.demo.command import Progress, find_links, make_report
from bench.demo.results import BASELINE, HEADLINE, LABELS, chart, conclusion, draw, sooner, tabulate, title
from bench.errors import ClusterUnavailableError
from bench.train.methods import METHODS
from bench.train.plan import Run, Settings
from bench.train.records import Ending, Evaluation, History, Interval
from bench.train.summary import Summary, summarise
from bench.train.training_run import Forecast, warm_up_then_cosine
from ci.install import describe

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = Settings("demo", 1, 2, 1, 1, 64, False, 2, 1, "torchrun", "10mbit", links="paced", seconds=20.0)


def history(losses: list[float], seconds: float, *, diverged: str = "") -> History:
    every_s = seconds / (len(losses) - 1)
    evaluations = [Evaluation(10 * i, loss, i * every_s, 1e4 * i) for i, loss in enumerate(losses)]
    steps = 10 * (len(losses) - 1)
    return History(None, [], evaluations, Ending(steps, seconds, 1, 1e3 * steps, 7, True, diverged))


SUMMARIES = summarise(
    {
        Run(BASELINE, 0.1, 0): history([5.0, 4.0, 3.0], 20.0),
        Run("flexdemo-sign", 0.1, 0): history([5.0, 4.5, 3.5], 20.0),
        Run(HEADLINE, 0.1, 0): history([5.0, 3.0, 2.0], 10.0),
        Run("local-muon", 0.1, 0): history([5.0, 4.0], 10.0, diverged="before step 10"),
    }
)


def test_all_methods_are_those_of_bench_train() -> None:
    assert set(LABELS) <= set(METHODS)


def test_sooner_is_the_baselines_time_over_ours_to_its_last_loss() -> None:
    assert sooner(SUMMARIES) == {BASELINE: 1.0, HEADLINE: 4.0}
    assert sooner(SUMMARIES[1:]) == {}


def test_the_table_says_what_was_reached_and_what_was_not() -> None:
    table = tabulate(SUMMARIES)
    assert table.columns[5:] == ("s to 3.00", "times sooner")
    cells = [row[1:] for row in table.rows]
    assert cells == [
        ("3.000", "20", "1.000", "1.0", "20.0", "1.0x"),
        ("3.500", "20", "1.000", "1.0", "not reached", "-"),
        ("2.000", "20", "0.500", "1.0", "5.0", "4.0x"),
        ("-",) * 6,
    ]


def test_the_conclusion_names_the_number_that_was_measured() -> None:
    assert conclusion(SUMMARIES) == "FlexDeMo has AdamW's loss of 3.00 after 5.0 s, not 20.0: 4.0 times sooner."
    assert "did not reach" in conclusion(SUMMARIES[:2])
    assert "no loss to compare with" in conclusion(SUMMARIES[1:])


@pytest.mark.parametrize(("links", "said"), [("paced", "paced in software"), ("namespaces", "network namespaces")])
def test_the_title_says_where_links_come_from(links: str, said: str) -> None:
    text = title(replace(SETTINGS, links="paced" if links == "paced" else "namespaces"))
    assert "links of 10 Mbit/s" in text
    assert said in text


def test_the_chart_has_every_method_that_did_not_diverge() -> None:
    lines = chart(SUMMARIES).splitlines()
    plotted = "".join(line[7:] for line in lines if "|" in line)
    assert set(plotted) == {" ", "A", "o", "#"}
    assert chart(SUMMARIES[1:]) == ""


def test_the_picture_is_drawn_although_a_method_diverged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(SUMMARIES, title(SETTINGS), tmp_path / "demo.png", BASELINE)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("summaries", "quick", "figures", "unmeasured"),
    [
        (SUMMARIES, False, {"total_s", "replicas_differ", "sooner"}, set()),
        (SUMMARIES, True, {"total_s", "replicas_differ"}, {"sooner"}),
        (SUMMARIES[:2], False, {"total_s", "replicas_differ"}, {"sooner"}),
    ],
)
def test_a_figure_is_measured_or_says_why_not(
    summaries: list[Summary], quick: bool, figures: set[str], unmeasured: set[str]
) -> None:
    report = make_report(summaries, SETTINGS, 60.0, quick=quick)
    assert (set(report.figures), set(report.unmeasured)) == (figures, unmeasured)


def test_links_are_paced_where_namespaces_do_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_spec: object) -> None:
        raise ClusterUnavailableError("no root")

    monkeypatch.setattr("bench.demo.command.open_cluster", refuse)
    assert find_links("auto", SETTINGS) == "paced"
    assert "no root" in capsys.readouterr().out
    assert find_links("namespaces", SETTINGS) == "namespaces"


def test_progress_adds_up_seconds_and_shows_the_last_loss() -> None:
    progress = Progress()
    progress.add(Interval(4, 4.5, 0.5, 0.0, 0.0, 0.0, 0.0, None))
    progress.add(Evaluation(6, 4.2, 3.0, 0.0))
    progress.add(Interval(6, 4.0, 0.5, 0.0, 0.0, 0.0, 0.0, None))
    assert str(progress).split(maxsplit=4) == ["3.0", "s", "step", "6", "training loss 4.00, validation loss 4.20"]


@pytest.mark.parametrize("steps", [10, 250])
def test_a_run_of_seconds_has_the_schedule_of_a_run_of_steps(steps: int) -> None:
    by_step, forecast = warm_up_then_cosine(steps), Forecast(seconds=20.0, step_s=20.0 / steps)
    for step in range(steps):
        assert forecast.warm_up_then_cosine(step) == pytest.approx(by_step(step), abs=1e-3)
        forecast.update(step + 1, 20.0 * (step + 1) / steps)


def test_a_forecast_follows_what_steps_took_last() -> None:
    forecast = Forecast(seconds=20.0, step_s=1.0)
    assert forecast.steps_left(5.0) == 5
    forecast.update(2, 12.0)
    assert (forecast.step_s, forecast.steps_left(20.0)) == (6.0, 8.0 / 6.0)
    forecast.update(3, 21.0)
    assert forecast.steps_left(20.0) < 0
    assert forecast.warm_up_then_cosine(3) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Collecting torch==2.13.0 (from flexcomm)", "looking for torch==2.13.0"),
        ("  Downloading torch-2.13.0.whl (190.1 MB)", "downloading torch-2.13.0.whl (190.1 MB)"),
        ("  Downloading torch-2.13.0.whl.metadata (29 kB)", None),
        ("Installing collected packages: numpy, torch", "unpacking 2 packages"),
        ("Installing collected packages: mpich", "unpacking mpich"),
        ("WARNING: nothing to worry about", None),
    ],
)
def test_of_pips_words_those_are_shown_that_take_time(line: str, said: str | None) -> None:
    assert describe(line) == said
