"""The fastest kernels whose library is installed; what is missing is said once, with what to install."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from flexcomm import InvalidArgumentError, kernels
from flexcomm.kernels import choose_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    kernels._choose.cache_clear()
    yield
    kernels._choose.cache_clear()


@pytest.mark.parametrize(
    ("device", "missing", "chosen", "said"),
    [
        (CUDA, {"cupy"}, "staged", ["cuda tensors are copied to the host", "flexcomm[cuda13], or flexcomm[cuda12]"]),
        (CUDA, {"cupy", "numba"}, "reference", ["cuda tensors are compressed by the slow reference", "[cuda13]"]),
        (CPU, {"numba"}, "reference", ["cpu tensors are compressed by the slow reference: install numba"]),
        (CPU, {"cupy"}, "cpu", []),
    ],
)
def test_what_is_missing_is_made_up_for_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: torch.device,
    missing: set[str],
    chosen: str,
    said: list[str],
) -> None:
    found = kernels.find_spec
    monkeypatch.delenv(kernels.KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None if name in missing else found(name))
    with caplog.at_level(logging.WARNING, logger="flexcomm"):
        assert [choose_kernels(device).name for _ in range(3)] == [chosen] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(said)
    assert all(part in warnings[0] for part in said)


def test_what_was_asked_for_by_name_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    with pytest.raises(InvalidArgumentError, match=r"gpu kernels need cupy: install flexcomm\[cuda13\]"):
        choose_kernels(CUDA, "gpu")
    with pytest.raises(InvalidArgumentError, match="staged kernels need numba: install numba"):
        choose_kernels(CUDA, "staged")
