"""Counts what a reader meets: modules, packages, lines, parameters and pages, here and in another checkout.

A module of the product is a Python file below `cluster`, `workers` or `deploy`; generated ones and `__init__.py` do not
count. A module has one importer if one other module of the product names it in an `import`. Commands of the command
line have a parameter per option and kernels for GPUs one per tensor and stride, so their parameters do not count.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.bench.options import Options
from tests.bench.processes.serve_command import ROOT
from tests.bench.report import heading, table

PRODUCT = ("cluster", "workers", "deploy")
SMALL = 60
"""A module with fewer lines is small."""
MOST_PARAMETERS = 6


def run(options: Options) -> None:
    """Count and report."""
    heading("Structure of the product, its tests and its pages")
    here = counts(ROOT)
    if options.against is None:
        table(("what", "here"), [[name, f"{count:,}"] for name, count in here.items()])
        return
    there = counts(options.against)
    rows = [[name, f"{there[name]:,}", f"{count:,}"] for name, count in here.items()]
    table(("what", "other checkout", "here"), rows)


def counts(root: Path) -> dict[str, int]:
    """What is counted in the checkout at `root`, by name."""
    files = _files(root, PRODUCT, "*.py")
    modules = [file for file in files if file.name != "__init__.py"]
    trees = {file: ast.parse(file.read_text("utf-8")) for file in files}
    importers: Counter[str] = Counter()
    for file, tree in trees.items():
        importers.update(_imported(tree) - {_name(root, file)})
    c_files = [*_files(root, PRODUCT, "*.c"), *_files(root, PRODUCT, "*.h")]
    tests = _files(root, ("tests",), "*.py")
    small = [file for file in modules if _lines([file]) < SMALL]
    return {
        "modules": len(modules),
        "packages": sum(file.name == "__init__.py" for file in files),
        f"modules under {SMALL} lines": len(small),
        "of these with a single importer": sum(importers[_name(root, file)] == 1 for file in small),
        "lines of Python": _lines(files),
        "lines of C": _lines(c_files),
        "lines of tests": _lines(tests),
        f"functions with more than {MOST_PARAMETERS} parameters": sum(
            _crowded(tree) for file, tree in trees.items() if file.parent.name not in {"commands", "triton"}
        ),
        "longest module, lines": max(_lines([file]) for file in modules),
        "bytes of pages at the root": sum(file.stat().st_size for file in root.glob("*.md")),
    }


def _files(root: Path, folders: tuple[str, ...], pattern: str) -> list[Path]:
    return [
        file
        for folder in folders
        for file in sorted((root / folder).rglob(pattern))
        if "_pb2" not in file.name and "__pycache__" not in file.parts
    ]


def _name(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imported(tree: ast.Module) -> set[str]:
    """The modules that a file may mean by its imports: `from a import b` names `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _lines(files: list[Path]) -> int:
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def _crowded(tree: ast.Module) -> int:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(
        len([one for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if one.arg != "self"])
        > MOST_PARAMETERS
        for node in functions
    )
