"""The prompts of a race by task, from Spec-Bench, HumanEval, GSM8K and other JSONL files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchTasks
from deploy.bench.measuring.setup import render_prompt
from workers.distill.prompts import by_task, read_prompts

TASK_NAMES = {
    "mt_bench": "conversation",
    "qa": "question-answering",
    "math_reasoning": "mathematics",
    "rag": "retrieval",
}
"""Names of Spec-Bench's tasks in the tables, where they differ from the names in its file (Xia et al. 2024)."""


def read_tasks(
    files: Sequence[Path], names: Sequence[str], per_task: int, tokenizer: Tokenizer | None, longest: int | None
) -> BenchTasks:
    """The first turns of the first `per_task` prompts of each task; with `names`, of these tasks only.

    A task is the category in a line, or else the file's name without its suffix. A task of several categories takes
    one prompt of each in turn. Without a tokenizer, prompts have no tokens. A prompt of more than `longest` tokens is
    left out. Raises `ConfigurationError`, which names the file and the line, or the unknown task and the known ones.
    """
    texts: dict[str, list[str]] = {}
    for file in files:
        turns = [prompt for prompt in read_prompts(file) if prompt.turns]
        for task, prompts in by_task(turns).items():
            name = TASK_NAMES.get(task, task) or file.stem
            texts.setdefault(name, []).extend(prompt.turns[0] for prompt in prompts)
    unknown = [name for name in names if name not in texts]
    if unknown or not texts:
        known = ", ".join(texts) or "none"
        raise ConfigurationError(f"--tasks: {', '.join(unknown) or 'nothing'} is not in the prompts; there are {known}")
    chosen = {name: texts[name] for name in names or texts}
    return {
        name: tuple(islice(filter(None, (render_prompt(text, tokenizer, longest) for text in found)), per_task))
        for name, found in chosen.items()
    }
