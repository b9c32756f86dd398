"""Trains a drafter's weights in a process of its own while nothing is served, and replaces them by better ones.

Nothing here can fail a request: a process that crashes, takes too long or brings worse weights costs its own time.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.draft.common.learning import LearnsOnline, Reservoir, TextsOfSalt
from workers.serve.learning.messages import Candidate, Task
from workers.serve.learning.versions import Versions

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.02
"""Pause between two looks at whether requests run, in seconds: while they do, the learner's process is stopped."""


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """With which process and when the learner trains."""

    command: tuple[str, ...]
    """Starts a process that reads a `Task` from its standard input and writes a `Candidate` to its standard output.
    Training is no part of serving, so whoever makes the learner names it."""
    fresh_texts: int = 32
    """Texts of a salt that must be new since its last training."""
    least_held_back: int = 8
    """Fewest held-back texts that a candidate is measured on."""
    most_seconds: float = 600.0
    """Longest time of one training, pauses not counted, in seconds."""
    idle_seconds: float = 1.0
    """Time without a request before the learner goes on, in seconds."""


class Learner:
    """A thread that waits for texts and for idle time, and has one training at a time in a process of its own."""

    def __init__(
        self,
        method: LearnsOnline,
        reservoir: Reservoir,
        configuration: Mapping[str, Any],
        versions: Versions,
        is_idle: Callable[[], bool],
        options: LearnerOptions,
    ) -> None:
        """`configuration` has the sections `draft` and `target`; `is_idle` says that no request runs."""
        self._method = method
        self._reservoir = reservoir
        self._configuration = configuration
        self._versions = versions
        self._is_idle = is_idle
        self._options = options
        self._closing = threading.Event()
        self._trained: dict[str, int] = {}
        self._busy_at = 0.0
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self.candidate: Candidate | None = None
        """The last measured candidate, whether it was taken or not."""

    def start(self) -> None:
        """Draft with the stored versions, and begin to collect and to learn."""
        for key in self._versions.changed():
            self._serve(key)
        self._method.collect_into(self._reservoir)
        self._thread.start()

    def close(self) -> None:
        """End a training under way, and the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def learn_once(self) -> bool:
        """Train for the salt with the most new texts, if there are enough. Returns whether weights were replaced."""
        texts = max(self._reservoir.salts(), key=self._fresh, default=None)
        options = self._options
        if texts is None or self._fresh(texts) < options.fresh_texts or len(texts.held_back) < options.least_held_back:
            return False
        self._trained[texts.key] = texts.seen
        task = Task(
            self._configuration,
            self._method.weights_of(texts.key),
            texts.training,
            texts.held_back,
            seed=self._versions.served(texts.key),
        )
        candidate = self.candidate = self._candidate(task.encode())
        if candidate is None:
            return False
        tau = (candidate.tokens_per_step_before, candidate.tokens_per_step)
        if not candidate.is_better:
            logger.info("new draft weights are dropped: %.2f tokens per step before, %.2f after", *tau)
            return False
        self._method.replace_weights(texts.key, candidate.weights)  # before it is stored, as it checks the weights
        version = self._versions.store(texts.key, candidate.weights)
        logger.info("draft weights are replaced by version %d: %.2f tokens per step before, %.2f after", version, *tau)
        return True

    def _run(self) -> None:
        while not self._closing.wait(self._options.idle_seconds / 4):
            try:
                for key in self._versions.changed():
                    self._serve(key)
                if self._may_run():
                    self.learn_once()
            except Exception:
                logger.exception("the learner failed: the served weights stay")

    def _serve(self, key: str) -> None:
        """Draft with the version that is to be served for a salt. One that does not fit is left out."""
        try:
            self._method.replace_weights(key, self._versions.weights(key))
        except (OSError, ValueError) as error:
            logger.warning("stored draft weights are left out: %s", error)

    def _fresh(self, texts: TextsOfSalt) -> int:
        return texts.seen - self._trained.get(texts.key, 0)

    def _may_run(self) -> bool:
        now = time.monotonic()
        if not self._is_idle():
            self._busy_at = now
        return now - self._busy_at >= self._options.idle_seconds

    def _candidate(self, task: bytes) -> Candidate | None:
        """What the learner's process brings; `None` if it fails, takes too long, or if this learner closes."""
        with os.fdopen(os.memfd_create("learning"), "w+b") as given:  # no text is written to a disk
            given.write(task)
            given.seek(0)
            with subprocess.Popen(self._options.command, stdin=given, stdout=subprocess.PIPE) as process:  # noqa: S603
                try:
                    data = self._wait(process)
                finally:
                    process.kill()
        if self._closing.is_set():
            return None
        try:
            if data is None or process.returncode != 0:
                raise ValueError(f"its process ended with {process.returncode}")
            return Candidate.decode(data)
        except ValueError as error:
            logger.warning("a training of the draft failed, and the served weights stay: %s", error)
            return None

    def _wait(self, process: subprocess.Popen[bytes]) -> bytes | None:
        ran, is_stopped, before = 0.0, False, time.monotonic()
        while not self._closing.is_set() and ran < self._options.most_seconds:
            try:
                data, _ = process.communicate(timeout=_CHECK_SECONDS)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                ran, before = ran + (0.0 if is_stopped else now - before), now
                if is_stopped is self._may_run():
                    is_stopped = not is_stopped
                    process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)
                continue
            return data
        return None
