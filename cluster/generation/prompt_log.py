"""A log of conversations whose clients let drafts learn from them: prompts for `pilotfish distill --prompts FILE`.

It holds what distillation reads, the messages of the system and of the users. Answers are not stored, neither new nor
earlier ones, because the target answers each message again when a draft is distilled. Nothing stored names the client,
its API key or the request.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import stat
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cluster.core.config.base import with_home
from cluster.core.config.draft_section import DraftSection
from cluster.generation.text.prompts import ChatPrompt, Prompt

logger = logging.getLogger(__name__)

SETTING = "draft.prompt_log_directory"
_MAX_WAITING_CHARS = 1 << 24
"""Most characters of conversations that wait in memory for a slow disk."""
_CLOSING_SECONDS = 5.0
"""Longest time that `close` waits for the disk, in seconds."""


class PromptLog:
    """Appends conversations to a JSONL file in a directory, a line each, in a thread of its own.

    Each process has a file of its own, so several may share the directory. A line is written at the end of the file by
    one call, so a process that is killed leaves complete lines, and at most one begun line after them. A full, slow or
    broken disk causes one warning and conversations that are not stored, never an error or a wait.
    """

    def __init__(self, directory: Path, learn_from: Literal["keys", "all"], max_bytes: int) -> None:
        """All files of the directory together take at most `max_bytes`, or a line more for each further process."""
        self.learn_from = learn_from
        """Whose conversations are stored, as in `DraftSection.learn_from`."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._file: Path | None = None
        self._waiting: queue.SimpleQueue[ChatPrompt | None] = queue.SimpleQueue()
        self._waiting_chars = 0
        self._lock = threading.Lock()
        self._warnings: set[str] = set()
        self._writer: threading.Thread | None = None

    @classmethod
    def of(cls, draft: DraftSection) -> PromptLog | None:
        """The log of a configuration; `None` without one. Raises `ConfigurationError`."""
        if draft.prompt_log_directory is None:
            return None
        return cls(with_home(SETTING, draft.prompt_log_directory), draft.learn_from, draft.prompt_log_bytes)

    def start(self) -> None:
        """Start the thread, which makes the directory."""
        self._writer = threading.Thread(target=self._run, name="prompt-log", daemon=True)
        self._writer.start()

    def add(self, prompt: Prompt) -> None:
        """Queue a conversation, and return at once. It is dropped if too many wait.

        A text without roles is left out: distillation asks each prompt by the chat template, and such a text was
        written for none, or has the template in it.
        """
        if not isinstance(prompt, ChatPrompt):
            return
        with self._lock:
            is_full = self._waiting_chars + prompt.chars > _MAX_WAITING_CHARS
            if not is_full:
                self._waiting_chars += prompt.chars
                self._waiting.put(prompt)
        if is_full:
            self._warn("the disk under %s is too slow: some conversations are not stored", self._directory)

    def close(self) -> None:
        """Write what waits and end the thread, within a few seconds."""
        if self._writer is None:
            return
        self._waiting.put(None)
        self._writer.join(_CLOSING_SECONDS)
        if self._writer.is_alive():
            self._warn("the disk under %s does not respond: some conversations are not stored", self._directory)

    def _run(self) -> None:
        is_usable = True
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (fault := directory_fault(self._directory)) is not None:
                raise OSError(fault)
        except OSError as error:
            is_usable = False
            self._warn("%s cannot be used, no conversations are stored: %s", self._directory, error)
        while (prompt := self._waiting.get()) is not None:
            try:
                if is_usable and (line := as_line(prompt)) is not None:
                    self._append(line)
            except OSError as error:  # what was written of the line stays the file's end: nothing follows it
                is_usable = False
                text = "%s cannot be written, no conversations are stored until the next start: %s"
                self._warn(text, self._directory, error)
            finally:
                with self._lock:
                    self._waiting_chars -= prompt.chars

    def _append(self, line: bytes) -> None:
        """Append a line if there is room. Raises `OSError`."""
        if _stored_bytes(self._directory) + len(line) > self._max_bytes:
            text = "%s is full (draft.prompt_log_bytes: %d): no conversations are stored until its files are moved away"
            self._warn(text, self._directory, self._max_bytes)
            return
        descriptor = self._opened()
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if written < len(line):
            raise OSError(f"{written} of {len(line)} bytes were written")

    def _opened(self) -> int:
        """Open this process's file, or begin another one if it was moved away. Raises `OSError`."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._file is not None:
            try:
                return os.open(self._file, flags)
            except FileNotFoundError:
                pass
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self._file = self._directory / f"prompts-{now}-{secrets.token_hex(4)}.jsonl"
        return os.open(self._file, flags | os.O_CREAT | os.O_EXCL, 0o600)

    def _warn(self, text: str, *values: object) -> None:
        """Log a warning once."""
        with self._lock:
            is_new = text not in self._warnings
            self._warnings.add(text)
        if is_new:
            logger.warning(f"{SETTING}: {text}", *values)


def as_line(prompt: ChatPrompt) -> bytes | None:
    """The line of a conversation; `None` if no user says anything in it.

    All messages of the system and of the developer become one, as distillation reads one. The line is ASCII, so that a
    line that was cut is still text.
    """
    said = [message for message in prompt.messages if message.content.strip()]
    system = "\n\n".join(message.content for message in said if message.role in ("system", "developer"))
    users = [message.content for message in said if message.role == "user"]
    if not users:
        return None
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": content} for content in users]
    return json.dumps({"messages": messages}).encode() + b"\n"


def _stored_bytes(directory: Path) -> int:
    """Bytes of all files in a directory. Raises `OSError`."""
    stored = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it was moved away meanwhile
                stored += entry.stat(follow_symlinks=False).st_size
    return stored


def directory_fault(directory: Path) -> str | None:
    """Why conversations are not stored in an existing directory; `None` if only this user may write to it.

    Raises `OSError` if there is no such directory.
    """
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it; run `chmod go-w {directory}`"
    return None if os.access(directory, os.R_OK | os.W_OK | os.X_OK) else "this user may not write to it"
