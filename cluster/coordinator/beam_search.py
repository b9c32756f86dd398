"""Beam search over sequences that decide once: the search itself is `cluster.core.beam`."""

from __future__ import annotations

from dataclasses import replace

from cluster.coordinator.samples import Birth, Turn
from cluster.core import beam
from cluster.core.beam import Candidate
from cluster.core.errors import InvalidRequest
from cluster.core.request import (
    BeamParameters,
    Commit,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    StoppingCriteria,
    Usage,
)


class Beams:
    """The `n` best answers of one search.

    Each running beam is a sequence that asks for one decision, and for what else might have followed: the decision
    itself is of no interest, its alternatives are. When the last beam of a round has them the search advances; its
    new beams share the stored KV of those they grew from, and whoever has no heir is let go. A beam that is late
    holds its own round up and nobody else's.
    """

    def __init__(self, request: GenerationRequest, parameters: BeamParameters, vocabulary_size: int) -> None:
        stopping = request.stopping
        self._request = request
        self._parameters = parameters
        self._state = beam.start(parameters, stopping.max_tokens, stopping.stop_token_ids)
        self._needed = min(self._state.candidates, vocabulary_size)
        self._heard: dict[int, tuple[Candidate, ...]] = {}
        self._rounds = 0

    @property
    def places(self) -> int:
        """See `Course`."""
        return self._parameters.width

    @property
    def answers(self) -> int:
        """See `Course`."""
        return self._request.n

    def begin(self) -> tuple[Birth, ...]:
        """See `Course`."""
        return (self._birth(0, parent=None),)

    def take(self, place: int, commit: Commit) -> Turn:
        """See `Course`. Raises `InvalidRequest` when the target told fewer alternatives than the search needs."""
        heard = commit.logprobs[0].top if commit.logprobs else ()
        if len(heard) < self._needed:
            raise InvalidRequest("logprobs", f"{len(heard)} alternatives", f"at least {self._needed}")
        self._heard[place] = heard
        if len(self._heard) < len(self._state.running):
            return Turn()
        self._state = beam.advance(self._state, [self._heard[index] for index in range(len(self._heard))])
        self._heard.clear()
        self._rounds += 1
        if beam.is_done(self._state):
            return Turn((), self._answers())
        return Turn(tuple(self._birth(index, running.parent) for index, running in enumerate(self._state.running)))

    def _birth(self, place: int, parent: int | None) -> Birth:
        """The running beam `place` as a sequence of its own."""
        request = replace(
            self._request,
            prompt=self._request.prompt + self._state.running[place].tokens,
            sampling=SamplingParameters(temperature=0.0, logprobs=self._state.candidates),
            stopping=StoppingCriteria(max_tokens=1),
            n=1,
            beam=None,
        )
        return Birth(place, request, None, parent, expects_heirs=True)

    def _answers(self) -> tuple[Commit, ...]:
        """Best first. A search over so few tokens that fewer than `n` answers exist leaves the others empty."""
        found = [(ended.tokens, ended.finish) for ended in beam.best(self._state, self._request.n)]
        found += [((), FinishReason.LENGTH)] * (self._request.n - len(found))
        prompt_len = len(self._request.prompt)
        return tuple(
            Commit(tokens, 0, (), finish, Usage(prompt_len, len(tokens), target_steps=self._rounds), index=index)
            for index, (tokens, finish) in enumerate(found)
        )
