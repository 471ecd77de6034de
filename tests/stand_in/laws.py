"""Holds laws on the stand-in: nothing may be reported, and all ranks must enqueue collectives in one order.

keep_on_stand_in(LAWS[law], Shape(2, 1))
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.ranks.laws import LAW_LIMIT_S, keep
from tests.stand_in import collectives, device
from tests.stand_in.build import build_device, build_kernels
from tests.stand_in.collective_order import find_disorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World
    from tests.ranks.shapes import Shape


@dataclass(frozen=True)
class Prepare:
    """Installs the stand-in on a rank; ``devices`` are those of its node, by default as many as ranks."""

    device_library: Path
    kernel_library: Path
    devices: int | None = None

    def __call__(self) -> Any:
        return device.install(self.device_library, self.kernel_library, self.devices or int(os.environ["WORLD_SIZE"]))


@dataclass(frozen=True)
class Checked:
    """A law, after which every rank says what its device found wrong."""

    law: Callable[[World], object]

    @property
    def __name__(self) -> str:
        return getattr(self.law, "__name__", str(self.law))

    def __call__(self, world: World) -> None:
        native: Any = torch.get_device_module(device.NAME).native
        # torch leaves it open where a registered backend is one of several, and warns of that when the group ends.
        dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        native.take_reports()
        collectives.LOG.clear()
        assert world.device.type == device.NAME, "this rank has a device"
        self.law(world)
        native.synchronize()
        found = native.take_reports()
        found += find_disorder(gather_logs(world))
        if found:
            raise AssertionError(f"{len(found)} reports:\n" + "\n".join(dict.fromkeys(found)))


def gather_logs(world: World) -> list[list[collectives.Enqueued]]:
    """Return what each rank enqueued."""
    own = torch.frombuffer(bytearray(json.dumps(collectives.LOG).encode()), dtype=torch.uint8)
    counts = world.control.all_gather(torch.tensor(own.numel())).wait().view(-1).tolist()
    rows = world.control.all_gatherv(own, counts).wait()
    return [[collectives.Enqueued.read(*one) for one in json.loads(row.numpy().tobytes())] for row in rows]


def keep_on_stand_in(
    law: Callable[[World], object], shape: Shape, *, devices: int | None = None, limit_s: float = 2 * LAW_LIMIT_S
) -> None:
    """Raise unless ranks on stand-ins keep a law, in an order in which devices would keep it, too."""
    keep(Checked(law), shape, limit_s, Prepare(build_device(), build_kernels(), devices))
