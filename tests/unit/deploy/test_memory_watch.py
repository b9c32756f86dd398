"""A process that the kernel kills for its memory is one line: who, why, what to set."""

from __future__ import annotations

from deploy.ray.memory_watch import MemoryWatch


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
