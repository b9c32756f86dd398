"""A rank that hangs ends a step of its group after `target.step_timeout_seconds`; waiting for a step has no bound.

This holds where rank 0's commands go over sockets, and where they are broadcast, as between hosts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import Ranks, running_ranks
from tests.support.models import tiny

pytestmark = pytest.mark.slow

RANKS = 3
STEP_SECONDS = 1.5
LITTLE_SECONDS = 1.5
"""What an error may take beyond the setting: two processes start to wait one after the other, on a busy machine."""
PROMPT = (5, 17, 33, 8)


def section(directory: Path) -> TargetSection:
    return TargetSection(
        path=str(directory),
        device="cpu",
        compile="off",
        compile_directory=str(KEPT),
        tensor_parallel=RANKS,
        step_timeout_seconds=STEP_SECONDS,
        kv=KvSection(block_size=4, pool_bytes=1 << 20),
    )


def serve_rank(rank: int, directory: Path, is_apart: bool, port: int, pipe: Connection) -> None:
    """Run one rank. Rank 0 executes the calls that the test sends; another one sends the error that ends it."""
    import torch

    from workers.verify import commands
    from workers.verify.build import build_engine
    from workers.verify.group import DriverRank, join_group, run_worker_rank

    torch.set_num_threads(1)
    if is_apart and rank == 1:
        pytest.MonkeyPatch().setattr(commands, "connect", lambda *_: None)
    target = section(directory)
    join_group(target, rank, "127.0.0.1", port)
    time.sleep(2 * STEP_SECONDS if rank == 1 else 0)  # a rank loads for longer than a step may take
    engine = build_engine(target, rank)
    if rank > 0:
        try:
            run_worker_rank(engine, target.step_timeout_seconds)
        except Exception as error:
            pipe.send(error)
        os._exit(0)
    group = DriverRank(engine, target.step_timeout_seconds)
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            called, arguments = pipe.recv()
            try:
                pipe.send(getattr(group, called)(*arguments))
            except Exception as error:
                pipe.send(error)
    os._exit(0)


@pytest.fixture(params=["one host", "several hosts"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    directory = tiny.save(tmp_path, tiny.llama())
    with running_ranks(RANKS, serve_rank, directory, request.param == "several hosts") as group:
        assert group.answer(0) == "ready"
        yield group


def step(group: Ranks, name: str) -> None:
    start = SequenceStart(len(PROMPT), SamplingParameters(temperature=0.0))
    verdicts = group.ask("step", StepBatch((VerifyRow(SequenceId(name), len(PROMPT), PROMPT, start=start),))).verdicts
    assert [len(verdict.tokens) for verdict in verdicts] == [1]


def test_a_rank_that_stops_fails_a_step_of_all_others_in_time_but_an_idle_group_waits_on(group: Ranks) -> None:
    step(group, "first")
    time.sleep(2 * STEP_SECONDS)
    step(group, "after an idle time")

    stopped = group.processes[2].pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(TargetUnavailable, match=r"not answered within target\.step_timeout_seconds: 1\.5"):
        step(group, "never")
    assert group.pipes[1].poll(LITTLE_SECONDS)
    assert time.monotonic() - begun < STEP_SECONDS + LITTLE_SECONDS
    assert isinstance(group.pipes[1].recv(), TargetUnavailable)
    with pytest.raises(TargetUnavailable, match="group is broken: a rank has not answered"):
        step(group, "later")
