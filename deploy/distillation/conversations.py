"""The target answers prompts in batches, and writes questions where there are none.

Of a conversation with several turns, the first one is answered. Longer answers become the documents of templates.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, islice

from cluster.core.errors import ConfigurationError, InvalidRequest
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from workers.distill.answers import Answer
from workers.distill.prompts import DOCUMENT, QUESTION, Prompt, Task

_USER = "(what the user says)"
"""A placeholder for the user's message, to find where the chat template puts it."""
_QUESTION_FLOOR = 0.05
"""Questions leave out tokens that are less probable than this share of the most probable one: mostly noise."""
_LEAST_DOCUMENT, _DOCUMENTS, _NEW_DOCUMENTS = 120, 4096, 512
"""Least tokens of an answer that becomes a document, most documents that are kept, and most new ones of a batch."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritingPlan:
    """Settings of one batch of texts that the target writes."""

    most_tokens: int
    """Most tokens of one text, without its prompt."""
    stops: tuple[int, ...]
    """Tokens that end a text, and are a part of it."""
    seed: int
    floor: float = 0.0
    """Tokens less probable than this share of the most probable one are never drawn."""
    ends: float | None = None
    """When all texts end, on the clock of `time.monotonic`; `None`: no limit."""


Write = Callable[[Sequence[Tokens], Sequence[float], WritingPlan], list[Tokens]]
"""What the target writes after each prompt, with a temperature for each; 0 is greedy."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Settings of the answers."""

    most_tokens: int
    """Most tokens of one answer, and of one question."""
    max_prompt: int
    """Longer prompts, in tokens, are left out."""
    rows: int
    """Conversations of one batch: the answers of a batch are handed out together."""
    stops: tuple[int, ...]
    seed: int = 0
    ends: float | None = None
    """When the last answer ends, on the clock of `time.monotonic`."""


class BatchedTarget:
    """A target that writes in batches, with its tokenizer."""

    def __init__(
        self,
        write: Write,
        tokenizer: Tokenizer,
        plan: AnswerPlan,
    ) -> None:
        self._write_all, self._tokenizer, self._plan = write, tokenizer, plan
        self._documents: list[tuple[str, str]] = []  # questions and long answers
        self._held: list[Task] = []  # templates that are only measured on, until there are enough documents
        self._draw = random.Random(plan.seed)  # noqa: S311 - a choice of texts, not a secret

    def answers(self, tasks: Iterable[Task]) -> Iterator[list[Answer]]:
        """The answers of one batch after another, until the tasks or the time end."""
        waiting = iter(tasks)
        while batch := self._batch(waiting):
            asked = [
                (task, prompt_tokens(task, self._tokenizer))
                for task in self._with_questions(self._with_documents(batch))
            ]
            if self._plan.ends is not None and time.monotonic() >= self._plan.ends:
                return
            if usable := [(task, prompt) for task, prompt in asked if 0 < len(prompt) <= self._plan.max_prompt]:
                yield self._answered(usable)

    def _batch(self, waiting: Iterator[Task]) -> list[Task]:
        """The tasks of the next batch: templates that waited for documents, then the next ones."""
        ready = [task for task in self._held if self._has_documents(task)]
        self._held = [task for task in self._held if task not in ready]
        return list(islice(chain(ready, waiting), max(len(ready), self._plan.rows)))

    def _has_documents(self, task: Task) -> bool:
        return len(self._documents) >= task.prompt.turns[0].count(DOCUMENT)

    def _answered(self, asked: Sequence[tuple[Task, Tokens]]) -> list[Answer]:
        heat = [task.temperature for task, _ in asked]
        written = self._write([prompt for _, prompt in asked], heat, 0.0, asked[0][0])
        long = (
            (task.prompt.turns[0], answer)
            for (task, _), answer in zip(asked, written, strict=True)
            if len(answer) >= _LEAST_DOCUMENT and not task.held_out and not task.prompt.is_template
        )
        new = [(question, self._tokenizer.decode(answer).strip()) for question, answer in islice(long, _NEW_DOCUMENTS)]
        self._documents = [*self._documents, *new][-_DOCUMENTS:]
        return [
            Answer(f"{task.key}:0", task.prompt.category, task.temperature, task.held_out, prompt, answer)
            for (task, prompt), answer in zip(asked, written, strict=True)
            if answer
        ]

    def _with_documents(self, tasks: list[Task]) -> list[Task]:
        """The tasks with texts in the place of placeholders, without templates as long as there are no texts.

        A template that is trained on comes again. One that is only measured on comes once, and waits.
        """
        found = []
        for task in tasks:
            if task.prompt.is_template:
                text = task.prompt.turns[0]
                count = text.count(DOCUMENT)
                if not self._has_documents(task):
                    self._held += [task] if task.held_out else []
                    continue
                chosen = self._draw.sample(self._documents, count)
                for _, document in chosen:
                    text = text.replace(DOCUMENT, document, 1)
                text = text.replace(QUESTION, self._draw.choice(chosen)[0])
                task = replace(task, prompt=replace(task.prompt, turns=(text,)))
            found.append(task)
        return found

    def _with_questions(self, tasks: list[Task]) -> list[Task]:
        """The tasks, with a question of the target where there is only a system message, and without empty ones."""
        silent = [task for task in tasks if not task.prompt.turns]
        if not silent:
            return tasks
        begun = [opened(self._tokenizer, system_messages(task.prompt)) for task in silent]
        written = self._write(begun, [1.0] * len(silent), _QUESTION_FLOOR, silent[0])
        texts = [self._tokenizer.decode(tokens).strip() for tokens in written]
        # A system message only says what is asked about in every second pass, where it is not read with the question.
        asked = [
            replace(
                task,
                prompt=replace(task.prompt, turns=(text,), system=None if task.turn_pass % 2 else task.prompt.system),
            )
            for task, text in zip(silent, texts, strict=True)
            if text
        ]
        return [task for task in tasks if task.prompt.turns] + asked

    def _write(self, prompts: list[Tokens], temperatures: list[float], floor: float, first: Task) -> list[Tokens]:
        plan = self._plan
        # Each batch draws other numbers, also than those of a run before this one.
        name = f"{plan.seed}:{floor}:{first.key}"
        seed = int.from_bytes(blake2b(name.encode(), digest_size=5).digest())
        writing = WritingPlan(plan.most_tokens, plan.stops, seed, floor, plan.ends)
        return self._write_all(prompts, temperatures, writing)


def prompt_tokens(task: Task, tokenizer: Tokenizer) -> Tokens:
    """The tokens of a task's first turn, with the system's message; none if the chat template refuses them."""
    try:
        return tokenizer.encode_chat([*system_messages(task.prompt), Message("user", task.prompt.turns[0])])
    except InvalidRequest:
        return ()


def opened(tokenizer: Tokenizer, before: Sequence[Message]) -> Tokens:
    """The conversation up to where the user's next message begins. Raises `ConfigurationError`."""
    text, found, _ = tokenizer.render_chat([*before, Message("user", _USER)]).partition(_USER)
    if not found:
        raise ConfigurationError(
            "prompts: the chat template changes the user's message, so the target cannot write questions; "
            "needed prompts with questions"
        )
    return tokenizer.encode(text, add_special_tokens=False)


def system_messages(prompt: Prompt) -> list[Message]:
    """The message of the system, if the prompt has one."""
    return [] if prompt.system is None else [Message("system", prompt.system)]
