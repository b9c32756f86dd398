"""Random numbers for acceptance rules.

A number is a hash of a purpose and counters (seed, position, …), so that it is the same on every machine and after
every restart. It is independent of the Gumbel noise, which drafts and decisions may have been drawn with.
"""

from __future__ import annotations

import struct
from hashlib import blake2b


def random_bits(purpose: bytes, *counters: int) -> int:
    """64 random bits. `purpose` has at most 16 bytes, and the counters are unsigned 64-bit numbers."""
    digest = blake2b(struct.pack(f"<{len(counters)}Q", *counters), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def uniform(purpose: bytes, *counters: int) -> float:
    """A number from 0 (included) to 1 (excluded), in steps of 2⁻⁵³. Arguments are those of `random_bits`."""
    return (random_bits(purpose, *counters) >> 11) * 2.0**-53
