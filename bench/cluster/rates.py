"""The arithmetic of a rate-limited cable: no process, no network."""

import re

from bench.errors import UsageError

_BITS_PER_S = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

LOWEST_RATE_BITS_PER_S = 100_000
HIGHEST_RATE_BITS_PER_S = 100_000_000_000

_FAST_BITS_PER_S = 500_000_000
_FRAME_NBYTES = 2000
_SEGMENTS_NBYTES = 68_000


def parse_rate(text: str) -> int:
    """Return the bits per second that ``text`` names in tc's style: a number and ``kbit``, ``mbit`` or ``gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if match is None:
        raise UsageError(
            f"got the rate {text!r}, needed a number with a unit, one of kbit, mbit, gbit (bits per second). "
            f"Write for example 100mbit or 2.5gbit."
        )
    rate_bits_per_s = round(float(match[1]) * _BITS_PER_S[match[2]])
    if not LOWEST_RATE_BITS_PER_S <= rate_bits_per_s <= HIGHEST_RATE_BITS_PER_S:
        raise UsageError(f"got the rate {text!r}, needed one between 100kbit and 100gbit.")
    return rate_bits_per_s


def format_rate(rate_bits_per_s: float) -> str:
    """Return the rate with the largest unit that leaves at least 1 before the point."""
    unit = next((u for u in ("gbit", "mbit") if rate_bits_per_s >= _BITS_PER_S[u]), "kbit")
    return f"{rate_bits_per_s / _BITS_PER_S[unit]:.4g}{unit}"


def burst_nbytes(rate_bits_per_s: int) -> int:
    """Return the token bucket's depth: the smallest that still carries 95 to 96 % payload.

    A deep bucket refills while ranks compute and then carries the next message for nothing: with 256 kB of burst a
    40 kB message crosses "100 mbit" in 0.24 ms instead of 3.2 ms. The floor holds one Ethernet frame; the rest covers
    the 176 us by which the shaper's timer may be late (both found by trial between 10 mbit and 1 gbit).

    Fast cables get a floor that holds what TCP hands down at once, 64 KiB, which the shaper would cut into frames
    otherwise: then four nodes that send at once, on two cores, get 27 % of 1 gbit each, and with it 90 % and more. The
    price is that 0.7 ms worth of bytes is free after a pause.
    """
    floor_nbytes = _FRAME_NBYTES if rate_bits_per_s < _FAST_BITS_PER_S else _SEGMENTS_NBYTES
    return floor_nbytes + round(rate_bits_per_s / 8 * 176e-6)


def probe_nbytes(rate_bits_per_s: int, duration_s: float) -> int:
    """Return how many bytes measure a cable for ``duration_s``, and never fewer than drown one burst of a slow one."""
    return max(64 * 1024, round(rate_bits_per_s / 8 * duration_s))
