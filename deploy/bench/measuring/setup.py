"""What every benchmark begins with: its machine, its prompts, and empty results."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import psutil

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, InvalidRequest
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchPrompt, BenchTasks
from deploy.bench.measuring.results import BenchResults
from deploy.bench.options import ContestOptions
from workers.distill.prompts import by_task, read_prompts

_Task = TypeVar("_Task")


def empty_results(title: str) -> BenchResults:
    """Results without measurements, with the machine and the command line of this process."""
    return BenchResults(title, describe_machine(), shlex.join(["pilotfish", *sys.argv[1:]]))


def endpoint_results(options: ContestOptions, tasks: BenchTasks) -> BenchResults:
    """Results without measurements of the server at `options.url`."""
    return empty_results(
        f"{options.model} at {options.url}; {sum(map(len, tasks.values()))} prompts ({', '.join(tasks)})"
    )


def chosen_tasks(tasks: Mapping[str, _Task], names: Sequence[str], source: str) -> dict[str, _Task]:
    """The tasks with these names, all without names. Raises `ConfigurationError` for one that is not in the source."""
    unknown = [name for name in names if name not in tasks]
    if unknown or not tasks:
        known = ", ".join(tasks) or "none"
        raise ConfigurationError(
            f"--tasks: {', '.join(unknown) or 'nothing'} is not in the {source}; there are {known}"
        )
    return {name: tasks[name] for name in names or tasks}


def describe_tasks(tasks: BenchTasks, max_tokens: int) -> str:
    """One line about the prompts. Raises `ConfigurationError` without any."""
    lengths = [len(prompt.tokens) for found in tasks.values() for prompt in found]
    if not lengths:
        raise ConfigurationError("--prompts: every prompt is longer than the model's context less --max-tokens")
    return (
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens ({', '.join(tasks)}), "
        f"at most {max_tokens} tokens each"
    )


def context_len(configuration: Configuration, directory: Path) -> int:
    """The longest sequence of prompt and answer: as configured, or the model's own."""
    own = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return configuration.target.max_context_len or int(own or 1 << 20)


def render_prompt(
    text: str, tokenizer: Tokenizer | None, longest: int | None, *, prediction: str = "", as_chat: bool = True
) -> BenchPrompt | None:
    """The prompt of a user's message, or of the plain text without `as_chat`; `None` if it has too many tokens.

    Without a tokenizer, it has no tokens.
    """
    if tokenizer is None:
        return BenchPrompt((), text, prediction)
    tokens = None
    if as_chat:
        with suppress(InvalidRequest):  # the model has no chat template
            tokens = tokenizer.encode_chat([Message("user", text, None)])
    tokens = tokenizer.encode(text) if tokens is None else tokens
    return BenchPrompt(tokens, text, prediction) if longest is None or len(tokens) <= longest else None


_VERSIONS = ("pilotfish", "torch", "transformers", "grpcio", "ray")


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads, memory, GPUs, versions and the time (UTC)."""
    # Importing torch takes more than a second. Who reads results needs none.
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": gpus,
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": {name: version(name) for name in _VERSIONS} | {"python": platform.python_version()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


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
    return {
        name: tuple(islice(filter(None, (render_prompt(text, tokenizer, longest) for text in found)), per_task))
        for name, found in chosen_tasks(texts, names, "prompts").items()
    }
