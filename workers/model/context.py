"""The longest sequence that a model is served with, and the width of its states, from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from cluster.core.errors import ConfigurationError, ModelLoadError

logger = logging.getLogger(__name__)

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_WIDTHS = ("hidden_size", "d_model", "n_embd")
"""Names of these numbers in the configurations of `transformers`."""
ENDLESS = 1 << 20
"""Longest sequence, in tokens, for which masks are read where a configuration states none."""


def stated_width(config: PreTrainedConfig) -> int:
    """Width of the residual stream. Raises `ModelLoadError` if the configuration does not state it."""
    width = _stated(config, _WIDTHS)
    if width is None:
        raise ModelLoadError(f"the configuration states none of {', '.join(_WIDTHS)}")
    return width


def longest_context(config: PreTrainedConfig) -> int:
    """Longest sequence that the configuration allows, in tokens."""
    return _own_limit(config) or ENDLESS


def context_len(config: PreTrainedConfig, wanted: int | None, bounds: Mapping[str, int]) -> int:
    """Longest sequence to serve, in tokens: `wanted`, or the longest that is computed right.

    `bounds` has the lengths from which a layer would be computed wrong, each with what a longer sequence would meet.
    Raises `ConfigurationError` if `wanted` is beyond them or beyond the model's own limit.
    """
    own = _own_limit(config)
    if own is None and wanted is None:
        raise ConfigurationError("target.max_context_len must be set: the model's configuration states no limit")
    if wanted is not None and own is not None and wanted > own:
        raise ConfigurationError(f"target.max_context_len: {wanted} is refused; the model's limit is {own}")
    length = int(wanted or own or 0)
    for why, bound in {**bounds, **dict(_rotation_bounds(config))}.items():
        if length <= bound:
            continue
        if wanted is not None:
            raise ConfigurationError(f"target.max_context_len: {wanted} is refused; it must be at most {bound}: {why}")
        logger.warning("target.max_context_len is %d instead of %d: %s", bound, length, why)
        length = bound
    return length


def _own_limit(config: PreTrainedConfig) -> int | None:
    """Longest sequence that the configuration states, or to which YaRN stretches it (Peng et al. 2023, section 3)."""
    own = _stated(config, _LENGTHS)
    for values in _rotations(config):
        factor = values.get("factor")  # without one, the stated length is the stretched one
        if own is not None and factor and values.get("rope_type") == "yarn":
            original = values.get("original_max_position_embeddings") or own
            own = max(own, int(original * factor))
    return own


def _rotations(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The parameters of rotary positions, those of all layers or of each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    yield found
    yield from (value for value in found.values() if isinstance(value, dict))


def _rotation_bounds(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """The length up to which all rows of a pass rotate by the same factors, for embeddings of the type longrope."""
    for values in _rotations(config):
        if values.get("rope_type") == "longrope":
            original = values.get("original_max_position_embeddings") or config.max_position_embeddings
            yield "a longer sequence would change the factors of longrope for all rows beside it", int(original)


def _stated(config: Any, names: tuple[str, ...]) -> int | None:
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), None)
