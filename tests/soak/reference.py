"""The answers of the model alone, and a check whether another answer differs by rounding only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cluster.core.tree import EMPTY_TREE
from tests.soak.requests import END, SoakRequest
from tests.support.models.plain_generation import write_alone
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide
from workers.sampling.grammar import GrammarCompiler

Tokens = tuple[int, ...]
Answers = tuple[Tokens, ...]


class Reference:
    """`transformers` in float32, one request at a time. Every answer is computed once and stored."""

    def __init__(self, directory: Path, bound: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._grammars = GrammarCompiler(directory, self._model.config.vocab_size, (END,))
        self._bound = bound
        self._known: dict[SoakRequest, Answers] = {}

    def answers(self, request: SoakRequest) -> Answers:
        """All `n` answers to a request."""
        if request not in self._known:
            found = self._beams(request) if request.width else self._samples(request)
            self._known[request] = found
        return self._known[request]

    def is_near(self, request: SoakRequest, index: int, answer: Sequence[int]) -> bool:
        """Whether the model generates `answer` if logits change by at most the bound.

        Beams are compared by their scores. For samples, the first different token decides, because the text after it
        has another prefix.
        """
        own = self.answers(request)[index]
        if request.width:
            return abs(self._score(request, own) - self._score(request, answer)) <= self._bound
        at = next((place for place, pair in enumerate(zip(own, answer, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return False
        tokens = (*request.prompt, *own[:at])
        favoured = replace(request.sampling(index), logit_bias=((answer[at], self._bound),))
        context = DecisionContext(favoured, tokens, len(request.prompt), self._mask(request)(tokens))
        return decide(self._logits(tokens)[-1:], [context]) == [answer[at]]

    def _samples(self, request: SoakRequest) -> Answers:
        return tuple(
            write_alone(self._model, request.prompt, request.sampling(index), request.max_tokens, self._mask(request))
            for index in range(request.n)
        )

    def _mask(self, request: SoakRequest) -> Callable[[Sequence[int]], AllowedTokens | None]:
        """What the request's grammar allows after tokens, its prompt included."""
        grammar = request.sampling(0).grammar
        if grammar is None:
            return lambda tokens: None
        matcher = self._grammars.matcher(grammar, len(request.prompt))

        def allowed(tokens: Sequence[int]) -> AllowedTokens | None:
            matcher.follow(tokens, len(tokens))
            return matcher.allowed(EMPTY_TREE)[0]

        return allowed

    @torch.inference_mode()
    def _beams(self, request: SoakRequest) -> Answers:
        """`generate` of `transformers`."""
        output = self._model.generate(
            torch.tensor([request.prompt]),
            attention_mask=torch.ones((1, len(request.prompt)), dtype=torch.long),
            max_new_tokens=request.max_tokens,
            num_beams=request.width,
            num_return_sequences=request.n,
            length_penalty=request.length_penalty,
            early_stopping=False,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(tuple(row[len(request.prompt) :].tolist()) for row in output)

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """`[tokens, vocabulary]`."""
        logits: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    def _score(self, request: SoakRequest, answer: Sequence[int]) -> float:
        """The score of a beam: its summed log-probability ÷ (tokens ** length penalty)."""
        first = len(request.prompt) - 1
        logprobs = self._logits((*request.prompt, *answer))[first:-1].log_softmax(-1)
        total = logprobs.gather(1, torch.tensor([list(answer)]).T).sum()
        return float(total) / math.pow(len(answer), request.length_penalty)
