"""A second decoder, in plain Python, written from ``docs/wire.md`` alone: the page is enough, and it is right."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from flexcomm import Pipeline, TensorSpec, demo, random_k, sign, striding, threshold, top_k
from flexcomm.codec import Decoder, Encoder, plan_buffer
from flexcomm.compress import Dct, Everything, Identity, TopK
from flexcomm.kernels import Selection, TensorPlan, ValueCode, choose_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

LOW32 = 0xFFFFFFFF
HEADER_BITS = 64 * 8
VALUE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "sign": 1, "sign2": 3}
SCALES = {"int8": 1, "sign": 1, "sign2": 2}


class Bits:
    """The bits of a buffer, lowest first."""

    def __init__(self, buffer: bytes) -> None:
        self.number, self.position = int.from_bytes(buffer, "little"), HEADER_BITS

    def take(self, width: int) -> int:
        self.position += width
        return self.number >> (self.position - width) & ((1 << width) - 1)

    def begin_section(self) -> None:
        self.position += -self.position % 32


def decode_as_documented(buffer: bytes, plan: TensorPlan, step: int, name: str) -> np.ndarray:
    """Return the coefficients ``[chunks, n]`` of a buffer that holds one tensor."""
    bits, n, values = Bits(buffer), plan.chunk_numel, plan.values.name.lower()
    counts = [plan.k] * plan.chunks
    if plan.variable_count:
        counts = [bits.take(n.bit_length()) for _ in range(plan.chunks)]
    sized_for = plan.k if plan.variable_count and not plan.variable_length else sum(counts)
    bits.begin_section()
    section, index_bits = bits.position, shortest_code(plan, sized_for)[0]
    index_padding, value_padding = padding(plan, index_bits)
    indices = list(read_indices(bits, plan, counts, sized_for, index_padding, step, name))
    bits.position = section + index_bits + plan.chunks * index_padding
    bits.begin_section()
    scales = [[bfloat16(bits.take(16)) for _ in range(SCALES.get(values, 0))] for _ in range(plan.chunks)]
    bits.begin_section()
    coefficients = np.zeros((plan.chunks, n), np.float32)
    for chunk, chosen in enumerate(indices):
        for index in chosen:
            coefficients[chunk, index] = read_value(bits.take(VALUE_BITS[values]), values, scales[chunk])
        bits.take(value_padding)
    return coefficients


def padding(plan: TensorPlan, section_bits: int) -> tuple[int, int]:
    """Return the bits behind each chunk's indices, and behind its values."""
    if plan.variable_count:
        return 0, 0
    values = plan.values.name.lower()
    index_bits, value_bits = section_bits // plan.chunks, plan.k * VALUE_BITS[values]
    payload_bits = index_bits + 16 * SCALES.get(values, 0) + value_bits
    lacking = (-index_bits % 32, -value_bits % 32)
    return lacking[0] * (64 * lacking[0] <= payload_bits), lacking[1] * (64 * lacking[1] <= payload_bits)


def shortest_code(plan: TensorPlan, entries: int) -> tuple[int, str, int]:
    """Return the length of the index section in bits, the code and its low bits."""
    n, chunks = plan.chunk_numel, plan.chunks
    if plan.selection not in (Selection.TOP_K, Selection.THRESHOLD) or (not plan.variable_count and plan.k == n):
        return 0, "none", 0
    w = max(1, (n - 1).bit_length())
    fano = [(entries * (low + 1) + chunks * ((n - 1) >> low), "elias-fano", low) for low in range(w)]
    return min([(entries * w, "packed", 0), *fano, (chunks * n, "bitmap", 0)], key=lambda code: code[0])


def read_indices(
    bits: Bits, plan: TensorPlan, counts: list[int], sized_for: int, padding: int, step: int, name: str
) -> Iterator[list[int]]:
    n, (_, code, low) = plan.chunk_numel, shortest_code(plan, sized_for)
    for chunk, count in enumerate(counts):
        if code == "none":
            yield sorted(shared_indices(plan, chunk, step, name))
        elif code == "packed":
            yield [bits.take(max(1, (n - 1).bit_length())) for _ in range(count)]
        elif code == "bitmap":
            yield [index for index in range(n) if bits.take(1)]
        else:
            lows = [bits.take(low) for _ in range(count)]
            highs = [place for place in range(count + ((n - 1) >> low)) if bits.take(1)]
            yield [(high - j) << low | lows[j] for j, high in enumerate(highs)]
        bits.take(padding)


def shared_indices(plan: TensorPlan, chunk: int, step: int, name: str) -> set[int]:
    n, keep = plan.chunk_numel, plan.k
    if plan.selection is Selection.STRIDING:
        return {(entry * n // keep + step) % n for entry in range(keep)}
    if plan.selection is not Selection.RANDOM_K:
        return set(range(n))
    deal, turn = divmod(step, math.ceil(n / keep))
    text = repr((plan.seed, name, deal)).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    chunk_key = mix(key + chunk * 0x9E3779B9 & LOW32)
    return {move((turn * keep + entry) % n, n, chunk_key) for entry in range(keep)}


def move(place: int, n: int, key: int) -> int:
    w = max(1, (n - 1).bit_length())
    mask, half = (1 << w) - 1, (w + 1) >> 1
    while True:
        for turn in range(4):
            place = place + mix(key + turn & LOW32) & mask
            place = place * 0x2C9277B5 & mask
            place ^= place >> half
        if place < n:
            return place


def mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & LOW32
    word = (word ^ word >> 13) * 0xC2B2AE35 & LOW32
    return word ^ word >> 16


def read_value(code: int, values: str, scales: list[np.float32]) -> np.float32:
    if values == "fp32":
        return np.uint32(code).view(np.float32)
    if values == "bf16":
        return bfloat16(code)
    if values == "fp16":
        return np.float32(np.uint16(code).view(np.float16))
    if values == "int8":
        return np.float32(code - 256 * (code >> 7)) * scales[0]
    magnitude = scales[0] if values == "sign" else scales[0] + np.float32(code >> 1) * scales[1]
    return -magnitude if code & 1 else magnitude


def bfloat16(code: int) -> np.float32:
    return np.uint32(code << 16).view(np.float32)


def restore(coefficients: np.ndarray, plan: TensorPlan) -> np.ndarray:
    """Return the matrix ``[rows, cols]``, by dense products in double precision."""
    height, width = plan.chunk_rows, plan.chunk_cols
    whole = np.zeros((plan.grid_rows * height, plan.grid_cols * width))
    for chunk, values in enumerate(coefficients.astype(np.float64)):
        down, right = height * (chunk // plan.grid_cols), width * (chunk % plan.grid_cols)
        block = values.reshape(height, width)
        if plan.transformed:
            block = dct_matrix(height).T @ values.reshape(width, height).T @ dct_matrix(width)
        whole[down : down + height, right : right + width] = block
    return whole[: plan.rows, : plan.cols]


def dct_matrix(n: int) -> np.ndarray:
    """Return the orthonormal DCT-II ``[frequency, position]``."""
    matrix = math.sqrt(2 / n) * np.cos(math.pi / n * np.outer(np.arange(n), np.arange(n) + 0.5))
    matrix[0] = math.sqrt(1 / n)
    return matrix


SHAPES = [(8, 70), (100,), (3, 5, 40), (37, 129)]
COMPRESSORS = [
    *(demo(4, 16, code.name.lower()) for code in ValueCode),
    Pipeline(Dct(8), Everything(), "fp16"),
    Pipeline(Identity(100), TopK(50), "int8"),
    Pipeline(Identity(64), TopK(2), "sign2"),
    Pipeline(Identity(256), TopK(63), "sign"),
    top_k(1 / 50),
    random_k(0.13, seed=3),
    striding(0.13),
    sign(),
    threshold(1.0, capacity=1 / 4, values="sign2"),
    threshold(2.0, capacity=None, values="int8"),
]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_decoder_written_from_the_page_reads_what_we_send(compressor: Pipeline, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    plan = plan_buffer((TensorSpec("layer.weight", shape, torch.float32),), compressor)
    buffer, out = torch.zeros(plan.nbytes, dtype=torch.uint8), torch.empty_like(x)
    kernels = choose_kernels(x.device)
    encoder = Encoder(plan, buffer, kernels)
    assert encoder.encode_([x], step=7, sequence=0) == ""
    nbytes = encoder.nbytes
    decoder = Decoder(plan, buffer[:nbytes], ["a"], kernels, [nbytes])
    assert decoder.verify(step=7, sequence=0) == []
    decoder.decode_([out], step=7, average="nodes")
    coefficients = decode_as_documented(bytes(buffer[:nbytes].tolist()), plan.plans[0], 7, "layer.weight")
    restored = torch.from_numpy(restore(coefficients, plan.plans[0])).reshape(shape)
    # Transforms round differently: a few units in the last of 24 bits, of sums of up to 256 numbers below 4.
    assert (restored - out).abs().max() < (1e-5 if plan.plans[0].transformed else 1e-30)
