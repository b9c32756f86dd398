"""Beam search as values: a state, and the next one when the target has told what may follow each beam.

Always the `width` continuations with the highest summed log-probability are followed. Which ends of
an answer count, when the search is over and how answers are scored is what `transformers` does
(`GenerationMixin._beam_search`), so that a search here and one there give the same answers. The
heuristics behind `EarlyStopping.NO` and `NEVER` are those of its pull request 20901.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamParameters, EarlyStopping, FinishReason

Candidate = tuple[int, float]
"""A token and its natural log-probability after the beam's tokens."""


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer that is still growing."""

    tokens: tuple[int, ...] = ()
    """Of the answer, without the prompt."""
    logprob: float = 0.0
    """Summed over `tokens`."""
    parent: int = 0
    """Index, among the running beams of the state before, of the one it grew from by one token."""


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """An answer that ended."""

    tokens: tuple[int, ...]
    """Of the answer, its stop token included."""
    logprob: float
    """Summed over `tokens`."""
    score: float
    """`logprob` ÷ (tokens ** length penalty): what answers are ranked by."""
    finish: FinishReason
    """`STOP` or `LENGTH`."""


@dataclass(frozen=True, slots=True)
class BeamState:
    """A search between two steps. All running beams have as many tokens."""

    parameters: BeamParameters
    max_tokens: int
    """Most tokens of an answer."""
    stop_token_ids: frozenset[int]
    """Tokens that end an answer, kept as its last."""
    running: tuple[Beam, ...] = (Beam(),)
    """Most probable first; at the start one without tokens, later `width`."""
    finished: tuple[FinishedBeam, ...] = ()
    """Best first, at most `width`."""

    @property
    def candidates(self) -> int:
        """How many of a beam's most probable continuations `advance` needs to miss none that count.

        Were all `width` survivors of one beam, its stop tokens could still come before each of them.
        """
        return candidates_needed(self.parameters.width, self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A beam and one token more."""

    parent: int
    token: int
    logprob: float


def candidates_needed(width: int, stop_token_ids: frozenset[int]) -> int:
    """Most probable continuations per beam that a search of this width has to see."""
    return width + len(stop_token_ids)


def start(parameters: BeamParameters, max_tokens: int, stop_token_ids: frozenset[int]) -> BeamState:
    """A search before its first token. Raises `InvalidRequest`."""
    if parameters.width < 1:
        raise InvalidRequest("width", parameters.width, "at least 1")
    if max_tokens < 1:
        raise InvalidRequest("max_tokens", max_tokens, "at least 1")
    return BeamState(parameters, max_tokens, stop_token_ids)


def advance(state: BeamState, candidates: Sequence[Sequence[Candidate]]) -> BeamState:
    """The state one token on. Afterwards `running[i].parent` tells whose memory beam `i` takes over.

    `candidates[i]` are the most probable continuations of `state.running[i]`, at least
    `state.candidates` of them where the vocabulary has as many; their order does not matter.
    Of equal sums the one of the earlier beam goes first, then that of the smaller token.
    A search that is done stays as it is. Raises `InvalidRequest` for another number of lists.
    """
    if is_done(state):
        return state
    if len(candidates) != len(state.running):
        raise InvalidRequest("candidates", f"{len(candidates)} lists", f"{len(state.running)}, one per running beam")
    ranked = sorted(
        (
            _Continuation(parent, token, beam.logprob + logprob)
            for parent, (beam, entries) in enumerate(zip(state.running, candidates, strict=True))
            for token, logprob in entries
        ),
        key=lambda entry: (-entry.logprob, entry.parent, entry.token),
    )
    return BeamState(
        state.parameters,
        state.max_tokens,
        state.stop_token_ids,
        running=_running(state, ranked),
        finished=_finished(state, ranked),
    )


def is_done(state: BeamState) -> bool:
    """Whether the answers are settled: as many as beams, and none that still grows could better them."""
    if not state.running:
        return True
    if len(state.finished) < state.parameters.width:
        return False
    if state.parameters.early_stopping is EarlyStopping.YES:
        return True
    return not _best_possible(state) > state.finished[-1].score


def best(state: BeamState, count: int) -> tuple[FinishedBeam, ...]:
    """The `count` best answers, best first; fewer when fewer have ended. Of equal scores the earlier goes first."""
    return state.finished[:count]


def _running(state: BeamState, ranked: Sequence[_Continuation]) -> tuple[Beam, ...]:
    """The `width` best continuations that do not end; none once answers have their full length."""
    if len(state.running[0].tokens) + 1 >= state.max_tokens:
        return ()
    going_on = (entry for entry in ranked if entry.token not in state.stop_token_ids)
    return tuple(
        Beam((*state.running[entry.parent].tokens, entry.token), entry.logprob, entry.parent)
        for entry in islice(going_on, state.parameters.width)
    )


def _finished(state: BeamState, ranked: Sequence[_Continuation]) -> tuple[FinishedBeam, ...]:
    """The `width` best answers that have ended. One counts only if it ends among the `width` best continuations."""
    length = len(state.running[0].tokens) + 1
    divisor = math.pow(length, state.parameters.length_penalty)
    ended = list(state.finished)
    for entry in ranked[: state.parameters.width]:
        stops = entry.token in state.stop_token_ids
        if stops or length >= state.max_tokens:
            tokens = (*state.running[entry.parent].tokens, entry.token)
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            ended.append(FinishedBeam(tokens, entry.logprob, entry.logprob / divisor, reason))
    ended.sort(key=lambda answer: -answer.score)  # stable: of equal scores the one that ended first
    return tuple(ended[: state.parameters.width])


def _best_possible(state: BeamState) -> float:
    """The score that the best running beam is taken to be able to reach."""
    penalty = state.parameters.length_penalty
    longest = state.parameters.early_stopping is EarlyStopping.NEVER and penalty > 0
    length = state.max_tokens if longest else len(state.running[0].tokens)
    return state.running[0].logprob / math.pow(length, penalty)
