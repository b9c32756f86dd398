"""The expected gain of speculation with a chain of drafted tokens (Leviathan, Kalman and Matias 2023, §3).

Times are in units of a plain step. `acceptance` is the acceptance rate of a drafted token, `length` the number of
drafted tokens in a round, `cost` the time to draft one, and `overhead` the time of a round beyond a plain step and its
drafting.
"""

from __future__ import annotations


def expected_tokens(acceptance: float, length: int) -> float:
    """Mean tokens of a round, accepted drafts and the target's own token: (1 − α^(γ+1)) ÷ (1 − α)."""
    if acceptance == 1.0:
        return length + 1.0
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def serial_speedup(acceptance: float, length: int, cost: float, overhead: float) -> float:
    """Speedup over plain decoding when drafting and verifying alternate."""
    return expected_tokens(acceptance, length) / (length * cost + 1 + overhead)


def overlapped_speedup(acceptance: float, length: int, cost: float, overhead: float) -> float:
    """Speedup over plain decoding when drafting and verifying overlap and every verdict is predicted."""
    return expected_tokens(acceptance, length) / max(1 + overhead, length * cost)
