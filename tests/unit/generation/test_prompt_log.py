"""Conversations are stored as prompts of a distillation: by line, within a bound, and without anybody's name."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.errors import ConfigurationError
from cluster.generation import prompt_log
from cluster.generation.prompt_log import PromptLog
from cluster.generation.text.chat_messages import CalledTool, Message
from cluster.generation.text.prompts import ChatPrompt, TextPrompt, TokenPrompt
from workers.distill.prompts import read_prompts


def chat(*messages: tuple[str, str]) -> ChatPrompt:
    return ChatPrompt(tuple(Message(role, content) for role, content in messages))


HI = chat(("user", "hi"))
LINE_BYTES = len(prompt_log.as_line(HI) or b"")


@contextmanager
def logging_to(directory: Path, max_bytes: int = 1 << 20) -> Iterator[PromptLog]:
    """A log that is closed at the end, so that all is written then."""
    log = PromptLog(directory, "keys", max_bytes)
    log.start()
    yield log
    log.close()


def stored(directory: Path) -> list[tuple[str | None, tuple[str, ...]]]:
    """What `pilotfish distill --prompts` reads of the only file."""
    (file,) = directory.iterdir()
    return [(prompt.system, prompt.turns) for prompt in read_prompts(file)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class TestWhatIsStored:
    def test_distillation_reads_the_messages_of_system_and_users_in_order(self, tmp_path: Path) -> None:
        called = Message("assistant", "", tool_calls=(CalledTool("1", "look", "{}"),))
        calls = ChatPrompt((Message("user", "Look."), called, Message("tool", "a fish", tool_call_id="1")))
        with logging_to(tmp_path) as log:
            log.add(chat(("system", "Be brief."), ("user", "One?"), ("assistant", "No."), ("user", "Zwei, 世界?\n")))
            log.add(calls)
            log.add(HI)

        assert stored(tmp_path) == [("Be brief.", ("One?", "Zwei, 世界?\n")), (None, ("Look.",)), (None, ("hi",))]

    def test_the_developer_is_the_system(self, tmp_path: Path) -> None:
        with logging_to(tmp_path) as log:
            log.add(chat(("system", "Be brief."), ("developer", "Be kind."), ("user", "Hi"), ("system", " ")))

        assert stored(tmp_path) == [("Be brief.\n\nBe kind.", ("Hi",))]

    def test_of_a_conversation_that_was_sent_at_each_turn_the_longest_is_read(self, tmp_path: Path) -> None:
        with logging_to(tmp_path) as log:
            for turns in (["One?"], ["One?", "Two?"], ["One?", "Two?", "Three?"], ["One?", "Else?"]):
                log.add(chat(*(("user", turn) for turn in turns)))

        assert stored(tmp_path) == [(None, ("One?", "Two?", "Three?")), (None, ("One?", "Else?"))]

    def test_answers_names_texts_tokens_and_what_no_user_says_are_not_stored(self, tmp_path: Path) -> None:
        with logging_to(tmp_path) as log:
            log.add(TextPrompt("<|user|>a text"))
            log.add(TokenPrompt((1, 2, 3)))
            log.add(chat(("assistant", "an answer"), ("user", " \n")))
            log.add(ChatPrompt((Message("user", "hi", name="alice"), Message("assistant", "an answer"))))

        (file,) = tmp_path.iterdir()
        assert file.read_bytes() == b'{"messages": [{"role": "user", "content": "hi"}]}\n'


class TestFiles:
    def test_only_this_user_may_read_them(self, tmp_path: Path) -> None:
        with logging_to(tmp_path / "new" / "log") as log:
            log.add(HI)

        (file,) = (tmp_path / "new" / "log").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700

    def test_each_process_has_one_of_its_own(self, tmp_path: Path) -> None:
        with logging_to(tmp_path) as one, logging_to(tmp_path) as other:
            for _ in range(3):
                one.add(HI)
                other.add(chat(("user", "ho")))

        found = sorted(tuple(prompt.turns[0] for prompt in read_prompts(file)) for file in tmp_path.iterdir())
        assert found == [("hi",) * 3, ("ho",) * 3]

    def test_one_that_was_moved_away_is_left_alone(self, tmp_path: Path) -> None:
        log = PromptLog(tmp_path / "log", "keys", 1 << 20)
        log.start()
        log.add(HI)
        log.close()
        (file,) = (tmp_path / "log").iterdir()
        moved = file.rename(tmp_path / file.name)
        log.start()
        log.add(chat(("user", "later")))
        log.close()

        assert [prompt.turns for prompt in read_prompts(moved)] == [("hi",)]
        assert stored(tmp_path / "log") == [(None, ("later",))]

    def test_a_line_that_a_killed_process_left_is_not_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with logging_to(tmp_path) as log:
            log.add(HI)
            log.add(chat(("user", "世界")))
        (file,) = tmp_path.iterdir()
        whole = file.read_bytes()

        for size in range(LINE_BYTES + 1, len(whole) - 1):
            file.write_bytes(whole[:size])
            assert [prompt.turns for prompt in read_prompts(file)] == [("hi",)], size
        assert f"{file}, line 2 is left out: the file ends within it" in warnings(caplog)[0]

    def test_one_that_was_replaced_by_a_link_is_not_followed(self, tmp_path: Path) -> None:
        log, other = PromptLog(tmp_path / "log", "keys", 1 << 20), tmp_path / "other"
        other.write_bytes(b"")
        for number in range(2):
            log.start()
            log.add(HI)
            log.close()
            if number == 0:
                (file,) = (tmp_path / "log").iterdir()
                file.unlink()
                file.symlink_to(other)

        assert other.read_bytes() == b""


class TestTheBound:
    def test_nothing_is_added_beyond_it_and_one_warning_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "earlier.jsonl").write_bytes(b"x" * LINE_BYTES)
        with logging_to(tmp_path, 3 * LINE_BYTES) as log:
            for _ in range(9):
                log.add(HI)

        assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 3 * LINE_BYTES
        (warning,) = warnings(caplog)
        assert f"draft.prompt_log_directory: {tmp_path} is full (draft.prompt_log_bytes: {3 * LINE_BYTES})" in warning

    def test_it_goes_on_once_files_are_moved_away(self, tmp_path: Path) -> None:
        log = PromptLog(tmp_path, "keys", LINE_BYTES)
        for _ in range(2):
            log.start()
            log.add(HI)
            log.add(HI)
            log.close()
            (file,) = tmp_path.iterdir()
            assert file.stat().st_size == LINE_BYTES
            file.unlink()


class TestABrokenDisk:
    @pytest.mark.parametrize("kind", ["file", "others", "foreign", "unwritable"])
    def test_a_directory_that_cannot_be_used_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        directory = tmp_path / "log"
        if kind == "file":
            directory.write_text("")
        else:
            directory.mkdir(mode=0o700)
        if kind == "others":
            directory.chmod(0o777)
        if kind == "foreign":
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        if kind == "unwritable":
            monkeypatch.setattr(os, "access", lambda *_: False)
        with logging_to(directory) as log:
            log.add(HI)
            log.add(HI)

        (warning,) = warnings(caplog)
        assert f"draft.prompt_log_directory: {directory} cannot be used, no conversations are stored: " in warning
        assert kind == "file" or not list(directory.iterdir())

    @pytest.mark.parametrize("writes", [None, 5])
    def test_after_a_failed_write_nothing_follows_what_it_left(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, writes: int | None
    ) -> None:
        write = os.write

        def failing(descriptor: int, line: bytes) -> int:
            if b"hi" in line:
                return write(descriptor, line)
            if writes is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, line[:writes])

        monkeypatch.setattr(os, "write", failing)
        with logging_to(tmp_path) as log:
            for text in ("hi", "ho", "hi"):
                log.add(chat(("user", text)))

        (warning,) = warnings(caplog)
        assert "cannot be written, no conversations are stored until the next start" in warning
        assert stored(tmp_path) == [(None, ("hi",))]

    def test_a_disk_that_hangs_neither_delays_a_request_nor_fills_the_memory(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs = threading.Event()
        monkeypatch.setattr(os, "write", lambda _, line: hangs.wait() and len(line))
        monkeypatch.setattr(prompt_log, "_CLOSING_SECONDS", 0.01)
        monkeypatch.setattr(prompt_log, "_MAX_WAITING_CHARS", 10)
        with logging_to(tmp_path) as log:
            for _ in range(100):
                log.add(HI)
            assert log._waiting_chars == 10
        hangs.set()

        assert len(warnings(caplog)) == 2
        assert "is too slow: some conversations are not stored" in warnings(caplog)[0]
        assert "does not respond: some conversations are not stored" in warnings(caplog)[1]


class TestSettings:
    def test_without_a_directory_there_is_no_log(self) -> None:
        assert PromptLog.of(DraftSection()) is None
        assert PromptLog.of(DraftSection(learn="on", learn_directory="learned")) is None

    @pytest.mark.parametrize("learn_from", ["keys", "all"])
    def test_consent_is_that_of_learning_which_need_not_be_on(self, learn_from: Literal["keys", "all"]) -> None:
        log = PromptLog.of(DraftSection(prompt_log_directory="log", learn_from=learn_from))
        assert log is not None
        assert log.learn_from == learn_from

    def test_an_unknown_home_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"draft\.prompt_log_directory: needed a known user"):
            PromptLog.of(DraftSection(prompt_log_directory="~no.body/log"))

    def test_a_section_without_drafts_stores_nothing(self) -> None:
        """Clusters that a command starts for itself have such a section: what they are asked is no client's."""
        assert DraftSection(prompt_log_directory="log").disabled().prompt_log_directory is None

    def test_a_log_that_never_started_can_be_closed(self, tmp_path: Path) -> None:
        PromptLog(tmp_path, "keys", 1).close()
