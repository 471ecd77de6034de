"""Parsing of the arguments of ``bench collectives``: sizes, compressors, element types."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

import torch

import flexcomm
from bench.errors import UsageError
from flexcomm import AlgorithmOption as Algorithm
from flexcomm import Compressor, FlexcommError

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A name each, as strings exist on the command line only. The library keeps no such list.
RECIPES: Mapping[str, Callable[..., Compressor]] = {
    "demo": flexcomm.demo,
    "dense": flexcomm.dense,
    "random_k": flexcomm.random_k,
    "sign": flexcomm.sign,
    "striding": flexcomm.striding,
    "threshold": flexcomm.threshold,
    "top_k": flexcomm.top_k,
}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BLOCK = 64
"""Sides of tensors are multiples of it, so that DeMo's chunks are whole."""


@dataclass(frozen=True)
class NamedCompressor:
    """A compressor, and the argument that named it."""

    name: str
    compressor: Compressor


def parse_size(text: str) -> int:
    """Return the bytes that ``text`` names in nccl-tests' style: a number and, if need be, ``K``, ``M`` or ``G``."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"got the size {text!r}, needed a number of bytes such as 65536, 64K, 16M or 1G.")
    return int(match[1]) * _UNITS[match[2].upper()]


def plan_sizes(least_nbytes: int, most_nbytes: int, factor: float) -> list[int]:
    """Return the sizes from the least to the most, each ``factor`` times the one before."""
    if factor <= 1:
        raise UsageError(f"got the factor {factor:g}, needed one above 1: -f 2 doubles from size to size.")
    if least_nbytes > most_nbytes:
        raise UsageError(f"got -b {least_nbytes} above -e {most_nbytes}: the first is the least size, in bytes.")
    return list(_grow(least_nbytes, most_nbytes, factor))


def _grow(least_nbytes: int, most_nbytes: int, factor: float) -> Iterator[int]:
    size = float(least_nbytes)
    while size <= most_nbytes:
        yield int(size)
        # At least one byte more: a factor of 1.01 must not stay where it is for ever.
        size = max(size * factor, size + 1)


def plan_shape(nbytes: int, itemsize: int) -> tuple[int, int]:
    """Return the shape of the matrix for a size: as many elements as fit, but in whole chunks.

    Below 4096 elements a power of two, from there on a multiple of 4096, as square as that allows.
    """
    count = max(1, nbytes // itemsize)
    blocks = count // _BLOCK**2
    if blocks == 0:
        bits = count.bit_length() - 1
        return 1 << bits // 2, 1 << bits - bits // 2
    rows = next(n for n in range(int(blocks**0.5), 0, -1) if blocks % n == 0)
    return rows * _BLOCK, blocks // rows * _BLOCK


def parse_compressor(text: str) -> NamedCompressor:
    """Return the compressor that ``recipe:name=value,...`` names, with the recipe's own argument names."""
    recipe, _, rest = text.strip().partition(":")
    if recipe not in RECIPES:
        raise UsageError(f"got the compressor {text!r}, needed one of {', '.join(RECIPES)}, as in demo:k=32.")
    known = list(inspect.signature(RECIPES[recipe]).parameters)
    arguments = dict(_parse_argument(text, word, known) for word in rest.split(",") if word)
    try:
        return NamedCompressor(text.strip(), RECIPES[recipe](**arguments))
    except (FlexcommError, TypeError) as error:
        raise UsageError(f"got the compressor {text!r}, but {error}") from error


def _parse_argument(text: str, word: str, known: Sequence[str]) -> tuple[str, object]:
    name, equals, value = (part.strip() for part in word.partition("="))
    if not equals or name not in known:
        raise UsageError(
            f"got {word!r} in the compressor {text!r}, needed name=value with a name of {', '.join(known)}."
        )
    return name, DTYPES.get(value, value) if name == "dtype" else _parse_value(value)


def _parse_value(text: str) -> object:
    """Return a whole number, a number or fraction, None, or the word itself."""
    if text == "None":
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        return text


def parse_dtype(name: str) -> torch.dtype:
    """Return the element type of that name."""
    if name not in DTYPES:
        raise UsageError(f"got --dtype {name!r}, needed one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def parse_algorithm(name: str) -> Algorithm:
    """Return ``name`` if it is an algorithm between nodes, or ``auto``."""
    for algorithm in get_args(Algorithm):
        if algorithm == name:
            found: Algorithm = algorithm
            return found
    raise UsageError(f"got --algorithm {name!r}, needed one of {', '.join(get_args(Algorithm))}.")
