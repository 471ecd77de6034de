"""A JSON document by names, in which whatever is missing or of the wrong kind is an error that says where."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexdemo.predict.errors import PredictError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Fields", "read_document"]


@dataclass(frozen=True)
class Fields:
    """An object of the document; ``where`` is its file and the names that lead to it."""

    where: str
    content: dict[str, object]

    def __contains__(self, name: str) -> bool:
        return self.content.get(name) is not None

    def number(self, name: str, *, least: float = 0.0) -> float:
        return _check_number(f"{self.where}: {name}", self._get(name), least)

    def whole(self, name: str, *, least: int = 0) -> int:
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PredictError(f"{self.where}: {name} is {value!r}, needed a whole number from {least}.")
        return value

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise PredictError(f"{self.where}: {name} is {value!r}, needed a text.")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        return tuple(
            _check_number(f"{self.where}: {name}[{place}]", value, 0.0) for place, value in enumerate(self._list(name))
        )

    def nested(self, name: str) -> Fields:
        return _as_fields(f"{self.where}: {name}", self._get(name))

    def each(self, name: str) -> Iterator[Fields]:
        for place, value in enumerate(self._list(name)):
            yield _as_fields(f"{self.where}: {name}[{place}]", value)

    def _list(self, name: str) -> list[object]:
        value = self._get(name)
        if not isinstance(value, list):
            raise PredictError(f"{self.where}: {name} is {value!r}, needed a list.")
        return value

    def _get(self, name: str) -> object:
        if name not in self.content:
            raise PredictError(f"{self.where}: {name} is missing; there are {', '.join(self.content) or 'no fields'}.")
        return self.content[name]


def read_document(file: Path) -> Fields:
    """Return what a file holds, which must be a JSON object."""
    try:
        return _as_fields(str(file), json.loads(file.read_text()))
    except OSError as error:
        raise PredictError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise PredictError(f"{file} is not JSON: {error}.") from error


def _as_fields(where: str, value: object) -> Fields:
    if not isinstance(value, dict):
        raise PredictError(f"{where} is {type(value).__name__}, needed an object with named fields.")
    return Fields(where, value)


def _check_number(where: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise PredictError(f"{where} is {value!r}, needed a number from {least:g}.")
    return float(value)
