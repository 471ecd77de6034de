"""Settings and runs of a command that trains, passed to the ranks in a file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_FILE = "plan.json"
INTERVALS = 48
EVALUATIONS = 16
"""Records and evaluations of a run of fixed duration."""

Links = Literal["namespaces", "paced"]


@dataclass(frozen=True)
class Settings:
    """Settings of all runs. Every rank takes ``windows`` windows for a step.

    With ``rate``, links between nodes have that rate: that of the ``namespaces`` of an emulated cluster, or of ranks on
    this host whose transports are ``paced``. With ``seconds``, a run takes as many steps as fit into so much training;
    ``steps``, ``log_every`` and ``eval_every`` do not matter then.

    The rest is for ``bench decentralized``: optimizers that accumulate do so over ``accumulate`` steps; a step's
    forward and backward pass last ``compute_ms`` at least, and ``straggler_percent`` longer on one node in every step.
    """

    size: str
    steps: int
    windows: int
    log_every: int
    eval_every: int
    eval_windows: int
    shard: bool
    nodes: int
    ranks_per_node: int
    launcher: str
    rate: str | None
    accumulate: int = 4
    compute_ms: float = 0.0
    straggler_percent: float = 0.0
    links: Links = "namespaces"
    seconds: float | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def stops(self) -> list[int]:
        """Return the steps at which intervals end, from 0 to the last."""
        stops = {0, self.steps, *range(0, self.steps, self.log_every), *range(0, self.steps, self.eval_every)}
        return sorted(stops)

    def evaluates_at(self, step: int) -> bool:
        return step % self.eval_every == 0 or step == self.steps


@dataclass(frozen=True)
class Run:
    """One method, trained once."""

    method: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-lr{self.lr:g}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """Runs one after the other, in the same processes."""

    settings: Settings
    runs: tuple[Run, ...]


def save_plan(plan: Plan, folder: Path) -> None:
    (folder / _FILE).write_text(json.dumps(asdict(plan), indent=2) + "\n")


def load_plan(folder: Path) -> Plan:
    """Return the plan that :func:`save_plan` wrote."""
    said = json.loads((folder / _FILE).read_text())
    return Plan(Settings(**said["settings"]), tuple(Run(**run) for run in said["runs"]))
