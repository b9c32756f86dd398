"""A model in memory, and the properties of it that other parts of the data plane use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from cluster.core.request import USUAL_SCORING, BeamScoring
from workers.forward.graph_memory import ModelSizes
from workers.forward.layout import RowShape
from workers.forward.partial_pass import WHOLE, PartialPass
from workers.kv.pool import KvPool
from workers.kv.spec import TOKENS_ALONE, KvCacheSpec, LayerShape
from workers.kv.state_slots import StateShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """What one forward pass computed."""

    logits: torch.Tensor
    """`[selected, vocabulary]`."""
    hidden: torch.Tensor | None = None
    """Hidden states of all tokens, bfloat16 `[tokens, taps * hidden]`; `None` without taps."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOptions:
    """What one forward pass computes, besides the logits of its rows."""

    partial: PartialPass = WHOLE
    """The parts of the model that are computed. Give the same object each time: each one has its own CUDA graphs."""
    inputs: torch.Tensor | None = None
    """`[tokens of all rows with their nodes, hidden]` replace the tokens' embeddings."""
    with_taps: bool = True
    """Whether the hidden states of the runner's taps are returned."""
    leaders: int = 0
    """If not 0, only that many of the largest logits of each selected token are wanted, and others may be −inf."""


WHOLE_PASS = PassOptions()


class NativeForward(Protocol):
    """A whole model in the CPU kernels' form."""

    def bind(self, pool: KvPool) -> None:
        """Use this pool's blocks from now on."""

    def compute(
        self,
        tokens: Sequence[int],
        selected: Sequence[int],
        rows: Sequence[RowShape],
        options: PassOptions = WHOLE_PASS,
        taps: Sequence[int] = (),
    ) -> PassOutput:
        """Run one step over the bound pool.

        `tokens` are the rows' tokens, one row after another; `selected` are the indices of those whose logits are
        wanted. Returns float32 logits, and the hidden states of `taps`.
        """


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSources:
    """Keys and values of several sources for every decoder layer, their tokens one source after another."""

    indices: tuple[int, ...]
    """Indices of the sources among those that were given, in the order in which `states` holds them."""
    states: torch.Tensor  # [tokens, layers, 2 (key, value), heads, dim]
    hidden: torch.Tensor  # [tokens, hidden], bfloat16: the encoder's output


class SourceReader(Protocol):
    """The encoder of an encoder-decoder model."""

    def encode(self, sources: Sequence[Sequence[int]], device: torch.device) -> Iterator[EncodedSources]:
        """Read the sources, in batches."""

    def project(self, hidden: torch.Tensor) -> EncodedSources:
        """The keys and values of one source, from this encoder's output `[tokens, hidden]`."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the generation configuration of an encoder-decoder model fixes for every answer, as `TargetInfo` has it."""

    decoder_start: tuple[int, ...]
    forced_eos_token_id: int | None
    bad_words: tuple[tuple[int, ...], ...]
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    beam_scoring: BeamScoring = USUAL_SCORING
    renormalize_logits: bool = False
    """Whether log-probabilities are those among the tokens that can be chosen, as beam search then takes them."""


@dataclass(frozen=True, slots=True)
class SourceParts:
    """What an encoder-decoder model has besides its decoder."""

    encoder: SourceReader
    defaults: GenerationDefaults
    max_source_len: int
    vocabulary_size: int
    """Tokens that the encoder distinguishes."""
    relative_biases: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    """Biases of the self-attention of each decoder layer: from key position minus query position
    `[rows, queries, keys]` to `[rows, heads, queries, keys]`. Empty: none has any."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A language model whose decoder's self-attention is paged."""

    module: PreTrainedModel
    """An empty module if the weights were read from a file of packed ones."""
    name: str
    layers: tuple[LayerShape, ...]
    """The layers that attend, in order."""
    hidden_size: int
    """Width of the residual stream."""
    vocabulary_size: int
    """Tokens in the whole vocabulary."""
    vocabulary_offset: int
    """First token of this rank's part of the logits; 0 if the rank has all of them."""
    max_context_len: int
    """Longest sequence, in tokens."""
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    code_directory: str | None = None
    """Directory that keeps compiled code between starts."""
    tensor_parallel: int = 1
    native: NativeForward | None = None
    """The layers and the head in the CPU kernels' form. If set, `module` no longer has them."""
    uses_cuda_graphs: bool = False
    """Whether forward passes of recurring sizes run as CUDA graphs."""
    vocabulary: torch.Tensor | None = None
    """The token of each column of the logits, int64, ascending, on their device, for a draft with a reduced head;
    `None`: all tokens."""
    source: SourceParts | None = None
    """Set exactly for an encoder-decoder model, whose decoder is `module`."""
    states: tuple[StateShape, ...] = ()
    """The states of its recurrent layers; empty for a model of attention alone."""
    decoder_layers: int = 0
    """Decoder layers, where some do not attend or attend more than once; 0: as many as `layers`."""

    @property
    def depth(self) -> int:
        """Decoder layers of the model."""
        return self.decoder_layers or len(self.layers)

    @property
    def attends(self) -> bool:
        """Whether any layer attends: not in a model of recurrent layers alone."""
        return self.layers != (TOKENS_ALONE,)

    @property
    def kv_spec(self) -> KvCacheSpec:
        """The properties that determine this model's KV pool. CUDA graphs need one scratch block."""
        return KvCacheSpec(
            self.layers,
            self.max_context_len,
            self.dtype,
            self.device,
            self.tensor_parallel,
            int(self.uses_cuda_graphs),
            has_sources=self.source is not None,
            states=self.states,
            reserved_bytes=self.graph_bytes if self.uses_cuda_graphs else 0,
            step_token_bytes=self.layer_bytes if self.device.type == "cuda" else 0,
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of the device that what layers compute of a token needs at most."""
        return self._sizes.layer_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of the device that its CUDA graphs need at most."""
        return self._sizes.graph_bytes

    @property
    def _sizes(self) -> ModelSizes:
        return ModelSizes(
            hidden_size=self.hidden_size,
            vocabulary_size=-(-self.vocabulary_size // self.tensor_parallel),
            attended=tuple((one.kv_heads * one.heads_per_kv, one.value_dim) for one in self.layers),
            longest=self.max_context_len,
            number_bytes=self.dtype.itemsize,
        )
