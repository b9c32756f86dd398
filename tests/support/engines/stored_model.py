"""Models whose weights stay as they are stored, and how close their logits are to those of the de-quantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cluster.core.config.model_section import ModelSection, PoolSection
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model

TEXT = tuple((7 * index) % 90 + 3 for index in range(48))
BOUND = 1e-3
"""Largest difference of a logit, as a share of the range of the logits."""


def load(path: Path, code: str, **values: Any) -> LoadedModel:
    """The model in a directory; `code` is the directory of compiled kernels."""
    section = {"path": str(path), "device": "cpu", "compile": "off", "compile_directory": code}
    return load_model(ModelSection.model_validate(section | {"quantization": "stored"} | values))


def logits(model: LoadedModel, *texts: tuple[int, ...]) -> torch.Tensor:
    """The logits of the first text, `[tokens, vocabulary]`."""
    pool = KvPool(model.kv_spec, PoolSection(block_size=4), 128)
    rows = []
    for text in texts:
        table = pool.new_table()
        pool.reserve(table, len(text))
        rows.append(ForwardRow(table, text, select=tuple(range(len(text)))))
    return ModelRunner(model, pool).forward(rows)[: len(texts[0])].float().clone()


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check logits `[tokens, vocabulary]`, and the best token where the two best are further apart than the bound."""
    bound = BOUND * float(expected.max() - expected.min())
    assert float((found - expected).abs().max()) <= bound
    best = expected.topk(2).values
    decided = best[:, 0] - best[:, 1] > bound
    assert torch.equal(found.argmax(1)[decided], expected.argmax(1)[decided])
