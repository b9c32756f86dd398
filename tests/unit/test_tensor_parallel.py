"""A group of ranks decides what one rank alone decides, and breaks as one."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config import KvSection, TargetSection
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from cluster.core.types import OpenRow, SamplingParameters, SequenceStart, StepBatch, VerifyRow
from tests import tiny

RANKS = 3
SETTINGS = {
    "greedy": SamplingParameters(temperature=0.0),
    "sampled, parts suffice": SamplingParameters(temperature=0.9, seed=4, presence_penalty=0.4),
    "sampled, whole needed": SamplingParameters(temperature=0.9, seed=4, top_k=30, top_p=0.9, min_p=0.01),
    "logprobs": SamplingParameters(temperature=0.9, seed=4, logprobs=2),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def section(directory: Path, ranks: int) -> TargetSection:
    return TargetSection(
        path=str(directory),
        device="cpu",
        tensor_parallel=ranks,
        kv=KvSection(block_size=4, pool_bytes=1 << 20, host_bytes=1 << 20),
    )


def serve_rank(rank: int, directory: Path, port: int, pipe: Connection | None) -> None:
    """A rank's whole life; rank 0 does what the test asks through its pipe."""
    import torch

    from workers.target.ranks import RankZero, build_engine, follow, join, leave

    torch.set_num_threads(1)
    join(section(directory, RANKS), rank, "127.0.0.1", port)
    engine = build_engine(section(directory, RANKS), rank)
    if pipe is None:
        follow(engine)
        leave()
        return
    group = RankZero(engine)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        method, arguments = asked
        try:
            pipe.send(getattr(group, method)(*arguments))
        except Exception as error:
            pipe.send(error)
    if group.broken is None:
        group.close()
        leave()
    os._exit(0)


@dataclass
class Group:
    pipe: Connection
    processes: list[Any]

    def ask(self, method: str, *arguments: object) -> Any:
        self.pipe.send((method, arguments))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(vocab_size=95))


@pytest.fixture(scope="module")
def group(directory: Path) -> Iterator[Group]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = free_port()
    processes = [
        context.Process(target=serve_rank, args=(rank, directory, port, theirs if rank == 0 else None))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    assert ours.recv() == "ready"
    yield Group(ours, processes)
    ours.send(None)
    for process in processes:
        process.join(timeout=30)
        if process.is_alive():
            process.kill()


PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_group_decides_what_one_rank_decides(group: Group, directory: Path, name: str) -> None:
    from workers.target.ranks import build_engine

    alone = build_engine(section(directory, 1))
    start = SequenceStart(len(PROMPT), SETTINGS[name])
    tokens = list(PROMPT)
    row = VerifyRow(SequenceId(name), len(tokens), PROMPT, start=start)
    for turn in range(12):
        batch = StepBatch((row,))
        expected, actual = alone.step(batch).verdicts[0], group.ask("step", batch).verdicts[0]
        assert actual.tokens == expected.tokens
        for ours, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        tokens.extend(actual.tokens)
        tree = TokenTree.from_candidates([[turn, 2], [tokens[-2], turn, 7], [3]], max_nodes=8)
        row = VerifyRow(SequenceId(name), len(tokens), (tokens[-1],), tree)
    released = group.ask("release", [SequenceId(name)])
    assert released.blocks_free == released.blocks_total


def test_forks_follow_on_every_rank(group: Group) -> None:
    start = SequenceStart(len(PROMPT), SETTINGS["greedy"])
    group.ask("step", StepBatch((VerifyRow(SequenceId("p"), len(PROMPT), PROMPT, start=start),)))
    opened = group.ask("open", [OpenRow(SequenceId("c"), (*PROMPT, 11), start, SequenceId("p"))])
    assert opened.stored_lens == (len(PROMPT),)
    rows = tuple(VerifyRow(SequenceId(name), len(PROMPT) + 1, (11,)) for name in ("p", "c"))
    verdicts = group.ask("step", StepBatch(rows)).verdicts
    assert verdicts[0].tokens == verdicts[1].tokens
    released = group.ask("release_all")
    assert released.blocks_free == released.blocks_total
    again = (OpenRow(SequenceId("again"), (*PROMPT, 11, 12), start), OpenRow(SequenceId("new"), (1, *PROMPT), start))
    assert group.ask("open", again).stored_lens == (len(PROMPT), 0)
    row = VerifyRow(SequenceId("again"), len(PROMPT) + 1, (11,))
    assert group.ask("step", StepBatch((row,))).verdicts[0].tokens == verdicts[0].tokens
    group.ask("release_all")


def test_the_death_of_any_rank_breaks_the_group_and_says_so(group: Group) -> None:
    group.processes[2].kill()
    group.processes[2].join()
    start = SequenceStart(len(PROMPT), SETTINGS["greedy"])
    row = VerifyRow(SequenceId("late"), len(PROMPT), PROMPT, start=start)
    with pytest.raises(TargetUnavailable, match="tensor-parallel group is broken"):
        group.ask("step", StepBatch((row,)))
    with pytest.raises(TargetUnavailable, match="tensor-parallel group is broken"):
        group.ask("release", [SequenceId("late")])
