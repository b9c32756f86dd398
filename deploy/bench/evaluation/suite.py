"""The tasks of an evaluation: which files are read, and the prompts that are made of their examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchPrompt, BenchTasks
from deploy.bench.options import EvaluationOptions
from deploy.bench.evaluation.tasks.arithmetic import read_arithmetic
from deploy.bench.evaluation.tasks.code import read_code
from deploy.bench.evaluation.tasks.correction import read_correction
from deploy.bench.evaluation.tasks.spec_bench import read_spec_bench
from deploy.bench.evaluation.tasks.task import Example, Task
from deploy.bench.evaluation.tasks.translation import read_translation
from deploy.bench.measuring.competitors import Skipped
from deploy.bench.measuring.setup import render_prompt


def read_suite(options: EvaluationOptions) -> tuple[tuple[Task, ...], tuple[Skipped, ...]]:
    """The chosen tasks, and those that are left out with the reason.

    Raises `ConfigurationError` for a file that cannot be read, and for an unknown task with the known ones.
    """
    tasks = {task.name: task for task in _read(options)}
    skipped = []
    if options.code and not options.execute_code:
        skipped.append(Skipped("code", "it runs what the model writes, which needs --execute-code"))
    unknown = [name for name in options.task_names if name not in tasks]
    if unknown or not tasks:
        known = ", ".join(tasks) or "none"
        raise ConfigurationError(f"--tasks: {', '.join(unknown) or 'nothing'} is not in the files; there are {known}")
    chosen = [tasks[name] for name in options.task_names or tasks]
    bound = options.max_tokens
    return tuple(replace(task, max_tokens=bound or task.max_tokens) for task in chosen), tuple(skipped)


def _read(options: EvaluationOptions) -> Iterator[Task]:
    most = options.examples
    if options.translation:
        yield read_translation(options.translation, options.languages, most)
    if options.correction:
        yield read_correction(options.correction, options.sentences_per_prompt, most)
    if options.spec_bench:
        yield from read_spec_bench(options.spec_bench, most)
    if options.arithmetic:
        yield read_arithmetic(options.arithmetic, most)
    if options.code and options.execute_code:
        yield read_code(options.code, most)


def with_prompts(
    tasks: tuple[Task, ...], tokenizer: Tokenizer | None, context_len: int | None, *, source_alone: bool
) -> tuple[tuple[Task, ...], BenchTasks]:
    """The prompts by task. Examples whose prompt and answer are longer than the context are left out of both.

    Raises `ConfigurationError` for a task of which nothing is left.
    """
    kept: list[Task] = []
    prompts: BenchTasks = {}
    for task in tasks:
        longest = None if context_len is None else context_len - task.max_tokens
        pairs = [(example, _prompt(example, tokenizer, longest, source_alone)) for example in task.examples]
        fitting = [(example, prompt) for example, prompt in pairs if prompt is not None]
        if not fitting:
            raise ConfigurationError(
                f"{task.name}: every prompt is longer than {longest} tokens, the model's context less --max-tokens"
            )
        kept.append(replace(task, examples=tuple(example for example, _ in fitting)))
        prompts[task.name] = tuple(prompt for _, prompt in fitting)
    return tuple(kept), prompts


def _prompt(
    example: Example, tokenizer: Tokenizer | None, longest: int | None, source_alone: bool
) -> BenchPrompt | None:
    text = example.prompt(source_alone=source_alone)
    return render_prompt(text, tokenizer, longest, prediction=example.prediction, as_chat=not source_alone)
