"""The data and the student of an encoder-decoder target: Seq-KD on its own greedy translations (Kim & Rush 2016)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from transformers import AutoConfig, PreTrainedModel

from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.distillation.budget import Budget
from deploy.distillation.data import ANSWERS, EVALUATION, DistillData, draft_vocabulary
from deploy.distillation.options import DistillOptions
from deploy.progress import ProgressReporter
from deploy.terminal import notices
from deploy.translation.sources import read_sources
from workers.distill.answers import Answer, AnswerFile, read_answers
from workers.distill.seq2seq.answers import decoder_start, greedy_answers
from workers.distill.seq2seq.student import Seq2SeqStudent, load_seq2seq_target, make_seq2seq_student, student_config
from workers.distill.student import StudentPlan
from workers.model.devices import choose_device
from workers.model.target_ends import decoder_vocabulary_size

_ROWS = 32
"""Sources that are translated at once."""
_SORTED = 16
"""Batches whose sources are sorted by length together."""

Item = TypeVar("Item")


def is_encoder_decoder(directory: Path) -> bool:
    """Whether the model in a directory has an encoder."""
    return bool(AutoConfig.from_pretrained(directory, trust_remote_code=False).is_encoder_decoder)


def read_source_files(options: DistillOptions) -> dict[str, tuple[str, ...]]:
    """The sources of every prompt file, by its name. Raises `InvalidRequest`, `ConfigurationError`."""
    if options.on_policy > 0:
        raise ConfigurationError("--on-policy: refused for an encoder-decoder target; it must be 0")
    return {path.name: read_sources(path, options.field) for path in options.prompts}


def prepare_seq2seq(
    directory: Path,
    options: DistillOptions,
    plan: StudentPlan,
    sources: dict[str, tuple[str, ...]],
    budget: Budget,
    *,
    is_frozen: bool,
) -> tuple[DistillData, Seq2SeqStudent]:
    """Translate the sources while the budget lasts, and make the student. Raises `ConfigurationError`."""
    student_config(AutoConfig.from_pretrained(directory, trust_remote_code=False), plan)
    target = load_seq2seq_target(directory, choose_device(options.device, 0))
    data = translate_all(target, directory, options, sources, budget, is_frozen=is_frozen)
    if options.vocabulary_size is not None:
        size = decoder_vocabulary_size(target.config)
        plan = replace(plan, vocabulary=draft_vocabulary(options, data, directory, size))
    return data, make_seq2seq_student(target, plan, decoder_start(target), options.seed)


def translate_all(
    target: PreTrainedModel,
    directory: Path,
    options: DistillOptions,
    sources: dict[str, tuple[str, ...]],
    budget: Budget,
    *,
    is_frozen: bool,
) -> DistillData:
    """Translate the sources that are missing while the budget lasts, and read all answers; their prompts are sources.

    `is_frozen`: the answers to train on stay as they are. Raises `ConfigurationError` without one to train on.
    """
    tokenizer = Tokenizer.load(directory)
    if not is_frozen:
        tasks = [task for name, texts in sources.items() for task in _tasks(name, texts, tokenizer, options)]
        tasks.sort(key=lambda task: not task.held_out)  # those held out are measured, so they come first
        _translate(target, tasks, options, ANSWERS, options.answer_tokens, budget)
    evaluated: tuple[Answer, ...] = ()
    if options.evaluate is not None:
        texts = read_sources(options.evaluate, options.field)[: options.evaluate_prompts]
        unseen = [_task(options.evaluate.name, number, text, tokenizer, True) for number, text in enumerate(texts)]
        _translate(target, unseen, options, EVALUATION, 0, budget)
        keys = {task.key for task in unseen}
        evaluated = tuple(a for a in read_answers(options.work_directory / EVALUATION) if a.key in keys)
    answers = [answer for answer in read_answers(options.work_directory / ANSWERS) if answer.answer]
    data = DistillData(
        train=tuple(answer for answer in answers if not answer.held_out),
        held_out=tuple(answer for answer in answers if answer.held_out),
        evaluation=evaluated,
        has_generated_questions=False,
    )
    if not data.train:
        raise ConfigurationError("answers: needed one to train on, found none; needed more --minutes or prompts")
    return data


def decoder_rows(data: DistillData, start: tuple[int, ...]) -> DistillData:
    """Return the answers with the decoder's start tokens as the prompt and the tokens of the prompt as the source."""

    def rows(answers: Sequence[Answer]) -> tuple[Answer, ...]:
        return tuple(replace(answer, prompt=start, source=answer.prompt) for answer in answers)

    return replace(data, train=rows(data.train), held_out=rows(data.held_out), evaluation=rows(data.evaluation))


def _tasks(name: str, texts: Sequence[str], tokenizer: Tokenizer, options: DistillOptions) -> list[Answer]:
    """The sources of one file in random order, without empty ones. The first are held out."""
    order = [number for number, text in enumerate(texts) if text.strip()]
    random.Random(f"{options.seed}:{name}").shuffle(order)  # noqa: S311 - an order, not a secret
    held_out = min(options.held_out, len(order) // 10)
    return [_task(name, number, texts[number], tokenizer, place < held_out) for place, number in enumerate(order)]


def _task(name: str, number: int, text: str, tokenizer: Tokenizer, held_out: bool) -> Answer:
    """A source without its answer."""
    return Answer(f"{name}:{number}", "", 0.0, held_out, tokenizer.encode(text), ())


def _translate(
    target: PreTrainedModel,
    tasks: Sequence[Answer],
    options: DistillOptions,
    name: str,
    answer_tokens: int,
    budget: Budget,
) -> None:
    """Append the answers to `tasks` to the file `name`, until it holds `answer_tokens` tokens to train on."""
    start = decoder_start(target)
    ends = min(budget.answers_end, budget.clock() + options.answer_minutes * 60)
    with (
        AnswerFile(options.work_directory / name) as file,
        ProgressReporter(notices, f"answers for {name}") as reporter,
    ):
        left = [task for task in tasks if task.key not in file.finished and len(task.prompt) < options.max_length]
        done = len(tasks) - len(left)
        for rows in _chunks(left, _ROWS * _SORTED):
            for batch in _chunks(sorted(rows, key=lambda task: len(task.prompt)), _ROWS):
                if answer_tokens and (file.answer_tokens >= answer_tokens or budget.clock() >= ends):
                    return
                found = greedy_answers(target, [task.prompt for task in batch], options.max_tokens, start)
                for task, (tokens, leading) in zip(batch, found, strict=True):
                    file.append(replace(task, answer=tokens, leading=leading))
                done += len(batch)
                reporter(done / len(tasks), f"{done:,} sources")


def _chunks(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk
