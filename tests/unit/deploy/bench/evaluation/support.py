"""Small data for the tests of `pilotfish bench tasks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FUNCTION = {
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}


def write_jsonl(directory: Path, *rows: dict[str, Any], name: str = "data.jsonl") -> Path:
    """Write one line per row."""
    file = directory / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
