"""The encoder of an encoder-decoder model: from sources to the keys and values that cross-attention reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from workers.forward.linear import FastLinear, make_linear_kernel
from workers.forward.loaded_model import EncodedSources
from workers.forward.replace_linear import replace_linear_layers
from workers.forward.weights.choice import store

_MOST_PADDED_TOKENS = 2048
"""Most tokens of one pass of the encoder, padding included, apart from a single longer source."""


class SourceEncoder:
    """Reads sources. It holds the encoder and the projections of its output to keys and values."""

    def __init__(self, encoder: Any, projection: nn.Module, layers: int, heads: int) -> None:
        """`projection` maps hidden states to the keys and values of all layers: `layers * 2 * heads * dim` numbers."""
        self.encoder = encoder
        self.projection: Any = projection
        self.layers = layers
        self.heads = heads
        self._reads_in_blocks = hasattr(encoder, "set_attention_type")
        """Whether it attends in blocks to a source that is long enough, as BigBird does."""
        self._reads_alone = self._reads_in_blocks or any(
            hasattr(part, "moe_eval_capacity_token_fraction") for part in encoder.modules()
        )
        """Whether what is read beside a source, padding included, changes its last block or the choice of experts."""

    def replace_linear_layers(self, quantization: str, directory: str | None = None) -> None:
        """Replace the linear layers by their fastest form. `directory` keeps the compiled CPU kernels."""
        replace_linear_layers(self.encoder, quantization, directory)
        storage = store(self.projection.weight.detach(), quantization)
        kernel = make_linear_kernel(storage, self.projection.bias, directory)
        self.projection = FastLinear(kernel, self.projection.out_features)

    @torch.inference_mode()
    def encode(self, sources: Sequence[Sequence[int]], device: torch.device) -> Iterator[EncodedSources]:
        """Read the sources, those of similar length in one pass."""
        alone = [(index,) for index in range(len(sources))]
        for indices in alone if self._reads_alone else batches([len(source) for source in sources]):
            batch = [sources[index] for index in indices]
            longest = max(map(len, batch))
            tokens = torch.tensor([[*source, *[0] * (longest - len(source))] for source in batch], device=device)
            lengths = torch.tensor([len(source) for source in batch], device=device)
            mask = torch.arange(longest, device=device) < lengths[:, None]  # [sources, tokens]
            padded = len(batch) * longest > sum(map(len, batch))
            if self._reads_in_blocks:
                self._choose_attention(longest)
            hidden = self.encoder(input_ids=tokens, attention_mask=mask.long() if padded else None).last_hidden_state
            hidden = hidden[mask] if padded else hidden.flatten(0, 1)
            yield EncodedSources(indices, self._project(hidden), hidden.bfloat16())

    def _choose_attention(self, length: int) -> None:
        """Let the encoder attend as its configuration says if a source of this length has enough blocks for it.

        The encoder itself attends to all tokens from the first shorter source on.
        """
        config = self.encoder.config
        has_enough = length > (5 + 2 * config.num_random_blocks) * config.block_size
        with torch.device("meta"):  # the modules of the other attention take the weights of those in place
            self.encoder.set_attention_type(config.attention_type if has_enough else "original_full")

    @torch.inference_mode()
    def project(self, hidden: torch.Tensor) -> EncodedSources:
        return EncodedSources((0,), self._project(hidden.to(input_embedding(self.encoder).dtype)), hidden.bfloat16())

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.projection(hidden)
        return projected.view(len(projected), self.layers, 2, self.heads, -1)


def input_embedding(encoder: Any) -> torch.Tensor:
    """The embedding of an encoder's tokens, `[tokens, hidden]`."""
    embedding = encoder.embed_tokens if hasattr(encoder, "embed_tokens") else encoder.get_input_embeddings()
    weight: torch.Tensor = embedding.weight
    return weight


def batches(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Group sources of similar length, so that padding at most doubles a pass and no pass is too long."""
    found: list[tuple[int, ...]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        longest = lengths[current[0]] if current else lengths[index]
        if current and (2 * lengths[index] < longest or longest * (len(current) + 1) > _MOST_PADDED_TOKENS):
            found.append(tuple(current))
            current = []
        current.append(index)
    return [*found, tuple(current)] if current else found
