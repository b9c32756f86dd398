"""Says where the accepted draft tokens of answers come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PHRASES = {
    "request": "the request itself",
    "earlier": "earlier answers",
    "trained": "trained drafts",
    "forced": "the grammar",
}
"""By the names of the receipt's `accepted_by_origin`."""


def origins_text(counts: Mapping[str, int]) -> str:
    """The counts in words, `30 from the request itself, 5 from earlier answers`; empty if nothing is counted."""
    return ", ".join(f"{counts[name]} from {phrase}" for name, phrase in _PHRASES.items() if counts.get(name))


def origin_shares(counts: Mapping[str, int]) -> str:
    """The shares in words, `86% the request itself, 14% earlier answers`; empty if nothing is counted."""
    total = sum(counts.get(name, 0) for name in _PHRASES)
    return ", ".join(f"{counts[name] / total:.0%} {phrase}" for name, phrase in _PHRASES.items() if counts.get(name))


def summed(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several counts; empty if there are none."""
    total: dict[str, int] = {}
    for counts in several:
        for name in _PHRASES:
            if name in counts:
                total[name] = total.get(name, 0) + counts[name]
    return total
