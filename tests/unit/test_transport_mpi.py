"""Device pointers reach an MPI only after a child process survived trying."""

from __future__ import annotations

import pytest
import torch

from flexcomm.transport.mpi import environment_without_launcher, mpi_is_gpu_aware


def test_without_a_device_no_mpi_is_gpu_aware() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    assert mpi_is_gpu_aware() is False


def test_the_child_does_not_take_this_rank_for_its_own() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_RANK": "1", "HYDI_CONTROL_FD": "7", "HOME": "/h"}
    choices = {"OMPI_MCA_btl": "tcp,self", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    assert environment_without_launcher(environ | choices) == {"HOME": "/h"} | choices
