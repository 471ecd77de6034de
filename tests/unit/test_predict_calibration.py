"""Files of measured figures: what is written is read again, what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flexdemo.predict.calibration import Calibration, Compute, read_calibration, write_calibration
from flexdemo.predict.codec import Call, Decoding, fit_codec, fit_decoding, for_k
from flexdemo.predict.collectives import read_collectives
from flexdemo.predict.errors import PredictError
from flexdemo.predict.measure_compute import SmallTransformer, load_workload, summarise
from flexdemo.predict.request import Request, describe_scene, plan_contestants, plan_scene
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
        ({"version": 2}, "has version 2, needed 1: measure anew"),
        ({"nodes": "left out"}, "nodes is missing; there are schema, version"),
        ({"nodes": 0}, "nodes is 0, needed a whole number from 1"),
        ({"nodes": True}, "nodes is True, needed a whole number"),
        ({"links": {}}, "links is {}, needed a list"),
        ({"links": [3]}, r"links\[0\] is int, needed an object"),
        ({"links": [{"link": "group"}]}, r"links\[0\]: nbytes is missing"),
        (
            {"links": [{"link": "group", "k": 2, "nbytes": [1, "x"], "seconds": [1, 2]}]},
            r"links\[0\]: nbytes\[1\] is 'x'",
        ),
        ({"links": [{"link": "pigeon", "k": 2, "nbytes": [1], "seconds": [1]}]}, "got the link 'pigeon'"),
        ({"links": [{"link": "group", "k": 2, "nbytes": [1], "seconds": [0]}]}, "says 0.0 s, needed more than 0"),
        ({"links": [{"link": 3, "k": 2, "nbytes": [1], "seconds": [1]}]}, "link is 3, needed a text"),
        ({"compute": {"name": "x"}}, "compute: model_nbytes is missing"),
        ({"compute": []}, "compute is list, needed an object"),
        ({"codec": [{"k": 8, "chunk": 2}]}, r"codec\[0\]: bits_per_kept is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PredictError, match=message):
        read_calibration(written(tmp_path, **changes))


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(PredictError, match=r"cannot read .*missing\.json"):
        read_calibration(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(PredictError, match=r"broken\.json is not JSON"):
        read_calibration(broken)
    with pytest.raises(PredictError, match="cannot write to"):
        write_calibration(MEASURED, {}, tmp_path / "nowhere" / "file.json")


def test_what_was_measured_makes_the_scene_and_what_is_given_counts_more() -> None:
    scene = plan_scene(Request(), MEASURED)
    assert (scene.nodes, scene.ranks_per_node) == (2, 4)
    assert scene.workload.slowness == (0.9, 1.1)
    assert scene.workload.sigma == 0.05
    assert scene.links == MeasuredLinks(TABLES)
    assert "(measured)" in describe_scene(scene, MEASURED)[0]
    other = plan_scene(Request(nodes=8, sigma=0.0, bits_per_s=1e6, ranks_per_node=1), MEASURED)
    assert (other.nodes, other.ranks_per_node, other.workload.slowness, other.workload.sigma) == (8, 1, (), 0.0)
    assert other.links.bytes_per_s == 125_000
    assert "carried over from" in describe_scene(other, MEASURED)[0]
    found, _ = plan_contestants(Request(ks=(8,)), scene, MEASURED)
    assert found[0].compression.encode_s_per_element == 1e-9  # type: ignore[attr-defined]


def test_measured_times_belong_to_the_measured_model() -> None:
    assert plan_scene(Request(parameters=1_000_000), MEASURED).workload.nbytes == 4_000_000
    with pytest.raises(PredictError, match="are those of a model of 1000000: give --forward-ms"):
        plan_scene(Request(parameters=2_000_000), MEASURED)
    with pytest.raises(PredictError, match="beside measured links"):
        plan_scene(Request(latency_s=1e-3), MEASURED)


def test_a_single_node_measures_no_links() -> None:
    alone = replace(MEASURED, nodes=1, links=(), compute=replace(COMPUTE, slowness=(1.0,)))
    with pytest.raises(PredictError, match="needed 2 or more: give --nodes"):
        plan_scene(Request(), alone)
    with pytest.raises(PredictError, match="no links: give --bandwidth"):
        plan_scene(Request(nodes=4), alone)
    assert plan_scene(Request(nodes=4, bits_per_s=1e9), alone).workload.forward_s == 0.1


# Compression


def test_decoding_is_split_between_elements_and_coefficients() -> None:
    def call(k: int) -> Call:
        kept = 4096 * k / 4096
        return Call(k, 64, 4096, 2, kept * 3, 1e-6 * k, 4096 * 2e-9 + 2 * kept * 5e-8)

    found = fit_codec([call(8), call(32), call(128)])
    assert [one.k for one in found] == [8, 32, 128]
    for one in found:
        assert one.decode_s_per_element == pytest.approx(2e-9)
        assert one.decode_s_per_kept == pytest.approx(5e-8)
        assert one.bits_per_kept == pytest.approx(24)
    assert found[1].encode_s_per_element == pytest.approx(32e-6 / 4096)
    (single,) = fit_codec([call(32)])
    assert single.decode_s_per_kept == 0.0
    assert single.decode_s_per_element == pytest.approx(call(32).decode_s / 4096)


def test_many_payloads_tell_what_their_coefficients_cost() -> None:
    kept = 4096 * 32 / 4096
    few, many = ((nodes, 4096 * 2e-9 + nodes * kept * 5e-8) for nodes in (2, 16))
    found = fit_decoding(Decoding(32, 64, 4096, 100, 4096e-9, few, many))
    assert found.encode_s_per_element == pytest.approx(1e-9)
    assert found.decode_s_per_element == pytest.approx(2e-9)
    assert found.decode_s_per_kept == pytest.approx(5e-8)
    assert found.bits_per_kept == pytest.approx(25)
    noisy = fit_decoding(Decoding(32, 64, 4096, 100, 1e-6, (2, 2e-6), (16, 1e-6)))
    assert (noisy.decode_s_per_kept, noisy.decode_s_per_element) == (0.0, 2e-6 / 4096)


def test_noise_never_makes_decoding_cost_less_than_nothing() -> None:
    falling = [Call(8, 64, 4096, 2, 30, 1e-6, 3e-6), Call(128, 64, 4096, 2, 400, 1e-6, 1e-6)]
    for one in fit_codec(falling):
        assert one.decode_s_per_kept == 0.0
        assert one.decode_s_per_element > 0
    steep = [Call(8, 64, 4096, 2, 30, 1e-6, 1e-9), Call(128, 64, 4096, 2, 400, 1e-6, 1e-3)]
    assert all(one.decode_s_per_element == 0.0 for one in fit_codec(steep))


def test_a_k_that_was_not_measured_costs_what_the_nearest_does() -> None:
    known = (Compression(k=8, encode_s_per_element=1e-9), Compression(k=128, encode_s_per_element=3e-9))
    assert for_k(known, 16) == replace(known[0], k=16)
    assert for_k(known, 100) == replace(known[1], k=100)
    assert for_k((), 16).k == 16


# bench collectives --json


def row(compressor: str, algorithm: str, **changes: Any) -> dict[str, Any]:
    base = {
        "size_nbytes": 1 << 20,
        "count": 1 << 18,
        "compressor": compressor,
        "algorithm": algorithm,
        "time_median_s": 0.02,
        "wire_nbytes": 3 * 6400.0,
        "payload_nbytes": 6400.0,
        "encode_s": 0.001,
        "inter_s": 0.004,
        "decode_s": 0.002,
    }
    return base | changes


def collectives_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "collectives.json"
    file.write_text(json.dumps({"name": "collectives", "rows": rows}))
    return file


def test_nodes_and_ranks_follow_from_what_was_sent(tmp_path: Path) -> None:
    crossing = 2 * 7 / 8 / 2 * (1 << 20)  # four nodes of two ranks
    rows = [
        row("all-reduce fp32", "all-reduce", wire_nbytes=crossing),
        row("all-reduce fp32", "all-reduce", wire_nbytes=crossing / 4, size_nbytes=1 << 18, time_median_s=0.006),
        row("demo:k=32", "gather"),
        row("demo:k=8,values=sign", "gather", payload_nbytes=800.0, wire_nbytes=2400.0, inter_s=0.001),
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
    with pytest.raises(PredictError, match="has 0 rows of all-reduce fp32 and 1 that went by gather"):
        read_collectives(collectives_file(tmp_path, [row("demo:k=32", "gather")]))
    alone = [row("all-reduce fp32", "all-reduce"), row("demo:k=32", "gather", wire_nbytes=0.0)]
    with pytest.raises(PredictError, match="needed a run on two nodes or more"):
        read_collectives(collectives_file(tmp_path, alone))
    strange = [row("all-reduce fp32", "all-reduce"), row("demo:k=many", "gather")]
    with pytest.raises(PredictError, match="cannot read k and chunk from 'demo:k=many'"):
        read_collectives(collectives_file(tmp_path, strange))
    file = tmp_path / "step.json"
    file.write_text("{}")
    with pytest.raises(PredictError, match="rows is missing; there are no fields"):
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
        with pytest.raises(PredictError, match=message):
            load_workload(text)


def test_variation_is_that_of_a_node_around_its_own_mean() -> None:
    # Node 1 is twice as slow as node 0, and both vary by a tenth.
    passes = torch.tensor([[0.9, 1.1], [1.8, 2.2]], dtype=torch.float64)
    by_node = torch.stack([passes / 3, 2 * passes / 3, torch.full_like(passes, 0.25)], dim=2)
    found = summarise(by_node, "a model", SmallTransformer(torch.device("cpu")))
    assert found.forward_s == pytest.approx(0.5)
    assert found.backward_s == pytest.approx(1.0)
    assert found.optimizer_s == 0.25
    assert found.sigma == pytest.approx(0.1)
    assert found.slowness == pytest.approx((2 / 3, 4 / 3))
