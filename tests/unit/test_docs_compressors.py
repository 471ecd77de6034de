"""The page about compressors says what they do: its example runs, and its bytes per parameter are counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import flexcomm
from flexcomm import TensorSpec
from flexcomm.codec import plan_buffer
from flexcomm.compress import Dct, Everything, Identity, Pipeline, ValueName
from flexcomm.errors import CompressorError
from flexcomm.kernels import ValueCode

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compressors.md").read_text()
SHAPES = {"matrix": (2048, 4096), "flat": (2048 * 4096,)}
COSTS = re.findall(r"^\| `(\w+\(.*?\))`.*? \| (matrix|flat) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
CHUNKS = re.findall(r"^\| `chunk` of `(\w+)` \| a whole number from 2 to (\d+)", PAGE, re.MULTILINE)
VALUE_BITS = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|", PAGE, re.MULTILINE)


def test_every_recipe_has_a_row() -> None:
    recipes = {"demo", "dense", "random_k", "sign", "striding", "threshold", "top_k"}
    assert {recipe.split("(")[0] for recipe, _, _ in COSTS} == recipes


@pytest.mark.parametrize(("recipe", "shape", "shown"), COSTS)
def test_bytes_per_parameter_are_those_of_the_plan(recipe: str, shape: str, shown: str) -> None:
    compressor = eval(recipe, {**vars(flexcomm), "torch": torch})  # noqa: S307  (our own page)
    plan = plan_buffer((TensorSpec("x", SHAPES[shape], torch.float32),), compressor)
    assert f"{plan.nbytes / (2048 * 4096):.4f}" == shown


@pytest.mark.parametrize("basis", [Identity, Dct])
def test_the_longest_chunk_shown_is_the_longest_there_is(basis: type[Identity] | type[Dct]) -> None:
    longest = int(dict(CHUNKS)[basis.__name__])
    assert Pipeline(basis(longest), Everything())
    with pytest.raises(CompressorError, match=f"from 2 to {longest}"):
        Pipeline(basis(longest + 1), Everything())


def test_every_value_code_has_a_row() -> None:
    assert {name for name, _, _ in VALUE_BITS} == {*ValueName.__args__} - {"native"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("values", "at_8", "at_32"), VALUE_BITS)
def test_bits_of_a_value_include_its_share_of_the_scales(values: str, at_8: str, at_32: str) -> None:
    code = ValueCode[values.upper()].format
    assert [code.bits + 16 * code.scales / k for k in (8, 32)] == [float(at_8), float(at_32)]


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "docs/compressors.md", "exec", dont_inherit=True), {"__name__": "example"})  # noqa: S102  (our own page)
