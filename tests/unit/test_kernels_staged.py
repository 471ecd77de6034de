"""The staged kernels keep the laws of every set; on a machine without another device, of tensors of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flexcomm.kernels.cpu import CpuKernels
from flexcomm.kernels.staged import StagedKernels
from flexcomm.testing import KERNEL_LAWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm.kernels import Kernels


@pytest.mark.parametrize("law", KERNEL_LAWS, ids=lambda law: law.__name__)
def test_staged_kernels_keep_the_law(law: Callable[[Kernels, str], None]) -> None:
    law(StagedKernels(CpuKernels(1)), "cpu")
