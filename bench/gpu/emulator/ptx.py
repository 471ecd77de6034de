"""What each instruction of PTX does to a warp, for the instructions that the library's kernels are made of.

PTX is what a driver makes machine code of; it shows what is computed, not what it costs. Lanes that part are taken to
meet again wherever they come to the same instruction, those behind first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bench.gpu.emulator.numbers import (
    bf16_codes,
    count_bits,
    fp16_codes,
    fp16_values,
    fused,
    highest_bit,
    reversed_bits,
    round_f64,
    shift_left,
    shift_right,
    to_integer,
)
from bench.gpu.emulator.warps import (
    ATOMICS,
    LANES,
    SHARED_WINDOW,
    Access,
    Block,
    Lanes,
    Row,
    Step,
    UnknownInstructionError,
    Warp,
    Work,
)

Get = Callable[["PtxWarp"], Row]
Body = Callable[["PtxWarp", Lanes], None]

_TYPES: dict[str, np.dtype[Any]] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype(bool),
}
_SPECIAL = {"%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x"}


class PtxWarp(Warp):
    """A warp whose registers have names; ``argument`` is the kernel's."""

    def __init__(self, block: Block, number: int, argument: bytes) -> None:
        super().__init__(block, number)
        self.argument = np.frombuffer(argument, np.uint8)
        self.rows: defaultdict[str, Row] = defaultdict(lambda: np.zeros(LANES, np.uint64))

    def _choose(self) -> tuple[int, Lanes]:
        first = min(at for at, _ in self._ready)
        together = np.logical_or.reduce([lanes for at, lanes in self._ready if at == first])
        self._ready = [group for group in self._ready if group[0] != first]
        return first, together

    def _goes_on(self) -> bool:
        if self.is_running and self._ready and self.at >= min(at for at, _ in self._ready):
            self._ready.append((self.at, self.active))
            return False
        return self.is_running


class _Instruction(NamedTuple):
    guard: str
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The type of what is computed: the first one named."""
        return next(one for one in self.modifiers if one in _TYPES)

    @property
    def source_kind(self) -> str:
        """The type of what it is computed from: the last one named."""
        return next(one for one in reversed(self.modifiers) if one in _TYPES)


# --- operands --------------------------------------------------------------------------------------------------------


def _get(text: str, kind: str) -> Get:
    dtype = _TYPES[kind]
    if text in _SPECIAL:
        return lambda warp: _special(warp, text).astype(dtype)
    if text.startswith("%"):
        if dtype.kind == "b":
            return lambda warp: warp.rows[text] != 0
        narrow = f"u{dtype.itemsize}"
        return lambda warp: warp.rows[text].astype(narrow).view(dtype)
    if text == "shared_words" or "_param_" in text:
        return lambda _: np.zeros(1, dtype)
    if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
        value = np.array([int(found[1], 16)], "u8" if len(found[1]) == 16 else "u4").view(dtype)
    else:
        value = np.array([int(text, 0) % (1 << 8 * dtype.itemsize)], f"u{dtype.itemsize}").view(dtype)
    return lambda _: value


def _special(warp: PtxWarp, name: str) -> Row:
    block = warp.block
    if name == "%tid.x":
        return warp.threads
    return np.full(1, {"%ctaid.x": block.number, "%ntid.x": block.threads, "%nctaid.x": block.blocks}[name], np.uint32)


def _put(warp: PtxWarp, name: str, value: Row, lanes: Lanes) -> None:
    if name == "_":
        return
    value = np.asarray(value)
    bits = value if value.dtype == bool else np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
    np.copyto(warp.rows[name], bits.astype(np.uint64), where=lanes)


def _computes(function: Callable[..., Row]) -> Callable[[_Instruction], Body]:
    """Return what makes an instruction whose result and operands are of one type."""

    def make(one: _Instruction) -> Body:
        gets = [_get(text, one.kind) for text in one.operands[1:]]
        dtype, result = _TYPES[one.kind], one.operands[0]
        return lambda warp, lanes: _put(warp, result, function(*[get(warp) for get in gets]).astype(dtype), lanes)

    return make


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _make_product(one: _Instruction) -> Body:
    """``mul`` and ``mad``, of integers the lower half of the product, or all of it."""
    dtype = _TYPES[one.kind]
    is_wide = "wide" in one.modifiers
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if is_wide else dtype
    if {"hi", "rz", "rm", "rp"} & {*one.modifiers}:
        raise UnknownInstructionError(one.name)
    a, b = (_get(text, one.kind) for text in one.operands[1:3])
    wide_kind = next(kind for kind, one in _TYPES.items() if one == wide)
    c = _get(one.operands[3], wide_kind) if one.name == "mad" else None

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        product = a(warp).astype(wide) * b(warp).astype(wide)
        _put(warp, one.operands[0], product if c is None else product + c(warp), lanes)

    return body


def _make_quotient(one: _Instruction) -> Body:
    a, b = (_get(text, one.kind) for text in one.operands[1:])
    is_float = one.kind.startswith("f")

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        x, y = np.broadcast_arrays(a(warp), b(warp))
        if is_float:
            result = x / y
        else:
            y = np.where(lanes, y, 1).astype(y.dtype)
            result = x // y if one.name == "div" else x % y
        _put(warp, one.operands[0], result, lanes)

    return body


def _make_shift(one: _Instruction) -> Body:
    dtype = _TYPES[one.kind]
    a, by, bits = _get(one.operands[1], one.kind), _get(one.operands[2], "u32"), 8 * dtype.itemsize
    shift = shift_left if one.name == "shl" else shift_right
    return lambda warp, lanes: _put(warp, one.operands[0], shift(a(warp), by(warp), bits).astype(dtype), lanes)


_COMPARES: dict[str, Callable[[Row, Row], Row]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "neu": np.not_equal,
    "leu": lambda a, b: ~(a > b),
    "ltu": lambda a, b: ~(a >= b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: (a != a) | (b != b),
}


def _make_comparison(one: _Instruction) -> Body:
    compare, (a, b) = _COMPARES[one.modifiers[0]], (_get(text, one.kind) for text in one.operands[1:])
    return lambda warp, lanes: _put(warp, one.operands[0], compare(a(warp), b(warp)), lanes)


def _make_choice(one: _Instruction) -> Body:
    (a, b), chooses = (_get(text, one.kind) for text in one.operands[1:3]), _get(one.operands[3], "pred")
    return lambda warp, lanes: _put(warp, one.operands[0], np.where(chooses(warp), a(warp), b(warp)), lanes)


def _make_extreme(one: _Instruction) -> Body:
    takes_numbers = one.kind.startswith("f") and "NaN" not in one.modifiers
    functions = {"min": (np.minimum, np.fmin), "max": (np.maximum, np.fmax)}[one.name]
    return _computes(functions[takes_numbers])(one)


_HALVES: dict[str, Callable[[Row], Row]] = {"f16x2": fp16_codes, "bf16x2": bf16_codes}


def _make_conversion(one: _Instruction) -> Body:
    if one.modifiers[1:2] and one.modifiers[1] in _HALVES:
        codes, (high, low) = _HALVES[one.modifiers[1]], (_get(text, "f32") for text in one.operands[1:])
        return lambda warp, lanes: _put(
            warp, one.operands[0], codes(high(warp)) << np.uint32(16) | codes(low(warp)), lanes
        )
    if one.modifiers == ("f32", "f16"):
        half = _get(one.operands[1], "b16")
        return lambda warp, lanes: _put(warp, one.operands[0], fp16_values(half(warp)), lanes)
    to, source = _TYPES[one.kind], _TYPES[one.source_kind]
    get = _get(one.operands[1], one.source_kind)

    def convert(x: Row) -> Row:
        if source.kind == "f" and to.kind in "iu":
            return to_integer(x, to.type, truncates="rzi" in one.modifiers)
        if "rni" in one.modifiers:
            return np.rint(x)
        return round_f64(x.astype(np.float64)) if to == np.float32 else x.astype(to)

    return lambda warp, lanes: _put(warp, one.operands[0], convert(get(warp)), lanes)


def _make_move(one: _Instruction) -> Body:
    result, source = one.operands
    if source.startswith("{"):
        parts = [_get(text, "b32") for text in source.strip("{}").split(",")]

        def pack(warp: PtxWarp, lanes: Lanes) -> None:
            low, high = (get(warp).astype(np.uint64) for get in parts)
            _put(warp, result, low | high << np.uint64(32), lanes)

        return pack
    if result.startswith("{"):
        names, get = [text.strip() for text in result.strip("{}").split(",")], _get(source, "b64")

        def unpack(warp: PtxWarp, lanes: Lanes) -> None:
            for i, name in enumerate(names):
                _put(warp, name, (get(warp) >> np.uint64(32 * i)).astype(np.uint32), lanes)

        return unpack
    return _computes(lambda x: x)(one)


def _make_bit_field(one: _Instruction) -> Body:
    """Put the lowest bits of the first number into the second."""
    dtype = _TYPES[one.kind]
    (a, b), (at, count) = (_get(text, one.kind) for text in one.operands[1:3]), (int(text) for text in one.operands[3:])
    mask = ((1 << count) - 1 << at) % (1 << 8 * dtype.itemsize)

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        _put(warp, one.operands[0], a(warp) << dtype.type(at) & dtype.type(mask) | b(warp) & ~dtype.type(mask), lanes)

    return body


# --- lanes together --------------------------------------------------------------------------------------------------


def _make_shuffle(one: _Instruction) -> Body:
    result, _, predicate = one.operands[0].partition("|")
    a, b = (_get(text, "b32") for text in one.operands[1:3])
    how, own = one.modifiers[1], np.arange(LANES)

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        warp.require_converged()
        by = b(warp).astype(np.int64)
        asked = {"up": own - by, "down": own + by, "bfly": own ^ by, "idx": by % LANES + 0 * own}[how]
        inside = (asked >= 0) & (asked < LANES)
        _put(warp, result, a(warp)[np.where(inside, asked, own)], lanes)
        _put(warp, predicate or "_", inside, lanes)

    return body


def _make_vote(one: _Instruction) -> Body:
    get, is_ballot = _get(one.operands[1], "pred"), "ballot" in one.modifiers

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        warp.require_converged()
        votes = get(warp) & lanes
        found = np.packbits(votes, bitorder="little").view(np.uint32) if is_ballot else np.full(1, votes.any())
        _put(warp, one.operands[0], found, lanes)

    return body


def _make_reduction(one: _Instruction) -> Body:
    get, reduce = _get(one.operands[1], one.kind), {"add": np.add, "max": np.maximum}[one.modifiers[1]]

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        warp.require_converged()
        _put(warp, one.operands[0], np.atleast_1d(reduce.reduce(get(warp)[lanes])).astype(np.uint32), lanes)

    return body


# --- memory ----------------------------------------------------------------------------------------------------------


def _address(text: str) -> Get:
    base, _, offset = text.strip("[]").partition("+")
    get, constant = _get(base, "b64"), int(offset or "0", 0)
    return lambda warp: get(warp).astype(np.int64) + constant


def _names(operand: str) -> list[str]:
    return [text.strip() for text in operand.strip("{}").split(",")]


def _window(one: _Instruction) -> int:
    return SHARED_WINDOW if "shared" in one.modifiers else 0


def _make_load(one: _Instruction) -> Body:
    names, get, dtype, window = _names(one.operands[0]), _address(one.operands[1]), _TYPES[one.kind], _window(one)
    bits = np.dtype(f"u{dtype.itemsize}")
    if "param" in one.modifiers:

        def load_argument(warp: PtxWarp, lanes: Lanes) -> None:
            words = warp.argument.view(bits)
            first = np.where(lanes, get(warp), 0) // bits.itemsize
            for i, name in enumerate(names):
                _put(warp, name, words[first + i], lanes)

        return load_argument

    def load(warp: PtxWarp, lanes: Lanes) -> None:
        rows = [np.zeros(LANES, bits) for _ in names]
        Access(warp, get(warp) + window, bits.itemsize * len(names), lanes).load(rows)
        for name, row in zip(names, rows, strict=True):
            _put(warp, name, row, lanes)

    return load


def _make_store(one: _Instruction) -> Body:
    gets, get = [_get(text, one.kind) for text in _names(one.operands[1])], _address(one.operands[0])
    itemsize, window = _TYPES[one.kind].itemsize, _window(one)

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        rows = [value(warp).view(f"u{itemsize}") for value in gets]
        Access(warp, get(warp) + window, itemsize * len(rows), lanes).store(rows)

    return body


def _make_atomic(one: _Instruction) -> Body:
    get, value, window = _address(one.operands[1]), _get(one.operands[2], one.kind), _window(one)
    change = next(ATOMICS[text.upper()] for text in one.modifiers if text.upper() in ATOMICS)
    dtype = _TYPES[one.kind]

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        found = Access(warp, get(warp) + window, dtype.itemsize, lanes).combine(change, value(warp))
        result = np.zeros(LANES, found.dtype)
        result[lanes] = found
        _put(warp, one.operands[0], result, lanes)

    return body


def _make_generic_address(one: _Instruction) -> Body:
    """``cvta``: addresses are generic already but for those of shared memory."""
    get, window = _get(one.operands[1], "b64"), 0 if "to" in one.modifiers else _window(one)
    return lambda warp, lanes: _put(warp, one.operands[0], get(warp) + np.uint64(window), lanes)


# --- control ---------------------------------------------------------------------------------------------------------


def _make_barrier(one: _Instruction) -> Body:
    if one.modifiers == ("warp", "sync"):
        return lambda warp, lanes: warp.wait("warp", lanes)
    votes = _get(one.operands[2], "pred") if "red" in one.modifiers else None

    def body(warp: PtxWarp, lanes: Lanes) -> None:
        if votes is not None:
            warp.block.vote = warp.block.vote or bool((votes(warp) & lanes).any())
        warp.wait("block", lanes)

    return body


def _make_vote_result(one: _Instruction) -> Body:
    return lambda warp, lanes: _put(warp, one.operands[0], np.full(1, warp.block.result), lanes)


def _make_exit(_: _Instruction) -> Body:
    return lambda warp, lanes: warp.leave(lanes)


def _nothing(_: _Instruction) -> Body:
    return lambda _warp, _lanes: None


_MAKERS: dict[str, Callable[[_Instruction], Body]] = {
    "add": _computes(lambda a, b: a + b),
    "sub": _computes(lambda a, b: a - b),
    **dict.fromkeys(("mul", "mad"), _make_product),
    **dict.fromkeys(("div", "rem"), _make_quotient),
    "fma": _computes(fused),
    "neg": _computes(np.negative),
    "abs": _computes(np.abs),
    **dict.fromkeys(("min", "max"), _make_extreme),
    "and": _computes(lambda a, b: a & b),
    "or": _computes(lambda a, b: a | b),
    "xor": _computes(lambda a, b: a ^ b),
    "not": _computes(lambda a: ~a),
    **dict.fromkeys(("shl", "shr"), _make_shift),
    "popc": _computes(count_bits),
    "brev": _computes(reversed_bits),
    "clz": _computes(lambda x: np.where(x == 0, np.uint32(32), np.uint32(31) - highest_bit(x))),
    "bfind": _computes(lambda x: np.where(x == 0, np.uint32(0xFFFFFFFF), np.uint32(31) - highest_bit(x))),
    "bfi": _make_bit_field,
    "setp": _make_comparison,
    "selp": _make_choice,
    "cvt": _make_conversion,
    "mov": _make_move,
    "shfl": _make_shuffle,
    "vote": _make_vote,
    "redux": _make_reduction,
    "ld": _make_load,
    "st": _make_store,
    **dict.fromkeys(("atom", "red"), _make_atomic),
    "cvta": _make_generic_address,
    "bar": _make_barrier,
    "vote_result": _make_vote_result,
    **dict.fromkeys(("ret", "exit"), _make_exit),
    "membar": _nothing,
}


# --- kernels ---------------------------------------------------------------------------------------------------------

_LINE = re.compile(r"\s*(?:@(!?%\w+)\s+)?([a-z]\w*)((?:\.\w+)*)\s*([^;]*);")


def _lines_of(text: str, kernel: str) -> Iterator[str]:
    """Yield the lines of a kernel; registers that inner braces declare get names of their own."""
    body = re.split(rf"\.entry\s+{kernel}\(", text, maxsplit=1)[1]
    inner = set[str]()
    for line in body[body.index("\n{") + 2 :].splitlines():
        if line.startswith("}"):
            return
        if declared := re.match(r"\s+\.reg \.\w+\s+(%\w+);", line):
            inner.add(declared[1])
        elif line.strip() == "}":
            inner.clear()
        else:
            yield re.sub(r"%\w+", lambda match: match[0] + "_inner" * (match[0] in inner), line)


class PtxKernel:
    """A kernel's PTX, to be run on the host; ``opcodes`` are those of its instructions."""

    def __init__(self, text: str, name: str) -> None:
        instructions, labels = list[_Instruction](), dict[str, int]()
        for line in _lines_of(text, name):
            if label := re.match(r"^(\$\w+):", line):
                labels[label[1]] = len(instructions)
            elif found := _LINE.match(line):
                operands = [text.strip() for text in re.split(r",(?![^{]*\})", found[4].strip()) if text.strip()]
                one = _Instruction(found[1] or "", found[2], tuple(found[3].split(".")[1:]), tuple(operands))
                instructions.append(one)
                if one.name == "bar" and "red" in one.modifiers:
                    instructions.append(one._replace(name="vote_result"))
            elif line.strip() and not line.strip().startswith((".", "//", "{")):
                raise UnknownInstructionError(line)
        self.opcodes = [".".join((one.name, *one.modifiers)) for one in instructions]
        self._steps: list[Step] = [self._postponed(number, one, labels) for number, one in enumerate(instructions)]

    def _postponed(self, number: int, one: _Instruction, labels: dict[str, int]) -> Step:
        def step(warp: PtxWarp) -> None:
            self._steps[number] = _make_step(one, labels)
            self._steps[number](warp)

        return step

    def run(self, grid: int, threads: int, shared_nbytes: int, argument: bytes) -> Work:
        """Run a launch, block by block; return what its warps did."""
        work = Work([0] * len(self._steps))
        with np.errstate(all="ignore"):
            for number in range(grid):
                block = Block(self._steps, work, number, grid, threads, shared_nbytes)
                block.run([PtxWarp(block, warp, argument) for warp in range(-(-threads // LANES))])
        return work


def _make_step(one: _Instruction, labels: dict[str, int]) -> Step:
    if one.name == "bra":
        target = labels[one.operands[0]]
        body: Body = lambda warp, lanes: warp.jump(lanes, target)  # noqa: E731
    elif one.name in _MAKERS:
        body = _MAKERS[one.name](one)
    else:
        raise UnknownInstructionError(f"{'.'.join((one.name, *one.modifiers))} {', '.join(one.operands)}")
    if not one.guard:
        return lambda warp: body(warp, warp.active)
    guard, is_negated = _get(one.guard.lstrip("!"), "pred"), one.guard.startswith("!")
    return lambda warp: body(warp, warp.active & (~guard(warp) if is_negated else guard(warp)))
