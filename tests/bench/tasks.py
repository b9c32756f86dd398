"""Spec-Bench's six tasks (Xia et al. 2024): prompts to measure with, never to train on."""

from __future__ import annotations

import json
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigurationError, shorten

SPEC_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "spec_bench.jsonl"
CONVERSATION = "multi-turn conversation"
TASKS = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), CONVERSATION
    ),
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}
"""By category. MT-bench's eight are one task."""


def read_tasks(file: Path | None, most: int) -> dict[str, list[str]]:
    """First turns by task, `most` of each: the first of every category, then the second.

    Raises `ConfigurationError`, which names the file, the line and what was found there.
    """
    file = file or SPEC_BENCH
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--prompts {file}: needed Spec-Bench's JSONL (`turns`, `category`); {error}"
        ) from None
    categories: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            category, prompt = _read(f"--prompts {file}, line {number}", line)
            categories.setdefault(category, []).append(prompt)
    tasks: dict[str, list[list[str]]] = {}
    for category, prompts in categories.items():
        tasks.setdefault(TASKS.get(category, category), []).append(prompts)
    if not tasks:
        raise ConfigurationError(f"--prompts {file}: needed at least one prompt, found none")
    return {
        task: [prompt for prompt in chain.from_iterable(zip_longest(*several)) if prompt is not None][:most]
        for task, several in tasks.items()
    }


def _read(place: str, line: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except ValueError:
        raise ConfigurationError(f"{place}: needed JSON, found {shorten(line)}") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ConfigurationError(f"{place}: needed an object with `turns`, found {shorten(line)}")
    return str(row.get("category", "prompts")), turns[0]
