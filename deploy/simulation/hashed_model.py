"""A deterministic 'language model': the next token is a hash of all tokens before it and the seed.

A wrong, missing or repeated token changes everything after it, and the reference answer is known without a cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_MASK = (1 << 64) - 1
_FIRST = 0x243F6A8885A308D3
_STEP = 0x9E3779B97F4A7C15
_DRAW = 0xBF58476D1CE4E5B9


class HashedModel:
    """Decides tokens below `vocabulary_size`. A *state* stands for all tokens up to a position."""

    def __init__(self, vocabulary_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocabulary_size = vocabulary_size
        self.eos_token_ids = eos_token_ids

    first_state = _FIRST
    """The state before any token."""

    @staticmethod
    def advance(state: int, token: int) -> int:
        """The state after one more token."""
        state = ((state ^ (token + 1)) * _STEP) & _MASK
        return state ^ (state >> 29)

    def state_of(self, tokens: Iterable[int]) -> int:
        """The state after `tokens`."""
        state = _FIRST
        for token in tokens:
            state = self.advance(state, token)
        return state

    def decide(self, state: int, seed: int) -> int:
        """The token that follows a state."""
        mixed = ((state ^ (seed * _STEP)) * _DRAW) & _MASK
        return (mixed >> 24) % self.vocabulary_size

    def other(self, state: int, seed: int, rank: int) -> int:
        """A token unlike the one that follows; different for `rank` 0, 1, … below the vocabulary's size."""
        return (self.decide(state, seed) + 1 + rank) % self.vocabulary_size

    def chance(self, state: int, seed: int, purpose: int) -> float:
        """A number in [0, 1) that depends on state, seed and purpose only."""
        mixed = (((state + purpose * _DRAW) ^ (seed * _STEP)) * _STEP) & _MASK
        mixed = ((mixed ^ (mixed >> 31)) * _DRAW) & _MASK
        return (mixed >> 11) / (1 << 53)

    def answer(self, prompt: Sequence[int], seed: int, max_tokens: int, stops: Collection[int]) -> list[int]:
        """The reference answer to a prompt: up to `max_tokens` tokens, or the first one of `stops`."""
        state, answer = self.state_of(prompt), list[int]()
        while len(answer) < max_tokens:
            token = self.decide(state, seed)
            answer.append(token)
            if token in stops:
                break
            state = self.advance(state, token)
        return answer
