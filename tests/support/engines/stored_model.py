"""Models whose weights stay as they are stored, and how close their logits are to those of the de-quantized ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cluster.core.config.model_section import ModelSection, PoolSection
from cluster.core.config.target_section import TargetSection
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.model.packed_weights.store import keep_packed, packed_file, read_packed

TEXT = tuple((7 * index) % 90 + 3 for index in range(48))
BOUND = 1e-3
"""Largest difference of a logit, as a share of the range of the logits."""


def load(path: Path, code: str, **values: Any) -> LoadedModel:
    """The model in a directory; `code` is the directory of compiled kernels."""
    section = {"path": str(path), "device": "cpu", "compile": "off", "compile_directory": code}
    return load_model(ModelSection.model_validate(section | {"quantization": "stored"} | values))


def logits(model: LoadedModel, *texts: tuple[int, ...]) -> torch.Tensor:
    """The logits of the first text, `[tokens, vocabulary]`."""
    pool = KvPool(model.kv_spec, PoolSection(block_size=4), 256)
    rows = []
    for text in texts:
        table = pool.new_table()
        pool.reserve(table, len(text))
        rows.append(ForwardRow(table, text, select=tuple(range(len(text)))))
    return ModelRunner(model, pool).forward(rows)[: len(texts[0])].float().clone()


def check_logits(model: LoadedModel, expected: torch.Tensor, text: tuple[int, ...] = TEXT) -> None:
    """Check the logits of a text, and that neither texts beside it nor its own end change a bit of them."""
    found = logits(model, text)
    check_close(found, expected)
    assert torch.equal(logits(model, text, text[:1], text[:7], text), found)
    for width in (1, 2, 7, 8):
        assert torch.equal(logits(model, text[:width]), found[:width])


def check_kept(section: TargetSection) -> LoadedModel:
    """Load a model, keep its packed weights, and check that what is read from them computes the same bits."""
    file = packed_file(section)
    assert file is not None
    model = load_model(section)
    writer = keep_packed(section, file, model)
    assert writer is not None
    writer.join()
    found = read_packed(section, file)
    assert found is not None
    assert torch.equal(logits(found, TEXT), logits(model, TEXT))
    return model


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check logits `[tokens, vocabulary]`, and the best token where the two best are further apart than the bound."""
    bound = BOUND * float(expected.max() - expected.min())
    assert float((found - expected).abs().max()) <= bound
    best = expected.topk(2).values
    decided = best[:, 0] - best[:, 1] > bound
    assert torch.equal(found.argmax(1)[decided], expected.argmax(1)[decided])


def check_greedy(reference: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Check that each token of an answer is the best one after the tokens before it, or as good but for the bound.

    Few answers show anything where the two best tokens are often that close, so these must be rare.
    """
    with torch.inference_mode():
        rows = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]  # [tokens, vocabulary]
    bound = BOUND * float(rows.max() - rows.min())
    best = rows.topk(2).values
    chosen = rows.gather(1, torch.tensor([answer]).T).squeeze(1)
    assert bool((best[:, 0] - chosen <= bound).all())
    assert float((best[:, 0] - best[:, 1] > bound).float().mean()) > 0.9
