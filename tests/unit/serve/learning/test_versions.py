"""Stored versions take bounded room, a rollback serves what was served before, and servers follow removals."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.draft.common.learning import salt_key
from workers.serve.learning import versions as module
from workers.serve.learning.versions import ABOUT, SERVED, Versions, roll_back, stored_versions, versions_of

A, B, C = (salt_key(f"{name}/") for name in "abc")
SIZE = 10_000
"""Bytes of the weights of a version."""
NEEDED = SIZE + 1_024
"""Room that a version needs, what is measured of it included."""
TIMES = itertools.count(1)


class Weights:
    """Writes weights of the same size, and checks that there is room for them."""

    saved_bytes = SIZE

    def __init__(self, directory: Path, most_bytes: int = 1 << 30) -> None:
        self.directory, self.most_bytes, self.saved = directory, most_bytes, 0

    def save(self, directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
        assert stored_bytes(self.directory) + NEEDED <= self.most_bytes
        (directory / "weights").write_bytes(bytes(SIZE))
        self.saved += 1

    def read(self, directory: Path) -> Mapping[str, torch.Tensor]:
        (directory / "weights").read_bytes()
        return {}


def stored_bytes(directory: Path) -> int:
    """Bytes of all versions."""
    return sum(file.stat().st_size for file in directory.glob("*/*/*"))


def versions_in(directory: Path, room: float = 1_000) -> tuple[Versions, Weights]:
    """Versions with room for so many of them."""
    most = int(room * NEEDED)
    weights: Any = Weights(directory, most)
    return Versions(directory, weights, most), weights


def store(versions: Versions, key: str, client: str | None = None) -> int:
    """Store the next version of a salt, which is that of a client or the client's own one."""
    number = versions.store(key, {}, {"client": client or key}, after=versions.served(key))
    assert versions._directory is not None
    os.utime(versions._directory / key / SERVED, (next(TIMES),) * 2)  # the clock of files may stand still meanwhile
    return number


def stored(directory: Path) -> dict[str, list[int]]:
    """The stored versions of each salt that has any."""
    return {one.key: list(one.stored) for one in versions_of(directory) if one.stored}


@pytest.mark.parametrize("room", [3, 4.5, 8.5])
def test_all_versions_together_have_room_also_while_one_is_written(tmp_path: Path, room: float) -> None:
    versions, weights = versions_in(tmp_path, room)
    for number in range(1, 12):
        assert store(versions, A) == number
        assert stored_bytes(tmp_path) <= room * NEEDED
        assert stored_versions(tmp_path / A)[-2:] == [number - 1, number][-number:]
    assert weights.saved == 11
    assert len(stored_versions(tmp_path / A)) == min(8, int(room))
    assert roll_back(tmp_path) == {A: 10}


def test_of_other_salts_those_go_first_that_no_rollback_would_serve(tmp_path: Path) -> None:
    versions, _ = versions_in(tmp_path, 6)
    for key in (A, A, A, B, B):
        store(versions, key)
    assert stored(tmp_path) == {A: [1, 2, 3], B: [1, 2]}
    store(versions, C)
    assert stored(tmp_path) == {A: [1, 2, 3], B: [1, 2], C: [1]}
    store(versions, C)
    assert stored(tmp_path) == {A: [2, 3], B: [1, 2], C: [1, 2]}


def test_the_client_with_the_most_bytes_makes_room_for_others(tmp_path: Path) -> None:
    """A client that sends many salts removes its own versions, the oldest first, and not those of others."""
    versions, _ = versions_in(tmp_path, 5)
    store(versions, A)
    salts = [salt_key(f"b/{number}") for number in range(8)]
    for key in salts:
        store(versions, key, client=B)
        assert A in stored(tmp_path)
    assert list(stored(tmp_path)) == [A, *salts[-4:]]
    store(versions, C)
    assert list(stored(tmp_path)) == [A, *salts[-3:], C]


def test_no_more_salts_are_stored_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SALTS", 2)
    versions, _ = versions_in(tmp_path)
    for key in (A, B, C):
        store(versions, key)
    assert list(stored(tmp_path)) == [B, C]


def test_without_room_nothing_is_written_and_the_served_version_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, weights = versions_in(tmp_path)
    for key in (A, A, B):
        store(versions, key)
    versions, small = versions_in(tmp_path, 2.5)
    assert versions.changed() == (A, B)
    with pytest.raises(ValueError, match=r"draft.learn_directory_bytes: 27560 is too small; it must be 3\d{4}$"):
        store(versions, A)
    versions, more = versions_in(tmp_path)
    assert versions.changed() == (A, B)
    usage = shutil.disk_usage(tmp_path)._replace(free=NEEDED - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for key in (A, C):
        with pytest.raises(ValueError, match=r"draft.learn_directory: 11023 bytes are free, and a version takes 11024"):
            store(versions, key)
    assert (weights.saved, small.saved, more.saved) == (3, 0, 0)
    assert (versions.served(A), stored(tmp_path)) == (2, {A: [1, 2], B: [1]})


def test_a_disk_that_is_full_at_the_last_moment_leaves_no_version_that_nobody_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, weights = versions_in(tmp_path)
    store(versions, A)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_serve", full)
    with pytest.raises(OSError, match="No space left"):
        store(versions, A)
    assert weights.saved == 2
    assert (versions.served(A), stored(tmp_path)) == (1, {A: [1]})
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == [A]


def test_a_rollback_serves_what_was_served_before_and_no_version_that_was_removed(tmp_path: Path) -> None:
    versions, _ = versions_in(tmp_path)
    for _ in range(3):
        store(versions, A)
    assert roll_back(tmp_path) == {A: 2}
    assert versions.changed() == (A,)
    assert store(versions, A) == 4
    assert roll_back(tmp_path) == {A: 2}
    assert roll_back(tmp_path) == {A: 1}
    assert roll_back(tmp_path) == {A: 0}


def test_a_version_to_roll_back_to_is_kept_however_old_it_is(tmp_path: Path) -> None:
    versions, _ = versions_in(tmp_path)
    for _ in range(8):
        store(versions, A)
    for _ in range(7):
        roll_back(tmp_path)
    assert versions.changed() == (A,)
    assert store(versions, A) == 9
    assert stored_versions(tmp_path / A) == [1, 3, 4, 5, 6, 7, 8, 9]
    assert roll_back(tmp_path) == {A: 1}


def test_a_rollback_without_the_version_before_serves_the_files_of_the_draft(tmp_path: Path) -> None:
    versions, _ = versions_in(tmp_path)
    for _ in range(3):
        store(versions, A)
    shutil.rmtree(tmp_path / A / "000002")
    assert roll_back(tmp_path) == {A: 0}


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON"])
def test_a_version_of_somebody_else_is_rolled_back_to_the_one_with_the_next_lower_number(
    tmp_path: Path, text: str
) -> None:
    versions, _ = versions_in(tmp_path)
    for _ in range(3):
        store(versions, A)
    (tmp_path / A / "000003" / ABOUT).write_text(text)
    assert roll_back(tmp_path) == {A: 2}


def test_a_rollback_for_a_client_reaches_each_of_its_salts(tmp_path: Path) -> None:
    versions, _ = versions_in(tmp_path)
    other = salt_key("a/other")
    for key, client in ((A, A), (other, A), (B, B)):
        store(versions, key, client)
    assert json.loads((tmp_path / other / "000001" / ABOUT).read_text())["client"] == A
    assert roll_back(tmp_path, A) == {A: 0, other: 0}
    assert {one.key: (one.client, one.served) for one in versions_of(tmp_path)} == {
        A: (A, 0),
        other: (A, 0),
        B: (B, 1),
    }


def test_a_removed_salt_is_served_with_the_files_of_the_draft_and_learns_again(tmp_path: Path) -> None:
    """An operator removes a client's folder, or another server makes room."""
    versions, _ = versions_in(tmp_path)
    for key in (A, A, B):
        store(versions, key)
    assert versions.changed() == ()
    shutil.rmtree(tmp_path / A)
    assert versions.changed() == (A,)
    assert (versions.served(A), versions.read(A), versions.served(B)) == (0, None, 1)
    assert store(versions, A) == 1


def test_what_is_served_stays_while_its_file_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes it, or a directory on the network does not answer."""
    versions, _ = versions_in(tmp_path)
    for key in (A, A, B):
        store(versions, key)
    assert versions.changed() == ()
    (tmp_path / A / SERVED).write_text("")
    assert (versions.changed(), versions.served(A)) == ((), 2)
    (tmp_path / A / SERVED).write_text("1\n")
    assert (versions.changed(), versions.served(A)) == ((A,), 1)
    with monkeypatch.context() as broken:
        stat = os.stat

        def stale(path: object, *arguments: Any, **options: Any) -> os.stat_result:
            if str(path).endswith(SERVED):
                raise OSError(errno.ESTALE, "stale")
            return stat(path, *arguments, **options)  # type: ignore[arg-type]

        broken.setattr(os, "stat", stale)
        assert versions.changed() == ()
    assert (versions.changed(), versions.served(A), versions.served(B)) == ((), 1, 1)


def test_what_stays_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests run meanwhile in other threads of the process."""
    versions, _ = versions_in(tmp_path)
    for key in (A, B):
        store(versions, key)
    versions.changed()
    read: list[str] = []
    served_version = module.served_version

    def recorded(folder: Path) -> int:
        read.append(folder.name)
        return served_version(folder)

    monkeypatch.setattr(module, "served_version", recorded)
    assert versions.changed() == () and not read
    (tmp_path / B / SERVED).write_text("0\n")
    assert versions.changed() == (B,) and read == [B]


def test_a_process_that_is_killed_while_it_removes_a_version_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, weights = versions_in(tmp_path, 3)
    for _ in range(3):
        store(versions, A)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store(versions, A)
    assert stored(tmp_path) == {A: [2, 3]}
    assert [*tmp_path.glob(".unfinished-*/weights")]
    versions.remove_unfinished()
    assert not [*tmp_path.glob(".unfinished-*")]
    assert store(versions, A) == 4 and weights.saved == 4
