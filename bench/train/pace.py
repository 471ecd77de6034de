"""How long the computation of a step takes: as long as it does or, by sleeping, longer.

All nodes of an emulated cluster share the cores of one machine, where real computation would measure how they get in
each other's way. Passes that mostly sleep are those of an accelerator, which leaves the host's cores idle.
"""

import hashlib
import time
from functools import partial

from bench.train.model import ByteGpt
from bench.train.plan import Settings
from flexcomm import World

_FORWARD = 1 / 3
"""The share of a step that the forward pass takes: a backward pass computes about twice as much."""


def straggler_of(seed: int, step: int, nodes: int) -> int:
    """Return the node that is slower in a step: any of them, a function of ``(seed, step)``."""
    key = hashlib.blake2b(f"straggler {seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "big") % nodes


class Pace:
    """Keeps the forward and backward passes of a rank's model to ``compute_ms``, block by block, if they are faster.

    Where this node is the straggler, they take ``straggler_percent`` longer.
    """

    def __init__(self, settings: Settings, seed: int, world: World) -> None:
        self._usual_s, self._slower = settings.compute_ms / 1e3, settings.straggler_percent / 100
        self._seed, self._world = seed, world
        self._wanted_s, self._begin_s, self._waited_before_s = 0.0, 0.0, 0.0

    def attach(self, model: ByteGpt) -> None:
        """Let the model's blocks take their time, whenever a step has begun."""
        parts = len(model.blocks) + 1
        for number, block in enumerate(model.blocks, start=1):
            if self._usual_s:
                block.register_forward_hook(partial(self._reach, _FORWARD * number / parts))
                block.register_full_backward_hook(partial(self._reach, 1 - (1 - _FORWARD) * number / parts))

    def begin(self, step: int) -> None:
        """Begin the passes of a step."""
        place = self._world.topology
        is_slow = straggler_of(self._seed, step, place.nodes) == place.node
        self._wanted_s = self._usual_s * (1 + self._slower if is_slow else 1)
        self._waited_before_s, self._begin_s = self._waited_s(), time.perf_counter()

    def end(self) -> float:
        """Let the passes last as long as they shall, and return how long they took, without waiting for cables."""
        self._reach(1.0)
        self._wanted_s = 0.0
        return time.perf_counter() - self._begin_s - (self._waited_s() - self._waited_before_s)

    def _reach(self, share: float, *_: object) -> None:
        """Sleep until the share of a step's time has passed; between steps, as in validations, there is none."""
        left_s = self._begin_s + share * self._wanted_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def _waited_s(self) -> float:
        waited_s: float = self._world.stats()["waiting_s"]
        return waited_s
