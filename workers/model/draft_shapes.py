"""The shapes of drafting modules, as their card stores them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from cluster.core.errors import ConfigurationError, shorten


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """Medusa heads (Cai et al. 2024) with an optional mixture of the last token and an optional selector."""

    title: ClassVar[str] = "Heads"
    meaning: ClassVar[str] = "Medusa heads (Cai et al. 2024)"

    depths: int = 4
    """Number of heads: tokens proposed along one path."""
    mix_rank: int = 1024
    """Width of the layer that adds the last committed token to the hidden state; 0: none (plain Medusa)."""
    selector_rank: int = 256
    """Width of the selector; 0: none."""

    def __post_init__(self) -> None:
        _check(self, {"depths": 1, "mix_rank": 0, "selector_rank": 0})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One Llama-like decoder layer: grouped-query attention with rotary positions, SwiGLU, RMS norms."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_width: int
    """Elements of one attention head; even."""
    intermediate_size: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    window: int = 512
    """Most context positions that a position attends to. Relative positions then never exceed those trained on."""

    def __post_init__(self) -> None:
        names = ("hidden_size", "heads", "kv_heads", "head_width", "intermediate_size", "window")
        _check(self, dict.fromkeys(names, 1))
        if self.heads % self.kv_heads:
            raise ConfigurationError(f"kv_heads: {self.kv_heads} is refused; it must divide heads, {self.heads}")
        if self.head_width % 2:
            raise ConfigurationError(f"head_width: {self.head_width} is refused; it must be even")
        for name in ("rope_theta", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}: {getattr(self, name)} is refused; it must be above 0")


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A drafter that predicts a block of tokens in one pass."""

    title: ClassVar[str] = "A block drafter"
    meaning: ClassVar[str] = "a block drafter: all tokens in one pass, from the target's hidden states"
    not_public: ClassVar[str] = (
        "each slot adds a learned vector to a projection of embedding and hidden state; in DFlash and DSpark it is the "
        "embedding of a mask token"
    )

    layer: LayerShape
    block: int = 6
    """Tokens predicted by one pass."""
    layers: int = 1
    selector_rank: int = 256
    """Width of the selector; 0: none."""

    def __post_init__(self) -> None:
        _check(self, {"block": 1, "layers": 1, "selector_rank": 0})


@dataclass(frozen=True, slots=True)
class EagleShape:
    """An EAGLE-3-like head: decoder layers on fused taps and shifted embeddings (Li et al. 2025)."""

    title: ClassVar[str] = "An EAGLE head"
    meaning: ClassVar[str] = "an EAGLE-3-like head (Li et al. 2025): decoder layers on the target's hidden states"
    not_public: ClassVar[str] = (
        "the residual stream begins as a projection of embedding and fused hidden states; in EAGLE-3 it begins as the "
        "fused hidden states"
    )

    layer: LayerShape
    layers: int = 1

    def __post_init__(self) -> None:
        _check(self, {"layers": 1})


@dataclass(frozen=True, slots=True)
class ExitShape:
    """Early exit: the target without some of its layers, and a norm before its head."""

    title: ClassVar[str] = "The norm of an early exit"
    meaning: ClassVar[str] = "early exit: the target drafts with some of its own layers"
    not_public: ClassVar[str] = "it is the target's own layers and a norm"

    layers: tuple[int, ...]
    """The target's layers that draft, ascending: the first L, or all but a skip set."""
    has_norm: bool = False
    """Whether an own norm is stored; otherwise the target's final norm is used."""

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigurationError(
                f"layers: {shorten(self.layers)} is refused; it must be ascending layer numbers, at least one"
            )


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table of successors (Token Recycling, Luo et al. 2024)."""

    title: ClassVar[str] = "A table"
    meaning: ClassVar[str] = "a table of successors (Token Recycling, Luo et al. 2024)"
    not_public: ClassVar[str] = "it is a table"

    successors: int = 8
    """Tokens stored after each token."""

    def __post_init__(self) -> None:
        _check(self, {"successors": 1})


Shape = HeadsShape | BlockShape | EagleShape | ExitShape | TableShape

SHAPES: dict[str, type[Shape]] = {
    "heads": HeadsShape,
    "block": BlockShape,
    "eagle": EagleShape,
    "exit": ExitShape,
    "table": TableShape,
}
"""By the kind of a draft. The kind `layers` is a model of its own, which `config.json` describes.

Plans of a training name a shape by its `title`, model cards by its `meaning`, which follows "The kind is …:", and say
with `not_public` what keeps it out of every public format.
"""


def shape_from(kind: str, values: Any) -> Shape:
    """The shape of a kind from a JSON object with exactly its fields. Raises `ConfigurationError` naming the field."""
    shape: Shape = _read(SHAPES[kind], values, "shape")
    return shape


def _read(kind: type[Any], values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigurationError(f"{where}: {shorten(values)} is refused; it must be an object")
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if values.keys() != wanted.keys():
        lacks, excess = sorted(wanted.keys() - values.keys()), sorted(values.keys() - wanted.keys())
        raise ConfigurationError(
            f"{where}: lacks {lacks or 'nothing'} and has {shorten(excess or 'nothing')} in excess"
        )
    return kind(**{name: _value(values[name], wanted[name], f"{where}.{name}") for name in wanted})


def _value(found: Any, kind: str, where: str) -> Any:
    if kind == "LayerShape":
        return _read(LayerShape, found, where)
    if kind == "tuple[int, ...]":
        if isinstance(found, (list, tuple)) and all(_is_number(value, int) for value in found):
            return tuple(found)
    elif kind == "bool":
        if isinstance(found, bool):
            return found
    elif _is_number(found, int if kind == "int" else (int, float)):
        return found
    raise ConfigurationError(f"{where}: {shorten(found)} is refused; it must be {kind}")


def _is_number(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check(shape: Any, least: dict[str, int]) -> None:
    for name, bound in least.items():
        value = getattr(shape, name)
        if value < bound:
            raise ConfigurationError(f"{name}: {value} is refused; it must be at least {bound}")
