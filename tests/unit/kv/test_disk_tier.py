"""The disk tier stores and loads blocks. A full, slow or broken disk loses blocks and never raises an error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.core.config.base import MIB
from cluster.core.errors import ConfigurationError
from tests.support.engines.kv_tiers import BLOCK_BYTES, FILE_BYTES, block, empty, held, holds, key, save, tiers_of
from workers.kv import disk
from workers.kv.disk import DiskTier


def test_blocks_evicted_from_the_host_are_written_to_disk_and_loaded_back(tmp_path: Path) -> None:
    with tiers_of(2, tmp_path, 100) as tiers:
        save(tiers, *range(6))
        assert all(holds(tiers, number) for number in range(6))
        assert (tiers.host.dropped, tiers.disk.saved, tiers.disk.loaded) == (4, 4, 4)


def test_a_block_on_disk_is_written_once(tmp_path: Path) -> None:
    with tiers_of(1, tmp_path, 100) as tiers:
        for _ in range(3):
            save(tiers, 1, 2)
        assert (tiers.host.saved, tiers.disk.saved) == (6, 2)


def test_the_disk_tier_works_without_host_memory(tmp_path: Path) -> None:
    with tiers_of(0, tmp_path, 100) as tiers:
        save(tiers, 1, 2, 1)
        assert holds(tiers, 1)
        assert tiers.disk.saved == 2


def test_the_bytes_on_disk_are_bounded_and_the_least_recently_used_blocks_are_evicted(tmp_path: Path) -> None:
    with tiers_of(0, tmp_path, 3) as tiers:
        save(tiers, 1, 2, 3)
        assert holds(tiers, 1)
        save(tiers, 4)
        assert held(tiers, range(10)) == [1, 3, 4]
        files = list(tmp_path.glob("*/*.safetensors"))
        assert len(files) == 3
        assert sum(file.stat().st_size for file in files) <= 3 * FILE_BYTES


def test_a_block_larger_than_the_bound_is_not_written(tmp_path: Path) -> None:
    with tiers_of(0, tmp_path, 0) as tiers:
        save(tiers, 1)
        assert not holds(tiers, 1)
        assert tiers.disk.dropped == 1


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "empty", "missing"])
def test_a_damaged_file_is_a_miss_and_its_bytes_are_freed(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(0, tmp_path, 1) as tiers:
        save(tiers, 1)
        (file,) = tmp_path.glob("*/*.safetensors")
        content = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            flipped = bytearray(content)
            flipped[-1] ^= 1
            damaged = {"flipped": bytes(flipped), "shorter": content[:-1], "longer": content + b"x", "empty": b""}
            file.write_bytes(damaged[damage])
        assert not tiers.load(key(1), empty())
        assert not tiers.find(key(1))
        assert "lost" in caplog.text
        save(tiers, 1)
        assert holds(tiers, 1)


def test_a_full_disk_logs_a_warning_and_loses_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with tiers_of(0, tmp_path, 100) as tiers:
        save(tiers, 1)
        monkeypatch.setattr(Path, "write_bytes", full)
        save(tiers, 2, 3)
        assert held(tiers, range(5)) == [1]
        assert holds(tiers, 1)
        assert len(list(tmp_path.glob("*/*.safetensors"))) == 1, "no half-written file stays"
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1


def test_a_directory_that_cannot_be_created_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with tiers_of(1, tmp_path / "file" / "kv", 100) as tiers:
        save(tiers, 1, 2)
        assert held(tiers, range(5)) == [2]
    assert "kv.disk_directory" in caplog.text


class Gate:
    """Holds every write to disk until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = Path.write_bytes

        def wait(file: Path, content: bytes) -> int:
            self.reached.set()
            assert self.opened.wait(10)
            return write(file, content)

        monkeypatch.setattr(Path, "write_bytes", wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


class TestWriter:
    """No call waits for the disk. A block that is not yet written is loaded from the queue."""

    def test_a_block_that_is_not_written_yet_comes_back_from_the_queue(self, tmp_path: Path, gate: Gate) -> None:
        with tiers_of(1, tmp_path, 100) as tiers:
            for number in range(4):
                tiers.save(key(number), block(number))
            assert not list(tmp_path.glob("*/*.safetensors"))
            assert all(holds(tiers, number) for number in range(4))
            gate.opened.set()
            tiers.flush()
            assert len(list(tmp_path.glob("*/*.safetensors"))) == 3
            assert all(holds(tiers, number) for number in range(4))

    def test_a_slow_disk_loses_blocks_and_delays_no_call(self, tmp_path: Path, gate: Gate) -> None:
        tier = DiskTier(str(tmp_path), MIB, max_queued=2)
        tier.start()
        content = torch.arange(BLOCK_BYTES).to(torch.uint8)
        for number in range(5):
            if tier.wants(key(number)):
                tier.save(key(number), content)
        assert [number for number in range(5) if key(number) in tier] == [0, 1]
        assert tier.counts.dropped == 3
        gate.opened.set()
        tier.flush()
        assert tier.wants(key(3))
        tier.save(key(3), content)
        loaded = tier.load(key(3))
        assert loaded is not None and torch.equal(loaded, content)
        tier.close()

    def test_closing_does_not_wait_for_queued_blocks(self, tmp_path: Path, gate: Gate) -> None:
        tiers = tiers_of(0, tmp_path, 100)
        tiers.start()
        for number in range(4):
            tiers.save(key(number), block(number))
        threading.Timer(0.05, gate.opened.set).start()
        tiers.close()
        assert list(tmp_path.iterdir()) == []
        assert not holds(tiers, 1)

    def test_a_disk_that_hangs_does_not_block_closing(
        self, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(disk, "_CLOSING_SECONDS", 0.02)
        tiers = tiers_of(0, tmp_path, 100)
        tiers.start()
        tiers.save(key(1), block(1))
        assert gate.reached.wait(10)
        tiers.close()
        assert "does not respond" in caplog.text
        caplog.clear()
        writer = next(thread for thread in threading.enumerate() if thread.name == "kv-disk")
        gate.opened.set()
        writer.join(10)
        assert list(tmp_path.iterdir()) == []
        assert not caplog.text, "after closing, errors are not logged"

    def test_a_failed_writer_is_logged_and_the_disk_stores_nothing_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(content: torch.Tensor) -> int:
            raise ZeroDivisionError

        with tiers_of(0, tmp_path, 100) as tiers:
            save(tiers, 1)
            with monkeypatch.context() as patched:
                patched.setattr(disk, "_checksum", fail)
                save(tiers, 2)
            assert "ZeroDivisionError" in caplog.text
            save(tiers, 3)
            assert held(tiers, range(5)) == [1]
            assert holds(tiers, 1), "written blocks stay readable"
            assert (tiers.disk.saved, tiers.disk.dropped) == (1, 2)

    def test_if_no_thread_can_start_nothing_is_stored(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            tiers = tiers_of(0, tmp_path, 100)
            tiers.start()
        save(tiers, 1)
        assert not holds(tiers, 1)
        assert "can't start new thread" in caplog.text
        tiers.close()
        assert list(tmp_path.iterdir()) == []


def test_closing_removes_the_written_files_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    tiers = tiers_of(0, tmp_path, 100)
    tiers.start()
    save(tiers, 1)
    assert len(list(tmp_path.iterdir())) == 2
    tiers.close()
    tiers.close()
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's"]
    save(tiers, 1)
    assert not holds(tiers, 1)


def test_files_of_dead_processes_are_removed_and_files_of_live_ones_are_not(tmp_path: Path) -> None:
    dead = tmp_path / "pilotfish-kv-dead"
    dead.mkdir()
    (dead / "lock").touch()  # the kernel released its lock when the process died
    (dead / "00.safetensors").touch()
    starting = tmp_path / "pilotfish-kv-starting"
    starting.mkdir()  # its process has not locked it yet
    with tiers_of(0, tmp_path, 100) as alive:
        assert not dead.exists()
        save(alive, 1)
        with tiers_of(0, tmp_path, 100):
            assert len(list(tmp_path.iterdir())) == 3
        assert holds(alive, 1)
    assert list(tmp_path.iterdir()) == [starting]


def test_a_directory_of_an_unknown_user_is_refused_with_its_setting() -> None:
    with pytest.raises(
        ConfigurationError, match=r"target\.kv\.disk_directory: needed a known user, found ~no\.body/kv"
    ):
        DiskTier("~no.body/kv", MIB)
