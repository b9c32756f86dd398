"""What speculation with a chain of guesses gains at best, by arithmetic.

Times are in units of a plain step; `acceptance` is the chance of each guess, `length` how many are made, `cost` a
guess' own time, `overhead` what a round takes beyond a plain step and its drafting. After Leviathan, Kalman and
Matias (2023), §3.
"""

from __future__ import annotations


def expected_tokens(acceptance: float, length: int) -> float:
    """Mean tokens of a round: the accepted guesses and the target's own, (1 − α^(γ+1)) ÷ (1 − α)."""
    if acceptance == 1.0:
        return length + 1.0
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def serial_speedup(acceptance: float, length: int, cost: float, overhead: float) -> float:
    """Draft, then verify."""
    return expected_tokens(acceptance, length) / (length * cost + 1 + overhead)


def overlapped_speedup(acceptance: float, length: int, cost: float, overhead: float) -> float:
    """Draft while verifying, were every guess about the round's end right: nothing waits for the faster of the two."""
    return expected_tokens(acceptance, length) / max(1 + overhead, length * cost)
