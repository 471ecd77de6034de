"""What groups of the backend are told: by options, for the process, or by the environment."""

from __future__ import annotations

import pytest
import torch

import flexcomm
from flexcomm.backend.options import BackendSettings, is_exact_region, parse_compressor, settings_for


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("demo(k=32)", flexcomm.demo(k=32)),
        (" top_k(0.25, values='sign2') ", flexcomm.top_k(0.25, values="sign2")),
        ("dense(dtype=torch.bfloat16)", flexcomm.dense(torch.bfloat16)),
        ("sign()", flexcomm.sign()),
    ],
)
def test_a_compressor_is_read_from_the_text_of_its_recipe(text: str, compressor: flexcomm.Compressor) -> None:
    assert parse_compressor(text) == compressor


@pytest.mark.parametrize(
    "text",
    ["", "demo", "demo(k=32", "exec('x')", "__import__('os').system('true')", "demo(k=open('x'))", "demo(**{'k': 3})"],
)
def test_any_other_text_is_refused_and_not_evaluated(text: str) -> None:
    with pytest.raises(flexcomm.CompressorError, match="FLEXCOMM_COMPRESSOR"):
        parse_compressor(text)


def test_a_recipe_says_itself_what_is_wrong_with_its_arguments() -> None:
    with pytest.raises(flexcomm.CompressorError):
        parse_compressor("demo(k=0)")


def test_options_come_before_what_was_configured_and_that_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings_for(None) == BackendSettings()
    monkeypatch.setenv("FLEXCOMM_COMPRESSOR", "demo(k=7)")
    assert settings_for(None) == BackendSettings(flexcomm.demo(k=7))
    flexcomm.configure_backend(flexcomm.BackendOptions(flexcomm.sign(), min_bytes=5))
    try:
        assert settings_for(None) == BackendSettings(flexcomm.sign(), min_bytes=5)
        assert settings_for(flexcomm.BackendOptions(flexcomm.demo(k=2))) == BackendSettings(flexcomm.demo(k=2))
    finally:
        flexcomm.configure_backend(None)
    assert settings_for(None) == BackendSettings(flexcomm.demo(k=7))


@pytest.mark.parametrize(
    "wrong",
    [
        {"compressor": "demo"},
        {"decay": 1.5},
        {"alpha": 0.0},
        {"average": "ranks"},
        {"min_bytes": -1},
        {"start_step": True},
        {"bucket_bytes": 0},
        {"nonfinite": "skip"},
    ],
)
def test_wrong_options_are_refused_by_name(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(flexcomm.InvalidArgumentError, match=name):
        flexcomm.BackendOptions(**wrong)  # type: ignore[arg-type]


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(flexcomm.InvalidArgumentError, match="BackendOptions"):
        settings_for(object())


def test_the_backend_is_registered_by_the_import() -> None:
    assert torch.distributed.is_backend_available("flexcomm")


def test_regions_are_exact_until_the_outermost_ends() -> None:
    with flexcomm.exact():
        with flexcomm.exact():
            pass
        assert is_exact_region()
    assert not is_exact_region()
