"""Ranks compute recurrent layers whole, each by itself, and by the same code: otherwise their bits would differ."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from tests.support.engines.engine_rows import PROMPT
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import start_ranks
from tests.support.models.hybrids import save_hybrid
from workers.forward import recurrent
from workers.forward.native import build
from workers.forward.recurrent import bind_recurrent, difference
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.model.share import Share
from workers.serve.node import free_port

pytestmark = pytest.mark.slow

RANKS = 2
TOKENS = 12
SECONDS = 120.0


def fail_in_a_layer(patched: pytest.MonkeyPatch) -> None:
    """The first recurrent layer fails its trial."""
    found = iter(["a planted fault"])
    patched.setattr(recurrent, "difference", lambda *of: next(found, None) or difference(*of))


def lack_kernels(patched: pytest.MonkeyPatch) -> None:
    """There is no compiler, nor a library that was built before."""
    patched.setattr(build, "_find_compiler", lambda: None)
    patched.setattr(build, "_find_prebuilt", lambda: None)
    build.own_library.cache_clear()  # as in a new process


FAULTS = {"none": None, "in a layer": fail_in_a_layer, "no kernels": lack_kernels}
"""What rank 1 lacks, and rank 0 does not."""


def serve(directory: Path, rank: int, ranks: int) -> tuple[list[int], list[str], torch.Tensor]:
    """A greedy text, what computes each recurrent layer, and the hidden states of the prompt."""
    section = ModelSection(path=str(directory), device="cpu", compile_directory=str(KEPT))
    model = load_model(section, rank=rank, tensor_parallel=ranks)
    layers = bind_recurrent(model.module)
    assert layers is not None
    mixers: list[Any] = [layers.mixers.get(layer) for layer in sorted(layers.shapes)]
    kinds = [type(mixer and mixer._kernels).__name__ for mixer in mixers]
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=100)
    runner, table, text = ModelRunner(model, pool, (0, 1, 2)), pool.new_table(), list(PROMPT)
    hidden = torch.empty(0)
    fresh: tuple[int, ...] = PROMPT
    while len(text) < len(PROMPT) + TOKENS:
        row = ForwardRow(table, fresh, select=(len(fresh) - 1,))
        pool.reserve(table, row.end)
        logits = runner.forward([row]).clone().float()
        hidden = hidden if hidden.numel() else runner.hidden_of(0).clone()
        runner.commit(row)
        own = Share(rank, ranks).tokens(model.vocabulary_size)
        whole = torch.full((model.vocabulary_size,), -torch.inf)
        whole[own] = logits[0, : own.stop - own.start]
        if ranks > 1:
            distributed.all_reduce(whole, op=distributed.ReduceOp.MAX)
        text.append(int(whole.argmax()))
        fresh = (text[-1],)
    return text[len(PROMPT) :], kinds, hidden


def run_rank(rank: int, directory: Path, port: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    for name, fault in FAULTS.items():
        with pytest.MonkeyPatch.context() as patched:
            if fault is not None and rank == 1:
                fault(patched)
            text, kinds, hidden = serve(directory, rank, RANKS)
        save_file({"hidden": hidden}, directory / f"{name}-{rank}.safetensors")
        (directory / f"{name}-{rank}.json").write_text(json.dumps([text, kinds]))
    distributed.barrier()
    os._exit(0)


def test_a_fault_of_one_rank_makes_all_compute_the_layer_by_the_same_other_code(tmp_path: Path) -> None:
    case = save_hybrid(tmp_path, "qwen3_next")
    ranks = start_ranks(run_rank, [(case.directory, free_port("127.0.0.1"))] * RANKS)
    expected = case.reference(PROMPT, TOKENS)
    for process in ranks:
        process.join(SECONDS)
        assert process.exitcode == 0
    kinds: dict[str, list[str]] = {}
    for name in FAULTS:
        (text, kinds[name]), other = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2))
        assert other == [text, kinds[name]], name
        assert text == expected, name
        first, second = (load_file(tmp_path / f"{name}-{rank}.safetensors")["hidden"] for rank in range(2))
        assert torch.equal(first, second), name
    count = len(kinds["none"])
    assert count > 1
    assert kinds["none"] == ["NativeRecurrence"] * count
    assert kinds["in a layer"] == ["NoneType", *kinds["none"][1:]]
    assert kinds["no kernels"] == ["ReferenceKernels"] * count
