"""Functions to complete, from lines with `prompt`, `entry_point` and `test`, as in HumanEval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from deploy.bench.evaluation.tasks.execution import passes
from deploy.bench.evaluation.tasks.jsonl import Row, read_rows
from deploy.bench.evaluation.tasks.metrics import percentage
from deploy.bench.evaluation.tasks.task import Example, Scores, Task

OPTION = "--code"
MAX_TOKENS = 384
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
NOTE = "pass@1: the share of answers whose function passes the test of its line, run in a process with limits."


def read_code(file: Path, most: int) -> Task:
    """The task of a file. Scoring it runs what the model wrote. Raises `ConfigurationError`."""
    return Task("code", tuple(map(_example, read_rows(OPTION, file, most))), MAX_TOKENS, score_code, (NOTE,))


def _example(row: Row) -> Example:
    beginning = row.text("prompt").strip("\n")
    instruction = f"Complete this Python function. Write the whole function.\n\n```python\n{beginning}\n```"
    return Example(instruction, beginning, (), "", row.text("test"), row.text("entry_point"))


def program_of(example: Example, answer: str) -> str:
    """The program that tests an answer: its first block of code, or all of it, and then the test.

    Where the answer does not define the function, it continues the beginning in the prompt.
    """
    block = _BLOCK.search(answer)
    code = block.group(1) if block else answer
    if not re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(example.entry_point)}\b", code, re.MULTILINE):
        code = f"{example.source}\n{code}"
    else:
        code = f"{_imports(example.source)}\n{code}"
    return f"{code}\n\n{example.program}\n\ncheck({example.entry_point})\n"


def _imports(beginning: str) -> str:
    return "\n".join(line for line in beginning.splitlines() if line.startswith(("import ", "from ")))


def score_code(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """The share of answers that pass."""
    results = [passes(program_of(example, answer)) for example, answer in zip(examples, answers, strict=True)]
    return {"pass@1, %": percentage(results)}
