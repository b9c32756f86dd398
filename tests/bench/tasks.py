"""The six tasks of Spec-Bench (Xia et al. 2024). Their prompts are never trained on."""

from __future__ import annotations

from pathlib import Path

from cluster.core.errors import ConfigurationError
from workers.distill.prompts import Prompt, by_task, read_prompts

SPEC_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "spec_bench.jsonl"
CONVERSATION = "multi-turn conversation"
NAMES = {
    "mt_bench": CONVERSATION,
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
    "": "prompts",
}
"""Names of tasks in the tables, where they differ from the names in the file."""


def read_tasks(file: Path | None, most: int) -> dict[str, list[str]]:
    """First turns by task, at most `most` of each: the first of every category, then the second.

    Raises `ConfigurationError` with the file, the line and what was found there.
    """
    tasks = by_task(read_user_prompts(file or SPEC_BENCH))
    return {NAMES.get(task, task): [prompt.turns[0] for prompt in some[:most]] for task, some in tasks.items()}


def read_user_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file that have a user turn. Raises `ConfigurationError` if there are none."""
    prompts = [prompt for prompt in read_prompts(file) if prompt.turns]
    if not prompts:
        raise ConfigurationError(f"--prompts {file}: needed at least one question, found system messages alone")
    return prompts
