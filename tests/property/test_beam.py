"""Beam search against an exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.core import beam
from cluster.core.beam import BeamState, Candidate
from cluster.core.request import BeamParameters, EarlyStopping, FinishReason

VOCABULARY = 6

parameters = st.builds(
    BeamParameters,
    width=st.integers(1, 4),
    length_penalty=st.floats(-2, 2),
    early_stopping=st.sampled_from(EarlyStopping),
)
stops = st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2)
weights = st.lists(st.integers(1, 50), min_size=97, max_size=97)


def continuations(drawn: Sequence[int], tokens: Sequence[int], count: int) -> list[Candidate]:
    """A model that is a table: the `count` most probable tokens after `tokens`."""
    place = sum((position + 1) * (token + 3) for position, token in enumerate(tokens)) * 7
    row = [drawn[(place + token * 13) % len(drawn)] for token in range(VOCABULARY)]
    logprobs = [(token, math.log(weight / sum(row))) for token, weight in enumerate(row)]
    return sorted(logprobs, key=lambda entry: (-entry[1], entry[0]))[:count]


def searched(state: BeamState, drawn: Sequence[int], count: int) -> list[BeamState]:
    """Every state up to the end."""
    states = [state]
    while not beam.is_done(states[-1]):
        running = states[-1].running
        states.append(beam.advance(states[-1], [continuations(drawn, grown.tokens, count) for grown in running]))
    return states


@given(parameters, stops, st.integers(1, 6), weights)
def test_the_candidates_of_a_state_are_enough(
    wanted: BeamParameters, ends: frozenset[int], max_tokens: int, drawn: list[int]
) -> None:
    state = beam.start(wanted, max_tokens, ends)
    assert searched(state, drawn, state.candidates) == searched(state, drawn, VOCABULARY)


@given(parameters, stops, st.integers(1, 6), weights)
def test_every_state_is_sorted_and_consistent(
    wanted: BeamParameters, ends: frozenset[int], max_tokens: int, drawn: list[int]
) -> None:
    states = searched(beam.start(wanted, max_tokens, ends), drawn, VOCABULARY)
    for before, after in pairwise(states):
        assert len(after.running) <= wanted.width
        assert len(after.finished) <= wanted.width
        assert [one.logprob for one in after.running] == sorted((one.logprob for one in after.running), reverse=True)
        assert [one.score for one in after.finished] == sorted((one.score for one in after.finished), reverse=True)
        for grown in after.running:
            assert grown.tokens[:-1] == before.running[grown.parent].tokens
            assert not ends & set(grown.tokens)
    for answer in states[-1].finished:
        assert not ends & set(answer.tokens[:-1])
        assert (answer.tokens[-1] in ends) == (answer.finish is FinishReason.STOP)
        assert answer.finish is FinishReason.STOP or len(answer.tokens) == max_tokens
        assert answer.score == answer.logprob / math.pow(len(answer.tokens), wanted.length_penalty)


@given(st.integers(1, 3), weights)
def test_a_beam_as_wide_as_all_answers_finds_the_most_probable_one(max_tokens: int, drawn: list[int]) -> None:
    wide = BeamParameters(VOCABULARY**max_tokens, 0.0, EarlyStopping.NEVER)
    final = searched(beam.start(wide, max_tokens, frozenset({0})), drawn, VOCABULARY)[-1]
    assert math.isclose(final.finished[0].logprob, most_probable(drawn, (), max_tokens))


def most_probable(drawn: Sequence[int], tokens: tuple[int, ...], max_tokens: int) -> float:
    """The log-probability of the best answer below `tokens`, by trying all."""
    if len(tokens) == max_tokens or (tokens and tokens[-1] == 0):
        return 0.0
    return max(
        logprob + most_probable(drawn, (*tokens, token), max_tokens)
        for token, logprob in continuations(drawn, tokens, VOCABULARY)
    )
