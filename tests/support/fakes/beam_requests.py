"""Requests for a beam search, and their expected answers."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core import beam
from cluster.core.request import BeamParameters, EarlyStopping, GenerationRequest
from tests.support.fakes.fake_cluster import request
from tests.support.fakes.fake_target import FakeTarget

PROMPT = tuple(range(1, 15))
STOPS = frozenset({3, 7, 11})


def beam_request(
    name: str = "r",
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 8,
    *,
    width: int = 4,
    n: int = 2,
    stop: frozenset[int] = STOPS,
    penalty: float = 1.0,
    early: EarlyStopping = EarlyStopping.NO,
    deadline: float | None = None,
) -> GenerationRequest:
    """A request for the `n` best answers of a beam search."""
    parameters = BeamParameters(width, penalty, early)
    return request(name, prompt, max_tokens, stop=stop, n=n, beam=parameters, deadline=deadline)


def beam_answers(target: FakeTarget, wanted: GenerationRequest) -> list[list[int]]:
    """The answers of a beam search over the target's full distribution at every step."""
    if wanted.beam is None:
        raise ValueError("the request has no beam search")
    state = beam.start(wanted.beam, wanted.stopping.max_tokens, wanted.stopping.stop_token_ids)
    while not beam.is_done(state):
        logprobs = (target.logprobs([*wanted.prompt, *running.tokens]) for running in state.running)
        state = beam.advance(state, [list(enumerate(values)) for values in logprobs])
    return [list(answer.tokens) for answer in beam.best(state, wanted.n)]
