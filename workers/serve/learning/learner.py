"""Trains a drafter's weights in a process of its own while nothing is served, and replaces them by better ones.

Nothing here can fail a request: a process that crashes, takes too long or brings worse weights costs its own time.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cluster.core.config.base import with_home
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from cluster.core.ports import DraftMethod
from cluster.core.verification import LearningStatus
from workers.draft.common.learning import LearnedWeights, LearnsOnline, Reservoir, TextsOfSalt, salt_key
from workers.serve.learning.messages import Candidate, Task
from workers.serve.learning.versions import LEAST_VERSIONS, MOST_BYTES, Versions, version_bytes

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_PROCESS = "deploy.distillation.learner_process"
"""The module that trains. It belongs to another distribution, so it is named as text."""
_PRIORITY = "idle"
"""The process computes only where nobody else wants to."""
_CHECK_SECONDS = 0.005
"""Pause between two looks at whether requests run while the learner's process runs, in seconds: then it is stopped."""
_STOPPED_CHECK_SECONDS = 0.1
"""Pause between two looks while the learner's process is stopped: running requests share the interpreter with them."""
_FOLLOW_SECONDS = 0.25
"""Pause between two looks at the versions that somebody else has chosen, in seconds."""


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """With which process and when the learner trains, and how much memory learned weights may take."""

    command: tuple[str, ...] = (sys.executable, "-m", _PROCESS, _PRIORITY)
    """Starts a process that reads a `Task` from its standard input and writes a `Candidate` to its standard output.

    Both are files in memory.
    """
    weight_bytes: int = 256 << 20
    """Most memory for learned weights, in bytes."""
    directory_bytes: int = MOST_BYTES
    """Most bytes of stored versions."""
    fresh_texts: int = 32
    """Texts of a salt that must be new since its last training."""
    most_texts: int = 192
    """Most texts that a training sees: the latest ones, so that drafts follow traffic that changes."""
    most_held_back: int = 64
    """Most texts that weights are measured on: the latest ones."""
    most_left_out: int = 24
    """Most texts that choose the best state of a training: the latest ones."""
    least_held_back: int = 8
    """Fewest held-back texts that a candidate is measured on."""
    most_seconds: float = 600.0
    """Longest processor time of one training, in seconds."""
    most_wall_seconds: float = 86_400.0
    """Longest time of one training, pauses not counted, in seconds. Where others compute, it waits for a processor."""
    idle_seconds: float = 1.0
    """Time without a request before the learner goes on, in seconds."""


def start_learner(
    configuration: Configuration,
    method: DraftMethod | None,
    is_idle: Callable[[], bool],
    options: LearnerOptions = LearnerOptions(),
) -> Learner:
    """Begin to collect texts and to learn from them; see `DraftSection.learn`.

    `is_idle` says that no request runs. `options.weight_bytes` is for an unset `draft.learn_weight_bytes`, and
    `options.directory_bytes` for an unset `draft.learn_directory_bytes`. Raises `ConfigurationError` if the method
    cannot learn, and if its weights or the training are missing.
    """
    draft, target = configuration.draft, configuration.target
    weights = method.weights if isinstance(method, LearnsOnline) else None
    if not isinstance(method, LearnsOnline) or weights is None:
        raise ConfigurationError(f"draft.learn: on is refused; drafts of this format of {draft.name} cannot be trained")
    if find_spec(_PROCESS.rpartition(".")[0]) is None or find_spec(_PROCESS) is None:
        raise ConfigurationError("draft.learn: on needs the extra distill: pip install 'pilotfish[distill]'")
    needed = weights.bytes_each
    most = draft.learn_weight_bytes or max(options.weight_bytes, needed)
    if needed > most:
        raise ConfigurationError(f"draft.learn_weight_bytes: {most} is too small; one client's weights take {needed}")
    values = {
        "target": target.model_dump(mode="json") | {"device": "cpu", "tensor_parallel": 1},
        "draft": draft.model_dump(mode="json"),
    }
    directory = None if draft.learn_directory is None else with_home("draft.learn_directory", draft.learn_directory)
    reservoir = Reservoir(draft.learn_text_bytes or method.default_text_bytes)
    versions = Versions(directory, weights, _directory_bytes(draft, weights, options))
    learner = Learner(weights, reservoir, values, versions, is_idle, replace(options, weight_bytes=most))
    try:
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        learner.start()
    except OSError as error:
        raise ConfigurationError(f"draft.learn_directory: {directory} cannot be used: {error.strerror}") from None
    method.collect_into(reservoir)
    return learner


def _directory_bytes(draft: DraftSection, weights: LearnedWeights, options: LearnerOptions) -> int:
    """Most bytes of stored versions. Raises `ConfigurationError` if those of one client have no room."""
    if draft.learn_directory is None:
        return 0
    try:
        needed = LEAST_VERSIONS * version_bytes(weights)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"draft.learn: on is refused; the draft's files cannot be copied: {error}") from error
    most = draft.learn_directory_bytes or max(options.directory_bytes, needed)
    if needed > most:
        raise ConfigurationError(
            f"draft.learn_directory_bytes: {most} is too small; {LEAST_VERSIONS} versions of one client take {needed}"
        )
    return most


@dataclass(frozen=True, slots=True)
class _Training:
    """A training under way."""

    key: str
    """`salt_key` of the salt."""
    base: int
    """The version that it began with."""
    about: dict[str, object]
    """What is stored beside its weights."""


class Learner:
    """A thread that waits for texts and for idle time, and has one training at a time in a process of its own."""

    def __init__(
        self,
        weights: LearnedWeights,
        reservoir: Reservoir,
        configuration: Mapping[str, Any],
        versions: Versions,
        is_idle: Callable[[], bool],
        options: LearnerOptions,
    ) -> None:
        """`configuration` has the sections `draft` and `target`; `is_idle` says that no request runs."""
        self._weights = weights
        self._reservoir = reservoir
        self._configuration = configuration
        self._versions = versions
        self._is_idle = is_idle
        self._options = options
        self._most_salts = options.weight_bytes // max(1, weights.bytes_each)
        self._closing = threading.Event()
        self._trained: dict[str, int] = {}
        """Texts of each salt that its last training could see."""
        self._turns: dict[str, int] = {}
        """The number of the last training of each salt and of each client."""
        self._learned: tuple[str, ...] = ()
        """The keys of the salts with learned weights in memory, the latest last."""
        self._counts = {"taken": 0, "dropped": 0, "failed": 0}
        self._busy_at = 0.0
        self._has_warned = False
        self._is_directory_lost = False
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self.candidate: Candidate | None = None
        """What was measured of the last candidate, whether it was taken or not, without its weights."""

    def status(self) -> LearningStatus:
        """What was collected and learned so far."""
        candidate = self.candidate
        return LearningStatus(
            version=max((self._versions.served(key) for key in self._learned), default=0),
            clients=len(self._learned),
            texts=self._reservoir.seen,
            text_bytes=self._reservoir.stored_bytes,
            **self._counts,
            tokens_per_step_before=0.0 if candidate is None else candidate.tokens_per_step_before,
            tokens_per_step=0.0 if candidate is None else candidate.tokens_per_step,
        )

    def start(self) -> None:
        """Draft with the stored versions, and begin to learn."""
        self._versions.remove_unfinished()
        self._follow()
        self._thread.start()

    def close(self) -> None:
        """End a training under way, and the thread. Texts are dropped."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._reservoir.close()

    def learn_once(self) -> bool:
        """Train for a salt with enough new texts, if there is one. Returns whether weights were replaced."""
        texts = self._next_texts()
        if texts is None:
            return False
        training, task = self._begin(texts)
        del texts  # like the weights, they are in the file, and the reservoir may drop them
        with task:
            candidate = self._candidate(task)
        if candidate is None:
            self._counts["failed"] += 1
            return False
        self.candidate = replace(candidate, weights={})  # its memory is free once it is taken or dropped
        is_taken = candidate.is_better and self._take(training, candidate)
        self._counts["taken" if is_taken else "dropped"] += 1
        tau = (candidate.tokens_per_step_before, candidate.tokens_per_step)
        result = f"version {self._versions.served(training.key)} drafts from now on" if is_taken else "dropped"
        logger.info("new draft weights: %.2f tokens per step before, %.2f after: %s", *tau, result)
        return is_taken

    def _begin(self, texts: TextsOfSalt) -> tuple[_Training, IO[bytes]]:
        """A training of the latest texts, and the file with its task."""
        self._trained[texts.key] = texts.seen
        if texts.key not in self._learned:
            self._serve(texts.key)  # its weights may have been left out for lack of memory
        base, options = self._versions.served(texts.key), self._options
        task = Task(
            self._configuration,
            self._weights.of(texts.key),
            texts.training[-options.most_texts :],
            texts.left_out[-options.most_left_out :],
            texts.held_back[-options.most_held_back :],
            seed=base,
        )
        about = {
            "client": salt_key(f"{texts.client}/"),
            "texts": len(task.training),
            "held_back_texts": len(task.held_back),
        }
        file = _memory_file("task")
        task.write(file)
        file.seek(0)
        return _Training(texts.key, base, about), file

    def _next_texts(self) -> TextsOfSalt | None:
        """The texts of the salt whose turn it is, among those with enough of them; `None` if there is none.

        It is the turn of the client whose last training began first, and of its salt whose last one did.
        """
        salts, options, turns = self._reservoir.salts(), self._options, self._turns
        self._trained = {one.key: min(one.seen, self._trained.get(one.key, 0)) for one in salts}
        found = []
        for one in salts:
            if self._fresh(one) < options.fresh_texts:
                continue
            if len(one.held_back) < options.least_held_back:
                self._warn_of_memory(one)
            else:
                found.append(one)
        if not found:
            return None
        texts = min(found, key=lambda one: (turns.get(one.client, 0), turns.get(one.key, 0), -self._fresh(one)))
        known = {name for one in salts for name in (one.client, one.key)}
        turn = 1 + max(turns.values(), default=0)
        self._turns = {name: last for name, last in turns.items() if name in known}
        self._turns |= {texts.client: turn, texts.key: turn}
        return texts

    def _warn_of_memory(self, texts: TextsOfSalt) -> None:
        """Say once that a client's texts are dropped before there are enough for a training."""
        kept = len(texts.training) + len(texts.left_out) + len(texts.held_back)
        if kept < texts.seen and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "draft.learn_text_bytes: %d keeps the latest %d texts of a client, and nothing is learned from so few; "
                "a training needs %d that are held back, a quarter of all",
                *(self._reservoir.most_bytes, kept, self._options.least_held_back),
            )

    def _take(self, training: _Training, candidate: Candidate) -> bool:
        """Store the weights, then draft with them. Returns whether that worked."""
        measured = {
            "tokens_per_step_before": candidate.tokens_per_step_before,
            "tokens_per_step": candidate.tokens_per_step,
        }
        try:
            self._weights.check(candidate.weights)
            self._versions.store(training.key, candidate.weights, training.about | measured, after=training.base)
        except (OSError, ValueError) as error:
            logger.warning("new draft weights are dropped: %s", error)
            return False
        self._replace_or_take_files(training.key, candidate.weights)
        return True

    def _run(self) -> None:
        while not self._closing.wait(min(_FOLLOW_SECONDS, self._options.idle_seconds / 4)):
            try:
                self._follow_if_possible()
                if self._may_run():
                    self.learn_once()
            except Exception:
                logger.exception("the learner failed: the served weights stay")

    def _follow(self) -> None:
        """Draft with the versions that somebody else has chosen, as many as there is memory for: the latest ones."""
        changed = self._versions.changed()
        for key in changed:
            if key in self._learned or key in changed[-self._most_salts :]:
                self._serve(key)

    def _follow_if_possible(self) -> None:
        """Follow unless the directory cannot be read: then what is served stays."""
        try:
            self._follow()
        except OSError as error:
            if not self._is_directory_lost:
                logger.warning("draft.learn_directory: the versions cannot be read: %s", error)
            self._is_directory_lost = True
        else:
            self._is_directory_lost = False

    def _serve(self, key: str) -> None:
        """Draft with the version that is to be served for a salt. Instead of one that does not fit, the files' do."""
        try:
            weights = self._versions.read(key)
        except (OSError, ValueError) as error:
            logger.warning("stored draft weights are left out: %s", error)
            weights = None
        self._replace_or_take_files(key, weights)

    def _replace_or_take_files(self, key: str, weights: Mapping[str, Tensor] | None) -> None:
        """Draft with stored weights, or with the files' where there is no memory for them."""
        try:
            self._replace(key, weights)
        except RuntimeError as error:  # of torch without memory on the device
            logger.warning("stored draft weights are left out: %s", error)
            self._replace(key, None)

    def _replace(self, key: str, weights: Mapping[str, Tensor] | None) -> None:
        """Draft with the weights for a salt, and no more with the oldest ones beyond the memory for them."""
        learned = [other for other in self._learned if other != key]
        while weights is not None and len(learned) >= self._most_salts:
            self._weights.replace(learned.pop(0), None)
        self._learned = tuple(learned)  # another thread reads it
        self._weights.replace(key, weights)
        if weights is not None:
            self._learned = (*learned, key)

    def _fresh(self, texts: TextsOfSalt) -> int:
        return texts.seen - self._trained.get(texts.key, 0)

    def _may_run(self) -> bool:
        now = time.monotonic()
        if not self._is_idle():
            self._busy_at = now
        return now - self._busy_at >= self._options.idle_seconds

    def _candidate(self, task: IO[bytes]) -> Candidate | None:
        """What the learner's process brings; `None` if it fails, takes too long, or if this learner closes.

        Both travel in files that are mapped. A large draft from a pipe comes in small pieces, and joining and parsing
        them would keep the interpreter from the requests that run.
        """
        # It takes nothing of a GPU, and finds the modules that this process finds.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with _memory_file("candidate") as brought:
            process = subprocess.Popen(  # noqa: S603
                self._options.command, stdin=task, stdout=brought, env=environment
            )
            with process:
                try:
                    excess = self._wait(process)
                finally:
                    process.kill()
            while not self._closing.is_set() and not self._may_run():
                self._closing.wait(_STOPPED_CHECK_SECONDS)
            if self._closing.is_set():
                return None
            try:
                if excess or process.returncode != 0:
                    raise ValueError(excess or f"its process ended with {process.returncode}")
                return Candidate.read(Path(f"/proc/self/fd/{brought.fileno()}"))
            except ValueError as error:
                logger.warning("a training of the draft failed, and the served weights stay: %s", error)
                return None

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Let the process run while no request does, until it ends. Returns what it took too much of, else nothing."""
        ran, is_stopped, before, looked = 0.0, False, time.monotonic(), time.monotonic()
        options = self._options
        while not self._closing.is_set():
            if process.poll() is not None:
                return ""
            self._closing.wait(_STOPPED_CHECK_SECONDS if is_stopped else _CHECK_SECONDS)
            now = time.monotonic()
            ran, before = ran + (0.0 if is_stopped else now - before), now
            if is_stopped is self._may_run():
                is_stopped = not is_stopped
                process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)
            if now - looked >= _FOLLOW_SECONDS:
                looked = now
                self._follow_if_possible()
                if ran > options.most_wall_seconds:
                    return f"it took more than {options.most_wall_seconds:g} s without pauses"
                if _processor_seconds(process.pid) > options.most_seconds:
                    return f"it took more than {options.most_seconds:g} s of a processor"
        return ""


def _processor_seconds(process_id: int) -> float:
    """Processor time of a process that was not waited for, in seconds; see `/proc/[pid]/stat` in proc(5)."""
    values = Path(f"/proc/{process_id}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def _memory_file(name: str) -> IO[bytes]:
    """An empty file in memory, because no text may get to a disk."""
    return os.fdopen(os.memfd_create(name), "w+b")
