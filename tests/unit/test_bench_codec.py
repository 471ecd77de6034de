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
from bench.targets import load_targets
from flexcomm import demo

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


@pytest.mark.slow
def test_a_run_reports_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_QUICK", codec.Settings((CHUNK, CHUNK), rounds=1, memory_cases=1, training_steps=3))
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
    assert {row["table"] for row in report["rows"]} >= {"speed", "bits", "error"}
