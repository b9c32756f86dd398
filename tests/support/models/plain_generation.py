"""Plain decoding with a model of `transformers` and its KV cache. Only the sampler is Pilotfish's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cluster.core.request import SamplingParameters
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide


@torch.inference_mode()
def write_alone(model: Any, prompt: Sequence[int], sampling: SamplingParameters, count: int) -> tuple[int, ...]:
    """Decode `count` tokens after the prompt, one forward pass each."""
    tokens = list(prompt)
    cache, fresh = None, tokens
    for _ in range(count):
        output = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        fresh = decide(output.logits[0, -1:], [DecisionContext(sampling, tuple(tokens), len(prompt))])
        tokens.extend(fresh)
    return tuple(tokens[len(prompt) :])
