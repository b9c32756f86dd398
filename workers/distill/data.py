"""The data of a distillation: the target's answers, generated where they are missing, and grouped by their use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer, AnswerFile, read_answers, trainable
from workers.distill.budget import Budget
from workers.distill.checkpoints import stored_seconds
from workers.distill.job import DistillJob, Quota
from workers.distill.loop import TrainingPlan
from workers.distill.options import DistillOptions
from workers.distill.prompts import Prompt, Task, evaluation_tasks, schedule
from workers.distill.vocabulary import frequent_tokens, stored_vocabulary
from workers.model.model_files import end_of_sequence_ids

ANSWERS, EVALUATION, VOCABULARY = "answers.jsonl", "evaluation.jsonl", "vocabulary.json"


@dataclass(frozen=True, slots=True)
class DistillData:
    """The target's answers, grouped by their use."""

    train: tuple[Answer, ...]
    held_out: tuple[Answer, ...]
    evaluation: tuple[Answer, ...]
    has_generated_questions: bool
    """Whether the target wrote some of the questions that are trained on."""


def begin_budget(job: DistillJob, *, is_frozen: bool, needs_states: bool = False) -> Budget:
    """The budget of a command, which is printed. `is_frozen`: no answers to train on are generated."""
    options = job.options
    with AnswerFile(options.work_directory / ANSWERS) as file:
        needs_answers = not is_frozen and file.answer_tokens < options.answer_tokens
    budget = Budget.begin(options.minutes, needs_answers=needs_answers, needs_states=needs_states)
    job.notices.print(budget.plan())
    return budget


def budgeted(plan: TrainingPlan, checkpoint: Path, budget: Budget) -> TrainingPlan:
    """The plan with the time that the budget leaves, in addition to that of earlier runs."""
    if plan.seconds is None:
        return plan
    return replace(plan, seconds=stored_seconds(checkpoint) + max(1.0, budget.left_for_training()))


def draft_vocabulary(job: DistillJob, options: DistillOptions, data: DistillData, size: int) -> tuple[int, ...]:
    """The tokens of a reduced head, which an earlier run may have chosen. Raises `ConfigurationError`."""
    wanted = options.vocabulary_size or size
    answers = (answer.answer for answer in data.train)
    always = end_of_sequence_ids(job.target)
    path = options.work_directory / VOCABULARY
    vocabulary = stored_vocabulary(path, lambda: frequent_tokens(answers, wanted, always, size))
    if len(vocabulary) != wanted:
        raise ConfigurationError(f"--vocabulary-size: {wanted} is refused; {path} was made with {len(vocabulary)}")
    return vocabulary


def collect_answers(
    job: DistillJob, files: Sequence[Sequence[Prompt]], budget: Budget, *, is_frozen: bool
) -> DistillData:
    """Generate the answers that are missing while the budget lasts, and read all of them.

    `is_frozen`: the answers to train on stay as they are, since a training on them has begun. Raises
    `ConfigurationError` if the budget leaves no answer to train on.
    """
    options = job.options
    evaluation = (
        [] if options.evaluate is None else evaluation_tasks(options.evaluate, options.evaluate_prompts, options.seed)
    )
    read = {"--prompts": chain(*files), "--evaluate": (task.prompt for task in evaluation)}
    for option, prompts in read.items():
        if any(prompt.is_template for prompt in prompts):
            raise ConfigurationError(
                f"{option}: templates are refused for kind {options.kind}; needed eagle3 or dspark"
            )
    if not is_frozen:
        tasks = schedule(files, options.temperatures, options.held_out, options.seed)
        _generate_answers(job, ANSWERS, tasks, options.answer_tokens, budget)
    if evaluation:
        _generate_answers(job, EVALUATION, evaluation, 0, budget)
    answers = read_answers(options.work_directory / ANSWERS)
    keys = {f"{task.key}:0" for task in evaluation}
    written = read_answers(options.work_directory / EVALUATION) if keys else ()
    evaluated = tuple(answer for answer in written if answer.key in keys)
    train = trainable(answers, evaluated)
    if not train:
        raise ConfigurationError(
            f"answers: needed one to train on, found none; the target had {budget.answer_seconds:.0f} s of --minutes "
            f"{options.minutes} for them. Needed more minutes or a lower --max-tokens"
        )
    return DistillData(
        train=train,
        held_out=tuple(answer for answer in answers if answer.held_out and answer.answer),
        evaluation=evaluated,
        has_generated_questions=any(not prompt.turns for prompts in files for prompt in prompts),
    )


def _generate_answers(job: DistillJob, name: str, tasks: Iterable[Task], answer_tokens: int, budget: Budget) -> None:
    """Append the answers to `tasks` to the file `name`, until it holds `answer_tokens` tokens to train on."""
    options = job.options
    seconds = min(options.answer_minutes * 60, budget.left_for_answers())
    quota = Quota(answer_tokens, seconds, options.max_tokens, ends=budget.answers_end)
    longest = budget.left_for_answers()  # conversations that have begun at `seconds` are finished
    with AnswerFile(options.work_directory / name) as file, job.notices.stage(f"answers for {name}", longest) as stage:

        def report(tokens: int) -> None:
            stage(tokens / answer_tokens if answer_tokens else 0.0, f"{tokens:,} tokens" if answer_tokens else "")

        job.served.answer(tasks, file, quota, report)
