"""An engine that calls a proposer as vLLM's model runner does, without vLLM.

Requests take the free rows of a batch, the last row moves into the place of one that has ended, prompts may be read in
two steps, and greedy verification accepts the drafted tokens that the target decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

LONGEST = 128


class Proposes(Protocol):
    def propose(self, sampled: Any, lengths: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]: ...


def vllm_config(
    address: str, drafted: int = 4, vocabulary_size: int = 96, rank: int = 0, longest: int = LONGEST, **section: Any
) -> Any:
    """The parts of vLLM's `VllmConfig` that a proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted),
        additional_config={"pilotfish": {"address": address, **section}},
        model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: vocabulary_size),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
    )


class Engine:
    """Decodes greedily by `decide`, the next token after a list of tokens, `rows` requests at once."""

    def __init__(self, proposer: Proposes, decide: Callable[[Sequence[int]], int], rows: int = 3) -> None:
        self._proposer = proposer
        self._decide = decide
        self._tokens = np.zeros((rows, LONGEST), np.int32)
        self._lengths = np.zeros(rows, np.int64)
        self._rows: list[_Request] = []
        self.accepted = 0
        self.steps = 0

    def run(self, prompts: Iterable[Sequence[int]], count: int, on_step: Callable[[int], None] = lambda _: None) -> Any:
        """The answers, with `count` tokens each. `on_step` is called after each step, with its number."""
        waiting = deque(_Request(list(prompt), len(prompt) + count) for prompt in prompts)
        answers = {id(one): one for one in waiting}
        order = list(answers)
        while waiting or self._rows:
            while waiting and len(self._rows) < len(self._tokens):
                self._place(len(self._rows), waiting.popleft())
            self._step()
            on_step(self.steps)
        return [answers[one].tokens for one in order]

    def _place(self, index: int, request: _Request) -> None:
        self._rows[index : index + 1] = [request]
        self._tokens[index, :] = -1  # what another request has left there
        self._tokens[index, : len(request.tokens)] = request.tokens
        self._lengths[index] = len(request.tokens)

    def _step(self) -> None:
        sampled = [self._verify(request) for request in self._rows]
        for index, (request, decided) in enumerate(zip(self._rows, sampled, strict=True)):
            end = len(request.tokens)
            self._tokens[index, end - len(decided) : end] = decided
            self._lengths[index] = end
        drafts = self._proposer.propose(sampled, self._lengths, self._tokens, slot_mappings=None)
        assert len(drafts) == len(self._rows)
        for request, draft in zip(self._rows, drafts, strict=True):
            assert all(isinstance(token, int) for token in draft)
            request.draft = draft
        self.steps += 1
        for index in reversed(range(len(self._rows))):
            if len(self._rows[index].tokens) == self._rows[index].length:
                last = self._rows.pop()
                if index < len(self._rows):
                    self._place(index, last)

    def _verify(self, request: _Request) -> list[int]:
        if request.unread:  # the rest of the prompt goes with the next step
            request.unread = False
            return []
        decided: list[int] = []
        for drafted in [*request.draft, None]:
            token = self._decide(request.tokens)
            request.tokens.append(token)
            decided.append(token)
            if len(request.tokens) == request.length or token != drafted:
                break
            self.accepted += 1
        request.draft = []
        return decided


class _Request:
    def __init__(self, tokens: list[int], length: int) -> None:
        self.tokens = tokens
        self.length = length
        self.draft: list[int] = []
        self.unread = len(tokens) > 8
