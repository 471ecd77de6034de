"""What is known of a run while it goes on and afterwards: one JSON object a line, one file a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO, TypeAlias

from bench.train.plan import Run


@dataclass(frozen=True)
class Start:
    """What a run begins with."""

    method: str
    lr: float
    seed: int
    parameters: int
    parameters_per_rank: int
    allreduce_nbytes: float
    world: str
    corpus: Mapping[str, object]


@dataclass(frozen=True)
class Interval:
    """Training since the last line: means over its steps, seconds of the slowest rank.

    ``waiting_s`` is how long the optimizer was blocked by cables, ``codec_s`` how long it encoded and decoded;
    ``sent_nbytes`` is what a node sent to others. ``fewer`` is how many times less than an fp32 all-reduce that is.
    ``compute_s`` is what forward and backward passes took on a mean rank, without waiting for cables.
    """

    step: int
    loss: float
    step_s: float
    tokens_per_s: float
    waiting_s: float
    codec_s: float
    sent_nbytes: float
    fewer: float | None
    compute_s: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """The loss on validation bytes; seconds of training and bytes a node sent, up to here."""

    step: int
    loss: float
    train_s: float
    sent_nbytes: float


@dataclass(frozen=True)
class Ending:
    """What a run came to. ``diverged`` says why it ended early; empty, if it did not.

    Replicas that may differ are compared by their mean, as every rank finds it; ``consensus_distance`` is how far they
    are from it, None if they do not differ. ``compute_s`` is that of all steps, on a mean rank.
    """

    steps: int
    train_s: float
    tokens: int
    sent_nbytes: float
    gradient_elements: int
    replicas_equal: bool
    diverged: str = ""
    compute_s: float = 0.0
    consensus_distance: float | None = None


Record: TypeAlias = Start | Interval | Evaluation | Ending
_KINDS: Mapping[str, type[Start | Interval | Evaluation | Ending]] = {
    "start": Start,
    "interval": Interval,
    "evaluation": Evaluation,
    "ending": Ending,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass
class History:
    """All records of a run so far, by kind."""

    start: Start | None = None
    intervals: list[Interval] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, record: Record) -> None:
        match record:
            case Start():
                self.start = record
            case Interval():
                self.intervals.append(record)
            case Evaluation():
                self.evaluations.append(record)
            case Ending():
                self.ending = record


def file_of(run: Run, folder: Path) -> Path:
    return folder / f"{run.name}.jsonl"


def write_record(record: Record, file: TextIO) -> None:
    """Write a line that a reader sees at once."""
    print(json.dumps({"kind": _NAMES[type(record)], **asdict(record)}), file=file, flush=True)


def parse_record(line: str) -> Record:
    """Return what :func:`write_record` was given."""
    said = json.loads(line)
    return _KINDS[said.pop("kind")](**said)


def read_records(file: Path, after: int = 0) -> Iterator[Record]:
    """Yield the records of complete lines behind the first ``after``; none, if there is no such file yet."""
    if file.exists():
        complete = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        yield from map(parse_record, complete[after:])


def read_history(run: Run, folder: Path) -> History:
    """Return what is known of a run."""
    history = History()
    for record in read_records(file_of(run, folder)):
        history.add(record)
    return history
