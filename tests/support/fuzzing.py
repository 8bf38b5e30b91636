"""How long fuzz tests go on, how one of their cases is repeated, and how bytes are damaged.

`QINFER_TEST_FUZZ_S` are the seconds of all of them together: 15 unless it says otherwise. Each case has a seed of its
own, and a failure names it: with `QINFER_TEST_SEED` set to it, a run begins with that case. Without it a run of up to
`SHORT_S` tries the same cases each time, so that it fails by what was changed, and a longer one others each time.
"""

import itertools
import os
import random
import time
from collections.abc import Callable

import pytest

SHORT_S = 15
FUZZ_S = float(os.environ.get("QINFER_TEST_FUZZ_S", SHORT_S))
SEED = int(os.environ.get("QINFER_TEST_SEED", 0 if FUZZ_S <= SHORT_S else random.getrandbits(32)))

within_limits = pytest.mark.timeout(FUZZ_S + 60)
"""Marks tests that go on for a share of the time, and may take longer than others."""

NASTY = (
    b"\0",
    b"\r\n",
    b"\r\n\r\n",
    b"\xff\xfe",
    b"%",
    b"..",
    b"/",
    b'"',
    b"{",
    b"-1",
    b"1e999",
    b"9" * 30,
    b"\xed\xa0\x80",
)
"""What parsers trip over."""


def fuzz(share: float, one: Callable[[random.Random], object]) -> None:
    """Runs one case after the other, for its share of the time.

    Args:
        share: The part of `FUZZ_S`, 0 … 1.
        one: Runs a case, as its random numbers say.
    """
    end_s = time.monotonic() + FUZZ_S * share
    for seed in itertools.count(SEED):
        try:
            one(random.Random(seed))
        except BaseException as error:
            error.add_note(f"repeat it with QINFER_TEST_SEED={seed}")
            raise
        if time.monotonic() >= end_s:
            return


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Returns bytes with one to three places flipped, cut out, repeated, overwritten or written between."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        begin = chance.randint(0, len(found))
        end = min(len(found), begin + int(chance.expovariate(0.1)) + 1)
        match chance.randint(0, 4):
            case 0 if begin < len(found):
                found[begin] ^= 1 << chance.randint(0, 7)
            case 1:
                del found[begin:end]
            case 2:
                found[begin:begin] = found[begin:end] * chance.choice((1, 1, 2, 50))
            case 3:
                found[begin:end] = chance.randbytes(end - begin)
            case _:
                found[begin:begin] = chance.choice(NASTY)
    return bytes(found)
