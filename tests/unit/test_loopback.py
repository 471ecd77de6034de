"""A world of one rank keeps the laws of every other."""

from __future__ import annotations

import pytest
import torch

import flexcomm
from flexcomm import testing
from flexcomm.transport import LoopbackTransport


@pytest.mark.parametrize("law", testing.TRANSPORT_LAWS, ids=lambda law: law.__name__)
def test_loopback_keeps_the_law(law) -> None:  # type: ignore[no-untyped-def]
    assert law(LoopbackTransport(), "cpu") is None  # it raises where it is broken


def test_a_broken_transport_is_found_out() -> None:
    class Forgetful(LoopbackTransport):
        def all_gather(self, x, out=None):  # type: ignore[no-untyped-def]
            return super().all_gather(torch.zeros_like(x), out)

    with pytest.raises(AssertionError, match="all_gather"):
        testing.check_transport(Forgetful())


def test_a_process_without_a_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with flexcomm.connect() as world:
        assert str(world.topology) == "rank 0 of 1: node 0 of 1, local rank 0 of 1 (none)"
        assert world.intra.all_reduce(torch.ones(2)).wait().tolist() == [1.0, 1.0]
        world.agree({"anything": 1})


def test_a_transport_that_cannot_be_had_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has NCCL")
    with pytest.raises(flexcomm.TransportUnavailableError, match="nccl needs a CUDA device"):
        flexcomm.connect(intra="nccl")


@pytest.mark.parametrize("keywords", [{"inter": "carrier pigeon"}, {"timeout_s": 0}, {"timeout_s": float("inf")}])
def test_an_argument_that_means_nothing_is_refused_by_name(keywords: dict[str, object]) -> None:
    with pytest.raises(flexcomm.InvalidArgumentError, match=str(next(iter(keywords.values())))):
        flexcomm.connect(**keywords)  # type: ignore[arg-type]
