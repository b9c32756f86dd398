"""Hidden states are stored only where all of them fit on the disk, which is asked before anything is computed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.modules.tap_cache import TapCache, stored_bytes

TAPS, HIDDEN_SIZE, LONGEST = (0, 2), 48, 16
ANSWERS = [Answer(f"prompts:{number}", "", 0.0, False, (1,) * 5, (2,) * (number + 1)) for number in range(3)]
LONG = Answer("long", "", 0.0, False, (1,) * 5, (2,) * 100)


def test_a_token_takes_two_bytes_for_each_value_of_each_tap() -> None:
    assert stored_bytes(tokens=1_000, width=3 * 4_096) == 24_576_000
    assert stored_bytes(tokens=0, width=3 * 4_096) == 0


def test_answers_that_do_not_fit_on_the_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored answers need no more room, and long ones only that of their first tokens."""
    stored = TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)
    line = {"key": ANSWERS[0].key, "tokens": 6, "checksum": stored._checksum(ANSWERS[0])}
    (tmp_path / "taps-0-2.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "taps-0-2.bfloat16").write_bytes(bytes(stored_bytes(6, len(TAPS) * HIDDEN_SIZE)))
    cache = TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)
    assert cache.has(ANSWERS[0])
    disk = SimpleNamespace(free=2 * (7 + 8 + LONGEST) * HIDDEN_SIZE * len(TAPS))
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: disk if directory == tmp_path else None)
    cache.check_space([*ANSWERS, LONG], "--work")
    disk.free -= 1
    needed = "the hidden states of 31 tokens take 5,952 bytes, and its disk has 5,951 free"
    with pytest.raises(ConfigurationError, match=re.escape(f"--work: {tmp_path} is refused; {needed}")):
        cache.check_space([*ANSWERS, LONG], "--work")
