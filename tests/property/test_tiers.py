"""Host and disk tiers hold the same blocks as two plain lists, for any order of saves, loads and damage."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.core.config.target_section import KvSection
from workers.kv.tiers import Tiers

pytestmark = pytest.mark.slow

BLOCK_BYTES = 512
FILE_BYTES = BLOCK_BYTES + 200
"""Bytes that are enough for one file with its header, and not for two."""

few_blocks = st.integers(0, 9)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def use(tier: list[int], number: int) -> bool:
    """Mark a block as the most recently used one. Return whether the tier has it."""
    if number in tier:
        tier.append(tier.pop(tier.index(number)))
        return True
    return False


class SettledTiers(RuleBasedStateMachine):
    """Compares the tiers with two lists that have the least recently used block first."""

    @initialize(host_blocks=st.integers(0, 3), disk_blocks=st.integers(0, 4))
    def start(self, host_blocks: int, disk_blocks: int) -> None:
        self.host: list[int] = []
        self.disk: list[int] = []
        self.damaged: set[int] = set()
        self.host_blocks, self.disk_blocks = host_blocks, disk_blocks
        self.directory = tempfile.TemporaryDirectory()
        section = KvSection(
            host_bytes=host_blocks * BLOCK_BYTES,
            disk_directory=self.directory.name,
            disk_bytes=disk_blocks * FILE_BYTES,
        )
        self.tiers = Tiers(section, BLOCK_BYTES, torch.device("cpu"))
        self.tiers.start()

    @rule(number=few_blocks)
    def save(self, number: int) -> None:
        self.tiers.save(key(number), [torch.full((BLOCK_BYTES // 8,), number)])
        self.tiers.flush()
        if not self.host_blocks:
            self._to_disk(number)
        elif not use(self.host, number):
            if len(self.host) == self.host_blocks:
                self._to_disk(self.host.pop(0))
            self.host.append(number)

    @rule(number=few_blocks)
    def load(self, number: int) -> None:
        loaded = torch.full((BLOCK_BYTES // 8,), -1)
        found = self.tiers.load(key(number), [loaded])
        if number not in self.host and number in self.damaged:
            self.damaged.remove(number)
            self.disk.remove(number)
        assert found == (use(self.host, number) or use(self.disk, number))
        assert (loaded == (number if found else -1)).all()

    @rule(number=few_blocks)
    def touch(self, number: int) -> None:
        self.tiers.touch([key(number)])
        use(self.host, number)
        use(self.disk, number)

    @rule(number=few_blocks)
    def damage(self, number: int) -> None:
        for file in Path(self.directory.name).glob(f"*/{key(number).hex()}.safetensors"):
            file.write_bytes(b"damaged")
            self.damaged.add(number)

    @invariant()
    def both_hold_the_same(self) -> None:
        if hasattr(self, "tiers"):
            assert [number for number in range(10) if self.tiers.find(key(number))] == sorted({*self.host, *self.disk})

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.close()
            assert list(Path(self.directory.name).iterdir()) == []
            self.directory.cleanup()

    def _to_disk(self, number: int) -> None:
        if use(self.disk, number):
            return
        self.disk.append(number)
        for gone in self.disk[: max(0, len(self.disk) - self.disk_blocks)]:
            self.disk.remove(gone)
            self.damaged.discard(gone)


TestSettledTiers = SettledTiers.TestCase
TestSettledTiers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class UnsettledTiers(RuleBasedStateMachine):
    """While the writer still runs, loaded blocks are right, and the disk holds no more bytes than allowed."""

    @initialize(host_blocks=st.integers(0, 2), disk_blocks=st.integers(0, 3))
    def start(self, host_blocks: int, disk_blocks: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.most_bytes = disk_blocks * FILE_BYTES
        section = KvSection(
            host_bytes=host_blocks * BLOCK_BYTES, disk_directory=self.directory.name, disk_bytes=self.most_bytes
        )
        self.tiers = Tiers(section, BLOCK_BYTES, torch.device("cpu"))
        self.tiers.start()

    @rule(numbers=st.lists(few_blocks, max_size=8))
    def save(self, numbers: list[int]) -> None:
        for number in numbers:
            self.tiers.save(key(number), [torch.full((BLOCK_BYTES // 8,), number)])

    @rule(number=few_blocks)
    def load(self, number: int) -> None:
        loaded = torch.full((BLOCK_BYTES // 8,), -1)
        found = self.tiers.load(key(number), [loaded])
        assert (loaded == (number if found else -1)).all()

    @rule(number=few_blocks)
    def touch(self, number: int) -> None:
        self.tiers.touch([key(number)])

    @rule()
    def flush(self) -> None:
        self.tiers.flush()
        for number in range(10):
            assert self.tiers.find(key(number)) == self.tiers.load(key(number), [torch.empty(BLOCK_BYTES // 8).long()])
        files = Path(self.directory.name).glob("*/*.safetensors")
        assert sum(file.stat().st_size for file in files) <= self.most_bytes

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.close()
            assert list(Path(self.directory.name).iterdir()) == []
            self.directory.cleanup()


TestUnsettledTiers = UnsettledTiers.TestCase
TestUnsettledTiers.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
