"""What every benchmark begins with: empty results, the length of the context, and a line about the prompts."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, InvalidRequest
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchPrompt, BenchTasks
from deploy.bench.measuring.results import BenchResults
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
import psutil


def empty_results(title: str) -> BenchResults:
    """Results without measurements, with the machine and the command line of this process."""
    return BenchResults(title, describe_machine(), shlex.join(["pilotfish", *sys.argv[1:]]))


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
