"""The data and the student of an encoder-decoder target: Seq-KD on its own greedy translations (Kim & Rush 2016)."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer, AnswerFile, Leading, read_answers, trainable
from workers.distill.budget import Budget, StepTimes
from workers.distill.data import ANSWERS, EVALUATION, DistillData, draft_vocabulary
from workers.distill.examples import padded
from workers.distill.job import DistillJob
from workers.distill.seq2seq_student import Seq2SeqStudent, make_seq2seq_student, student_config
from workers.distill.student import StudentPlan
from workers.distill.target_model import load_seq2seq_target
from workers.model.devices import choose_device
from workers.model.target_ends import decoder_vocabulary_size, read_config

_ROWS = 32
"""Sources that are translated at once."""
_SORTED = 16
"""Batches whose sources are sorted by length together."""
ALTERNATIVES = 8
"""Most probable tokens that are stored at each position."""

Item = TypeVar("Item")


def is_encoder_decoder(directory: Path) -> bool:
    """Whether the model in a directory has an encoder. Raises `ModelLoadError`."""
    return bool(read_config(directory).is_encoder_decoder)


def read_source_files(job: DistillJob) -> dict[str, tuple[str, ...]]:
    """The sources of every prompt file, by its name. Raises `InvalidRequest`, `ConfigurationError`."""
    if job.options.on_policy > 0:
        raise ConfigurationError("--on-policy: refused for an encoder-decoder target; it must be 0")
    return {path.name: job.served.read_sources(path, job.options.field) for path in job.options.prompts}


def prepare_seq2seq(
    job: DistillJob, plan: StudentPlan, sources: dict[str, tuple[str, ...]], budget: Budget, *, is_frozen: bool
) -> tuple[DistillData, Seq2SeqStudent]:
    """Translate the sources while the budget lasts, and make the student. Raises `ConfigurationError`."""
    options = job.options
    student_config(read_config(job.target), plan)
    target = load_seq2seq_target(job.target, choose_device(options.device, 0))
    data = translate_all(target, job, sources, budget, is_frozen=is_frozen)
    if options.vocabulary_size is not None:
        size = decoder_vocabulary_size(target.config)
        plan = replace(plan, vocabulary=draft_vocabulary(job, options, data, size))
    return data, make_seq2seq_student(target, plan, decoder_start(target), options.seed)


def translate_all(
    target: PreTrainedModel,
    job: DistillJob,
    sources: dict[str, tuple[str, ...]],
    budget: Budget,
    *,
    is_frozen: bool,
) -> DistillData:
    """Translate the sources that are missing while the budget lasts, and read all answers; their prompts are sources.

    `is_frozen`: the answers to train on stay as they are. Raises `ConfigurationError` without one to train on.
    """
    options = job.options
    if not is_frozen:
        tasks = [task for name, texts in sources.items() for task in _tasks(job, name, texts)]
        tasks.sort(key=lambda task: not task.held_out)  # those held out are measured, so they come first
        _translate(target, job, tasks, ANSWERS, options.answer_tokens, budget)
    evaluated: tuple[Answer, ...] = ()
    if options.evaluate is not None:
        texts = job.served.read_sources(options.evaluate, options.field)[: options.evaluate_prompts]
        unseen = [_task(job, options.evaluate.name, number, text, True) for number, text in enumerate(texts)]
        _translate(target, job, unseen, EVALUATION, 0, budget)
        keys = {task.key for task in unseen}
        evaluated = tuple(a for a in read_answers(options.work_directory / EVALUATION) if a.key in keys)
    answers = [answer for answer in read_answers(options.work_directory / ANSWERS) if answer.answer]
    data = DistillData(
        train=trainable(answers, evaluated),
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


def _tasks(job: DistillJob, name: str, texts: Sequence[str]) -> list[Answer]:
    """The sources of one file in random order, without empty ones. The first are held out."""
    order = [number for number, text in enumerate(texts) if text.strip()]
    random.Random(f"{job.options.seed}:{name}").shuffle(order)  # noqa: S311 - an order, not a secret
    held_out = min(job.options.held_out, len(order) // 10)
    return [_task(job, name, number, texts[number], place < held_out) for place, number in enumerate(order)]


def _task(job: DistillJob, name: str, number: int, text: str, held_out: bool) -> Answer:
    """A source without its answer."""
    return Answer(f"{name}:{number}", "", 0.0, held_out, job.served.encode(text), ())


def _translate(
    target: PreTrainedModel, job: DistillJob, tasks: Sequence[Answer], name: str, answer_tokens: int, budget: Budget
) -> None:
    """Append the answers to `tasks` to the file `name`, until it holds `answer_tokens` tokens to train on.

    0 answers all tasks. The last batch is expected to end within the budget.
    """
    options, start = job.options, decoder_start(target)
    ends, times = budget.answers_end, StepTimes(budget.clock)
    if answer_tokens:
        ends = min(ends, budget.clock() + options.answer_minutes * 60)
    longest = max(0.0, ends - budget.clock())
    with AnswerFile(options.work_directory / name) as file, job.notices.stage(f"answers for {name}", longest) as report:
        left = [task for task in tasks if task.key not in file.finished and len(task.prompt) < options.max_length]
        done = len(tasks) - len(left)
        for rows in _chunks(left, _ROWS * _SORTED):
            for batch in _chunks(sorted(rows, key=lambda task: len(task.prompt)), _ROWS):
                if (answer_tokens and file.answer_tokens >= answer_tokens) or not times.one_fits(ends):
                    return
                with times.one():
                    found = greedy_answers(target, [task.prompt for task in batch], options.max_tokens, start)
                for task, (tokens, leading) in zip(batch, found, strict=True):
                    file.append(replace(task, answer=tokens, leading=leading))
                done += len(batch)
                shares = (done / len(tasks), file.answer_tokens / answer_tokens if answer_tokens else 0.0)
                report(min(1.0, max(shares)), f"{done:,} sources")


def _chunks(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk


def decoder_start(target: Any) -> tuple[int, ...]:
    """The tokens that every answer of an encoder-decoder target begins after: its start token and a forced one."""
    settings = target.generation_config
    first = settings.decoder_start_token_id
    found = (settings.bos_token_id if first is None else first, settings.forced_bos_token_id)
    return tuple(int(token) for token in found if token is not None)


@torch.inference_mode()
def greedy_answers(
    target: Any, sources: Sequence[tuple[int, ...]], max_tokens: int, decoder_start: tuple[int, ...]
) -> list[tuple[tuple[int, ...], Leading]]:
    """Translate a batch of sources. Each answer ends with its end-of-sequence token, unless it has `max_tokens`.

    The generation settings of the target hold, apart from beams. A last token that the settings force is left out.
    """
    device = target.get_output_embeddings().weight.device
    tokens, mask = padded(sources, device, int(target.config.pad_token_id))
    forced = len(decoder_start) - 1
    settings = copy.deepcopy(target.generation_config)
    settings.num_beams, settings.do_sample = 1, False
    settings.max_length, settings.max_new_tokens = None, max_tokens + forced
    settings.output_scores = settings.return_dict_in_generate = True
    written = target.generate(input_ids=tokens, attention_mask=mask, generation_config=settings)
    leading, log_probabilities = _leading(written.scores[forced:])
    ends = _end_tokens(target)
    answers = []
    for row, answer in enumerate(written.sequences[:, len(decoder_start) :].tolist()):
        count = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
        if count == max_tokens and target.generation_config.forced_eos_token_id is not None:
            count -= 1
        best = Leading(leading[row, :count].astype(np.int32), log_probabilities[row, :count].astype(np.float16))
        answers.append((tuple(answer[:count]), best))
    return answers


def _leading(scores: Sequence[Tensor]) -> tuple[Any, Any]:
    """The most probable tokens at each step and their log-probabilities, both [rows, steps, alternatives]."""
    found = [step.float().log_softmax(dim=-1).topk(min(ALTERNATIVES, step.shape[-1])) for step in scores]
    tokens, values = (torch.stack([getattr(step, name) for step in found], dim=1) for name in ("indices", "values"))
    unknown = values == -torch.inf
    return tokens.masked_fill(unknown, -1).cpu().numpy(), values.cpu().numpy()


def _end_tokens(target: Any) -> frozenset[int]:
    found = target.generation_config.eos_token_id
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
