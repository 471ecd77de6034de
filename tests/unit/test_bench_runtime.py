"""The runtime benchmark: its fit, its predictions, and that held-out clusters have no part in them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from bench.cli import main
from bench.runtime import command as runtime
from bench.runtime.cluster_runs import FIGURE_CLUSTER, ClusterResult, ClusterShape, plan_cluster_runs, swap_s
from bench.runtime.command import find_figures, make_quick, make_report, parse_methods
from bench.runtime.fit import Calibration, Fitted, HostFit, LinkFit, fit, fit_nonnegative
from bench.runtime.methods import PacedModel
from bench.runtime.plan import (
    METHODS,
    HostCosts,
    Job,
    JobResult,
    Load,
    read_jobs,
    read_results,
    seconds_per_iteration,
    write_jobs,
    write_results,
)
from bench.runtime.predictions import (
    Row,
    busy_nodes,
    format_markdown,
    format_rows,
    make_rows,
    period_of,
    predict,
    write_markdown,
)
from bench.targets import load_targets
from flexcomm import gossip
from flexdemo.runtime import LinkTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CORES = 2
LOAD = Load(parameters=4 * 64 * 1024, buckets=4, forward_s=0.1, backward_s=0.2)
JOB = Job(LOAD, ("all-reduce", "exponential"), iterations=6, warmups=2)
COSTS = HostCosts(0.04, 0.06, 0.002, 0.02, 0.03, 0.01, payload_nbytes=1_600.0)
FREE = HostFit(0.0, 0.0, 0.0, 0.0, 0.0, payload_nbytes=1_600.0)
IDEAL = Fitted({kind: LinkFit(1.0, 0.0, 0.0) for kind in ("swap", "split", "all-reduce", "gather")}, FREE, CORES)
RATE = 100e6


def table(link: str, k: int, seconds: Callable[[int], float], sizes: tuple[int, ...] = (10_000, 100_000)) -> LinkTable:
    return LinkTable(link, k, sizes, tuple(seconds(size) for size in sizes))


def calibration(nodes: int, rate_bits_per_s: float) -> Calibration:
    """One whose swaps and all-reduces follow known figures, and whose costs are those of nodes that share two cores."""

    def swap_s(size: int) -> float:
        return 1.05 * 8 * size / rate_bits_per_s + 0.002 * max(1, nodes / CORES) + 1e-9 * nodes * size

    def all_reduce_s(size: int) -> float:
        return 1.1 * 2 * (nodes - 1) / nodes * 8 * size / rate_bits_per_s

    crowd = max(1.0, nodes / CORES)
    costs = replace(COSTS, **dict.fromkeys(("all_reduce_s", "encode_s", "flexdemo_s"), crowd * 0.01))
    costs = replace(costs, decode_s=crowd * 0.02, decentralized_s=crowd * 0.03, mix_s=crowd * 0.001)
    tables = table("group", 2, swap_s), table("all-reduce", nodes, all_reduce_s), table("gather", nodes, swap_s)
    return Calibration(nodes, rate_bits_per_s, tables, costs)


def found(iteration_s: float, job: Job = JOB) -> JobResult:
    return JobResult(finished_s={method: [iteration_s * (t + 1) for t in range(job.steps)] for method in job.methods})


def test_the_fit_finds_the_figures_that_made_the_tables() -> None:
    fitted = fit([calibration(2, 100e6), calibration(4, 1e9)], CORES)
    swap = fitted.links["swap"]
    assert (swap.stretch, swap.latency_s, swap.host_s_per_byte) == pytest.approx((1.05, 0.002, 1e-9))
    assert fitted.links["all-reduce"].stretch == pytest.approx(1.1)
    assert fitted.links["all-reduce"].latency_s == pytest.approx(0, abs=1e-9)
    host = fitted.host
    assert (host.all_reduce_s, host.decentralized_s) == pytest.approx((0.01, 0.031))
    assert (host.encode_s, host.decode_s) == pytest.approx((0.01, 0.02))


def test_fitted_links_hold_at_other_rates_and_numbers_of_nodes() -> None:
    links = fit([calibration(2, 100e6), calibration(4, 1e9)], CORES).links_at(50e6, busy_nodes=8)
    expected_s = {table.link: table.at(100_000) for table in calibration(8, 50e6).tables}
    assert links.tau("group", 2, 100_000) == pytest.approx(expected_s["group"])
    assert links.tau("edges", 1, 100_000) == pytest.approx(expected_s["group"])
    assert links.tau("all-reduce", 8, 100_000) == pytest.approx(expected_s["all-reduce"])


def test_nothing_is_fitted_to_be_faster_than_the_link() -> None:
    early = table("all-reduce", 2, lambda size: 0.5 * 8 * size / RATE)
    fitted = fit([Calibration(2, RATE, (early,), COSTS)], CORES)
    assert fitted.links["all-reduce"] == LinkFit(1.0, 0.0, 0.0)


def test_a_group_that_was_not_measured_takes_what_an_all_reduce_takes() -> None:
    links = fit([calibration(2, 100e6)], CORES).links_at(RATE, busy_nodes=4)
    assert links.tau("group", 4, 1e6) == pytest.approx(links.tau("all-reduce", 4, 1e6))


def test_of_columns_that_look_alike_the_first_gets_all() -> None:
    assert fit_nonnegative([[1.0, 2.0], [2.0, 4.0]], [3.0, 6.0], [1.0, 1.0]) == pytest.approx([3.0, 0.0])


def test_no_fitted_figure_is_below_zero() -> None:
    slope, base = fit_nonnegative([[1.0, 1.0], [2.0, 1.0]], [1.0, 3.0], [1.0, 1.0])
    assert slope > 0
    assert base == 0


def test_an_iteration_is_the_median_of_whole_periods_after_warm_up() -> None:
    long_short = [10.0, 11.0, 14.0, 15.0, 18.0, 19.0]
    assert seconds_per_iteration(long_short, warmups=2, period=2) == 2.0
    assert seconds_per_iteration([1.0, 2.0, 3.0, 14.0, 15.0, 16.0], warmups=1, period=1) == 1.0
    assert seconds_per_iteration([4.0, 8.0], warmups=0, period=6) == 4.0


def test_all_reduce_is_predicted_by_its_closed_form() -> None:
    tau_s = 2 * 3 / 4 * 8 * LOAD.bucket_nbytes / RATE
    expected_s = LOAD.forward_s + max(LOAD.backward_s, LOAD.backward_s / 4 + 3 * tau_s) + tau_s
    assert predict("all-reduce", JOB, 4, RATE, IDEAL) == pytest.approx(expected_s)


@pytest.mark.parametrize("method", ["exponential", "exponential-backward", "ring"])
@pytest.mark.parametrize("rate", [10e6, 1e9])
def test_decentralized_takes_what_computing_or_exchanging_takes(method: str, rate: float) -> None:
    job = replace(JOB, iterations=12, warmups=6)
    expected_s = max(LOAD.compute_s, 8 * LOAD.nbytes / rate)
    assert predict(method, job, 4, rate, IDEAL) == pytest.approx(expected_s)


def test_flexdemo_is_predicted_from_what_its_payloads_take() -> None:
    # Three receive what four send of each bucket; the last bucket's leaves when the backward pass is over.
    expected_s = LOAD.compute_s + 3 * 8 * FREE.payload_nbytes / RATE
    assert predict("flexdemo-overlap", JOB, 4, RATE, IDEAL) == pytest.approx(expected_s)
    assert predict("flexdemo", JOB, 4, RATE, IDEAL) == pytest.approx(expected_s + 9 * 8 * FREE.payload_nbytes / RATE)


def test_nodes_that_share_a_core_queue_for_it() -> None:
    fitted = replace(IDEAL, host=replace(FREE, all_reduce_s=0.01))
    extra_s = [predict("all-reduce", JOB, n, 1e12, fitted) - predict("all-reduce", JOB, n, 1e12, IDEAL) for n in (2, 8)]
    assert extra_s == pytest.approx([0.01, 0.04])


def test_nodes_that_step_when_they_like_hardly_meet_on_a_core_that_is_mostly_idle() -> None:
    assert IDEAL.queued_s(0.01, sleep_s=100.0, nodes=8) == pytest.approx(0.01, rel=0.01)
    # Eight that always want two cores: each waits for all others, half of its work for each.
    assert IDEAL.queued_s(0.01, sleep_s=0.0, nodes=8) == pytest.approx(0.04, rel=0.15)
    assert IDEAL.queued_s(0.0, sleep_s=0.0, nodes=8) == 0.0
    queued_s = [IDEAL.queued_s(0.01, 0.02, nodes) for nodes in (1, 2, 4, 8)]
    assert queued_s == sorted(queued_s)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_every_method_is_predicted_for_any_number_of_nodes(method: str, nodes: int) -> None:
    assert predict(method, JOB, nodes, RATE, IDEAL) >= LOAD.compute_s - 1e-9
    assert period_of(method, nodes) >= 1


def test_half_of_the_nodes_are_busy_where_pairs_alternate() -> None:
    assert busy_nodes(gossip.base(8)) == 8
    assert busy_nodes(gossip.alternating_exponential_ring(8)) == 4


def test_one_node_is_slower_in_every_iteration_and_not_always_the_same() -> None:
    workload = replace(LOAD, straggler=0.2).workload()
    draws = [workload.draw(4, step, seed=7) for step in range(20)]
    assert all(sorted(draw) == pytest.approx([1, 1, 1, 1.2]) for draw in draws)
    assert len({int(draw.argmax()) for draw in draws}) == 4
    assert all((workload.draw(4, step, seed=7) == draw).all() for step, draw in enumerate(draws))


def test_what_all_nodes_wait_for_is_predicted_with_the_same_draws() -> None:
    slower = replace(JOB, load=replace(LOAD, straggler=0.2))
    difference_s = predict("all-reduce", slower, 4, 1e12, IDEAL) - predict("all-reduce", JOB, 4, 1e12, IDEAL)
    assert difference_s == pytest.approx(0.2 * LOAD.compute_s)


def test_a_prediction_does_not_change_when_a_held_out_measurement_does() -> None:
    clusters = [ClusterShape(2, "100mbit"), ClusterShape(4, "100mbit"), ClusterShape(4, "50mbit")]
    runs = plan_cluster_runs(clusters, clusters[:1], replace(JOB), rounds=3)
    known = calibration(2, 100e6)

    def rows_where_held_out_takes(seconds: float) -> list[Row]:
        results = []
        for run in runs:
            seen = [found(seconds if run.held_out else 0.4, job) for job in run.jobs]
            # Even if ranks had calibrated there.
            tables = known.tables if not run.held_out else (table("all-reduce", 4, lambda size: seconds * size),)
            costs = known.costs if not run.held_out else replace(COSTS, all_reduce_s=seconds)
            results.append(ClusterResult(run, (replace(seen[0], tables=tables, costs=costs), *seen[1:])))
        return make_rows(results, fit([one for v in results if (one := v.calibration()) is not None], CORES))

    once, again = rows_where_held_out_takes(0.5), rows_where_held_out_takes(5.0)
    assert [row.predicted_s for row in once] == [row.predicted_s for row in again]
    assert all(row.measured_s == pytest.approx(5.0) for row in again if row.held_out)
    assert [row.held_out for row in once] == [True] * 2 + [False] * 2 + [True] * 5


def test_clusters_that_calibrate_come_first_and_are_not_held_out() -> None:
    runs = plan_cluster_runs(
        [ClusterShape(4, "100mbit"), ClusterShape(2, "0.1gbit")],
        [ClusterShape(2, "100mbit"), ClusterShape(8, "1gbit")],
        JOB,
        3,
    )
    assert [(run.cluster.nodes, run.held_out) for run in runs] == [
        (2, False),
        (8, False),
        (4, True),
    ]
    assert [run.jobs[0].rounds for run in runs] == [3, 3, 0]
    # Nobody asked for iterations on eight nodes.
    assert [run.jobs[0].methods for run in runs] == [JOB.methods, (), JOB.methods]


def test_figures_are_measured_where_computing_lasts_as_long_as_an_exchange() -> None:
    (run,) = plan_cluster_runs([FIGURE_CLUSTER], [], replace(JOB, load=replace(LOAD, sigma=0.1, straggler=0.5)), 0)
    _, steady, slower = run.jobs
    assert steady.load.compute_s == pytest.approx(swap_s(LOAD, FIGURE_CLUSTER))
    assert (steady.load.straggler, slower.load.straggler, slower.load.sigma) == (0.0, 0.2, 0.0)


def row(
    method: str,
    measured_s: float,
    straggler: float = 0.0,
    *,
    held_out: bool = True,
    nodes: int = 4,
    load: Load = LOAD,
) -> Row:
    compute_s = swap_s(load, FIGURE_CLUSTER)
    return Row(method, nodes, "100mbit", compute_s, straggler, 0.0, held_out, predicted_s=0.11, measured_s=measured_s)


@pytest.mark.parametrize("load", [LOAD, Load()], ids=["small", "large"])
def test_figures_are_those_of_the_targets(load: Load) -> None:
    whole_s = swap_s(load, FIGURE_CLUSTER)
    seen = [("exponential", 1.1 * whole_s, 0.0), ("all-reduce", 2.0, 0.2), ("exponential", 1.0, 0.2)]
    rows = [row(*one, load=load) for one in seen]
    report = make_report(rows, IDEAL, replace(JOB, load=load), {})
    assert report.figures["straggler_speedup"] == pytest.approx(2.0)
    assert report.figures["worst_error"] == pytest.approx(max(abs(one.error) for one in rows))
    assert set(load_targets("runtime", report.known_figures)) == report.known_figures
    if load is LOAD:
        assert "so small that messages cost more" in report.unmeasured["decentralized_of_bound"]
    else:
        assert report.figures["decentralized_of_bound"] == pytest.approx(1.1)


def test_what_was_not_measured_is_named() -> None:
    report = make_report([row("exponential", 0.1, nodes=2, held_out=False)], IDEAL, JOB, {})
    assert report.figures == {}
    assert "no cluster of 4 nodes at 100mbit" in report.unmeasured["straggler_speedup"]
    assert "every cluster calibrates" in report.unmeasured["worst_error"]
    assert find_figures([], LOAD) == {}


def test_the_worst_error_is_that_of_held_out_clusters() -> None:
    report = make_report([row("exponential", 0.1), row("exponential", 1.0, held_out=False)], IDEAL, JOB, {})
    assert report.figures["worst_error"] == pytest.approx(0.1)


def test_tables_say_what_was_predicted_measured_and_held_out(tmp_path: Path) -> None:
    rows = [row("exponential", 0.1, 0.2), replace(row("all-reduce", 0.22, held_out=False), sigma=0.05)]
    first, second = format_rows(rows)
    assert first[3:] == ("84 ms, one +20%", "yes", "110", "100", "+10.0%")
    assert second[3:] == ("84 ms, sigma 5%", "no", "110", "220", "-50.0%")
    write_markdown(rows, tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0].startswith("| method | nodes | rate |")
    assert lines[2] == "| " + " | ".join(first) + " |"
    assert format_markdown(rows).count("\n") == 4


def test_jobs_and_findings_survive_the_way_to_the_ranks_and_back(tmp_path: Path) -> None:
    jobs = [JOB, replace(JOB, rounds=3, methods=())]
    write_jobs(jobs, tmp_path)
    assert read_jobs(tmp_path) == jobs
    seen = [found(0.1), JobResult(calibration(2, RATE).tables, COSTS, {})]
    write_results(seen, tmp_path)
    assert read_results(tmp_path) == seen


def test_a_paced_model_has_its_gradients_one_by_one_from_the_last() -> None:
    model = PacedModel(replace(LOAD, forward_s=0.0, backward_s=0.0), node=1)
    came: list[torch.Tensor] = []
    for parameter in model.parameters:
        parameter.register_post_accumulate_grad_hook(came.append)  # type: ignore[no-untyped-call]
    model.run()
    assert [id(parameter) for parameter in came] == [id(parameter) for parameter in reversed(model.parameters)]
    for parameter, gradient in zip(model.parameters, model.gradients, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
        # Its own: what is done to it does not come back in the next iteration.
        assert parameter.grad.data_ptr() != gradient.data_ptr()


def test_buckets_are_whole_chunks_near_to_what_was_asked_for() -> None:
    load = Load()
    assert load.shape[0] % 64 == load.shape[1] % 64 == 0
    assert load.nbytes == pytest.approx(4 * load.parameters, rel=0.05)
    assert Load(parameters=1, buckets=1).shape == (64, 1024)


def test_quick_measures_less_of_the_same() -> None:
    quick = make_quick(replace(JOB, load=Load(), iterations=12))
    full_s, quick_s = (swap_s(load, FIGURE_CLUSTER) / load.compute_s for load in (Load(), quick.load))
    assert quick.load.nbytes < Load().nbytes
    assert quick_s == pytest.approx(full_s, rel=0.3)


def test_methods_come_in_the_tables_order() -> None:
    assert parse_methods("flexdemo, all-reduce") == ("all-reduce", "flexdemo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1"], "got --nodes 1"),
        (["--nodes", "two"], "got --nodes 'two'"),
        (["--rates", "fast"], "needed a number with a unit"),
        (["--calibrate", "2"], "needed nodes and a rate, as in 4:100mbit"),
        (["--calibrate", "2:fast"], "needed a number with a unit"),
        (["--methods", "gossip"], "needed some of all-reduce, exponential"),
        (["--compute-ms", "100"], "got --compute-ms '100'"),
        (["--compute-ms", "10,-1"], "got --compute-ms '10,-1'"),
        (["--straggler", "-5"], "got --straggler -5"),
        (["--sigma", "200"], "--sigma 200"),
        (["--buckets", "0"], "got --buckets 0"),
        (["-n", "0"], "got -n 0"),
        (["--launcher", "slurm"], "slurm"),
    ],
)
def test_bad_arguments_exit_with_2_before_any_cluster_is_opened(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "run_clusters", lambda *_: pytest.fail("opened"))
    assert main(["runtime", *arguments]) == 2
    assert message in capsys.readouterr().err
