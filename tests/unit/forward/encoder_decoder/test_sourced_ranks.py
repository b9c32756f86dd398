"""Two ranks that share the heads of an encoder-decoder model write what one rank writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import EvidenceSection, KvSection, TargetSection
from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.errors import ConfigurationError
from tests.support.engines.colocated_decoding import decode_together
from tests.support.engines.engine_sequence import GREEDY, drafts_near, some_tokens
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import running_ranks
from tests.support.engines.sourced import SAMPLED, SOURCE, sourced, translate
from tests.support.models import context_free, tiny
from workers.draft.registry import create
from workers.model.draft_shapes import HeadsShape
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify.engine import TargetEngine

pytestmark = pytest.mark.slow

RANKS = 2
SOURCES = (SOURCE, tuple(some_tokens(13, 2)))
REQUESTS = {"greedy": GREEDY, "sampled": SAMPLED}
BUDGET = DraftBudget(6, 3)


CROWD = tuple(tuple(token - 1 for token in some_tokens(40, seed)) for seed in range(3))
"""Sources of ten blocks, of which the pool holds one or two."""
TURNS = (0, 1, 0, 2, 1, 2, 0)
"""Indices in `CROWD`, one for each turn. A source that returns soon comes from the host, else from the disk."""
BLOCKS, HOST_BLOCKS = 26, 14


def section(directory: Path, ranks: int, **tiers: Any) -> TargetSection:
    memory = KvSection(block_size=4, pool_bytes=1 << 20, **tiers)
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


def in_little_memory(directory: Path, ranks: int, rank: int = 0) -> list[list[int]]:
    """Answers of forks and of preempted sequences, whose sources evict each other to the host and to disks.

    Some blocks cannot be loaded on rank 1 alone.
    """
    from workers.kv.load_cost import CostModel
    from workers.verify import build as build_module

    key_bytes = 4 * 6 * (12 if directory.name.startswith("t5") else 8)
    block_bytes = 4 * 2 * 2 * key_bytes // ranks  # keys and values of four tokens in two layers
    tiers = {"host_bytes": HOST_BLOCKS * block_bytes, "disk_directory": str(directory / f"disk-{ranks}-{rank}")}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build_module, "blocks_that_fit", lambda model, kv: BLOCKS)
        patched.setattr(CostModel, "worth_loading", lambda costs, host_bytes, disk_bytes, tokens: tokens > 0)
        engine = build_module.build_engine(section(directory, ranks, **tiers), rank)
        memory = engine._pool.tiers
        assert memory is not None
        load, calls = memory.load, count(1)
        patched.setattr(memory, "load", lambda key, parts: (rank == 0 or next(calls) % 7 > 0) and load(key, parts))
        found: list[list[int]] = []
        for source in (CROWD[which] for which in TURNS):
            parent = sourced(engine, source, "parent", SAMPLED)
            parent.open()
            fork = sourced(engine, source, "fork", SAMPLED, answer=parent.decode(7))
            assert fork.open("parent") == len(fork.tokens) - 1
            found += [fork.decode(6), parent.decode(6)]
            engine.release([parent.name])  # preempted
            assert parent.open() >= 8
            found.append(parent.decode(5, drafts_near(parent.tokens)))
            engine.release_all()
            memory.flush()
        assert engine.info().kv.blocks_free == BLOCKS
        assert memory.host.loaded > 0 and memory.disk.loaded > 0
        assert rank == 0 or next(calls) > 8
        engine.close()
    return found


def drafted(
    directory: Path, ranks: int, rank: int = 0, budget: DraftBudget = BUDGET
) -> tuple[dict[str, list[int]], int]:
    """Answers with drafts of heads, and the number of accepted tokens.

    The hidden states are the same on every rank, so each rank may draft for itself.
    """
    from workers.verify.build import build_engine

    target = section(directory, ranks).model_copy(update={"evidence": EvidenceSection(taps=(2,))})
    settings = {"method": "heads", "heads": {"path": str(directory / "heads"), "weights": "float32"}}
    engine = build_engine(target, rank, create(load_configuration({"draft": settings}).draft, target))
    requests = {name: (tuple(engine.info().decoder_start), one) for name, one in REQUESTS.items()}
    found = decode_together(engine.step, requests, 12, budget, dict(zip(REQUESTS, SOURCES, strict=True)))
    engine.release_all()
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
    return {name: one.answer[:12] for name, one in found.items()}, sum(one.accepted for one in found.values())


def run_rank(rank: int, directories: Sequence[Path], with_heads: Sequence[Path], port: int, pipe: Connection) -> None:
    """Run one rank in its process."""
    import torch

    from workers.verify.build import build_engine
    from workers.verify.group import join_group, leave_group

    torch.set_num_threads(1)
    join_group(section(directories[0], RANKS), rank, "127.0.0.1", port)
    for directory in directories:
        engine = build_engine(section(directory, RANKS), rank)
        pipe.send((answers(engine), engine.info().kv.blocks_total))
    for directory in directories:
        pipe.send(in_little_memory(directory, RANKS, rank))
    for directory in with_heads:
        pipe.send(drafted(directory, RANKS, rank))
    leave_group()
    os._exit(0)


def test_ranks_write_what_one_rank_writes(tmp_path: Path) -> None:
    from workers.verify.build import build_engine

    families = sorted(tiny.ENCODER_DECODER_FAMILIES)
    directories = [tiny.save(tmp_path / name, tiny.ENCODER_DECODER_FAMILIES[name](vocab_size=95)) for name in families]
    with_heads = [context_free.save_sourced_target(tmp_path / f"{name}-with-heads", name) for name in families]
    for directory in with_heads:
        context_free.save_untrained(directory, directory / "heads", "heads", (2,), HeadsShape(3, 16, 8))
    with running_ranks(RANKS, run_rank, directories, with_heads) as ranks:
        for directory in directories:
            engine = build_engine(section(directory, 1))
            expected = answers(engine)
            for found, blocks in ranks.answers():
                assert found == expected, directory.name
                assert blocks > 1.9 * engine.info().kv.blocks_total  # each block has half of the heads
        for directory in directories:
            wanted = in_little_memory(directory, 1)
            assert ranks.answers() == [wanted] * RANKS, directory.name
            assert wanted[:3] == wanted[6:9] == wanted[18:]  # the same answers, from loaded blocks
        for directory in with_heads:
            plain, _ = drafted(directory, 1, budget=NO_DRAFT)
            for found, accepted in ranks.answers():
                assert found == plain, directory.name
                assert accepted > 12


def test_heads_that_the_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.marian())
    with pytest.raises(ConfigurationError, match="does not divide num_attention_heads = 6"):
        load_model(ModelSection(path=str(directory), device="cpu"), tensor_parallel=4)
