"""Beam search over sequences of one decision each. The search itself is `cluster.core.beam`."""

from __future__ import annotations

from dataclasses import replace

from cluster.coordinator.requests.decoding_strategy import NewSequence, StrategyStep
from cluster.core import beam, bounds
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


class BeamSearch:
    """The `n` best answers of one search.

    Each running beam is a sequence that requests one decision with its most probable alternatives. The search uses only
    the alternatives, and advances when all beams have theirs. The new beams share the stored KV of their parents, and
    beams without children end. A late beam delays only its own search.
    """

    def __init__(self, request: GenerationRequest, parameters: BeamParameters, vocabulary_size: int) -> None:
        stopping = request.stopping
        self._request = request
        self._parameters = parameters
        self._state = beam.start(
            parameters,
            stopping.max_tokens,
            stopping.stop_token_ids,
            stopping.forced_eos_token_id,
            # The first token of a decoder's start is not counted; those after it are forced tokens of the answer.
            len(request.prompt) - 1 if request.source else 0,
        )
        self._most_needed = min(vocabulary_size, bounds.MAX_LOGPROBS)
        self._candidates: dict[int, tuple[Candidate, ...]] = {}
        self._rounds = 0

    @property
    def slots(self) -> int:
        """Most sequences that the request runs at a time: the beam width."""
        return self._parameters.width

    @property
    def answers(self) -> tuple[int, ...]:
        """The indices of the answers."""
        return self._request.open_answers

    def start(self) -> tuple[NewSequence, ...]:
        """The first beam."""
        return (self._beam(0, parent=None),)

    def advance(self, slot: int, commit: Commit) -> StrategyStep:
        """Take the alternatives of one beam, and advance the search with those of the last beam.

        Raises `InvalidRequest` when the target reports fewer alternatives than the search needs.
        """
        candidates = commit.logprobs[0].top if commit.logprobs else ()
        if len(candidates) < self._needed(slot):
            raise InvalidRequest("logprobs", f"{len(candidates)} alternatives", f"at least {self._needed(slot)}")
        refused = self._refused(slot)
        self._candidates[slot] = tuple(entry for entry in candidates if entry[0] not in refused)
        if len(self._candidates) < len(self._state.running):
            return StrategyStep()
        self._state = beam.advance(self._state, [self._candidates[index] for index in range(len(self._candidates))])
        self._candidates.clear()
        self._rounds += 1
        if beam.is_done(self._state):
            return StrategyStep((), self._answers())
        return StrategyStep(
            tuple(self._beam(index, running.parent) for index, running in enumerate(self._state.running))
        )

    def _refused(self, slot: int) -> frozenset[int]:
        """Tokens that one beam cannot have next."""
        tokens = self._request.prompt + self._state.running[slot].tokens
        return self._request.sampling.repeated_ngram_ends(tokens) | self._excluded(slot)

    def _excluded(self, slot: int) -> frozenset[int]:
        """Stop tokens while one beam is too short, and the last tokens of forbidden sequences whose others end it."""
        tokens, sampling = self._state.running[slot].tokens, self._request.sampling
        stops = self._state.stop_token_ids if len(tokens) < sampling.min_tokens else frozenset()
        ends = (word[-1] for word in sampling.bad_words if tokens[len(tokens) - len(word) + 1 :] == word[:-1])
        return stops.union(ends)

    def _needed(self, slot: int) -> int:
        """How many alternatives the search needs of one beam: some of them may be refused."""
        return min(self._state.candidates + len(self._refused(slot)), self._most_needed)

    def _beam(self, slot: int, parent: int | None) -> NewSequence:
        """The running beam `slot` as a sequence of its own."""
        sampling = self._request.sampling
        request = replace(
            self._request,
            prompt=self._request.prompt + self._state.running[slot].tokens,
            sampling=SamplingParameters(
                temperature=0.0,
                logprobs=self._needed(slot),
                # The beam's tokens are the prompt here, and bad words are looked for in the answer alone.
                bad_words=tuple((token,) for token in sorted(self._excluded(slot))),
                no_repeat_ngram_size=sampling.no_repeat_ngram_size,
            ),
            stopping=StoppingCriteria(max_tokens=1),
            n=1,
            beam=None,
        )
        return NewSequence(slot, request, None, parent, may_fork=True)

    def _answers(self) -> tuple[Commit, ...]:
        """Return the answers, best first. Where the search found fewer answers than requested, the others are empty."""
        found = [(ended.tokens, ended.finish) for ended in beam.best(self._state, self._request.n)]
        found += [((), FinishReason.LENGTH)] * (self._request.n - len(found))
        input_len = len(self._request.input)
        return tuple(
            Commit(tokens, 0, (), finish, Usage(input_len, len(tokens), target_steps=self._rounds), index=index)
            for index, (tokens, finish) in enumerate(found)
        )
