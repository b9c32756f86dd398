"""Beam search as pure functions: from one state and the candidates of each beam to the next state.

The search follows the `width` continuations with the highest summed log-probability. It ends, scores and ranks answers
like `transformers` (`GenerationMixin._beam_search`), so that both give the same answers. The heuristics of
`EarlyStopping.NO` and `NEVER` are those of pull request 20901 of `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamParameters, EarlyStopping, FinishReason

Candidate = tuple[int, float]
"""A token and its natural log-probability after the tokens of its beam."""


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished answer."""

    tokens: tuple[int, ...] = ()
    """Tokens of the answer, without the prompt."""
    logprob: float = 0.0
    """Sum of the log-probabilities of `tokens`."""
    parent: int = 0
    """Index of the parent beam in `running` of the previous state. The parent has one token less."""


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished answer."""

    tokens: tuple[int, ...]
    """Tokens of the answer, including its stop token."""
    logprob: float
    """Sum of the log-probabilities of `tokens`."""
    score: float
    """`logprob` ÷ (number of tokens ** length penalty). Answers are ranked by it."""
    finish: FinishReason
    """`STOP` or `LENGTH`."""


@dataclass(frozen=True, slots=True)
class BeamState:
    """A search between two steps. All running beams have the same number of tokens."""

    parameters: BeamParameters
    max_tokens: int
    """Most tokens of an answer."""
    stop_token_ids: frozenset[int]
    """Tokens that end an answer and are kept as its last token."""
    forced_eos_token_id: int | None = None
    """The last token, with probability 1, of an answer that reaches `max_tokens`; `None` forces none."""
    forced_start: int = 0
    """Tokens before the answer that count towards its length in scores, as forced tokens do in `transformers`."""
    running: tuple[Beam, ...] = (Beam(),)
    """Running beams, most probable first: one without tokens at the start, later up to `width`."""
    finished: tuple[FinishedBeam, ...] = ()
    """Finished answers, best first, at most `width`."""

    @property
    def candidates(self) -> int:
        """How many of the most probable continuations of each beam `advance` needs.

        All `width` next beams may come from one beam, and all stop tokens may be more probable than any of them.
        """
        return candidates_needed(self.parameters.width, self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A beam with one more token."""

    parent: int
    token: int
    logprob: float


def candidates_needed(width: int, stop_token_ids: frozenset[int]) -> int:
    """Number of most probable continuations per beam that a search of this width needs."""
    return width + len(stop_token_ids)


def start(
    parameters: BeamParameters,
    max_tokens: int,
    stop_token_ids: frozenset[int],
    forced_eos_token_id: int | None = None,
    forced_start: int = 0,
) -> BeamState:
    """A search before its first token; see `BeamState`. Raises `InvalidRequest`."""
    if parameters.width < 1:
        raise InvalidRequest("width", parameters.width, "at least 1")
    if max_tokens < 1:
        raise InvalidRequest("max_tokens", max_tokens, "at least 1")
    return BeamState(parameters, max_tokens, stop_token_ids, forced_eos_token_id, forced_start)


def advance(state: BeamState, candidates: Sequence[Sequence[Candidate]]) -> BeamState:
    """Return the state after one more token. Its running beam `i` continues beam `running[i].parent` of `state`.

    `candidates[i]` are the most probable continuations of `state.running[i]` in any order: at least
    `state.candidates`, or all if the vocabulary has fewer. Among equal sums the earlier beam goes first, then the
    smaller token. A search that is done stays unchanged. Raises `InvalidRequest` for a wrong number of lists.
    """
    if is_done(state):
        return state
    if len(candidates) != len(state.running):
        raise InvalidRequest("candidates", f"{len(candidates)} lists", f"{len(state.running)}, one per running beam")
    if state.forced_eos_token_id is not None and _ends_by_length(state):
        candidates = [((state.forced_eos_token_id, 0.0),)] * len(state.running)
    ranked = sorted(
        (
            _Continuation(parent, token, beam.logprob + logprob)
            for parent, (beam, entries) in enumerate(zip(state.running, candidates, strict=True))
            for token, logprob in entries
        ),
        key=lambda entry: (-entry.logprob, entry.parent, entry.token),
    )
    return replace(state, running=_running(state, ranked), finished=_finished(state, ranked))


def is_done(state: BeamState) -> bool:
    """Whether the search is over: no beam is running, or `width` answers are finished and none can be improved."""
    if not state.running:
        return True
    if len(state.finished) < state.parameters.width:
        return False
    if state.parameters.early_stopping is EarlyStopping.YES:
        return True
    return not _best_possible(state) > state.finished[-1].score


def best(state: BeamState, count: int) -> tuple[FinishedBeam, ...]:
    """The `count` best answers, best first; fewer when fewer exist. Among equal scores the earlier one goes first."""
    return state.finished[:count]


def _running(state: BeamState, ranked: Sequence[_Continuation]) -> tuple[Beam, ...]:
    """The `width` best continuations that do not end; none once answers have `max_tokens`."""
    if _ends_by_length(state):
        return ()
    going_on = (entry for entry in ranked if entry.token not in state.stop_token_ids)
    return tuple(
        Beam((*state.running[entry.parent].tokens, entry.token), entry.logprob, entry.parent)
        for entry in islice(going_on, state.parameters.width)
    )


def _finished(state: BeamState, ranked: Sequence[_Continuation]) -> tuple[FinishedBeam, ...]:
    """The `width` best finished answers. A new one counts only if it is among the `width` best continuations."""
    length = len(state.running[0].tokens) + 1
    divisor = math.pow(length + state.forced_start, state.parameters.length_penalty)
    ends_by_length = _ends_by_length(state)
    ended = list(state.finished)
    for entry in ranked[: state.parameters.width]:
        stops = entry.token in state.stop_token_ids
        if stops or ends_by_length:
            tokens = (*state.running[entry.parent].tokens, entry.token)
            is_forced = ends_by_length and entry.token == state.forced_eos_token_id
            reason = FinishReason.STOP if stops and not is_forced else FinishReason.LENGTH
            ended.append(FinishedBeam(tokens, entry.logprob, entry.logprob / divisor, reason))
    ended.sort(key=lambda answer: -answer.score)  # a stable sort: among equal scores the earlier one stays first
    return tuple(ended[: state.parameters.width])


def _best_possible(state: BeamState) -> float:
    """The score that the best running beam can reach, by the heuristic of `early_stopping`."""
    penalty = state.parameters.length_penalty
    longest = state.parameters.early_stopping is EarlyStopping.NEVER and penalty > 0
    length = state.max_tokens if longest else len(state.running[0].tokens)
    return state.running[0].logprob / math.pow(length + state.forced_start, penalty)


def _ends_by_length(state: BeamState) -> bool:
    """Whether the next token is the last that an answer may have."""
    return len(state.running[0].tokens) + 1 >= state.max_tokens
