"""What happens with a torch that lacks a private name, and with one that is newer than those tested."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.torch_version import TorchVersion

import flexcomm
from flexcomm.stats import SyncRecord, Timed
from flexcomm.versions import TESTED_ON, TESTED_VERSIONS, log_untested_version, private

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_private_returns_what_the_names_lead_to() -> None:
    assert private(SimpleNamespace(_a=SimpleNamespace(_b=3)), "_a", "_b") == 3


def test_a_missing_name_is_an_error_with_the_versions_and_what_to_do() -> None:
    with pytest.raises(flexcomm.TorchVersionError) as caught:
        private(SimpleNamespace(_a=torch.zeros(1)), "_a", "_no_such_name")
    told = str(caught.value)
    assert told.startswith(f"torch {torch.__version__} has no Tensor._no_such_name")
    assert all(version in told for version in TESTED_VERSIONS)
    assert f"pip install torch=={TESTED_VERSIONS[-1]}" in told


def test_a_missing_name_of_a_class_is_told_as_the_class_has_it() -> None:
    with pytest.raises(flexcomm.TorchVersionError, match=r"has no Tensor\._no_such_name"):
        private(torch.Tensor, "_no_such_name")


@pytest.fixture
def _forgetful() -> Iterator[None]:
    log_untested_version.cache_clear()
    yield
    log_untested_version.cache_clear()


def connected_with(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[logging.LogRecord]:
    """Return what two calls of ``connect`` log of the version."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with caplog.at_level(logging.INFO, logger="flexcomm"):
        for _ in range(2):
            flexcomm.connect().close()
    return [record for record in caplog.records if version in record.getMessage()]


@pytest.mark.usefixtures("_forgetful")
@pytest.mark.parametrize("version", ["99.0.0", f"{TESTED_VERSIONS[-1]}.1", "99.1.0.dev20270101+cu132"])
def test_a_newer_torch_is_logged_once(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (record,) = connected_with(version, monkeypatch, caplog)
    assert record.levelno == logging.WARNING
    assert record.name.split(".")[0] == "flexcomm"
    assert TESTED_ON in record.getMessage()


@pytest.mark.usefixtures("_forgetful")
@pytest.mark.parametrize("version", [*TESTED_VERSIONS, f"{TESTED_VERSIONS[-1]}+cpu", "2.13.1"])
def test_a_torch_that_is_not_newer_is_not_logged(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not connected_with(version, monkeypatch, caplog)


def test_a_torch_that_does_not_tell_whether_it_profiles_is_given_all_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert isinstance(Timed(SyncRecord(), "encode")._range, torch.profiler.record_function)
