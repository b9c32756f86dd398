"""The tokens that a draft can propose: the most frequent ones of the target's answers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cluster.core.errors import ConfigurationError


def frequent_tokens(
    answers: Iterable[Sequence[int]], size: int, always: Iterable[int], vocabulary_size: int
) -> tuple[int, ...]:
    """The `size` most frequent tokens of the answers, ascending, with those in `always` included.

    Among equally frequent tokens the lowest come first. If the answers have fewer tokens, the lowest other tokens are
    added. Raises `ConfigurationError` for a size that is not between 1 and `vocabulary_size`.
    """
    check_size(size, vocabulary_size)
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer)
    first = dict.fromkeys(always)
    order = [*first, *sorted(counts, key=lambda token: (-counts[token], token)), *range(vocabulary_size)]
    return tuple(sorted(list(dict.fromkeys(order))[:size]))


def check_size(size: int, vocabulary_size: int) -> None:
    """Raise `ConfigurationError` for a size that is not between 1 and `vocabulary_size`."""
    if not 1 <= size <= vocabulary_size:
        raise ConfigurationError(f"vocabulary_size: {size} is refused; it must be within 1 and {vocabulary_size}")


def stored_vocabulary(path: Path, tokens: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens in the file. If it does not exist, it is written with `tokens()`: later answers do not change them."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.part")
        scratch.write_text(json.dumps(tokens()), encoding="utf-8")
        os.replace(scratch, path)  # an interruption leaves no part of it
    return tuple(json.loads(path.read_text(encoding="utf-8")))
