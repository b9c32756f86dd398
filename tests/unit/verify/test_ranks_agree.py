"""What a rank finds on its machine (compiler, device, files) decides for all ranks alike, or all refuse it."""

from __future__ import annotations

import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import distributed

from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import running_ranks
from tests.support.models import tiny
from workers.forward.experts import FastExperts
from workers.forward.native import build
from workers.verify import group
from workers.verify.build import build_engine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

RANKS, TOKENS = 2, 8
PROMPT = (5, 17, 33, 8, 61)
Found = tuple[list[int], int, str, list[str]]
"""Text, accepted draft tokens, attention backend, and what computes the experts of each layer."""


def generate(section: TargetSection, rank: int) -> Found:
    """A greedy text, drafted partly rightly; all ranks run the same steps."""
    engine = build_engine(section, rank)
    start = SequenceStart(len(PROMPT), SamplingParameters(temperature=0.0))
    text, accepted = list(PROMPT), 0
    fresh: tuple[int, ...] = PROMPT
    while len(text) < len(PROMPT) + TOKENS:
        tree = TokenTree.chain([text[-1], 7])  # small random models repeat themselves
        row = VerifyRow(SequenceId("one"), len(text), fresh, tree, start=start if fresh is PROMPT else None)
        verdict = engine.step(StepBatch((row,))).verdicts[0]
        assert verdict.fault is None, verdict.fault
        text += verdict.tokens
        fresh, accepted = verdict.tokens[-1:], accepted + len(verdict.tokens) - 1
    model = engine._model.module
    kernels = [type(part.kernel).__name__ for part in model.modules() if isinstance(part, FastExperts)]
    name = engine._runner._attention.name if engine._runner._attention else ""
    engine.close()
    return text, accepted, name, kernels


def lack_compiler(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(build, "_find_compiler", lambda: None)
    patched.setattr(build, "_find_prebuilt", lambda: None)
    build.own_library.cache_clear()  # as in a new process


def serve(rank: int, section: TargetSection, other: Path, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    group.join_group(section, rank, "127.0.0.1", port)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            lack_compiler(patched)
        pipe.send(generate(section, rank))
    build.own_library.cache_clear()
    pipe.send(generate(section, rank))
    try:
        build_engine(section.model_copy(update={"path": str(other)}) if rank else section, rank)
    except ConfigurationError as error:
        pipe.send(str(error).replace(str(other), section.path))
    distributed.barrier()
    os._exit(0)


def join_with_a_gpu_on_one(rank: int, section: TargetSection, port: int, pipe: Connection) -> None:
    pytest.MonkeyPatch().setattr(group, "choose_device", lambda *_: torch.device("cuda" if rank else "cpu"))
    try:
        group.join_group(section, rank, "127.0.0.1", port)
    except ConfigurationError as error:
        pipe.send(str(error))
    pipe.recv()
    os._exit(0)


@pytest.fixture
def section(tmp_path: Path) -> TargetSection:
    return TargetSection(
        path=str(tiny.save(tmp_path / "model", tiny.mixtral(num_attention_heads=4, num_key_value_heads=2))),
        device="cpu",
        compile="off",
        compile_directory=str(KEPT),
        tensor_parallel=RANKS,
        kv=KvSection(block_size=4, pool_bytes=1 << 20),
    )


def test_a_rank_without_compiler_or_with_other_files(section: TargetSection, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", tiny.mixtral(num_attention_heads=4, num_key_value_heads=2), seed=1)
    with running_ranks(RANKS, serve, section, other) as ranks:
        expected, accepted, _, _ = generate(section.model_copy(update={"tensor_parallel": 1}), 0)
        lacking, whole, refused = (ranks.answers() for _ in range(3))
    assert accepted > 0
    assert lacking[0] == lacking[1]
    assert lacking[0][0] == expected
    assert lacking[0][2] == "sdpa"
    assert whole[0] == whole[1]
    assert whole[0][0] == expected
    assert whole[0][2] == "native"
    assert set(whole[0][3]) == {"PackedExperts"}
    assert not {"PackedExperts"} & set(lacking[0][3])
    assert refused[0] == refused[1]
    assert "must hold the same files for all ranks" in refused[0]


def test_a_gpu_on_one_rank_alone_is_refused(section: TargetSection) -> None:
    with running_ranks(RANKS, join_with_a_gpu_on_one, section) as ranks:
        for error in ranks.answers():
            assert "target.device: cpu is refused, because it is cpu, cuda for ranks 0 to 1" in error
