"""Records of a run, during it and afterwards: one JSON object a line, one file a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO, TypeAlias

from bench.train.plan import Run


@dataclass(frozen=True)
class Start:
    """The first record: method, model, world and data of a run."""

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

    ``waiting_s`` is how long the optimizer was blocked by communication, ``codec_s`` how long it encoded and decoded;
    ``sent_nbytes`` is what a node sent to others. ``fewer`` is how many times less than an fp32 all-reduce that is.
    ``compute_s`` is what forward and backward passes took on a mean rank, without waiting for messages.
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
    """The last record: totals of a run. ``diverged`` says why it ended early; empty, if it did not.

    Replicas that may differ are compared by their mean, as computed on every rank; ``consensus_distance`` is their
    distance from it, None if they do not differ. ``compute_s`` is that of all steps, on a mean rank.
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
_RECORD_TYPES: Mapping[str, type[Start | Interval | Evaluation | Ending]] = {
    "start": Start,
    "interval": Interval,
    "evaluation": Evaluation,
    "ending": Ending,
}
_NAMES = {record_type: name for name, record_type in _RECORD_TYPES.items()}


@dataclass
class History:
    """All records of a run so far, by type."""

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
    """Write a record as a line, and flush it."""
    print(json.dumps({"kind": _NAMES[type(record)], **asdict(record)}), file=file, flush=True)


def parse_record(line: str) -> Record:
    """Return the record that :func:`write_record` wrote."""
    said = json.loads(line)
    return _RECORD_TYPES[said.pop("kind")](**said)


def read_records(file: Path, after: int = 0) -> Iterator[Record]:
    """Yield the records of complete lines behind the first ``after``; none, if there is no such file yet."""
    if file.exists():
        complete = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        yield from map(parse_record, complete[after:])


def read_history(run: Run, folder: Path) -> History:
    """Return all records of a run."""
    history = History()
    for record in read_records(file_of(run, folder)):
        history.add(record)
    return history
