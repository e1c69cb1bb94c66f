# SPDX-License-Identifier: Apache-2.0
"""A million hostile inputs in minutes: real texts that were cut, doubled, flipped and mixed.

Hypothesis draws a seed for each batch, so that every run tries others. What fails is told as it
was, with its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, settings  # noqa: TID251 (a count alone)
from hypothesis import strategies as st

BATCHES, BATCH = 1000, 1000
SEEDS = settings(
    max_examples=BATCHES,
    phases=(Phase.generate,),  # another seed is no smaller input
    suppress_health_check=[HealthCheck.too_slow],
)
WORDS = (
    *(b"\0", b"\n", b"=", b" ", b".", b",", b":", b"-", b'"', b"\\", b"<", b"\xff", b"\n\n", b"()"),
    *("\u2028".encode(), "\x85".encode(), "\u00b2".encode(), "\u0967".encode(), b"\r", b"\x0c"),
    *(b"-1", b"1e999", b"nan", b"inf", b"0x7", b"1_0", b"9" * 20, b"9" * 5000, b"null"),
    *(b"[" * 2000, b"\0\0\0\1", b"\xff\xff\xff\xff", b"\xed\xa0\x80", b"\xf0\x9f", b"\x1b["),
    *(b"\nPARAM l_hard gpu=1\n", b"BEGIN\n", b"- fuse x"),
)
LONGEST_TOKEN = 64


def mixed(samples: tuple[bytes, ...], rng: random.Random) -> bytes:
    """Return a sample with some of it cut, doubled, flipped, or replaced by another's or a word."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.randrange(1, 7)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(8)
        if kind in (0, 6):
            at, end = token_around(data, at)
        else:
            end = min(len(data), at + rng.choice((0, 1, 4, 30, 1000)))
        if kind == 1:
            piece = bytes([data[at] ^ 1 << rng.randrange(8)]) if end > at else b"\0"
            end = min(end, at + 1)
        elif kind == 2:
            piece = b""
        elif kind == 3:
            piece = bytes(data[at:end]) * 2
        elif kind == 4:
            piece = rng.randbytes(4)
        elif kind == 5:
            piece = rng.choice(samples)[at:end]
        elif kind == 6:
            other = rng.choice(samples)
            begin, behind = token_around(other, rng.randrange(len(other) + 1))
            piece = other[begin:behind]
        else:
            piece = rng.choice(WORDS)
        data[at:end] = piece
    return bytes(data)


def token_around(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Return where the word or number around a place begins and ends."""
    begin = end = at
    while begin > 0 and at - begin < LONGEST_TOKEN and data[begin - 1 : begin].isalnum():
        begin -= 1
    while end < len(data) and end - at < LONGEST_TOKEN and data[end : end + 1].isalnum():
        end += 1
    return begin, end


def try_batch(
    samples: tuple[bytes, ...], check: Callable[[bytes], object], seed: int, size: int = BATCH
) -> None:
    """Check so many mixed inputs; raise AssertionError that tells the first that fails."""
    rng = random.Random(seed)
    for number in range(size):
        data = mixed(samples, rng)
        try:
            check(data)
        except Exception as fault:
            raise AssertionError(f"input {number} of seed {seed}: {fault!r} of {data!r}") from fault


def try_a_million(samples: tuple[bytes, ...], check: Callable[[bytes], object]) -> None:
    """Check a million mixed inputs, of seeds that nobody tried before."""
    for sample in samples:
        check(sample)

    @SEEDS
    @given(st.integers(0, (1 << 64) - 1))
    def batches(seed: int) -> None:
        try_batch(samples, check, seed, BATCH)

    batches()
