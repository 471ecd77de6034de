"""Two transports side by side, chosen by where a tensor lives: ``auto`` on a machine with GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexcomm.transport.base import Handle, Transport


class PerDeviceTransport:
    """Host tensors over ``host``, an accelerator's over ``device``; both join the same ranks in the same order."""

    def __init__(self, host: Transport, device: Transport) -> None:
        self.name = f"{host.name} for host tensors, {device.name} for device tensors"
        self.rank = host.rank
        self.size = host.size
        self.timeout_s = host.timeout_s
        self._host = host
        self._device = device

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        return self._for(x).all_gather(x, out)

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Handle[tuple[Tensor, ...]]:
        return self._for(x).all_gatherv(x, counts, out)

    def all_reduce(self, x: Tensor) -> Handle[Tensor]:
        return self._for(x).all_reduce(x)

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        return self._for(x).reduce_scatter(x, out)

    def broadcast(self, x: Tensor, root: int = 0) -> Handle[Tensor]:
        return self._for(x).broadcast(x, root)

    def send_recv(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Handle[tuple[Tensor, ...]]:
        return self._for(*(x for _, x in (*sends, *receives))).send_recv(sends, receives)

    def barrier(self) -> Handle[None]:
        return self._host.barrier()

    def _for(self, *tensors: Tensor) -> Transport:
        return self._host if all(x.is_cpu for x in tensors) else self._device
