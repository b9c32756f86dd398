"""The two consoles of the command line: answers and tables on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

output = Console(highlight=False, soft_wrap=True, emoji=False)
notices = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def write_text(text: str) -> None:
    """Write a part of an answer to stdout at once, exactly as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write a value to stdout as JSON, with escapes where the output is not Unicode."""
    output.print_json(json.dumps(value), ensure_ascii=not output.encoding.startswith("utf"))


def notify(text: str) -> None:
    """Write one line to stderr."""
    notices.print(text, markup=False)
