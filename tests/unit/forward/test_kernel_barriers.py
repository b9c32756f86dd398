"""Programs that share work by a counter: no thread counts before all have stored, or loads before it is counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import workers


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """The calls of a function of `triton.language`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tl.{name}":
            yield node


def test_a_counter_of_programs_stands_between_two_barriers() -> None:
    found = []
    for path in Path(workers.__path__[0]).rglob("triton/*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            barriers = [call.lineno for call in calls(function, "debug_barrier")]
            for counted in calls(function, "atomic_add"):
                if "acq_rel" in ast.unparse(counted):
                    found.append(f"{path.name}: {function.name}")
                    assert min(barriers) < counted.lineno < max(barriers), found[-1]
    assert len(found) == 3, found
