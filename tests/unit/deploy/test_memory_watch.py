"""A process that is ended because memory is short is one line: who, why, what to set. It is a drafter if possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import machine
from deploy.ray.memory_watch import MemoryGuard, MemoryWatch, WatchedProcess

CONTROLLER = WatchedProcess(1, "ray::ServeController", 9 << 30)
TARGET = WatchedProcess(2, "ray::FirstRank", 8 << 30)
SMALL, LARGE = (
    WatchedProcess(number, "ray::ServeReplica:pilotfish:Draft", size << 20) for number, size in ((3, 300), (4, 700))
)
REPLICA = WatchedProcess(5, "ray::ServeReplica:pilotfish:Target", 1 << 30)


class Machine:
    """A machine with some processes, whose used share of memory and time are set."""

    def __init__(self, *processes: WatchedProcess) -> None:
        self.share = 0.5
        self.now = 1000.0
        self.processes = list(processes)
        self.ended: list[int] = []
        self.guard = MemoryGuard(0.9, lambda: self.share, lambda: self.processes, self.end, lambda: self.now)

    def end(self, process: int) -> None:
        self.ended.append(process)
        self.processes = [one for one in self.processes if one.id != process]


def test_the_largest_drafter_ends_first_and_the_next_one_half_a_minute_later() -> None:
    found = Machine(CONTROLLER, TARGET, SMALL, LARGE, REPLICA)
    assert found.guard.look() is None
    found.share = 0.93
    said = found.guard.look() or ""
    assert found.ended == [LARGE.id]
    assert said.startswith("93% of the memory is in use, more than cluster.memory_threshold (0.9): ended a drafter (")
    assert "ray::ServeReplica:pilotfish:Draft, 700 MiB" in said
    assert "lower draft.replicas or target.kv.pool_bytes, or raise cluster.memory_threshold" in said
    assert "\n" not in said
    assert (found.guard.look(), found.ended) == (None, [LARGE.id])
    found.now += 30
    assert found.guard.look() is not None
    assert found.ended == [LARGE.id, SMALL.id]


def test_a_drafter_that_comes_back_is_ended_less_and_less_often_until_an_hour_is_calm() -> None:
    found = Machine(TARGET)

    def pause() -> float:
        """Seconds between two ends of a drafter that comes back at once."""
        begun, count = found.now, len(found.ended)
        while len(found.ended) == count:
            found.now += 2
            found.processes = [TARGET, LARGE]
            found.guard.look()
        return found.now - begun

    found.share = 0.93
    assert [pause() for _ in range(10)] == [2, 30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    found.share = 0.5
    for _ in range(1799):
        found.now += 2
        found.guard.look()
    found.share = 0.93
    assert pause() == 2  # the pause is over, and the next is as long
    assert pause() == 30


def test_nothing_else_is_ended_and_the_warning_comes_once() -> None:
    found = Machine(CONTROLLER, TARGET, REPLICA)
    found.share = 0.99
    said = found.guard.look() or ""
    assert "no process of the cluster can be replaced cheaply" in said and "lower target.kv.pool_bytes" in said
    assert found.guard.look() is None
    found.share = 0.89  # it hardly falls
    assert found.guard.look() is None
    found.share = 0.99
    assert found.guard.look() is None
    found.share = 0.5
    assert found.guard.look() is None
    found.share = 0.99
    assert found.guard.look() == said
    assert not found.ended


def test_a_threshold_of_1_ends_nothing() -> None:
    ended: list[int] = []
    guard = MemoryGuard(1.0, lambda: 1.0, lambda: [SMALL], ended.append)
    assert (guard.look(), ended) == (None, [])


@pytest.mark.parametrize(("current", "share"), [(900, 0.7), (1000, 0.8)])
def test_the_memory_of_a_container_is_counted_without_what_the_kernel_can_take_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: int, share: float
) -> None:
    set_memory(monkeypatch, available=9000, total=10_000)
    assert machine.used_memory_share(tmp_path) == pytest.approx(0.1)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text(f"{current}\n")
    (tmp_path / "memory.stat").write_text("anon 600\nactive_file 150\ninactive_file 50\n")
    assert machine.used_memory_share(tmp_path) == pytest.approx(share)


def set_memory(monkeypatch: pytest.MonkeyPatch, available: int, total: int) -> None:
    """Set the memory of the machine, in bytes."""
    memory = type("Memory", (), {"available": available, "total": total})
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)


def test_a_container_with_a_limit_does_not_count_the_memory_of_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_memory(monkeypatch, available=200, total=10_000)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert machine.used_memory_share(tmp_path) == pytest.approx(0.3)
    (tmp_path / "memory.max").write_text("10000\n")  # no limit below the memory of the machine
    assert machine.used_memory_share(tmp_path) == pytest.approx(0.98)


def test_the_first_version_of_control_groups_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, available=9000, total=10_000)
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    (folder / "memory.usage_in_bytes").write_text("900\n")
    (folder / "memory.stat").write_text(
        "active_file 1\ninactive_file 1\ntotal_active_file 150\ntotal_inactive_file 50\n"
    )
    assert machine.used_memory_share(tmp_path) == pytest.approx(0.7)
    assert machine.free_memory_limit(tmp_path) == 100
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # the kernel's number for none
    assert machine.used_memory_share(tmp_path) == pytest.approx(0.1)
    assert machine.free_memory_limit(tmp_path) >= 1 << 60


def test_a_killed_process_is_named_once() -> None:
    kills, processes = [7], {1: "ray::ServeReplica:pilotfish:Draft", 2: "raylet"}
    watch = MemoryWatch(lambda: kills[0], lambda: dict(processes))
    assert watch.look() is None
    del processes[1]
    kills[0] = 8
    said = watch.look() or ""
    assert said.startswith("memory is used up, and the kernel killed 1 process (ray::ServeReplica:pilotfish:Draft); ")
    assert "lower target.kv.pool_bytes" in said
    assert "\n" not in said
    assert watch.look() is None


def test_a_process_of_another_program_is_told_apart() -> None:
    kills = iter((0, 2))
    watch = MemoryWatch(lambda: next(kills), lambda: {2: "raylet"})
    assert "killed 2 processes (none of this cluster)" in (watch.look() or "")


def test_a_process_that_ends_by_itself_is_not_mentioned() -> None:
    lists = iter(({1: "a"}, {}))
    assert MemoryWatch(lambda: 0, lambda: next(lists)).look() is None
