"""The interface of attention backends, and the registry of all of them.

An attention backend is one file of `workers.forward.backends`: a class decorated with `@register_backend`. It states
what it supports; `workers.forward.backends.choice` picks the backends of a model when the model is loaded. No other
file names one, except for `sdpa`, the reference that every other backend is compared with.

Once a step, the rows are planned: a backend derives its own metadata from them on the host, or from a `PaddedStep` on
the device. Each layer then writes its new keys and values, and attends.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch

from cluster.core.ids import BlockId
from workers.forward.gathered_step import RelativeBias
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape
from workers.forward.padded_step import PaddedStep
from workers.forward.projections import Projections
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore
from workers.transfer import StepArray

Metadata = TypeVar("Metadata")
_MOST_OF_A_GROUP = 16


class Feature(Enum):
    """What attention may have to compute besides softmax(q·k) v over the positions up to a query's own."""

    WINDOWS = "windows"
    """Layers whose queries see the last positions only."""
    SINKS = "sinks"
    """Windows whose queries also see the first positions of the sequence."""
    TREES = "trees"
    """Rows whose last tokens form a tree: each sees its ancestors, and no other node."""
    SOURCES = "sources"
    """Cross-attention to the stored source of each row."""
    RELATIVE_BIAS = "relative bias"
    """A bias for each relative position, added to the products of queries and keys."""
    SOFT_CAP = "soft-capped logits"
    """Products of queries and keys that tanh bounds."""
    LEARNED_SINKS = "learned sinks"
    """A learned logit of each head that takes a share of the softmax."""
    ALIBI = "ALiBi"
    """Biases of products in proportion to the distance of key and query, with a slope for each head."""
    LATENTS = "latents"
    """Values that are the first numbers of their keys, and are not stored by themselves."""


class StepKind(Enum):
    """A kind of step that an attention backend can compute."""

    RAGGED = "steps of any size"
    """Rows of any number and width, planned on the host: `plan`."""
    PADDED = "CUDA graphs"
    """Steps of fixed sizes that a CUDA graph may hold: `plan_padded`."""


@dataclass(frozen=True, slots=True)
class AttentionSetting:
    """A model and its pool, for which a backend is opened."""

    store: KvStore
    layers: tuple[LayerShape, ...]
    """The shape of each of the model's layers."""
    blocks: int
    """Blocks of the pool, without the scratch block."""
    dtype: torch.dtype
    device: torch.device
    relative_biases: tuple[RelativeBias, ...] = ()
    """One for each layer, which layers may share; empty: none has any."""
    has_sources: bool = False
    """Whether the model has cross-attention."""
    code_directory: str | None = None
    """Directory that keeps compiled code between starts."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.store.kv_groups.layout.block_size

    @property
    def scratch(self) -> BlockId:
        """The block after the pool's last, for padding: no sequence holds it."""
        return BlockId(self.blocks)

    def features(self, kind: StepKind) -> frozenset[Feature]:
        """What steps of this kind have to compute. Padded steps never read sources."""
        windows = {placement.window for placement in self.store.kv_groups.placements}
        needed = {Feature.TREES}
        needed |= {Feature.WINDOWS for window in windows if window.size is not None}
        needed |= {Feature.SINKS for window in windows if window.sinks}
        needed |= {Feature.SOFT_CAP for shape in self.layers if shape.soft_cap is not None}
        needed |= {Feature.LEARNED_SINKS for shape in self.layers if shape.has_learned_sinks}
        needed |= {Feature.ALIBI for shape in self.layers if shape.alibi_slopes is not None}
        needed |= {Feature.LATENTS for shape in self.layers if shape.latent_dim is not None}
        if self.relative_biases:
            needed.add(Feature.RELATIVE_BIAS)
        if self.has_sources and kind is StepKind.RAGGED:
            needed.add(Feature.SOURCES)
        return frozenset(needed)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports. `None` stands for no restriction."""

    steps: frozenset[StepKind]
    features: frozenset[Feature]
    devices: frozenset[str] | None = None
    """Types of devices: `cpu`, `cuda`."""
    kv_types: frozenset[torch.dtype] | None = None
    """Types of fresh keys and values, which are those of stored ones unless these have 8 bits."""
    stored_types: frozenset[torch.dtype] = frozenset()
    """8-bit types of stored keys and values that it quantizes and reads; see `workers.kv.eight_bits`."""
    head_sizes: range | None = None
    latent_sizes: range | None = None
    """Numbers of keys that hold their values, which count in place of `head_sizes`."""
    most_heads_per_kv: int | None = None
    """Most query heads that share one KV head with values of its own."""
    block_sizes: frozenset[int] | None = None
    """Tokens per block."""
    most_table_blocks: int | None = None
    """Bound on the number of block tables per sequence times the pool's blocks."""
    is_batch_invariant: bool = False
    """Whether a row's results have the same bits alone and beside any others."""
    skips_unused_blocks: bool = False
    """Whether a padded row costs as much as the blocks that it uses, and not as many as its block table has."""
    packs_steps: bool = False
    """Whether steps of any size are planned as a CUDA graph may hold them: `plan_packed`."""
    prompts: tuple[int, ...] = ()
    """Fewest tokens of the prompt chunks that have kernels of their own, all of which the trial and the warm-up run."""

    def problem(self, setting: AttentionSetting, kind: StepKind) -> str | None:
        """Why the backend does not compute steps of this kind for a model; `None` if it does."""
        if kind not in self.steps:
            return f"it does not compute {kind.value}"
        if self.devices is not None and setting.device.type not in self.devices:
            return f"it does not run on {setting.device.type}"
        if self.kv_types is not None and setting.dtype not in self.kv_types:
            return f"it does not read keys and values of {setting.dtype}"
        if setting.store.stored is not None and setting.store.stored not in self.stored_types:
            return f"it does not read keys and values stored as {setting.store.stored}"
        if missing := setting.features(kind) - self.features:
            return f"it does not compute {', '.join(sorted(feature.value for feature in missing))}"
        return self._size_problem(setting)

    def _size_problem(self, setting: AttentionSetting) -> str | None:
        for shape in setting.layers:
            has_latents = shape.latent_dim is not None
            sizes, most = (self.latent_sizes, None) if has_latents else (self.head_sizes, self.most_heads_per_kv)
            if sizes is not None and shape.head_dim not in sizes:
                return f"it does not support heads of {shape.head_dim} numbers"
            if most is not None and shape.heads_per_kv > most:
                return f"it does not support {shape.heads_per_kv} query heads per KV head"
        if self.block_sizes is not None and setting.block_size not in self.block_sizes:
            return f"it does not support blocks of {setting.block_size} tokens"
        blocks = setting.store.kv_groups.layout.tables * setting.blocks
        if self.most_table_blocks is not None and blocks > self.most_table_blocks:
            return f"{blocks} blocks of all tables are more than its {self.most_table_blocks}"
        return None


@dataclass(frozen=True, slots=True)
class PackedPlan(Generic[Metadata]):
    """A step's metadata as arrays on the host."""

    arrays: list[StepArray]
    metadata: Callable[[Sequence[torch.Tensor]], Metadata]
    """From the arrays on the device to the metadata, without a wait."""


class AttentionBackend(Protocol[Metadata]):
    """Attention of one model over one pool. A backend inherits this, and plans the kinds of steps that it computes."""

    def plan(self, rows: Sequence[RowShape]) -> Metadata:  # noqa: ARG002 - for backends that compute such steps
        """The metadata of a step, whose tokens are the rows' tokens, one row after another. Computed on the host."""
        raise ValueError(f"{type(self).__name__} does not compute {StepKind.RAGGED.value}")

    def plan_packed(self, rows: Sequence[RowShape], size: GraphSize | None = None) -> PackedPlan[Metadata]:  # noqa: ARG002
        """What `plan` copies to the device.

        With `size` and no rows, the arrays are those of a CUDA graph: their shapes depend on the size alone, and each
        has one number everywhere, which is padding. Those of rows that fit are what the first parts of these have, in
        every dimension. Tokens that are padding are stored in the scratch block, and attend to nothing.
        """
        raise ValueError(f"{type(self).__name__} does not pack steps")

    def plan_sources(self, rows: Sequence[RowShape]) -> Metadata:  # noqa: ARG002
        """The metadata of a step's cross-attention: every token of a row sees all of the row's source."""
        raise ValueError(f"{type(self).__name__} does not compute {Feature.SOURCES.value}")

    def plan_padded(self, step: PaddedStep) -> Metadata:  # noqa: ARG002
        """The metadata of a step of fixed sizes, computed on the device without a wait: a CUDA graph may hold it."""
        raise ValueError(f"{type(self).__name__} does not compute {StepKind.PADDED.value}")

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: Metadata) -> None:
        """Store the keys and values of the step's tokens, `[tokens, kv_heads, dim]`, in the pool.

        Values of `Feature.LATENTS` are the first numbers of their keys, and are stored with them. NaN and infinities
        are replaced by finite numbers: the next sequence that gets the block may read it, masked.
        """

    def write_rotated(self, layer: int, fresh: Projections, metadata: Metadata) -> torch.Tensor:
        """Rotate queries and keys, and store keys and values. Returns the queries `[tokens, heads, dim]`."""
        queries, keys, values = fresh.rotated()
        self.write(layer, keys, values, metadata)
        return queries

    def attend(self, layer: int, queries: torch.Tensor, metadata: Metadata, scaling: float | None) -> torch.Tensor:
        """Attention of the queries `[tokens, heads, dim]` to what is stored, `[tokens, heads, value dim]`.

        `scaling` multiplies the products of queries and keys; `None` stands for dim ** -0.5.
        """

    def attend_with_sinks(
        self,
        layer: int,  # noqa: ARG002
        queries: torch.Tensor,  # noqa: ARG002
        metadata: Metadata,  # noqa: ARG002
        scaling: float | None,  # noqa: ARG002
        sinks: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """Attend where each head has a learned logit, `sinks` `[heads]`: a key without a value in the softmax."""
        raise ValueError(f"{type(self).__name__} does not compute {Feature.LEARNED_SINKS.value}")


def latent_groups(heads: int) -> int:
    """Groups of at most 16 query heads, all of one size, of those that read one latent: more would not fit registers.

    Each group is work of its own.
    """
    return next(heads // size for size in range(_MOST_OF_A_GROUP, 0, -1) if heads % size == 0)


def with_whole_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor `[tokens, heads, dim]` itself if each head's numbers are contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class BackendUnavailable(Exception):
    """A backend that supports a model cannot be opened on this machine. The message says why."""


@dataclass(frozen=True, slots=True)
class BackendPlugin:
    """A registered backend."""

    name: str
    capabilities: Capabilities
    preference: int
    """Order of trials: the supported backend with the highest preference is tried first. One below 0, which is that of
    the reference, is tried only where `target.attention_backend` names it."""
    open: Callable[[AttentionSetting], AttentionBackend[Any]]
    """Raises `BackendUnavailable`."""


REFERENCE = "sdpa"
"""The backend that supports every model and whose results the others must have."""

_backends: dict[str, BackendPlugin] = {}
BackendType = TypeVar("BackendType", bound=AttentionBackend[Any])


def register_backend(
    name: str, capabilities: Capabilities, preference: int
) -> Callable[[Callable[[AttentionSetting], BackendType]], Callable[[AttentionSetting], BackendType]]:
    """Make the decorated class or factory known as `name`. Raises `ValueError` when the name is taken."""

    def add(create: Callable[[AttentionSetting], BackendType]) -> Callable[[AttentionSetting], BackendType]:
        if name in _backends:
            raise ValueError(f"attention backend {name!r} is registered twice")
        _backends[name] = BackendPlugin(name, capabilities, preference, create)
        return create

    return add


def all_backends() -> list[BackendPlugin]:
    """Every backend, the most preferred first."""
    package = __package__ or "workers.forward.backends"
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{file.name}")
    return sorted(_backends.values(), key=lambda plugin: (-plugin.preference, plugin.name))
