"""Where ranks meet follows from what the launcher left behind."""

from __future__ import annotations

import pytest

from flexcomm.bootstrap.job import (
    FIRST_PORT,
    PORTS,
    find_rendezvous,
    own_interfaces,
    rendezvous_from_slurm,
)
from flexcomm.errors import TransportUnavailableError
from flexcomm.topology import RankInfo


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[007-009,12],login1", "gpu007"), ("node3", "node3"), ("a1,b2", "a1"), ("rack-2-[5,7]", "rack-2-5")],
)
def test_the_first_host_of_a_slurm_list_is_found(nodelist: str, host: str) -> None:
    assert rendezvous_from_slurm({"SLURM_STEP_NODELIST": nodelist}).address == host


def test_steps_of_one_job_meet_on_different_ports() -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[1-2]"}
    ports = {rendezvous_from_slurm(job | {"SLURM_STEP_ID": str(step)}).port for step in range(10)}
    assert len(ports) == 10
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)


def test_what_the_user_set_comes_first() -> None:
    environ = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4567", "SLURM_STEP_NODELIST": "gpu1"}
    place = find_rendezvous(RankInfo("slurm", 0, 2), None, environ)
    assert (place.address, place.port) == ("10.1.2.3", 4567)


def test_ranks_that_cannot_meet_are_told_what_to_set() -> None:
    with pytest.raises(TransportUnavailableError, match="MASTER_ADDR and MASTER_PORT"):
        find_rendezvous(RankInfo("openmpi", 0, 2), None, {})


def test_own_interfaces_include_the_loopback() -> None:
    assert ("lo", "127.0.0.1") in own_interfaces()
