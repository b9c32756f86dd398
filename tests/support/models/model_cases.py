"""Tiny models whose layers see all positions or a window of them, and engines and references over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.kv import KvLayout
from tests.support.engines.kv_tiers import always_load
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine

WINDOW = 12
BLOCK = 4


def gemma3(**changes: object) -> PreTrainedConfig:
    """Five layers: the third has full attention, the others a window of `WINDOW` tokens."""
    shape = {"hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3}
    kinds = ["full_attention" if layer == 2 else "sliding_attention" for layer in range(5)]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    size = {"vocab_size": tiny.VOCABULARY, "intermediate_size": 80, "head_dim": 8, "max_position_embeddings": 256}
    window = {"sliding_window": WINDOW, "layer_types": kinds, "query_pre_attn_scalar": 8}
    return Gemma3TextConfig(**(shape | ends | size | window | changes))


@dataclass(frozen=True)
class ModelCase:
    """A saved model. Builds engines and references from it."""

    directory: Path

    def model(self) -> LoadedModel:
        """Load the model. Every engine needs a model of its own, because a model is bound to its pool."""
        return load_model(ModelSection(path=str(self.directory), device="cpu"))

    def engine(self, blocks: int = 300, **changes: object) -> TargetEngine:
        return self.engine_and_pool(blocks, **changes)[0]

    def engine_and_pool(self, blocks: int, **changes: object) -> tuple[TargetEngine, KvPool]:
        """An engine and its pool. Computing a token costs 1 s, so that stored blocks are always loaded."""
        model = self.model()
        pool = KvPool(model.kv_spec, KvSection(block_size=BLOCK, **changes), blocks)
        always_load(pool)
        return TargetEngine(model, pool, LocalDecider()), pool

    def layout(self) -> KvLayout:
        return group_layers(self.model().kv_spec, KvSection(block_size=BLOCK)).layout

    def reference(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens by `transformers` alone."""
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        tokens = torch.tensor([list(prompt)])
        output = model.generate(
            tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, use_cache=False
        )
        return output[0, len(prompt) :].tolist()


def save_case(directory: Path, config: PreTrainedConfig) -> ModelCase:
    """Save a model with random weights in `directory`."""
    tiny.save(directory, config, sharpness=4.0)
    return ModelCase(directory)


CONFIGURATIONS = {
    "full": tiny.llama,
    "window": lambda: tiny.mistral(sliding_window=WINDOW),
    "hybrid": gemma3,
    "latent": tiny.deepseek_v3,
}
USUAL_CONFIGURATIONS = ("full", "hybrid", "window")
"""Configurations of models that store keys and values of each head."""
