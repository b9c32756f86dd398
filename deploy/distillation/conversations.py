"""The target answers prompts in large batches on one device, without a cluster, and writes questions where none are.

Of a conversation with several turns, the first one is answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from cluster.core.errors import ConfigurationError, InvalidRequest
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from workers.distill.answers import Answer
from workers.distill.eagle3.texts import Tokens, WritingPlan, continuations
from workers.distill.prompts import Task

_USER = "(what the user says)"
"""A placeholder for the user's message, to find where the chat template puts it."""
_QUESTION_FLOOR = 0.05
"""Questions leave out tokens that are less probable than this share of the most probable one: mostly noise."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Settings of the answers."""

    most_tokens: int
    """Most tokens of one answer, and of one question."""
    max_prompt: int
    """Longer prompts, in tokens, are left out."""
    rows: int
    """Conversations of one batch."""
    stops: tuple[int, ...]
    seed: int = 0
    ends: float | None = None
    """When the last answer ends, on the clock of `time.monotonic`."""


class BatchedTarget:
    """A target on one device, with its tokenizer."""

    def __init__(self, target: Any, tokenizer: Tokenizer, plan: AnswerPlan, told: Callable[[str], None]) -> None:
        self._target, self._tokenizer, self._plan, self._told = target, tokenizer, plan, told
        self._rows, self._batches = plan.rows, 0

    def answers(self, tasks: Iterable[Task]) -> Iterator[list[Answer]]:
        """The answers of one batch after another, until the tasks or the time end.

        A batch that does not fit the memory is halved, as those after it.
        """
        waiting = iter(tasks)
        batch = list(islice(waiting, self._rows))
        while batch and (self._plan.ends is None or time.monotonic() < self._plan.ends):
            try:
                found = self._answered(batch)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                torch.cuda.empty_cache()
                self._rows = len(batch) // 2
                self._told(f"{len(batch)} conversations do not fit the memory; {self._rows} from now on")
                batch = batch[: self._rows]
                continue
            yield found
            batch = list(islice(waiting, self._rows))

    def _answered(self, tasks: list[Task]) -> list[Answer]:
        asked = self._with_questions(tasks)
        encoded = [(task, self._encoded(task)) for task in asked]
        usable = [(task, prompt) for task, prompt in encoded if 0 < len(prompt) <= self._plan.max_prompt]
        if not usable:
            return []
        written = self._write([prompt for _, prompt in usable], [task.temperature for task, _ in usable], 0.0)
        return [
            Answer(f"{task.key}:0", task.prompt.category, task.temperature, task.held_out, prompt, answer)
            for (task, prompt), answer in zip(usable, written, strict=True)
            if answer
        ]

    def _with_questions(self, tasks: list[Task]) -> list[Task]:
        """The tasks, with a question of the target where there is only a system message, and without empty ones."""
        silent = [task for task in tasks if not task.prompt.turns]
        if not silent:
            return tasks
        written = self._write([self._opened(task) for task in silent], [1.0] * len(silent), _QUESTION_FLOOR)
        texts = [self._tokenizer.decode(tokens).strip() for tokens in written]
        asked = [
            replace(task, prompt=replace(task.prompt, turns=(text,)))
            for task, text in zip(silent, texts, strict=True)
            if text
        ]
        return [task for task in tasks if task.prompt.turns] + asked

    def _write(self, prompts: list[Tokens], temperatures: list[float], floor: float) -> list[Tokens]:
        self._batches += 1
        plan = self._plan
        # Each batch draws other numbers.
        seed = plan.seed * 1_000_003 + self._batches
        writing = WritingPlan(plan.most_tokens, plan.stops, seed, floor, plan.ends)
        return continuations(self._target, prompts, temperatures, writing)

    def _encoded(self, task: Task) -> Tokens:
        try:
            return self._tokenizer.encode_chat([*_system(task), Message("user", task.prompt.turns[0])])
        except InvalidRequest:
            return ()

    def _opened(self, task: Task) -> Tokens:
        """The conversation up to where the user's message begins. Raises `ConfigurationError`."""
        opened, found, _ = self._tokenizer.render_chat([*_system(task), Message("user", _USER)]).partition(_USER)
        if not found:
            raise ConfigurationError(
                "prompts: the chat template changes the user's message, so the target cannot write questions; "
                "needed prompts with questions"
            )
        return self._tokenizer.encode(opened, add_special_tokens=False)


def _system(task: Task) -> list[Message]:
    return [] if task.prompt.system is None else [Message("system", task.prompt.system)]
