"""The structure: the direction of imports, the size of files and functions, the paths in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"cluster", "workers", "protos", "deploy", "tests", "helm"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
MORE_PARAMETERS = {
    "workers/serve/worker_server.py:host_draft": "it assembles a worker, once, from its parts",
    "workers/forward/attention.py:paged_attention_forward": "transformers calls every attention function with these",
    "cluster/generation/service.py:__init__": "it assembles the service, once, from its parts",
    "cluster/generation/text/tokenizer.py:__init__": "it assembles a tokenizer from what a model directory says",
    "cluster/ingress/http.py:create_app": "it assembles the HTTP API, once, from its parts",
}
"""Functions with more parameters, and why."""
FAULTS = {
    "the core imports the wire": ({"cluster/core/fault_wire.py": "import cluster.wire"}, "Layers, high to low"),
    "a worker imports the coordinator": (
        {"workers/draft/fault.py": "import cluster.coordinator"},
        "Workers know the core",
    ),
    "sampling imports the KV memory": ({"workers/sampling/fault.py": "import workers.kv"}, "Layers, high to low"),
    "the KV memory imports the forward pass": (
        {"workers/kv/fault_forward.py": "import workers.forward"},
        "Layers, high to low",
    ),
    "the control plane imports torch": ({"cluster/ingress/fault.py": "import torch"}, "The control plane imports"),
    "the control plane imports Ray": ({"cluster/coordinator/fault_ray.py": "import ray"}, "The control plane imports"),
    "the data plane imports deploy": ({"workers/serve/fault.py": "import deploy"}, "Layers, high to low"),
    "the verifier imports Ray": ({"workers/verify/fault.py": "import ray"}, "Ray places"),
    "the core reads the clock": ({"cluster/core/fault_time.py": "import time"}, "The core is pure"),
    "the coordinator reads protobuf": (
        {"cluster/coordinator/fault_protobuf.py": "import pilotfish.v1"},
        "Protobuf stays",
    ),
    "the client package imports the cluster": (
        {"pilotfish_client/fault.py": "import cluster.core"},
        "The client package stands alone",
    ),
    "the package for vLLM imports vLLM": ({"pilotfish_vllm/fault.py": "import vllm"}, "The package for vLLM needs"),
    "serving imports the benchmarks": (
        {"deploy/ray/fault_bench.py": "import deploy.bench"},
        "Serving imports no other",
    ),
    "serving imports training": (
        {"deploy/ray/fault_training.py": "import workers.distill"},
        "Serving does not import training",
    ),
    "two files import each other": (
        {
            "workers/kv/fault.py": "import workers.kv.fault_two",
            "workers/kv/fault_two.py": "import workers.kv.fault",
        },
        "No cycles",
    ),
    "two files import each other, one for types alone": (
        {
            "cluster/coordinator/fault.py": "import cluster.coordinator.fault_two",
            "cluster/coordinator/fault_two.py": (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cluster.coordinator.fault"
            ),
        },
        "No cycles",
    ),
    "two files import each other, one inside a function": (
        {
            "deploy/fault.py": "import deploy.fault_two",
            "deploy/fault_two.py": "def late():\n    import deploy.fault",
        },
        "No cycles",
    ),
}


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--config", "pyproject.toml", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(directory), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def source_files() -> list[Path]:
    """Every Python file of the project that a person wrote."""
    folders = ("cluster", "workers", "deploy", "tests", "protos/pilotfish_client", "protos/pilotfish_vllm")
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def line_count(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def copied_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__")
    for source in (
        "cluster",
        "workers",
        "deploy",
        "protos/pilotfish",
        "protos/pilotfish_client",
        "protos/pilotfish_vllm",
    ):
        shutil.copytree(ROOT / source, directory / Path(source).name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def test_the_contracts_hold(copied_sources: Path) -> None:
    outcome = lint(copied_sources)
    assert outcome.returncode == 0, outcome.stdout
    assert " 0 broken" in outcome.stdout


@pytest.fixture(scope="module")
def broken(copied_sources: Path) -> dict[str, str]:
    """For each contract that does not hold with all faults planted, by name, what the linter says of it."""
    planted = [(copied_sources / file, text) for files, _ in FAULTS.values() for file, text in files.items()]
    for file, text in planted:
        assert not file.exists()
        file.write_text(f"{text}\n", encoding="utf-8")
    try:
        outcome = lint(copied_sources)
    finally:
        for file, _ in planted:
            file.unlink()
    assert outcome.returncode != 0
    _, _, details = outcome.stdout.partition("Broken contracts")
    sections = re.split(r"^(.+)\n-+$", details, flags=re.M)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_breaks_its_contract(broken: dict[str, str], name: str) -> None:
    files, contract = FAULTS[name]
    (said,) = (text for title, text in broken.items() if title.startswith(contract))
    (file, text), *others = files.items()
    module = file.removesuffix(".py").replace("/", ".")
    if others:
        (cycles,) = re.findall(
            rf"^No cycles are allowed in {module.rpartition('.')[0]}\.\n((?:.*:)?(?:\n*- .*)*)", said, re.M
        )
        assert "- .fault_two -> .fault " in cycles
    else:
        assert f" {module} -> {text.removeprefix('import ')} (l.1)\n" in said


C_FAULTS = {
    "two sources call each other": {
        "fault.c": "void pilotfish_one(void)\n{\n    pilotfish_two();\n}\n",
        "fault_two.c": "void pilotfish_two(void)\n{\n    pilotfish_one();\n}\n",
    },
    "a macro defines one of two sources that call each other": {
        "fault.c": (
            "#define DEFINE(NAME) \\\nvoid pilotfish_many_##NAME(void) \\\n{ \\\n    pilotfish_two(); \\\n}\n"
            "DEFINE(float)\n"
        ),
        "fault_two.c": "void pilotfish_two(void)\n{\n    pilotfish_many_float();\n}\n",
    },
    "two headers include each other": {
        "fault.h": '#include "fault_two.h"\n',
        "fault_two.h": '#include "fault.h"\n',
    },
}


def c_sources() -> dict[str, str]:
    return {file.name: file.read_text("utf-8") for file in (ROOT / "workers/forward/native").glob("*.[ch]")}


def c_dependencies(sources: dict[str, str]) -> dict[str, set[str]]:
    """From each C file to those that it includes and to those that define functions which it calls."""
    code = {name: re.sub(r"/\*.*?\*/", "", text, flags=re.S) for name, text in sources.items()}
    defined = {
        function: name
        for name, text in code.items()
        for function in re.findall(r"^(?!static)[\w *]*?\b(pilotfish_\w+)(?:##\w+)?\([^;{]*?\)[\s\\]*\{", text, re.M)
    }

    def definition(function: str) -> str | None:
        prefixes = (one for one in defined if one.endswith("_") and function.startswith(one))  # a macro adds the rest
        return defined.get(function) or next((defined[prefix] for prefix in prefixes), None)

    found: dict[str, set[str]] = {}
    for name, text in code.items():
        called = {definition(function) for function in re.findall(r"\bpilotfish_\w+", text) if name.endswith(".c")}
        found[name] = ({*re.findall(r'#include "([\w.]+)"', text)} | {file for file in called if file}) - {name}
    return found


def cycles(dependencies: dict[str, set[str]]) -> set[str]:
    """The files that are on a cycle, or depend on one."""
    left = {name: set(files) for name, files in dependencies.items()}
    while free := [name for name, files in left.items() if not files & left.keys()]:
        for name in free:
            del left[name]
    return set(left)


def test_no_c_files_include_or_call_each_other() -> None:
    dependencies = c_dependencies(c_sources())
    assert "tiles.c" in dependencies["products.c"]  # calls are found
    assert "attention.c" in dependencies["decoder.c"]  # also of functions that a macro defines
    assert cycles(dependencies) == set()


@pytest.mark.parametrize("name", C_FAULTS)
def test_a_planted_cycle_of_c_files_is_found(name: str) -> None:
    assert cycles(c_dependencies(c_sources() | C_FAULTS[name])) == set(C_FAULTS[name])


def test_no_file_is_too_long() -> None:
    sizes = {str(file.relative_to(ROOT)): line_count(file) for file in source_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


class Function(NamedTuple):
    """What the tests read of a function. Whole trees of all files would be some million objects."""

    file: str
    name: str
    line: int
    lines: int
    parameters: int
    """Without `self` and `cls`."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all statements in it. Expressions, of which there are ten times as many, hold no functions."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            yield from statements(child)


def functions_of(file: Path) -> Iterator[Function]:
    path = file.relative_to(ROOT).as_posix()
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(parameter.arg not in {"self", "cls"} for parameter in given)
            yield Function(path, node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1, count)


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    return [function for file in source_files() for function in functions_of(file)]


def test_no_function_is_too_long(functions: list[Function]) -> None:
    sizes = {f"{one.file}:{one.line} {one.name}": one.lines for one in functions}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def test_no_function_of_the_product_has_too_many_parameters(functions: list[Function]) -> None:
    """A command has a parameter per option, and a kernel for GPUs one per tensor and stride."""
    too_many = {
        f"{one.file}:{one.name}": one.parameters
        for one in functions
        if one.parameters > MAX_PARAMETERS
        and not one.file.startswith(("tests/", "deploy/commands/"))
        and "/triton/" not in one.file
    }
    assert too_many.keys() <= MORE_PARAMETERS.keys(), too_many


def test_no_three_files_of_tests_share_a_name() -> None:
    names = Counter(file.name for file in (ROOT / "tests").rglob("*.py"))
    shared = {name for name, count in names.items() if count > 2}
    assert shared - {"__init__.py", "__main__.py", "conftest.py"} == set()


def pages() -> list[Path]:
    """Every page that a person reads."""
    return [*ROOT.glob("*.md"), *(ROOT / "deploy" / "docs").rglob("*.md"), ROOT / "helm" / "pilotfish" / "README.md"]


def test_every_path_that_a_page_names_exists() -> None:
    named = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        paths = re.findall(r"`((?:cluster|workers|protos|deploy|tests|helm|\.ci)/[^`\s:*]*)`", text)
        named += len(paths)
        missing = [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]
        assert [path for path in missing if path != "workers/draft/successor.py"] == [], page.name
    assert named > 100


@pytest.mark.parametrize(("page", "words"), [("README.md", 1000), ("ARCHITECTURE.md", 2200), ("BENCHMARKS.md", 2500)])
def test_a_page_is_as_long_as_its_reader_has_patience(page: str, words: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= words


def test_pages_at_the_root_stay_short() -> None:
    assert sum(page.stat().st_size for page in ROOT.glob("*.md")) <= 100_000
    assert (ROOT / "DECISIONS.md").stat().st_size <= 40_000


def test_every_link_between_the_pages_leads_to_a_file_and_a_heading() -> None:
    links = 0
    for page in pages():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            file = page.parent / target if target else page
            links += 1
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in _anchors(file), f"{page.name}: {target}#{anchor}"
    assert links > 60


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_the_top_level_is_the_given_one() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("the sources are not a git checkout")
    folders = {line.split("/", 1)[0] for line in tracked.stdout.splitlines() if "/" in line}
    assert folders - {".ci", ".github", ".devcontainer"} <= TOP_LEVEL
