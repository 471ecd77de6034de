"""Numbers as people write them on a command line."""

from __future__ import annotations

import re

from flexdemo.predict.errors import PredictError
from flexdemo.runtime import ModelError, Straggler

__all__ = ["format_bits_per_s", "format_number", "format_seconds", "parse_bits_per_s", "parse_count", "parse_straggler"]

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def parse_bits_per_s(text: str) -> float:
    """Return the rate that ``text`` names in tc's style: a number and ``kbit``, ``mbit`` or ``gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise PredictError(
            f"got the rate {text!r}, needed a number above 0 with a unit, one of kbit, mbit, gbit (bits per second). "
            f"Write for example 100mbit or 2.5gbit."
        )
    return float(match[1]) * _RATES[match[2]]


def parse_count(text: str) -> int:
    """Return a number of parameters such as 65000000, 124M or 1.3B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmb]?)", text.strip().lower())
    if match is None or not round(float(match[1]) * _COUNTS[match[2]]):
        raise PredictError(f"got {text!r} parameters, needed a number such as 65000000, 124M or 1.3B.")
    return round(float(match[1]) * _COUNTS[match[2]])


def parse_straggler(text: str | None) -> Straggler:
    """Return what ``P:X`` says: with probability P a node takes X % longer in an iteration."""
    if text is None:
        return Straggler()
    match = re.fullmatch(r"(\d*\.?\d+):(\d*\.?\d+)%?", text.strip())
    if match is None:
        raise PredictError(
            f"got --straggler {text!r}, needed PROBABILITY:PERCENT, such as 0.01:50: in one of a hundred iterations a "
            f"node takes 50 % longer."
        )
    try:
        return Straggler(float(match[1]), float(match[2]) / 100)
    except ModelError as error:
        raise PredictError(f"got --straggler {text!r}: {error}") from error


def format_bits_per_s(bits_per_s: float) -> str:
    """Return the rate with the largest unit that leaves at least 1 before the point, rounded."""
    unit = next((one for one in ("gbit", "mbit") if bits_per_s >= 0.9995 * _RATES[one]), "kbit")
    return f"{format_number(bits_per_s / _RATES[unit])}{unit}"


def format_seconds(seconds: float) -> str:
    """Return milliseconds in three digits, or as many as there are before the point."""
    return format_number(1e3 * seconds)


def format_number(number: float) -> str:
    """Return three digits, or as many as there are before the point."""
    return f"{number:.3g}" if number < 99.95 else f"{number:.0f}"
