"""Functions to complete, from lines with `prompt`, `entry_point` and `test`, as in HumanEval.

Programs that a model wrote run in processes of their own. Limits bound time, memory, files and processes. They are no
sandbox: a program can read what this user can read.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.bench.evaluation.tasks.jsonl import Row, read_rows
from deploy.bench.evaluation.tasks.metrics import percentage
from deploy.bench.evaluation.tasks.task import Example, Scores, Task

OPTION = "--code"
MAX_TOKENS = 384
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
NOTE = "pass@1: the share of answers whose function passes the test of its line, run in a process with limits."
_SECONDS = 10
"""Longest run time of a program."""
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 1 << 20
_PASSED = 73
"""Exit code after the last line of a program: one that ends itself earlier does not pass."""
# The program runs in the same process, after the limits are set; it cannot raise them again.
_PRELUDE = f"""
import resource, sys
for kind, most in (("CPU", {_SECONDS}), ("AS", {_MEMORY_BYTES}), ("FSIZE", {_FILE_BYTES}), ("CORE", 0), ("NPROC", 0)):
    number = getattr(resource, "RLIMIT_" + kind)
    resource.setrlimit(number, (most, most))
source = open(sys.argv[1], encoding="utf-8").read()
exec(compile(source, "answer", "exec"), {{"__name__": "answer"}})
sys.exit({_PASSED})
"""


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


def passes(program: str, seconds: float = _SECONDS) -> bool:
    """Whether the program runs to its last line in time. It has no environment, no input and an empty directory."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "answer.py")
        file.write_text(program, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-c", _PRELUDE, str(file)]
        try:
            ended = subprocess.run(  # noqa: S603 - the user asked for it with an option of its own
                command,
                cwd=directory,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == _PASSED
