"""Runs `llama-server` of llama.cpp, built here for the processor of this machine, in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import httpx

from tests.bench.processes.serve_command import LOOPBACK, POLL_SECONDS, ROOT
from workers.serve.node import free_port

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
"""The release of the Python package whose source has that of llama.cpp in it."""
ENVIRONMENTS = ROOT / ".venv" / "interop"
START_SECONDS = 120.0
_SOURCE = "*/vendor/llama.cpp"
_TILES = "vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
    "-DLLAMA_OPENSSL=OFF",
)


def missing_tools() -> str:
    """What building llama.cpp needs and this machine lacks, in words; empty if nothing is missing."""
    missing = [names[0] for names in (("cmake",), ("c++", "g++", "clang++")) if not any(map(shutil.which, names))]
    return f"llama.cpp is not built here: no {' and no '.join(missing)}" if missing else ""


def install(environments: Path = ENVIRONMENTS) -> Path:
    """The program `llama-server`. The first call builds it, which takes minutes; one that was cut off goes on.

    `CMAKE_BUILD_PARALLEL_LEVEL` bounds how many files are compiled at once. Raises `subprocess.CalledProcessError`.
    """
    home = (environments / f"llama-cpp-{VERSION}").resolve()
    build, program = home / "build", home / "build" / "bin" / "llama-server"
    if not any(home.glob(_SOURCE)):
        home.mkdir(parents=True, exist_ok=True)
        wanted = f"{PACKAGE}=={VERSION}"
        _run(
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", str(home), wanted
        )
        (archive,) = home.glob("*.tar.gz")
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            shutil.unpack_archive(archive, scratch, filter="data")
            (source,) = Path(scratch).iterdir()
            _keep_tile_configuration(source / _TILES)
            source.rename(home / source.name)
    (source,) = home.glob(_SOURCE)
    _run("cmake", "-S", str(source), "-B", str(build), *_OPTIONS)
    parallel = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
    _run("cmake", "--build", str(build), "--target", program.name, "--parallel", parallel)
    return program


def _keep_tile_configuration(file: Path) -> None:
    """Mend the set-up of AMX tiles: gcc drops its stores, and the first product on tiles is an illegal instruction.

    Its maintainers have this open (ggml-org/llama.cpp, pull request 26954). Raises `RuntimeError` for another source.
    """
    text, wrong = file.read_text(), "alignas(64) tile_config_t tc = {};"
    if text.count(wrong) != 1:
        raise RuntimeError(f"{file} is not that of {PACKAGE} {VERSION}: {wrong!r} is not there")
    file.write_text(text.replace(wrong, wrong.replace("tile_config_t", "static thread_local tile_config_t")))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


class LlamaServer:
    """Runs `llama-server` with a GGUF file inside `with`. Raises `RuntimeError` with its last output if it fails."""

    def __init__(self, program: Path, file: Path, *, together: int, context: int) -> None:
        """`together` requests of at most `context` tokens each run at once. A thread computes on each core."""
        self._command = [str(program), "--model", str(file), "--host", LOOPBACK]
        self._command += ["--parallel", str(together), "--ctx-size", str(together * context)]
        self._command += ["--threads", str(os.cpu_count() or 1), "--cache-ram", "0"]  # it keeps no prompts
        self.http_url = ""

    def __enter__(self) -> Self:
        port = free_port(LOOPBACK)
        self.http_url = f"http://{LOOPBACK}:{port}"
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*self._command, "--port", str(port)], stdout=self._output, stderr=subprocess.STDOUT
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._output.seek(0)
                raise RuntimeError(
                    f"llama-server did not start: {self._output.read().decode(errors='replace')[-2000:]}"
                )
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.http_url}/health", timeout=POLL_SECONDS * 10).is_success
        except httpx.TransportError:
            return False
