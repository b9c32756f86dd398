"""Bounds of everything that crosses a socket, and the functions that check values against them.

Every function raises `InvalidRequest`, which names the field, the value and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized

from cluster.core.errors import InvalidRequest

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_ROWS = 4096
MAX_TOKENS = 1 << 20
MAX_TOKEN_ID = (1 << 31) - 1
MAX_SEQUENCE_ID_BYTES = 128
MAX_CLIENT_BYTES = 64
MAX_SALT_BYTES = 256
"""Longest `cache_salt` of a request."""
MAX_SCOPED_SALT_BYTES = MAX_CLIENT_BYTES + 1 + MAX_SALT_BYTES
"""Longest salt with the name of its client, see `scoped_salt`."""
MAX_TRACEPARENT_BYTES = 64
MAX_NAME_BYTES = 256
MAX_SPEAKER_NAME_BYTES = 64
MAX_FAULT_BYTES = 1024
MAX_EOS_TOKENS = 1024
MAX_RANKS = 4096

MAX_TREE_NODES = 256
MAX_TREE_DEPTH = 64
MAX_EVIDENCE = 4096
"""Most steps whose evidence one row brings."""
MAX_TOP = 64
"""Most tokens at one position of the evidence."""
MAX_TAP_WIDTH = 1 << 20
"""Most values of the hidden states at one position."""
MAX_DISTRIBUTION_TOKENS = 256
"""Most tokens of a truncated draft distribution."""
MAX_LISTED_TOKENS = 256
"""Most tokens of a list that says which may follow, or which may not."""
MAX_LISTED_VOCABULARY = 1 << 20
"""Largest vocabulary of which such lists are made."""

MAX_TEMPERATURE = 1e6
MAX_TOP_K = 1 << 20
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e6
MAX_ALLOWED_TOKENS = 1 << 16
"""Most tokens that a request allows, if it does not allow all."""
MAX_BAD_WORDS = 512
"""Most token sequences that a request forbids."""
MAX_BAD_TEXTS = 256
"""Most texts that a request forbids."""
MAX_BAD_TEXT_CHARS = 256
MAX_BAD_WORD_TOKENS = 64
"""Most tokens of a forbidden sequence."""
MAX_THINK_MARKER = 64
"""Most tokens that begin or end what a model thinks."""
MAX_FORMAT_PARTS = 32
"""Most parts of a call, and most markers of an answer, in a format that a checkpoint describes itself."""
MAX_FORMAT_TEXT_BYTES = 256
"""Longest text in such a format."""
MAX_FORMAT_OBJECT_BYTES = 1024
MAX_NO_REPEAT_NGRAM = 1024
"""Longest token sequences that may be forbidden to repeat."""
MAX_GRAMMAR_BYTES = 128 * 1024
"""Longest grammar or JSON schema, in bytes."""
MAX_CHOICES = 4096
"""Most texts of a choice."""
MAX_LOGIT_BIAS = 1024
"""Most tokens with a bias."""
MAX_BIAS = 100.0
"""Largest bias, in either direction."""
MAX_LOGPROBS = 256
MAX_PROMPT_LOGPROBS = 1 << 17
"""Most log-probabilities of the tokens of one prompt."""
MIN_LOGPROB = -1e30
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_TOKENS = 1024
"""Most stop tokens of a request, without the model's own end-of-sequence tokens."""
MAX_END_TOKENS = MAX_STOP_TOKENS + MAX_EOS_TOKENS
MAX_PREDICTION_TOKENS = 1 << 16
MAX_SOURCE_TOKENS = 1 << 16
"""Most tokens of the source of an encoder-decoder model."""
MAX_DECODER_START = 64
"""Most tokens with which the decoder of an encoder-decoder model starts."""

MAX_TOOLS = 128
"""Most tools that a request offers."""

MAX_KV_GROUPS = 256
MAX_KV_TABLES = 4096
MAX_STEP_SAMPLES = 1024
MAX_SAMPLE_SECONDS = 3600.0
MAX_STEP_SECONDS = 86_400.0

MAX_EXACT_INTEGER = 1 << 53
"""Largest count that a double holds exactly."""
MAX_JSON_DEPTH = 64
"""Deepest nesting of arrays and objects in an HTTP body, in a tool, and in the arguments of a call."""


def count(field: str, values: Sized, least: int, most: int, unit: str = "entries") -> None:
    """Refuse a collection with fewer than `least` or more than `most` entries. Check this before the entries."""
    if not least <= len(values) <= most:
        raise InvalidRequest(field, f"{len(values)} {unit}", f"between {least} and {most} {unit}")


def integer(field: str, value: int, least: int, most: int) -> int:
    """Return an integer in `least … most`; refuse any other."""
    if not least <= value <= most:
        raise InvalidRequest(field, value, f"between {least} and {most}")
    return value


def integers(field: str, values: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """Return integers in `least … most`; name the first one that is not. The caller has checked their number."""
    found = tuple(values)  # once: each look at a repeated field of a message costs as much
    if found and not (min(found) >= least and max(found) <= most):
        for index, value in enumerate(found):
            integer(f"{field}[{index}]", value, least, most)
    return found


def number(field: str, value: float, least: float, most: float, *, above: bool = False) -> float:
    """Return a finite number in `least … most`; refuse any other. With `above`, refuse `least` itself too."""
    is_large_enough = value > least if above else value >= least
    if not (math.isfinite(value) and is_large_enough and value <= most):
        bound = f"above {least:g} and at most {most:g}" if above else f"between {least:g} and {most:g}"
        raise InvalidRequest(field, value, bound)
    return value


def text(field: str, value: str, most: int) -> str:
    """Return a string of at most `most` bytes in UTF-8; refuse a longer one."""
    if len(value.encode()) > most:
        raise InvalidRequest(field, value, f"at most {most} bytes")
    return value


def client(value: str) -> str:
    """Return the name of a client, which a slash separates from its ids and salts. Raises `InvalidRequest`."""
    if "/" in text("client", value, MAX_CLIENT_BYTES):
        raise InvalidRequest("client", value, "without a slash")
    return value


def identifier(field: str, value: str) -> str:
    """Return a sequence id of 1 to `MAX_SEQUENCE_ID_BYTES` bytes; refuse any other."""
    if not 1 <= len(value.encode()) <= MAX_SEQUENCE_ID_BYTES:
        raise InvalidRequest(field, value, f"between 1 and {MAX_SEQUENCE_ID_BYTES} bytes")
    return value


def identifiers(field: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return sequence ids of 1 to `MAX_SEQUENCE_ID_BYTES` bytes; name the first one that is not."""
    found = tuple(values)
    if not all(map(str.isascii, found)) or not all(found) or max(map(len, found), default=0) > MAX_SEQUENCE_ID_BYTES:
        for index, value in enumerate(found):
            identifier(f"{field}[{index}]", value)
    return found


def distinct_rows(sequence_ids: Iterable[str]) -> None:
    """Refuse a sequence that is in two rows; name the second row."""
    seen: set[str] = set()
    for index, value in enumerate(sequence_ids):
        if value in seen:
            raise InvalidRequest(f"rows[{index}].sequence_id", value, "in one row only")
        seen.add(value)


def tokens(
    field: str, values: Sequence[int], least: int, most: int, vocabulary_size: int = MAX_TOKEN_ID + 1
) -> tuple[int, ...]:
    """Return `least … most` token ids below `vocabulary_size`; name the first id that is not."""
    count(field, values, least, most)
    return integers(field, values, 0, vocabulary_size - 1)
