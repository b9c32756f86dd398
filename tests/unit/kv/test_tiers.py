"""Where blocks go that the pool has no place for, and when they come back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.core.config import MIB, KvSection
from cluster.core.errors import ConfigurationError
from workers.kv import disk
from workers.kv.disk import DiskTier
from workers.kv.load_cost import CostModel, Medium
from workers.kv.tiers import Tiers, agreed_length, single_rank

BLOCK_BYTES = 2 * 2 * (4 * 1 * 8) * 2
"""Keys and values of two layers: 4 tokens, 1 head of 8 numbers, 2 bytes each."""
FILE_BYTES = BLOCK_BYTES + 200
"""A file has a header."""
CPU = torch.device("cpu")
WITHOUT_CUDA = not torch.cuda.is_available()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(WITHOUT_CUDA, reason="needs an NVIDIA GPU")]),
]


def block(number: int) -> list[torch.Tensor]:
    """The content of a block that no other number has; no number (NaN) is in it too."""
    drawn = torch.randn(4, 4, 1, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
    drawn[0, 0, 0, 0] = float("nan")
    return list(drawn)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def empty() -> list[torch.Tensor]:
    return [torch.zeros_like(part) for part in block(0)]


def holds(tiers: Tiers, number: int) -> bool:
    """Whether the block comes back, bit by bit; whether it does must be what `find` said."""
    found, parts = tiers.find(key(number)), empty()
    assert tiers.load(key(number), parts) == found
    if found:
        for part, original in zip(parts, block(number), strict=True):
            assert torch.equal(part.view(torch.int16), original.view(torch.int16))
    return found


def held(tiers: Tiers, numbers: range) -> list[int]:
    return [number for number in numbers if tiers.find(key(number))]


def tiers_of(host_blocks: int = 0, directory: Path | None = None, disk_blocks: int = 0) -> Tiers:
    section = KvSection(
        host_bytes=host_blocks * BLOCK_BYTES,
        disk_directory=str(directory) if directory else None,
        disk_bytes=disk_blocks * FILE_BYTES,
    )
    return Tiers(section, BLOCK_BYTES, CPU)


@pytest.fixture
def host() -> Iterator[Tiers]:
    """Room for three blocks in host memory."""
    with tiers_of(3) as tiers:
        yield tiers


def save(tiers: Tiers, *numbers: int) -> None:
    """One after another, each written before the next."""
    for number in numbers:
        tiers.save(key(number), block(number))
        tiers.flush()


def test_a_block_comes_back_bit_by_bit(host: Tiers) -> None:
    assert not holds(host, 1)
    save(host, 1)
    assert holds(host, 1)
    assert holds(host, 1), "it stays where it is"
    assert (host.host.saved, host.host.loaded, host.host.dropped) == (1, 2, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_a_pool_that_is_written_on_at_once_come_back(device: str, tmp_path: Path) -> None:
    section = KvSection(host_bytes=2 * BLOCK_BYTES, disk_directory=str(tmp_path), disk_bytes=MIB)
    pool = [part.to(device) for part in block(0)]
    with Tiers(section, BLOCK_BYTES, torch.device(device)) as tiers:
        for number in range(8):
            for part, content in zip(pool, block(number), strict=True):
                part.copy_(content)
            tiers.save(key(number), pool)
            for part in pool:
                part.zero_()
        for number in reversed(range(8)):
            assert tiers.load(key(number), pool)
            for part, content in zip(pool, block(number), strict=True):
                assert torch.equal(part.cpu().view(torch.int16), content.view(torch.int16))
        assert tiers.worth_loading([key(7)], 1 << 20)


def test_parts_may_differ_in_shape_and_lie_apart() -> None:
    pool = torch.arange(64, dtype=torch.float32).view(2, 4, 8)
    parts = [pool[1, :2], pool[0, 3:]]
    with Tiers(KvSection(host_bytes=MIB), 24 * 4, CPU) as tiers:
        tiers.save(key(1), parts)
        kept = [part.clone() for part in parts]
        pool.zero_()
        assert tiers.load(key(1), parts)
    assert all(torch.equal(part, copy) for part, copy in zip(parts, kept, strict=True))


def test_the_least_recently_used_block_goes_first(host: Tiers) -> None:
    save(host, 1, 2, 3)
    assert holds(host, 1)
    save(host, 2)  # known already: nothing is copied, but it is used
    save(host, 4, 5)
    assert held(host, range(10)) == [2, 4, 5]
    assert (host.host.saved, host.host.dropped) == (5, 2)


def test_looking_for_a_block_is_no_use_of_it(host: Tiers) -> None:
    save(host, 1, 2, 3)
    assert host.find(key(1))
    save(host, 4)
    assert not host.find(key(1))


def test_blocks_that_are_about_to_be_loaded_can_be_held_back(host: Tiers) -> None:
    save(host, 1, 2, 3)
    host.touch([key(1), key(9)])
    save(host, 4, 5)
    assert held(host, range(10)) == [1, 4, 5]


@pytest.mark.parametrize("host_bytes", [0, BLOCK_BYTES - 1])
def test_without_room_for_a_block_nothing_is_kept(host_bytes: int) -> None:
    with Tiers(KvSection(host_bytes=host_bytes), BLOCK_BYTES, CPU) as tiers:
        save(tiers, 1)
        assert not holds(tiers, 1)


def test_content_of_another_size_is_refused(host: Tiers) -> None:
    with pytest.raises(ValueError, match=f"a block has {BLOCK_BYTES} bytes, not 192"):
        host.save(key(1), block(1)[:3])


def test_more_host_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    with pytest.raises(ConfigurationError, match=r"kv\.host_bytes"):
        Tiers(KvSection(host_bytes=1 << 60), BLOCK_BYTES, CPU).start()


def test_what_the_host_has_no_place_for_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    with tiers_of(2, tmp_path, 100) as tiers:
        save(tiers, *range(6))
        assert all(holds(tiers, number) for number in range(6))
        assert (tiers.host.dropped, tiers.disk.saved, tiers.disk.loaded) == (4, 4, 4)


def test_a_block_on_disk_is_written_once(tmp_path: Path) -> None:
    with tiers_of(1, tmp_path, 100) as tiers:
        for _ in range(3):
            save(tiers, 1, 2)
        assert (tiers.host.saved, tiers.disk.saved) == (6, 2)


def test_disk_serves_without_host_memory(tmp_path: Path) -> None:
    with tiers_of(0, tmp_path, 100) as tiers:
        save(tiers, 1, 2, 1)
        assert holds(tiers, 1)
        assert tiers.disk.saved == 2


def test_the_bytes_on_disk_are_bounded_and_the_least_recently_used_go(tmp_path: Path) -> None:
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
def test_a_damaged_file_is_a_miss_and_its_room_is_free_again(
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


def test_a_disk_that_takes_nothing_more_costs_a_warning_and_blocks(
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


def test_a_directory_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    """Nobody waits for the disk; a block is read from where it is, or missed."""

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

    def test_when_the_disk_cannot_keep_up_blocks_are_lost_and_nobody_waits(self, tmp_path: Path, gate: Gate) -> None:
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

    def test_closing_does_not_wait_for_what_is_queued(self, tmp_path: Path, gate: Gate) -> None:
        tiers = tiers_of(0, tmp_path, 100)
        tiers.start()
        for number in range(4):
            tiers.save(key(number), block(number))
        threading.Timer(0.05, gate.opened.set).start()
        tiers.close()
        assert list(tmp_path.iterdir()) == []
        assert not holds(tiers, 1)

    def test_a_disk_that_hangs_keeps_nobody_from_closing(
        self, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(disk, "_CLOSING_SECONDS", 0.02)
        tiers = tiers_of(0, tmp_path, 100)
        tiers.start()
        tiers.save(key(1), block(1))
        assert gate.reached.wait(10)
        tiers.close()
        assert "does not answer" in caplog.text
        caplog.clear()
        writer = next(thread for thread in threading.enumerate() if thread.name == "kv-disk")
        gate.opened.set()
        writer.join(10)
        assert list(tmp_path.iterdir()) == []
        assert not caplog.text, "after the end nobody wants to hear of it"

    def test_a_writer_that_fails_is_told_of_and_the_disk_takes_nothing_more(
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
            assert holds(tiers, 1), "what was written stays readable"
            assert (tiers.disk.saved, tiers.disk.dropped) == (1, 2)

    def test_without_a_thread_to_be_had_nothing_is_kept(
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


def test_closing_removes_what_was_written_and_nothing_else(tmp_path: Path) -> None:
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


def test_what_a_dead_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "pilotfish-kv-dead"
    dead.mkdir()
    (dead / "lock").touch()  # the kernel unlocked it when its process died
    (dead / "00.safetensors").touch()
    starting = tmp_path / "pilotfish-kv-starting"
    starting.mkdir()  # it has no lock yet
    with tiers_of(0, tmp_path, 100) as alive:
        assert not dead.exists()
        save(alive, 1)
        with tiers_of(0, tmp_path, 100):
            assert len(list(tmp_path.iterdir())) == 3
        assert holds(alive, 1)
    assert list(tmp_path.iterdir()) == [starting]


def test_two_ranks_that_obey_the_same_calls_hold_the_same_blocks() -> None:
    with tiers_of(3) as one, tiers_of(3) as other:
        for rank in (one, other):
            save(rank, 1, 2, 3)
            rank.load(key(1), empty())
            save(rank, 4, 2, 5)
        assert held(one, range(10)) == held(other, range(10)) == [2, 4, 5]


class TestAgreement:
    """Ranks whose disks differ open a sequence with what all of them have."""

    @staticmethod
    def run(ranks: list[set[int]], most: int = 10) -> int:
        """Each rank has some lengths to offer; they go through the rounds together."""
        bound, rounds = most, 0

        def agree(_: int) -> int:
            nonlocal rounds
            rounds += 1
            return min(longest(rank, bound) for rank in ranks)

        def longest(rank: set[int], bound: int) -> int:
            return max((length for length in rank | {0} if length <= bound), default=0)

        def remember(asked: int) -> int:
            nonlocal bound
            bound = asked
            return longest(ranks[0], asked)

        answer = agreed_length(remember, most, agree)
        assert rounds <= 1 + sum(len(rank) + 1 for rank in ranks)
        return answer

    def test_alone_the_longest_is_taken(self) -> None:
        assert agreed_length(lambda bound: min(bound, 7), 10, single_rank) == 7
        assert agreed_length(lambda bound: 0, 10, single_rank) == 0
        assert agreed_length(lambda bound: bound, 0, single_rank) == 0

    def test_the_least_is_taken(self) -> None:
        assert self.run([set(range(8)), set(range(5))]) == 4
        assert self.run([set(range(8)), {0}]) == 0

    def test_a_length_that_one_rank_cannot_offer_is_passed_over(self) -> None:
        # With windows a longer prefix may be had where a shorter one is not.
        assert self.run([{2, 5, 9}, {2, 4, 8, 9}]) == 9
        assert self.run([{2, 5, 8}, {2, 4, 9}]) == 2
        assert self.run([{5, 8}, {4, 9}]) == 0


class TestCosts:
    """What is sooner: copying or computing."""

    def test_until_measured_loading_counts_as_slow_and_computing_as_fast(self) -> None:
        costs = CostModel()
        assert costs.worth_loading(16 * 10_000, 0, 16)
        assert not costs.worth_loading(16 * 100_000, 0, 16)
        assert costs.worth_loading(0, 16 * 1_000, 16)
        assert not costs.worth_loading(0, 16 * 10_000, 16)

    def test_measurements_outweigh_the_beginning(self) -> None:
        costs = CostModel()
        costs.record_compute(512, 512, 1.0)
        assert costs.worth_loading(16 * 1_000_000, 0, 16)
        for _ in range(20):
            costs.record_load(Medium.HOST, MIB, 0.5)
        assert not costs.worth_loading(16 * 100_000, 0, 16)
        assert costs.worth_loading(0, 16 * 1_000, 16), "the other medium has its own price"

    def test_passes_over_few_tokens_say_nothing(self) -> None:
        costs = CostModel()
        for _ in range(100):
            costs.record_compute(1, 1, 0.05)
        assert not costs.worth_loading(16 * 100_000, 0, 16)

    def test_steps_of_many_decoding_sequences_say_nothing_about_prompts(self) -> None:
        costs = CostModel()
        for _ in range(100):
            costs.record_compute(96, 32, 0.5)
        assert not costs.worth_loading(16 * 100_000, 0, 16)
        costs.record_compute(96, 64, 0.5)
        assert costs.worth_loading(16 * 100_000, 0, 16)

    def test_a_step_that_was_not_waited_for_counts_with_the_next_that_was(self) -> None:
        costs = CostModel()
        for _ in range(100):
            costs.record_compute(512, 512, 0.001, awaited=False)
        assert not costs.worth_loading(16 * 100_000, 0, 16), "nothing is known yet"
        costs.record_compute(512, 512, 101.0)
        assert costs.worth_loading(16 * 1_000_000, 0, 16)
        assert not costs.worth_loading(16 * 3_000_000, 0, 16)

    def test_a_slow_copy_is_forgiven_in_time(self) -> None:
        costs = CostModel()
        costs.record_compute(512, 512, 1.0)
        costs.record_load(Medium.DISK, MIB, 60.0)
        refusals = 0
        while not costs.worth_loading(0, MIB, 64):
            refusals += 1
            assert refusals < 1000
        assert refusals > 3

    def test_a_block_costs_what_the_place_costs_where_it_lies(self, tmp_path: Path) -> None:
        with tiers_of(1, tmp_path, 100) as tiers:
            save(tiers, 1, 2)  # the second one displaced the first
            tiers.costs.record_compute(512, 512, 512.0)
            assert tiers.worth_loading([key(1), key(2)], 8)
            tiers.costs.record_load(Medium.HOST, MIB, 1e6)
            assert tiers.worth_loading([key(1)], 8)
            assert not tiers.worth_loading([key(2)], 8)
            tiers.costs.record_load(Medium.DISK, MIB, 1e6)
            assert not tiers.worth_loading([key(1)], 8)
