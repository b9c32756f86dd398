"""A tiny target with a chat template, and `pilotfish bench` for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import tiny, tiny_tokenizer
from tests.support.terminal import run_command

SETTINGS = ("target.device=cpu", "target.compile=off", "target.kv.pool_bytes=4194304", "draft.controller=off")


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "target"
    tiny_tokenizer.byte_level(tiny.save(directory, tiny.llama(vocab_size=320, head_dim=8)))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory


def command(target: Path, *words: str) -> int:
    """Run `pilotfish bench` with these words. Returns its exit code."""
    settings = [part for setting in (f"target.path={target}", *SETTINGS) for part in ("--set", setting)]
    return run_command("bench", *words, *settings)
