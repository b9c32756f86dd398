"""Trainings of drafts that learn: order of clients, bounds of time, the learner's process, the server's memory."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.errors import ConfigurationError
from cluster.core.ids import CacheSalt
from cluster.core.request import SamplingParameters, SequenceStart
from tests.unit.serve.learning.served import (
    COMMAND,
    TIMES,
    Served,
    accepted,
    answers,
    learner_of,
    task_in,
    trees,
    wait_until,
)
from workers.draft.common.learning import CollectedText, Reservoir, salt_key
from workers.draft.common.modules.learned_modules import LearnedModules
from workers.serve.configuration import load_configuration
from workers.serve.learning.learner import Learner, start_learner
from workers.serve.learning.messages import Candidate
from workers.serve.learning.versions import MOST_BYTES, Versions


@pytest.fixture
def served(tmp_path: Path) -> Served:
    torch.set_num_threads(1)
    return Served(tmp_path)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The salt of each training. All fail."""
    salts: list[str] = []
    monkeypatch.setattr(Learner, "_candidate", lambda _, file: salts.append(task_in(file).training[0].start.cache_salt))
    return salts


def add(reservoir: Reservoir, salt: str, count: int, tokens: int = 8) -> None:
    start = SequenceStart(1, SamplingParameters(), CacheSalt(salt), allows_learning=True)
    for _ in range(count):
        hidden = torch.zeros(tokens, 48, dtype=torch.bfloat16)
        reservoir.add(CollectedText(start, tuple(range(tokens)), 0, hidden))


def test_a_client_with_too_few_texts_for_a_training_keeps_no_other_one_waiting(
    served: Served, trained: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The client's texts are so long that few are kept, and it sends the most."""
    served.reservoir = Reservoir(600_000)
    add(served.reservoir, "b/", 40)
    add(served.reservoir, "a/", 100, tokens=400)
    learner = learner_of(served)
    learner._options = replace(learner._options, least_held_back=6)
    held_back = {one.client: len(one.held_back) for one in served.reservoir.salts()}
    assert held_back["a"] < 6 <= held_back["b"]
    assert not learner.learn_once()
    assert trained == ["b/"]
    assert "draft.learn_text_bytes" in caplog.text


def test_clients_take_turns_and_so_do_their_salts(served: Served, trained: list[str]) -> None:
    """Neither many texts nor many salts of one client keep another one waiting."""
    learner = learner_of(served)
    salts = {"a/1": 60, "a/2": 50, "a/3": 40, "b/": 30}
    for _ in range(4):
        for salt, count in salts.items():
            add(served.reservoir, salt, count)
        learner.learn_once()
        learner.learn_once()
    assert trained == ["a/1", "b/", "a/2", "b/", "a/3", "b/", "a/1", "b/"]


def candidate_of(served: Served, directory: Path) -> Path:
    """A file with a candidate."""
    weights = {name: value + 1 for name, value in served.weights.of("").items()}
    with (directory / "candidate").open("wb") as file:
        Candidate(weights, (9, 9, 9), (5, 5, 5), (9, 9, 9)).write(file)
    return directory / "candidate"


def test_the_time_of_a_training_that_waits_for_a_processor_does_not_count(served: Served, tmp_path: Path) -> None:
    add(served.reservoir, "a/", 40)
    file = candidate_of(served, tmp_path)
    program = f"""
import sys, time
from pathlib import Path
time.sleep(3)
sys.stdout.buffer.write(Path({str(file)!r}).read_bytes())
"""
    learner = learner_of(served, command=(sys.executable, "-S", "-c", program), most_seconds=2.0)
    begun = time.monotonic()
    assert learner.learn_once()
    assert time.monotonic() - begun > 3


@pytest.mark.parametrize(
    ("program", "bounds", "reason"),
    [
        ("while True: pass", {"most_seconds": 0.3}, "it took more than 0.3 s of a processor"),
        ("import time; time.sleep(60)", {"most_wall_seconds": 0.3}, "it took more than 0.3 s without pauses"),
    ],
    ids=["processor", "wall"],
)
def test_a_training_that_takes_too_long_ends(
    served: Served, caplog: pytest.LogCaptureFixture, program: str, bounds: dict[str, Any], reason: str
) -> None:
    add(served.reservoir, "a/", 40)
    learner = learner_of(served, command=(sys.executable, "-c", program), **bounds)
    begun = time.monotonic()
    assert not learner.learn_once()
    assert time.monotonic() - begun < 50
    assert reason in caplog.text
    assert learner.status().failed == 1


def test_the_server_keeps_neither_weights_nor_texts_for_a_training(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training waits for a processor as long as others compute, and texts that are dropped meanwhile make room."""
    add(served.reservoir, "a/", 40)
    (texts,) = served.reservoir.salts()
    copies = [weakref.ref(text.hidden) for text in (*texts.training, *texts.left_out, *texts.held_back)]
    del texts
    of = served.weights.of

    def recorded(key: str) -> Mapping[str, torch.Tensor]:
        found = {name: value.clone() for name, value in of(key).items()}
        copies.extend(map(weakref.ref, found.values()))
        return found

    alive: list[bool] = []

    def waited(_: Learner, process: subprocess.Popen[bytes]) -> str:
        served.reservoir._texts.clear()
        alive.extend(one() is not None for one in copies)
        process.wait()
        return ""

    monkeypatch.setattr(served.weights, "of", recorded)
    monkeypatch.setattr(Learner, "_wait", waited)
    assert not learner_of(served, command=("true",)).learn_once()
    assert len(alive) > 40 and not any(alive)


def test_a_directory_that_cannot_be_read_any_more_changes_nothing_and_is_told_once(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    versions, key = Versions(tmp_path / "versions", served.weights), salt_key("a/")
    learned = {name: value + 1 for name, value in served.weights.of(key).items()}
    versions.store(key, learned, {}, after=0)
    learner = learner_of(served, Versions(tmp_path / "versions", served.weights))
    learner.start()
    calls: list[None] = []

    def unreadable(_: Versions) -> tuple[str, ...]:
        calls.append(None)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Versions, "changed", unreadable)
    wait_until(lambda: len(calls) > 5)
    learner.close()
    assert len(caplog.records) == 1 and "the versions cannot be read" in caplog.text
    name = next(iter(learned))
    assert torch.equal(served.weights.of(key)[name], learned[name].bfloat16().float())


def test_where_new_weights_have_no_memory_those_that_made_room_do_not_count(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(served)
    learner._most_salts = 1
    weights = served.weights.of("")
    learner._replace_or_take_files(salt_key("a/"), weights)
    assert learner.status().clients == 1
    own = served.weights.replace

    def without_memory(key: str, weights: Mapping[str, torch.Tensor] | None) -> None:
        if weights is not None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        own(key, weights)

    monkeypatch.setattr(served.weights, "replace", without_memory)
    learner._replace_or_take_files(salt_key("b/"), weights)
    assert learner.status().clients == 0


def test_the_room_of_versions_is_checked_when_a_server_starts(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(size: int, most: int | None) -> Learner:
        monkeypatch.setattr(LearnedModules, "saved_bytes", size)
        changes = {"draft.learn_directory": str(tmp_path / "versions"), "draft.learn_directory_bytes": most}
        learner = start_learner(load_configuration(served.values, changes), served.method, lambda: True)
        learner.close()
        return learner

    size = (1 << 20) - 1024  # and so much that says what was measured
    text = "draft.learn_directory_bytes: 3145728 is too small; 3 versions of one client take 3145731"
    with pytest.raises(ConfigurationError, match=text):
        started(size + 1, 3 << 20)
    assert started(size, 3 << 20)._versions._most_bytes == 3 << 20
    assert started(size, None)._versions._most_bytes == MOST_BYTES
    assert started(MOST_BYTES, None)._versions._most_bytes == 3 * (MOST_BYTES + 1024)


def test_the_process_ends_with_its_parent_and_before_others_while_its_libraries_are_loaded(tmp_path: Path) -> None:
    """The parent stops it for as long as requests run, perhaps at that time, and it has texts in its memory."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    program = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = (sys.executable, "-c", program, *COMMAND)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            wait_until(lambda: Path(f"/proc/{child}/oom_score_adj").read_text().strip() == "1000")
            os.kill(child, signal.SIGSTOP)
            assert state(child) != ""
            parent.kill()
            parent.wait()
            wait_until(lambda: state(child) in ("", "Z"))
        finally:
            parent.kill()
            if state(child) not in ("", "Z"):
                os.kill(child, signal.SIGKILL)


def state(process_id: int) -> str:
    """The state of a process; empty without one."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.slow
def test_a_training_that_is_killed_in_its_middle_costs_nothing_and_the_next_one_succeeds(
    served: Served, tmp_path: Path
) -> None:
    """The process has taken some of its steps when it is killed, once. Requests run before and after."""
    before = [served.serve() for _ in range(TIMES)][-1]
    reached = tmp_path / "reached"
    program = f"""
import os, signal
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
from deploy.distillation import learner_process
taken, reached = [], Path({str(reached)!r})
def count(*_):
    taken.append(1)
    if len(taken) == 20 and not reached.exists():
        Path(f"{{reached}}.part").write_text(str(os.getpid()))
        os.rename(f"{{reached}}.part", reached)
        signal.pause()
register_optimizer_step_post_hook(count)
learner_process.main()
"""
    versions = Versions(tmp_path / "versions", served.weights)
    learner = learner_of(served, versions, (sys.executable, "-c", program, "normal"))
    learner.start()
    wait_until(reached.exists)
    assert trees(served.serve()) == trees(before)

    os.kill(int(reached.read_text()), signal.SIGKILL)

    wait_until(lambda: learner.status().failed == 1)
    assert (learner.status().version, versions.served(salt_key("a/"))) == (0, 0)
    assert trees(served.serve()) == trees(before)
    for _ in range(TIMES):
        served.serve()
    wait_until(lambda: learner.status().taken == 1)
    learner.close()
    after = served.serve()
    assert answers(after) == answers(before) and accepted(after) > accepted(before)
