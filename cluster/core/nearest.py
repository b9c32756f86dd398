"""Finds the known name that an unknown name misspells."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LEAST_LIKENESS = 0.75
"""Least similarity of two names, from 0 to 1, for the one to be a misspelling of the other."""
_LEAST_LIKENESS_OF_LAST = 0.65
"""Least similarity of the last parts of two dotted paths, from 0 to 1, for a misspelling."""
_LONGEST_NAME = 100


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of which `name` is a misspelling; `None` if none is similar enough.

    Names with dots are paths: their last parts must be similar too, because long common beginnings say little.
    """
    for found in difflib.get_close_matches(name[:_LONGEST_NAME], tuple(known), n=3, cutoff=_LEAST_LIKENESS):
        last, meant = (one.rpartition(".")[2] for one in (name[:_LONGEST_NAME], found))
        if difflib.SequenceMatcher(None, last, meant).ratio() >= _LEAST_LIKENESS_OF_LAST:
            return found
    return None
