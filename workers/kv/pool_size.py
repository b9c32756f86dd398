"""How large the paged KV pool is: its blocks, their bytes, and the memory that it may take."""

from __future__ import annotations

import psutil
import torch

from cluster.core.config.model_section import GPU_FRACTION, USUAL_FRACTION, PoolSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from workers.kv.eight_bits import STORED_TYPES, record_bytes
from workers.kv.groups import KvCacheGroups, group_layers
from workers.kv.spec import TOKENS_ALONE, KvCacheSpec
from workers.kv.states import STATES_PER_SEQUENCE

_MAX_BLOCKS = 1 << 22
USUAL_SEQUENCES = 32
"""Sequences with recurrent states in a pool whose section states no number."""
PREFIX_STATES_PER_SEQUENCE = 2
"""States at the ends of cached blocks for each sequence, unless the section states a number: one after the last block
of a running sequence, and one of an earlier prompt."""


def blocks_that_fit(spec: KvCacheSpec, section: PoolSection, truncatable: bool = False) -> int:
    """Number of blocks that fit into the configured bytes, or the fraction of unreserved free memory, on this rank.

    Raises `ConfigurationError` if not even one fits, and if configured bytes leave a GPU no memory for CUDA graphs and
    activations.
    """
    budget = section.pool_bytes
    if budget is None:
        budget = int(_unreserved_bytes(spec, section) * memory_fraction(spec, section))
    elif spec.device.type == "cuda" and budget > (most := _unreserved_bytes(spec, section)):
        name = _section_name(section)
        raise ConfigurationError(
            f"{name}.pool_bytes: {budget} is refused; it must be at most {most}, which weights, CUDA graphs and the "
            f"activations of the largest step leave of the GPU, or unset, which takes {name}.memory_fraction of that"
        )
    if spec.states:
        needed = state_bytes(spec, section)
        if needed >= budget:
            raise ConfigurationError(
                f"target.kv.sequences: the recurrent states of {kept_sequences(section)} sequences take {needed} bytes "
                f"and the pool may take {budget} bytes; lower scheduler.max_sequences or target.kv.prefix_states, or "
                "raise target.kv.pool_bytes or target.kv.memory_fraction"
            )
        budget -= needed
    size = block_bytes(group_layers(spec, section, truncatable), spec.dtype, stored_type(section))
    blocks = min(budget // size, _MAX_BLOCKS)
    if spec.layers == (TOKENS_ALONE,):  # as many as all sequences and kept prefixes can use
        blocks = min(blocks, 2 * kept_sequences(section) * -(-spec.max_context_len // section.block_size))
    if blocks < 1:
        raise ConfigurationError(
            f"{_section_name(section)}.pool_bytes: a block of {section.block_size} tokens takes {size} bytes, "
            f"and the pool may take {budget} bytes"
        )
    return int(blocks)


def memory_fraction(spec: KvCacheSpec, section: PoolSection) -> float:
    """The share of the free memory that a pool takes. A draft model's shares its GPU with the target."""
    if section.memory_fraction is not None:
        return section.memory_fraction
    return GPU_FRACTION if spec.device.type == "cuda" and isinstance(section, KvSection) else USUAL_FRACTION


def memory_setting(spec: KvCacheSpec, section: PoolSection) -> tuple[str, float]:
    """The key of the setting that says how much memory a pool takes, and its value."""
    name = _section_name(section)
    if section.pool_bytes is not None:
        return f"{name}.pool_bytes", section.pool_bytes
    return f"{name}.memory_fraction", memory_fraction(spec, section)


def _section_name(section: PoolSection) -> str:
    return "target.kv" if isinstance(section, KvSection) else "draft.model.kv"


def _unreserved_bytes(spec: KvCacheSpec, section: PoolSection) -> int:
    """Free bytes of the device beside those for CUDA graphs and for the activations of the largest step.

    Graphs of drafting passes are captured already, so they are not free.
    """
    return max(0, free_bytes(spec.device) - spec.reserved_bytes - largest_step(section) * spec.step_token_bytes)


def largest_step(section: PoolSection) -> int:
    """Tokens of the step for whose activations a GPU has memory beside the pool; 0 if the section names none."""
    return (section.step_tokens if isinstance(section, KvSection) else None) or 0


def stored_type(section: PoolSection) -> torch.dtype | None:
    """The 8-bit type of stored keys and values; `None` where they have the model's type."""
    return STORED_TYPES.get(section.dtype) if isinstance(section, KvSection) else None


def block_bytes(kv_groups: KvCacheGroups, dtype: torch.dtype, stored: torch.dtype | None = None) -> int:
    """Bytes of keys and values in one block on this rank, scales included. `stored` is their 8-bit type, if any."""
    token = 0
    for shape in kv_groups.block_layers:
        own = shape.kv_heads * shape.head_dim * dtype.itemsize if stored is None else record_bytes(shape)
        token += shape.records * own
    return token * kv_groups.layout.block_size


def state_bytes(spec: KvCacheSpec, section: PoolSection) -> int:
    """Most bytes that the states of recurrent layers take on this rank; 0 without such layers."""
    count = 1 + STATES_PER_SEQUENCE * kept_sequences(section) + kept_prefix_states(section)  # one is all zeros
    return sum(shape.size for shape in spec.states) * count


def kept_sequences(section: PoolSection) -> int:
    """Sequences whose recurrent states the pool has room for."""
    return (section.sequences if isinstance(section, KvSection) else None) or USUAL_SEQUENCES


def kept_prefix_states(section: PoolSection) -> int:
    """States at the ends of cached blocks that the pool has room for."""
    if not isinstance(section, KvSection) or not section.prefix_cache:
        return 0
    return section.prefix_states or PREFIX_STATES_PER_SEQUENCE * kept_sequences(section)


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that a device has free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has freed
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
