"""Files of measured figures: what is written is read again, what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flexcomm import InvalidArgumentError
from flexdemo.predict import plan_methods, plan_scenario
from flexdemo.predict.calibration import (
    Calibration,
    CodecTiming,
    Compute,
    compression_for_k,
    fit_compressions,
    read_calibration,
    read_collectives,
    write_calibration,
)
from flexdemo.predict.measure import SmallTransformer, load_workload, summarise_compute
from flexdemo.predict.report import describe_scenario
from flexdemo.runtime import Compression, LinkTable, MeasuredLinks

if TYPE_CHECKING:
    from pathlib import Path

COMPUTE = Compute("a model", 4_000_000, 0.1, 0.2, 0.01, 0.05, (0.9, 1.1))
TABLES = (
    LinkTable("group", 2, (1 << 16, 1 << 20), (0.001, 0.01)),
    LinkTable("all-reduce", 2, (1 << 16, 1 << 20), (0.001, 0.012)),
)
MEASURED = Calibration(2, 4, TABLES, COMPUTE, (Compression(k=8, encode_s_per_element=1e-9), Compression(k=32)))


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "calibration.json"
    write_calibration(MEASURED, {"note": "for people"}, file)
    document = json.loads(file.read_text())
    document.update(changes)
    file.write_text(json.dumps({name: value for name, value in document.items() if value != "left out"}))
    return file


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    assert read_calibration(written(tmp_path)) == MEASURED
    assert read_calibration(written(tmp_path, compute=None)) == replace(MEASURED, compute=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "something"}, "is no calibration: needed"),
        ({"schema": "left out"}, "is no calibration: needed"),
        ({"version": 1}, "has version 1, needed 2: measure anew"),
        ({"nodes": "left out"}, "nodes is missing; there are schema, version"),
        ({"nodes": 0}, "nodes is 0, needed a whole number from 1"),
        ({"nodes": True}, "nodes is True, needed a whole number"),
        ({"links": {}}, "links is {}, needed a list"),
        ({"links": [3]}, r"links\[0\] is int, needed an object"),
        ({"links": [{"link": "group"}]}, r"links\[0\]: k is missing; there are link\."),
        (
            {"links": [{"link": "group", "k": 2, "nbytes": [1, "x"], "seconds": [1, 2]}]},
            r"links\[0\]: nbytes\[1\] is 'x'",
        ),
        ({"links": [{"link": "pigeon", "k": 2, "nbytes": [1], "seconds": [1]}]}, "got the link 'pigeon'"),
        ({"links": [{"link": "group", "k": 2, "nbytes": [1], "seconds": [0]}]}, "says 0.0 s, needed more than 0"),
        ({"links": [{"link": 3, "k": 2, "nbytes": [1], "seconds": [1]}]}, "link is 3, needed a string"),
        ({"compute": {"name": "x"}}, "compute: model_nbytes is missing"),
        ({"compute": []}, "compute is list, needed an object"),
        ({"codec": [{"k": 8, "chunk": 2}]}, r"codec\[0\]: bits_per_coefficient is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_calibration(written(tmp_path, **changes))


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot read .*missing\.json"):
        read_calibration(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"broken\.json is not JSON"):
        read_calibration(broken)
    with pytest.raises(InvalidArgumentError, match="cannot write to"):
        write_calibration(MEASURED, {}, tmp_path / "nowhere" / "file.json")


def test_what_was_measured_makes_the_scenario_and_what_is_given_counts_more() -> None:
    scenario = plan_scenario(MEASURED)
    assert (scenario.nodes, scenario.ranks_per_node) == (2, 4)
    assert scenario.workload.slowness == (0.9, 1.1)
    assert scenario.workload.sigma == 0.05
    assert scenario.links == MeasuredLinks(TABLES)
    assert "(measured)" in describe_scenario(scenario, MEASURED)[0]
    other = plan_scenario(MEASURED, nodes=8, sigma=0.0, bits_per_s=1e6, ranks_per_node=1)
    assert (other.nodes, other.ranks_per_node, other.workload.slowness, other.workload.sigma) == (8, 1, (), 0.0)
    assert other.links.bytes_per_s == 125_000
    assert "extrapolated from" in describe_scenario(other, MEASURED)[0]
    found, _ = plan_methods(scenario.nodes, MEASURED.codec, ks=(8,))
    assert found[0].compression.encode_s_per_element == 1e-9  # type: ignore[attr-defined]


def test_measured_times_belong_to_the_measured_model() -> None:
    assert plan_scenario(MEASURED, parameters=1_000_000).workload.nbytes == 4_000_000
    with pytest.raises(InvalidArgumentError, match="those of a model of 1000000: give --forward-ms"):
        plan_scenario(MEASURED, parameters=2_000_000)
    with pytest.raises(InvalidArgumentError, match="beside measured links"):
        plan_scenario(MEASURED, latency_us=1000)


def test_a_single_node_measures_no_links() -> None:
    alone = replace(MEASURED, nodes=1, links=(), compute=replace(COMPUTE, slowness=(1.0,)))
    with pytest.raises(InvalidArgumentError, match="needed 2 or more: give --nodes"):
        plan_scenario(alone)
    with pytest.raises(InvalidArgumentError, match="no links: give --bandwidth"):
        plan_scenario(alone, nodes=4)
    assert plan_scenario(alone, nodes=4, bits_per_s=1e9).workload.forward_s == 0.1


# Compression


def test_decoding_costs_are_told_apart_by_timings_of_several_k() -> None:
    def timing(k: int) -> CodecTiming:
        coefficients = 4096 * k / 4096
        return CodecTiming(k, 64, 4096, coefficients * 3, 1e-6 * k, {2: 4096 * 2e-9 + 2 * coefficients * 5e-8})

    found = fit_compressions([timing(8), timing(32), timing(128)])
    assert [one.k for one in found] == [8, 32, 128]
    for one in found:
        assert one.decode_s_per_element == pytest.approx(2e-9)
        assert one.decode_s_per_coefficient == pytest.approx(5e-8)
        assert one.bits_per_coefficient == pytest.approx(24)
    assert found[1].encode_s_per_element == pytest.approx(32e-6 / 4096)
    (single,) = fit_compressions([timing(32)])
    assert single.decode_s_per_coefficient == 0.0
    assert single.decode_s_per_element == pytest.approx(timing(32).decode_s[2] / 4096)


def test_decoding_costs_are_told_apart_by_few_and_many_payloads() -> None:
    coefficients = 4096 * 32 / 4096
    decode_s = {payloads: 4096 * 2e-9 + payloads * coefficients * 5e-8 for payloads in (2, 16)}
    found = fit_compressions([CodecTiming(32, 64, 4096, 100, 4096e-9, decode_s)])[0]
    assert found.encode_s_per_element == pytest.approx(1e-9)
    assert found.decode_s_per_element == pytest.approx(2e-9)
    assert found.decode_s_per_coefficient == pytest.approx(5e-8)
    assert found.bits_per_coefficient == pytest.approx(25)
    noisy = fit_compressions([CodecTiming(32, 64, 4096, 100, 1e-6, {2: 2e-6, 16: 1e-6})])[0]
    assert (noisy.decode_s_per_coefficient, noisy.decode_s_per_element) == (0.0, pytest.approx(1.5e-6 / 4096))


def test_noise_never_makes_decoding_cost_less_than_nothing() -> None:
    falling = [CodecTiming(8, 64, 4096, 30, 1e-6, {2: 3e-6}), CodecTiming(128, 64, 4096, 400, 1e-6, {2: 1e-6})]
    for one in fit_compressions(falling):
        assert one.decode_s_per_coefficient == 0.0
        assert one.decode_s_per_element > 0
    steep = [CodecTiming(8, 64, 4096, 30, 1e-6, {2: 1e-9}), CodecTiming(128, 64, 4096, 400, 1e-6, {2: 1e-3})]
    assert all(one.decode_s_per_element == 0.0 for one in fit_compressions(steep))


def test_a_k_that_was_not_measured_costs_what_the_nearest_does() -> None:
    known = (Compression(k=8, encode_s_per_element=1e-9), Compression(k=128, encode_s_per_element=3e-9))
    assert compression_for_k(known, 16) == replace(known[0], k=16)
    assert compression_for_k(known, 100) == replace(known[1], k=100)
    assert compression_for_k((), 16).k == 16


# bench collectives --json


def row(compressor: str, algorithm: str, **changes: Any) -> dict[str, Any]:
    base = {
        "size_nbytes": 1 << 20,
        "count": 1 << 18,
        "compressor": compressor,
        "algorithm": algorithm,
        "time_median_s": 0.02,
        "payload_nbytes": 6400.0,
        "encode_s": 0.001,
        "inter_s": 0.004,
        "decode_s": 0.002,
        "nodes": 4,
        "ranks_per_node": 2,
    }
    return base | changes


def collectives_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "collectives.json"
    file.write_text(json.dumps({"name": "collectives", "rows": rows}))
    return file


def test_collectives_become_tables_and_costs(tmp_path: Path) -> None:
    rows = [
        row("all-reduce fp32", "all-reduce"),
        row("all-reduce fp32", "all-reduce", size_nbytes=1 << 18, time_median_s=0.006),
        row("demo:k=32", "gather"),
        row("demo:k=8,values=sign", "gather", payload_nbytes=800.0, inter_s=0.001),
        row("top_k:rate=1/32", "gather", inter_s=0.006),
    ]
    found = read_collectives(collectives_file(tmp_path, rows))
    assert (found.nodes, found.ranks_per_node, found.compute) == (4, 2, None)
    assert found.links == (
        LinkTable("all-reduce", 4, (1 << 18, 1 << 20), (0.006, 0.02)),
        LinkTable("gather", 4, (1600, 12800), (0.001, 0.005)),
    )
    assert [one.k for one in found.codec] == [32, 8]
    assert found.codec[0].encode_s_per_element == pytest.approx(0.001 / (1 << 17))


def test_files_of_other_benchmarks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has 0 rows of all-reduce fp32 and 1 of the algorithm gather"):
        read_collectives(collectives_file(tmp_path, [row("demo:k=32", "gather")]))
    alone = [row("all-reduce fp32", "all-reduce", nodes=1), row("demo:k=32", "gather", nodes=1)]
    with pytest.raises(InvalidArgumentError, match="needed a run on two nodes or more"):
        read_collectives(collectives_file(tmp_path, alone))
    older = [{"compressor": "all-reduce fp32", "algorithm": "all-reduce", "size_nbytes": 1, "time_median_s": 1.0}]
    with pytest.raises(
        InvalidArgumentError, match=r"rows\[0\]: nodes is missing; .* Measure with `python -m bench collectives"
    ):
        read_collectives(collectives_file(tmp_path, older))
    strange = [row("all-reduce fp32", "all-reduce"), row("demo:k=many", "gather")]
    with pytest.raises(InvalidArgumentError, match="cannot read k and chunk from 'demo:k=many'"):
        read_collectives(collectives_file(tmp_path, strange))
    file = tmp_path / "step.json"
    file.write_text("{}")
    with pytest.raises(InvalidArgumentError, match="rows is missing; there are no fields"):
        read_collectives(file)


# Compute


def test_a_workload_is_any_object_with_three_phases_and_a_size() -> None:
    step = SmallTransformer(torch.device("cpu"))
    step.forward()
    step.backward()
    step.step()
    assert step.nbytes == 12_636_160
    for text, message in (
        ("module", "needed package.module:function"),
        ("nowhere_at_all:make", "cannot load --workload"),
        ("json:nothing", "cannot load --workload"),
        ("collections:OrderedDict", "without forward, backward, step, nbytes"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            load_workload(text)


def test_variation_is_that_of_a_node_around_its_own_mean() -> None:
    # Node 1 is twice as slow as node 0, and both vary by a tenth.
    passes = torch.tensor([[0.9, 1.1], [1.8, 2.2]], dtype=torch.float64)
    by_node = torch.stack([passes / 3, 2 * passes / 3, torch.full_like(passes, 0.25)], dim=2)
    found = summarise_compute(by_node, "a model", 4096)
    assert found.forward_s == pytest.approx(0.5)
    assert found.backward_s == pytest.approx(1.0)
    assert found.optimizer_s == 0.25
    assert found.sigma == pytest.approx(0.1)
    assert found.slowness == pytest.approx((2 / 3, 4 / 3))
