"""The two consoles of the command line: answers and tables on stdout, everything else on stderr."""

from __future__ import annotations

import sys

from rich.console import Console

output = Console(highlight=False, soft_wrap=True, emoji=False)
notices = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def write_text(text: str) -> None:
    """Write a part of an answer to stdout at once, exactly as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def notify(text: str) -> None:
    """Write one line to stderr."""
    notices.print(text, markup=False)
