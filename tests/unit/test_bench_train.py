"""The training benchmark: its corpus, model, schedule, rates and sums. What it learns is not a test's business."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest
import torch

from bench.cli import main
from bench.errors import UsageError
from bench.train.command import KNOWN_FIGURES, make_report
from bench.train.comparison import check_settings, describe, plan_runs, plan_sweep
from bench.train.corpus import draw_batch, is_validation, list_sources, load_corpus, spread_windows
from bench.train.learning_rates import Choice, Swept, choose_rates, load_rates, save_sweep
from bench.train.loop import allreduce_nbytes
from bench.train.methods import BASELINE, METHODS, Muon, group_parameters, orthogonal, parse_methods
from bench.train.model import SIZES, build_model, find_size, loss_of
from bench.train.plan import Plan, Run, Settings, load_plan, save_plan
from bench.train.records import (
    Ending,
    Evaluation,
    History,
    Interval,
    Start,
    file_of,
    parse_record,
    read_history,
    read_records,
    write_record,
)
from bench.train.summary import Point, columns_for, draw_plot, find_common_loss, format_rows, seconds_to, summarise
from bench.train.training_run import warm_up_then_cosine
from bench.train.watch import Lines, Reader
from flexcomm import Topology
from flexcomm.topology import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")
SETTINGS = Settings("tiny", 100, 2, 25, 50, 16, shard=False, nodes=2, ranks_per_node=1, launcher="openmpi", rate=None)
FAST, SLOW = Run(BASELINE, 0.002, 0), Run("flexdemo-sign", 0.001, 0)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sixty small files; some of them are for validation by their names."""
    for number in range(60):
        place = tmp_path / "lib" / f"part{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"module{number}.py").write_text(f"x = {number}\n" * 20)
    for excluded in ("site-packages", "test", "__pycache__"):
        (tmp_path / "lib" / excluded).mkdir()
        (tmp_path / "lib" / excluded / "strange.py").write_text("stranger = 1\n")
    (tmp_path / "lib" / "notes.txt").write_text("stranger = 2\n")
    return tmp_path / "lib"


def test_the_corpus_is_split_by_file_and_the_split_depends_on_names_alone(sources: Path) -> None:
    names = list_sources(sources)
    assert len(names) == 60
    assert names == sorted(names)
    held = [name for name in names if is_validation(name)]
    assert 0 < len(held) < 60
    corpus = load_corpus(sources)
    training, validation = (bytes(half.tolist()) for half in (corpus.training, corpus.validation))
    assert validation == b"".join((sources / name).read_bytes() for name in held)
    assert training == b"".join((sources / name).read_bytes() for name in names if name not in held)


def test_the_split_of_known_files_is_fixed() -> None:
    names = ["abc.py", "ast.py", "json/decoder.py", "os.py", "email/utils.py", "typing.py", "socket.py", "random.py"]
    assert [name for name in names if is_validation(name)] == ["random.py"]


def test_another_corpus_has_another_digest(sources: Path) -> None:
    before = load_corpus(sources).digest
    assert load_corpus(sources).digest == before
    (sources / "part0" / "module0.py").write_text("y = 0\n")
    assert load_corpus(sources).digest != before


def test_a_folder_without_sources_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got 0 bytes to train on"):
        load_corpus(tmp_path)


def test_a_batch_is_a_function_of_seed_step_and_rank() -> None:
    data = torch.arange(200, dtype=torch.uint8).repeat(50)
    place = {"seed": 1, "step": 2, "rank": 3}
    batch = draw_batch(data, 4, 16, **place)
    assert batch.shape == (4, 17)
    assert torch.equal(batch, draw_batch(data, 4, 16, **place))
    assert torch.equal(batch.diff() % 200, torch.ones(4, 16, dtype=torch.long))
    for name in place:
        assert not torch.equal(batch, draw_batch(data, 4, 16, **{**place, name: 7}))


def test_batches_and_validation_windows_reach_both_ends_of_the_data() -> None:
    data = torch.arange(10, dtype=torch.uint8)
    drawn = {int(draw_batch(data, 1, 8, seed=0, step=step, rank=0)[0, 0]) for step in range(32)}
    assert drawn == {0, 1}
    assert spread_windows(data, 3, 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


@pytest.mark.parametrize(("name", "numel"), [("tiny", 120_576), ("small", 842_496), ("wide", 5_055_360)])
def test_models_have_the_parameters_they_promise(name: str, numel: int) -> None:
    model = build_model(find_size(name), 0, CPU)
    assert sum(param.numel() for param in model.parameters()) == numel


def test_a_model_is_a_function_of_its_seed_and_begins_near_ignorance() -> None:
    one, same, other = (build_model(SIZES["tiny"], seed, CPU) for seed in (0, 0, 1))
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    windows = draw_batch(torch.arange(256, dtype=torch.uint8).repeat(9), 4, 64, seed=0, step=0, rank=0)
    # ln 256 is what a uniform guess costs; small random weights are close to one.
    assert float(loss_of(one, windows).detach()) == pytest.approx(5.545, abs=0.3)


def test_a_later_byte_does_not_change_earlier_logits() -> None:
    model = build_model(SIZES["tiny"], 0, CPU)
    text = torch.arange(64).view(1, -1)
    changed = text.clone()
    changed[0, 40] = 200
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])


@pytest.mark.parametrize("steps", [1, 2, 20, 1000])
def test_the_schedule_rises_to_one_and_falls_to_a_tenth(steps: int) -> None:
    factors = [warm_up_then_cosine(steps)(step) for step in range(steps + 1)]
    peak = factors.index(max(factors))
    assert max(factors) == 1.0
    assert peak == max(1, round(0.2 * steps)) - 1
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)
    assert all(factor > 0 for factor in factors)


def test_methods_are_found_by_name_in_the_tables_order() -> None:
    assert parse_methods("all") == tuple(METHODS)
    assert parse_methods("random, adamw") == (BASELINE, "random")
    assert all(method.middle in method.grid and 3 <= len(method.grid) <= 5 for method in METHODS.values())
    assert all(list(method.grid) == sorted(method.grid) for method in METHODS.values())


@pytest.mark.parametrize("small_dense", [False, True])
def test_every_parameter_is_in_one_group(small_dense: bool) -> None:
    model = build_model(SIZES["tiny"], 0, CPU)
    groups = group_parameters(model, small_dense=small_dense)
    grouped = [name for group in groups for name, _ in group["params"]]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())
    assert len(groups) == 1 + small_dense
    if small_dense:
        assert all(param.dim() == 1 for _, param in groups[1]["params"])
        assert all(param.dim() == 2 for _, param in groups[0]["params"])


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = Plan(SETTINGS, (FAST, SLOW))
    save_plan(plan, tmp_path)
    assert load_plan(tmp_path) == plan


def test_runs_are_looked_at_where_they_are_logged_and_evaluated_and_at_both_ends() -> None:
    settings = replace(SETTINGS, steps=70, log_every=25, eval_every=30)
    assert settings.stops() == [0, 25, 30, 50, 60, 70]
    assert [step for step in settings.stops() if settings.evaluates_at(step)] == [0, 30, 60, 70]


def test_seeds_are_the_outer_loop() -> None:
    runs = plan_runs({"a": Choice(1.0, ""), "b": Choice(2.0, "")}, [0, 1])
    assert [(run.seed, run.method, run.lr) for run in runs] == [(0, "a", 1), (0, "b", 2), (1, "a", 1), (1, "b", 2)]


def test_a_sweep_tries_all_of_a_grid_or_the_one_rate_that_is_given() -> None:
    grid = METHODS["local"].grid
    assert plan_sweep(["local", "random"], None)[: len(grid)] == tuple(Run("local", lr, 0) for lr in grid)
    assert {run.method for run in plan_sweep(["local", "random"], None)[len(grid) :]} == {"random"}
    assert plan_sweep(["local", "random"], 0.5) == (Run("local", 0.5, 0), Run("random", 0.5, 0))


def test_rates_come_from_the_sweep_that_was_saved_and_else_from_the_middle(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    save_sweep(SETTINGS, {BASELINE: {0.001: 3.0, 0.002: 2.5, 0.004: None}, "random": {0.001: None}}, file)
    chosen = choose_rates("tiny", [BASELINE, "random", "local"], None, file)
    assert (chosen[BASELINE].lr, chosen[BASELINE].source[:5]) == (0.002, "swept")
    for name in ("random", "local"):
        assert chosen[name] == Choice(METHODS[name].middle, "the middle of its grid: not swept")
    assert choose_rates("wide", [BASELINE], None, file)[BASELINE].lr == METHODS[BASELINE].middle
    assert choose_rates("tiny", [BASELINE], 0.5, file) == {BASELINE: Choice(0.5, "--lr")}


def test_a_sweep_keeps_what_it_did_not_try_but_nothing_of_other_settings(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    save_sweep(SETTINGS, {BASELINE: {0.001: 3.0}, "local": {0.001: 3.0}}, file)
    known = save_sweep(SETTINGS, {BASELINE: {0.002: 2.0}}, file)
    assert load_rates(file)["tiny"][BASELINE].losses == known[BASELINE].losses == {0.001: 3.0, 0.002: 2.0}
    assert set(known) == {BASELINE}
    assert set(load_rates(file)["tiny"]) == {BASELINE, "local"}
    longer = replace(SETTINGS, steps=200)
    save_sweep(longer, {BASELINE: {0.004: 1.0}}, file)
    swept = load_rates(file)["tiny"][BASELINE]
    assert swept.losses == {0.004: 1.0}
    assert swept.settings == asdict(longer)


def test_a_best_rate_at_the_edge_is_told() -> None:
    assert Swept({1.0: 3.0, 2.0: 2.0, 4.0: 1.0}).is_at_edge
    assert not Swept({1.0: 3.0, 2.0: 2.0, 4.0: None}).is_at_edge


def test_a_damaged_rates_file_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    for text in ("{", '{"tiny": 3}', '{"tiny": {"adamw": {}}}'):
        file.write_text(text)
        with pytest.raises(UsageError, match="not what a sweep writes"):
            load_rates(file)


RECORDS = (
    Start(BASELINE, 0.002, 0, 100, 50, 400.0, "2 nodes", {"digest": "ab"}),
    Evaluation(0, 5.5, 0.0, 0.0),
    Evaluation(25, 4.0, 1.0, 100.0),
    Interval(25, 4.5, 0.04, 1000.0, 0.02, 0.01, 4.0, 100.0),
    Ending(25, 1.0, 1000, 100.0, 50, replicas_equal=True),
)


def test_records_come_back_from_their_lines(tmp_path: Path) -> None:
    file = file_of(FAST, tmp_path)
    with file.open("w") as lines:
        for record in RECORDS:
            write_record(record, lines)
        lines.write('{"kind": "ending", "st')
    assert list(read_records(file)) == list(RECORDS)
    assert list(read_records(file, after=4)) == [RECORDS[4]]
    history = read_history(FAST, tmp_path)
    assert (history.start, history.ending) == (RECORDS[0], RECORDS[4])
    assert (len(history.intervals), len(history.evaluations)) == (1, 2)
    assert read_history(SLOW, tmp_path) == History()
    assert parse_record(json.dumps({"kind": "evaluation", **asdict(RECORDS[1])})) == RECORDS[1]


def test_what_ranks_note_is_shown_once_with_losses_in_one_line(tmp_path: Path) -> None:
    reader, lines = Reader(Plan(SETTINGS, (SLOW, FAST)), tmp_path), Lines()
    with file_of(FAST, tmp_path).open("w") as file:
        for record in RECORDS:
            write_record(record, file)
    taken = list(reader.take())
    assert [steps for _, steps, _ in taken] == [100, 100, 125, 125, 200]
    shown = [line for _, _, record in taken for line in lines.of(record)]
    assert shown[-1].split() == ["25", "4.5000", "4.0000", "1,000", "40.0", "20.0", "10.0", "0.0000", "100.0x"]
    assert list(reader.take()) == []


def history(losses: list[float], step_s: float, step_nbytes: float, diverged: str = "") -> History:
    steps = [50 * number for number in range(len(losses))]
    evaluations = [
        Evaluation(step, loss, step * step_s, step * step_nbytes) for step, loss in zip(steps, losses, strict=True)
    ]
    last = steps[-1]
    ending = Ending(last, last * step_s, 10 * last, last * step_nbytes, 7, replicas_equal=True, diverged=diverged)
    return History(None, [], evaluations, ending)


HISTORIES = {
    FAST: history([5.0, 3.0, 2.0], 0.4, 4e6),
    SLOW: history([5.0, 4.0, 2.5], 0.1, 1e5),
    replace(FAST, seed=1): history([5.0, 3.0, 2.2], 0.4, 4e6),
    replace(SLOW, seed=1): history([5.0, 4.0, 2.5], 0.1, 1e5),
    Run("random", 0.1, 0): history([5.0], 0.1, 1e5, diverged="before step 25"),
    Run("local", 0.1, 0): History(),
}


def test_a_time_to_a_loss_lies_between_the_evaluations_around_it() -> None:
    curve = [Point(0, 5.0, 0.0, 0), Point(50, 3.0, 10.0, 0), Point(100, 3.5, 20.0, 0), Point(150, 2.5, 30.0, 0)]
    assert seconds_to(curve, 5.0) == 0.0
    assert seconds_to(curve, 4.0) == 5.0
    assert seconds_to(curve, 3.0) == 10.0
    assert seconds_to(curve, 2.75) == 27.5
    assert seconds_to(curve, 2.0) is None
    assert seconds_to([], 2.0) is None


def test_the_table_shows_means_over_seeds_beside_the_baseline() -> None:
    summaries = summarise(HISTORIES)
    assert [one.method for one in summaries] == [BASELINE, "flexdemo-sign", "random"]
    common = find_common_loss(summaries)
    assert common == 2.5
    assert columns_for(common)[-1] == "s to 2.500"
    rows = format_rows(summaries)
    # 3.0 at 20 s and 2.1 at 40 s, on average: 2.5 after five ninths of the way.
    assert rows[0] == (BASELINE, "0.002", "2.1000", "0.2000", "1.000", "4", "1.0x", "0.400", "25", "31.1")
    assert rows[1] == ("flexdemo-sign", "0.001", "2.5000", "0.0000", "1.190", "0.1", "40.0x", "0.100", "100", "10.0")
    assert rows[2][:5] == ("random", "0.1", "diverged", "-", "-")


def test_a_seed_that_diverged_is_counted_beside_those_that_did_not() -> None:
    some = {FAST: HISTORIES[FAST], replace(FAST, seed=1): history([5.0], 0.4, 4e6, diverged="before step 25")}
    assert format_rows(summarise(some))[0][2] == "2.0000 (1 diverged)"


def test_figures_compare_with_the_baseline_where_that_is_fair() -> None:
    emulated = replace(SETTINGS, rate="100mbit")
    report = make_report(summarise(HISTORIES), emulated, quick=False)
    assert set(report.figures) == KNOWN_FIGURES
    assert report.figures["bytes_saved"] == 40.0
    assert report.figures["loss_ratio"] == pytest.approx(2.5 / 2.1)
    assert report.figures["speedup"] == pytest.approx((20 + 20 * 5 / 9) / 10)
    assert (report.figures["diverged"], report.figures["replicas_differ"]) == (1.0, 0.0)
    json.dumps(asdict(report)["rows"])


@pytest.mark.parametrize(
    ("settings", "quick", "unmeasured"),
    [
        (SETTINGS, False, {"speedup": "give --rate"}),
        (SETTINGS, True, dict.fromkeys(KNOWN_FIGURES - {"diverged", "replicas_differ"}, "--quick")),
        (replace(SETTINGS, nodes=1), False, dict.fromkeys(KNOWN_FIGURES - {"diverged", "replicas_differ"}, "one node")),
    ],
)
def test_figures_that_mean_nothing_say_why(settings: Settings, quick: bool, unmeasured: dict[str, str]) -> None:
    report = make_report(summarise(HISTORIES), settings, quick=quick)
    assert set(report.unmeasured) == set(unmeasured)
    assert all(reason in report.unmeasured[figure] for figure, reason in unmeasured.items())


def test_figures_need_both_methods() -> None:
    report = make_report(summarise({FAST: HISTORIES[FAST]}), SETTINGS, quick=False)
    assert set(report.figures) == {"diverged", "replicas_differ"}
    assert all("needs adamw and flexdemo-sign" in reason for reason in report.unmeasured.values())


def test_an_all_reduce_sends_what_a_ring_of_nodes_must() -> None:
    assert allreduce_nbytes(100, Topology(0, blocks(4, 2), "test")) == 400
    assert allreduce_nbytes(100, Topology(0, blocks(8, 2), "test")) == 600
    assert allreduce_nbytes(100, Topology(0, blocks(2, 2), "test")) == 0


def test_the_plot_is_drawn_although_some_methods_diverged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_plot(summarise(HISTORIES), describe(SETTINGS), tmp_path / "train.png")
    assert (tmp_path / "train.png").stat().st_size > 10_000


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "7b"], "needed one of tiny, "),
        (["--methods", "adamw,zip"], "needed all, or some of adamw, "),
        (["--methods", ","], "needed all"),
        (["--steps", "0"], "got --steps 0"),
        (["--steps", "14", "--methods", "local"], "nodes synchronise every 5 with local"),
        (["--batch", "0"], "got --batch 0"),
        (["--eval-every", "0"], "got --eval-every 0"),
        (["--seeds", "one"], "got --seeds 'one'"),
        (["--nodes", "0"], "got 0 nodes"),
        (["--rate", "fast"], "needed a number with a unit"),
        (["--launcher", "slurm"], "needed one of openmpi, mpich, torchrun"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why_before_anything_is_written(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_does_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="a rank that openmpi started"):
        check_settings(SETTINGS, [BASELINE])


def test_a_folder_with_another_runs_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adamw.jsonl").touch()
    assert main(["train", "--quick", "--methods", BASELINE, "--out", str(tmp_path)]) == 2
    assert "records of another run" in capsys.readouterr().err


def test_muon_makes_singular_values_one_and_keeps_their_vectors() -> None:
    """Five iterations bring them to 0.7 to 1.2, as published, not to one."""
    matrix = torch.randn(40, 70, generator=torch.Generator().manual_seed(0))
    for x in (matrix, matrix.T):
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        turned = left.T @ orthogonal(x) @ right.T
        values = turned.diagonal()
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3
        assert float((turned - values.diag()).abs().max()) < 1e-3


def test_muon_steps_as_torchs_does() -> None:
    """But for its bfloat16: five iterations of products rounded to 2**-8 each."""
    start, gradients = torch.randn(32, 48), [torch.randn(32, 48) for _ in range(3)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    one = Muon([ours], 0.01, weight_decay=0.1)
    other = torch.optim.Muon([theirs], 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        one.step()
        other.step()
    moved = (theirs - start).detach()
    assert float((ours - theirs).detach().norm() / moved.norm()) < 0.05
