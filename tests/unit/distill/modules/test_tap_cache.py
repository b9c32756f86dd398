"""Hidden states are stored only where all of them fit on the disk, which is asked before anything is computed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.modules import module_trainer, tap_cache
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


def test_a_line_of_the_index_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    """Here the disk was full in the middle of the line."""

    def read(rows: Sequence[Sequence[int]], *_: object) -> list[Tensor]:
        return [torch.full((len(row), len(TAPS) * HIDDEN_SIZE), len(row), dtype=torch.bfloat16) for row in rows]

    TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST).fill(read, ANSWERS[:1], lambda done, wanted: None)
    with (tmp_path / "taps-0-2.jsonl").open("ab") as index:
        index.write(b'{"key": "prompts:1", "tok')

    TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST).fill(read, ANSWERS, lambda done, wanted: None)

    cache = TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)
    assert [set(cache.of(answer).flatten().tolist()) for answer in ANSWERS] == [{6}, {7}, {8}]


def states_of(rows: Sequence[Sequence[int]], *_: object) -> list[Tensor]:
    """Hidden states whose values are all the number of tokens of their text."""
    return [torch.full((len(row), len(TAPS) * HIDDEN_SIZE), len(row), dtype=torch.bfloat16) for row in rows]


def test_what_another_process_has_stored_meanwhile_stays(tmp_path: Path) -> None:
    """A command looks at what is stored, and computes what is missing only once its target has started."""
    first, second = (TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST) for _ in range(2))

    first.fill(states_of, ANSWERS[:2], lambda done, wanted: None)
    second.fill(states_of, ANSWERS[1:], lambda done, wanted: None)

    for cache in (second, TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)):
        assert [set(cache.of(answer).flatten().tolist()) for answer in ANSWERS] == [{6}, {7}, {8}]
    assert (tmp_path / "taps-0-2.bfloat16").stat().st_size == stored_bytes(6 + 7 + 8, len(TAPS) * HIDDEN_SIZE)


def test_two_processes_never_store_hidden_states_at_the_same_time(tmp_path: Path) -> None:
    """The index of each would name rows of the other one."""

    def read(rows: Sequence[Sequence[int]], *_: object) -> list[Tensor]:
        with pytest.raises(ConfigurationError, match=r"taps .*taps-0-2\.jsonl: another process has it open"):
            TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST).fill(states_of, ANSWERS, lambda done, wanted: None)
        return states_of(rows)

    cache = TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)
    cache.fill(read, ANSWERS[:1], lambda done, wanted: None)

    assert set(cache.of(ANSWERS[0]).flatten().tolist()) == {6}


def test_a_command_that_lacks_no_hidden_states_waits_for_no_writer(tmp_path: Path) -> None:
    TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST).fill(states_of, ANSWERS[:1], lambda done, wanted: None)

    def read(rows: Sequence[Sequence[int]], *_: object) -> list[Tensor]:
        TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST).fill(states_of, ANSWERS[:1], lambda done, wanted: None)
        return states_of(rows)

    cache = TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)
    cache.fill(read, ANSWERS, lambda done, wanted: None)

    assert all(map(cache.has, ANSWERS))


def test_files_have_a_bounded_size_and_an_interruption_between_two_loses_one_answer_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is whole in one file; one that is longer than a file has it alone."""
    answers = [Answer(f"prompts:{number}", "", 0.0, False, (1,) * 5, (number,) * 3) for number in range(7)]
    monkeypatch.setattr(tap_cache, "_FILE_BYTES", stored_bytes(20, len(TAPS) * HIDDEN_SIZE))
    monkeypatch.setattr(tap_cache, "_BATCH_TOKENS", 8)

    def read(rows: Sequence[Sequence[int]], *_: object) -> list[Tensor]:
        return [torch.full((len(row), len(TAPS) * HIDDEN_SIZE), row[-1], dtype=torch.bfloat16) for row in rows]

    def killed(rows: Sequence[Sequence[int]], *_: object) -> list[Tensor]:
        if rows[0][-1] == 5:
            raise KeyboardInterrupt
        return read(rows)

    with pytest.raises(KeyboardInterrupt):
        TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST).fill(killed, answers, lambda done, wanted: None)
    with (tmp_path / "taps-0-2.2.bfloat16").open("ab") as rows:
        rows.write(b"rows without a line in the index")
    cache = TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)
    assert [cache.has(answer) for answer in answers] == [True] * 5 + [False] * 2
    cache.fill(read, answers, lambda done, wanted: None)

    sizes = {file.name: file.stat().st_size for file in tmp_path.glob("*.bfloat16")}
    row = len(TAPS) * HIDDEN_SIZE
    names = ("taps-0-2.bfloat16", *(f"taps-0-2.{number}.bfloat16" for number in (1, 2, 3)))
    assert sizes == dict(zip(names, (stored_bytes(tokens, row) for tokens in (16, 16, 16, 8)), strict=True))
    for found in (cache, TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)):
        assert [set(found.of(answer).flatten().tolist()) for answer in answers] == [{number} for number in range(7)]
        assert all(found.of(answer).shape == (8, row) for answer in answers)
    monkeypatch.setattr(tap_cache, "_FILE_BYTES", 1)
    other = TapCache(tmp_path / "other", TAPS, HIDDEN_SIZE, LONGEST)
    other.fill(read, answers[:2], lambda done, wanted: None)
    assert len(list((tmp_path / "other").glob("*.bfloat16"))) == 2


def test_a_line_of_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taps-0-2.jsonl").write_text('{"key": "a", "tokens": 3, "checksum": 1, "file": 2}\n')
    with pytest.raises(ConfigurationError, match="at byte 0 is refused"):
        TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)


@pytest.mark.parametrize("line", ['{"key": "a", "tok{"key": "b"}', '{"key": "a", "tokens": 3}', "[]"])
def test_an_index_with_a_line_that_says_nothing_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "taps-0-2.jsonl").write_text(f"{line}\n")
    with pytest.raises(ConfigurationError, match=r"taps-0-2\.jsonl: .* at byte 0 is refused; .* taps-0-2\.bfloat16$"):
        TapCache(tmp_path, TAPS, HIDDEN_SIZE, LONGEST)


@pytest.mark.parametrize("minutes", [None, 2.0])
def test_with_minutes_a_disk_that_may_become_full_is_only_told(
    minutes: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    options = SimpleNamespace(work_directory=tmp_path, minutes=minutes, max_length=512)
    data = SimpleNamespace(held_out=ANSWERS[:1], train=ANSWERS[1:], evaluation=())
    job = SimpleNamespace(target=tmp_path, notices=SimpleNamespace(print=told.append))
    run: Any = SimpleNamespace(job=job, options=options, data=data)
    card: Any = SimpleNamespace(taps=TAPS, hidden_size=HIDDEN_SIZE)
    monkeypatch.setattr(module_trainer, "states_of", lambda *_: tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    lack = "the hidden states of 21 tokens take 4,032 bytes, and its disk has 9 free"
    if minutes is None:
        with pytest.raises(ConfigurationError, match=f"--work: .* is refused; {lack}"):
            module_trainer.states_that_fit(run, card)
    else:
        module_trainer.states_that_fit(run, card)
        assert told == [f"--work: {tmp_path}: {lack}; --minutes has to end before the disk is full"]


@pytest.mark.parametrize(("longest", "stored"), [(512, 4096), (5000, 5000)])
def test_all_tokens_of_a_text_that_is_trained_on_have_hidden_states(
    longest: int, stored: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SimpleNamespace(work_directory=tmp_path, minutes=None, max_length=longest)
    data = SimpleNamespace(held_out=(), train=ANSWERS, evaluation=())
    run: Any = SimpleNamespace(job=SimpleNamespace(target=tmp_path), options=options, data=data)
    card: Any = SimpleNamespace(taps=TAPS, hidden_size=HIDDEN_SIZE)
    monkeypatch.setattr(module_trainer, "states_of", lambda *_: tmp_path)

    assert module_trainer.states_that_fit(run, card).max_length == stored
