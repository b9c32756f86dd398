"""Two ranks that share the heads of an encoder-decoder model write what one rank writes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cluster.core.config.sections import KvSection, ModelSection, TargetSection
from cluster.core.errors import ConfigurationError
from tests.support.engines.engine_sequence import GREEDY, drafts_near, some_tokens
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import start_ranks
from tests.support.engines.sourced import SAMPLED, SOURCE, translate
from tests.support.models import tiny
from workers.model.loading import load_model
from workers.verify.engine import TargetEngine

RANKS = 2
SOURCES = (SOURCE, tuple(some_tokens(13, 2)))


def section(directory: Path, ranks: int) -> TargetSection:
    memory = KvSection(block_size=4, pool_bytes=1 << 20)
    return TargetSection(
        path=str(directory), device="cpu", tensor_parallel=ranks, kv=memory, compile_directory=str(KEPT)
    )


def answers(engine: TargetEngine) -> list[list[int]]:
    """Greedy and sampled answers without and with drafts; the same calls on every rank."""
    found = []
    for source in SOURCES:
        for sampling in (GREEDY, SAMPLED):
            plain = translate(engine, 12, source, sampling)
            drafts = drafts_near([*engine.info().decoder_start, *plain])
            found += [plain, translate(engine, 12, source, sampling, drafts)]
    return found


def run_rank(rank: int, directories: Sequence[Path], port: int, pipe: Connection) -> None:
    """Run one rank in its process."""
    import torch

    from workers.verify.build import build_engine
    from workers.verify.group import join_group, leave_group

    torch.set_num_threads(1)
    join_group(section(directories[0], RANKS), rank, "127.0.0.1", port)
    for directory in directories:
        engine = build_engine(section(directory, RANKS), rank)
        pipe.send((answers(engine), engine.info().kv.blocks_total))
    leave_group()
    os._exit(0)


def test_ranks_write_what_one_rank_writes(tmp_path: Path) -> None:
    from workers.verify.build import build_engine

    families = sorted(tiny.ENCODER_DECODER_FAMILIES)
    directories = [tiny.save(tmp_path / name, tiny.ENCODER_DECODER_FAMILIES[name](vocab_size=95)) for name in families]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    pipes = [Pipe() for _ in range(RANKS)]
    processes = start_ranks(run_rank, [(directories, port, theirs) for _, theirs in pipes])
    for _, theirs in pipes:
        theirs.close()  # so that this process notices the end of a rank
    try:
        for directory in directories:
            engine = build_engine(section(directory, 1))
            expected = answers(engine)
            for ours, _ in pipes:
                assert ours.poll(60.0)
                found, blocks = ours.recv()
                assert found == expected, directory.name
                assert blocks > 1.9 * engine.info().kv.blocks_total  # each block has half of the heads
    finally:
        for process in processes:
            process.kill()


def test_heads_that_the_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.marian())
    with pytest.raises(ConfigurationError, match="does not divide num_attention_heads = 6"):
        load_model(ModelSection(path=str(directory), device="cpu"), tensor_parallel=4)
