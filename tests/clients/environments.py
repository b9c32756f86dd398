"""Virtual environments of other programs: one each, installed from a file of pins."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).resolve().parent / "pins"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
_MARK = ".installed"


@dataclass(frozen=True)
class ClientKind:
    """One client: its environment and its script."""

    name: str
    script: str
    pins: str = ""
    """The file of pins, without its suffix; empty for the client's name."""
    uses_project: bool = False
    """Whether it needs torch, which it finds in the environment of the project instead of installing it again."""
    wheels: tuple[str, ...] = ()
    """Directories of the project that are built into wheels and installed."""
    names_all: bool = False
    """Whether the pins name all that is installed, so that the packages' own dependencies are not looked at."""


KINDS = (
    ClientKind("openai", "openai_client.py"),
    ClientKind("langchain", "langchain_client.py"),
    ClientKind("litellm", "litellm_client.py"),
    ClientKind("anthropic", "anthropic_client.py"),
    ClientKind("vllm-bench-payloads", "vllm_payloads.py", pins="openai"),
    ClientKind("grpc-reflection", "reflection_client.py"),
    ClientKind("pilotfish-client", "pilotfish_client_wheel.py", wheels=("protos",)),
    ClientKind("guidellm", "guidellm_client.py", uses_project=True),
    ClientKind("lm-eval", "lm_eval_client.py", uses_project=True),
)


def install(kind: ClientKind, directory: Path, pinned: Path = PINS) -> Path:
    """Make the environment of a client, unless it is up to date. Returns its Python.

    `pinned` has the files of pins. Wheels of the project are built and installed each time. Raises
    `subprocess.CalledProcessError`.
    """
    pins = pinned / f"{kind.pins or kind.name}.txt"
    home = directory / (kind.pins or kind.name)
    python, mark = home / "bin" / "python", home / _MARK
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if not mark.exists() or mark.read_text() != digest:
        _run(sys.executable, "-m", "venv", "--clear", str(home))
        if kind.uses_project:
            inside = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
            (Path(inside) / "project.pth").write_text(sysconfig.get_path("purelib"))
        alone = ("--no-deps",) if kind.names_all else ()
        _run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *alone, "-r", str(pins))
        mark.write_text(digest)
    if kind.wheels:
        _install_wheels(python, kind, home / "wheels")
    return python


def _install_wheels(python: Path, kind: ClientKind, wheels: Path) -> None:
    shutil.rmtree(wheels, ignore_errors=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "-q", "--no-deps", "-w", str(wheels), *(str(ROOT / source) for source in kind.wheels))
    _run(*pip, "install", "-q", "--no-deps", "--force-reinstall", *map(str, wheels.glob("*.whl")))
    if not kind.names_all:
        _run(*pip, "check")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)
