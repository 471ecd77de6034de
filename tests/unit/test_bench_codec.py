"""The codec benchmark compares equals and writes every figure down. How fast things are is not a test's business."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch

from bench.cli import main
from bench.codec import command as codec
from bench.codec.codecs import CHUNK, FlexcommCodec, PublishedCodec, dct_basis, find_agreement
from bench.codec.payloads import entropy_bits
from bench.codec.speed import draw_gradient, geometries, interleave
from bench.codec.stages import ALL, DECODE, ENCODE, StagedCodec, StageTime, measure_stages, touched_share
from bench.targets import load_targets
from flexcomm import demo, random_k

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRIES = geometries((2 * CHUNK, 3 * CHUNK))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.case)
def test_both_codecs_send_the_same_coefficients(geometry) -> None:  # type: ignore[no-untyped-def]
    assert find_agreement(draw_gradient(geometry.shape, seed=1), geometry.k) > 0.999


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.case)
def test_both_codecs_average_over_contributors_alike(geometry) -> None:  # type: ignore[no-untyped-def]
    gradients = [draw_gradient(geometry.shape, seed) for seed in range(3)]
    ours = FlexcommCodec(geometry.shape, demo(geometry.k, CHUNK, "fp32"), decay=0.0)
    buffers = [ours.encode_(gradient).clone() for gradient in gradients]
    theirs = [PublishedCodec(geometry.shape, geometry.k).encode_(gradient) for gradient in gradients]
    out = torch.empty(geometry.shape)
    ours.decode_(out, torch.cat(buffers), len(buffers))
    # Sums of up to 4096 products, in another order.
    torch.testing.assert_close(out, PublishedCodec(geometry.shape, geometry.k).decode(theirs), atol=1e-5, rtol=0)


def test_the_basis_is_orthonormal() -> None:
    basis = dct_basis(CHUNK).double()
    torch.testing.assert_close(basis.T @ basis, torch.eye(CHUNK, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_entropy_is_that_of_uniformly_drawn_sets() -> None:
    assert entropy_bits(64, 8) == pytest.approx(math.log2(math.comb(64, 8)) / 8)


def test_bodies_are_interleaved_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert calls == ["a", "b"] * 3


SENT_INDICES = {
    ENCODE: [ALL, "accumulate", "pick", "put indices", "put values", "rest of encode"],
    DECODE: [ALL, "verify", "get values", "decode", "rest of decode"],
}
SHARED_INDICES = {
    ENCODE: [ALL, "accumulate", "pick", "put values", "rest of encode"],
    DECODE: [ALL, "verify", "get values, pick", "decode", "rest of decode"],
}
STAGES = {
    "demo(k=32)": SENT_INDICES,
    'demo(k=32, values="sign")': SENT_INDICES,
    "top_k(1/32)": SENT_INDICES,
    "random_k(1/32)": SHARED_INDICES,
    "striding(1/32)": SHARED_INDICES,
    "demo(k=4), flat": SENT_INDICES,
}


@pytest.fixture(scope="module")
def stages() -> list[StageTime]:
    return measure_stages([(2 * CHUNK, CHUNK), (CHUNK, CHUNK)], rounds=1)


def test_every_recipe_has_all_of_its_stages_behind_what_torch_does(stages: list[StageTime]) -> None:
    assert [(one.recipe, one.verb, one.stage) for one in stages] == [
        *[("torch", verb, ALL) for verb in ("x.add_(y)", "AdamW(fused=True)")],
        *[
            (recipe, verb, stage)
            for recipe, verbs in STAGES.items()
            for verb, names in verbs.items()
            for stage in names
        ],
    ]
    assert all(math.isfinite(one.gb_per_s) for one in stages)
    assert stages[0].gb_per_s > 0


def test_stages_move_the_bytes_of_dense_arrays_and_of_touched_lines(stages: list[StageTime]) -> None:
    nbytes = {(one.recipe, one.stage): one.bytes_per_element for one in stages if one.stage != ALL}
    assert {nbytes[recipe, "accumulate"] for recipe in STAGES} == {12.0}
    assert {nbytes[recipe, "decode"] for recipe in STAGES if "demo" in recipe} == {8.0}
    # Every 32nd element: one in every second line of 16.
    assert nbytes["striding(1/32)", "decode"] == 4.0
    assert 0 < nbytes["random_k(1/32)", "decode"] < 4.0
    assert not any(moved for (_, stage), moved in nbytes.items() if stage not in ("accumulate", "decode"))


@pytest.mark.parametrize("compressor", [demo(4, CHUNK), random_k(1 / 32)], ids=["sent indices", "shared indices"])
def test_stages_add_up_to_the_prefix_with_all_loops(compressor) -> None:  # type: ignore[no-untyped-def]
    codec = StagedCodec("recipe", compressor, [draw_gradient((CHUNK, CHUNK), seed=0)], [torch.zeros(CHUNK, CHUNK)])
    # Whole numbers, so that sums are exact.
    ns = {name: float(number * number + 1) for number, name in enumerate(codec.bodies)}
    rows = codec.split(ns)
    whole = {one.verb: one.ns_per_element for one in rows if one.stage == ALL}
    last_encode = next(name for name in ns if "put values" in name)
    assert whole == {ENCODE: ns[last_encode], DECODE: ns["recipe: verify"] + ns["recipe: decode"]}
    for verb, spent in whole.items():
        assert sum(one.ns_per_element for one in rows if one.verb == verb and one.stage != ALL) == spent


def test_lines_are_touched_where_an_element_is_not_zero() -> None:
    x = torch.zeros(4, 16)
    x[1, 3] = x[1, 4] = -1.0
    assert touched_share([x, torch.ones(2, 32)]) == 5 / 8


@pytest.mark.slow
def test_a_run_reports_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = codec.Settings(
        (CHUNK, CHUNK), rounds=1, memory_cases=1, training_steps=3, stage_shapes=((CHUNK, CHUNK),)
    )
    monkeypatch.setattr(codec, "_QUICK", settings)
    monkeypatch.setattr(codec, "keep_freed_memory", lambda: True)  # the real one would last for all tests
    threads, file = torch.get_num_threads(), tmp_path / "codec.json"
    try:
        with pytest.raises(SystemExit) as left:
            main(["codec", "--quick", "--json", str(file)])
    finally:
        torch.set_num_threads(threads)
    assert left.value.code == 0
    report = json.loads(file.read_text())
    assert {*report["figures"], *report["unmeasured"]} == set(report["known_figures"])
    assert set(load_targets("codec", frozenset(report["known_figures"]))) <= set(report["known_figures"])
    assert {row["table"] for row in report["rows"]} >= {"speed", "bits", "error", "stages"}
    stages = [row for row in report["rows"] if row["table"] == "stages"]
    assert {row["recipe"] for row in stages} == {"torch", *STAGES}
    assert all(math.isfinite(row["of_memory"]) for row in stages)
