"""Runs programs that a model wrote, in processes of their own with limits.

The limits bound time, memory, files and processes. They are no sandbox: a program can read what this user can read.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10
"""Longest run time of a program."""
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 1 << 20
_PASSED = 73
"""Exit code after the last line of a program: one that ends itself earlier does not pass."""
# The program runs in the same process, after the limits are set; it cannot raise them again.
_PRELUDE = f"""
import resource, sys
for kind, most in (("CPU", {SECONDS}), ("AS", {_MEMORY_BYTES}), ("FSIZE", {_FILE_BYTES}), ("CORE", 0), ("NPROC", 0)):
    number = getattr(resource, "RLIMIT_" + kind)
    resource.setrlimit(number, (most, most))
source = open(sys.argv[1], encoding="utf-8").read()
exec(compile(source, "answer", "exec"), {{"__name__": "answer"}})
sys.exit({_PASSED})
"""


def passes(program: str, seconds: float = SECONDS) -> bool:
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
