"""What the model alone would have answered, and whether another answer is only a matter of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.soak.asks import Ask
from tests.support.plain_generation import write_alone
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide

Tokens = tuple[int, ...]
Answers = tuple[Tokens, ...]


class Reference:
    """`transformers` in float32, one request after another; every answer is computed once and kept."""

    def __init__(self, directory: Path, bound: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._bound = bound
        self._known: dict[Ask, Answers] = {}

    def answers(self, asked: Ask) -> Answers:
        """All `n` of them."""
        if asked not in self._known:
            found = self._beams(asked) if asked.width else self._samples(asked)
            self._known[asked] = found
        return self._known[asked]

    def is_near(self, asked: Ask, index: int, answer: Sequence[int]) -> bool:
        """Whether `answer` would be the model's own, had logits moved by no more than the bound.

        Beams are compared by their scores; of samples, the first token that differs is looked at, since
        everything after it is another text.
        """
        own = self.answers(asked)[index]
        if asked.width:
            return abs(self._score(asked, own) - self._score(asked, answer)) <= self._bound
        at = next((place for place, pair in enumerate(zip(own, answer, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return False
        tokens = (*asked.prompt, *own[:at])
        favoured = replace(asked.sampling(index), logit_bias=((answer[at], self._bound),))
        return decide(self._logits(tokens)[-1:], [DecisionContext(favoured, tokens, len(asked.prompt))]) == [answer[at]]

    def _samples(self, asked: Ask) -> Answers:
        return tuple(
            write_alone(self._model, asked.prompt, asked.sampling(index), asked.max_tokens) for index in range(asked.n)
        )

    @torch.inference_mode()
    def _beams(self, asked: Ask) -> Answers:
        """`generate` of `transformers`."""
        output = self._model.generate(
            torch.tensor([asked.prompt]),
            attention_mask=torch.ones((1, len(asked.prompt)), dtype=torch.long),
            max_new_tokens=asked.max_tokens,
            num_beams=asked.width,
            num_return_sequences=asked.n,
            length_penalty=asked.length_penalty,
            early_stopping=False,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(tuple(row[len(asked.prompt) :].tolist()) for row in output)

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """`[tokens, vocabulary]`."""
        logits: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    def _score(self, asked: Ask, answer: Sequence[int]) -> float:
        """A beam's: its summed log-probability ÷ (tokens ** length penalty)."""
        first = len(asked.prompt) - 1
        logprobs = self._logits((*asked.prompt, *answer))[first:-1].log_softmax(-1)
        total = logprobs.gather(1, torch.tensor([list(answer)]).T).sum()
        return float(total) / math.pow(len(answer), asked.length_penalty)
