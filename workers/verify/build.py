"""Builds a target's engine from its configuration: weights, KV pool, decider, acceptance rule, warm-up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.ports import DraftMethod
from cluster.core.verification import StepSample
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import choose_attention
from workers.forward.symmetric_all_reduce import reduce_through_symmetric_memory
from workers.kv.pool import KvPool
from workers.kv.pool_size import blocks_that_fit
from workers.kv.start_memory import populate, release_free_memory
from workers.model.drafting.fusion import load_fusion
from workers.model.fingerprint import fingerprint, weights_digest
from workers.model.kv_effect import state_kv_effect
from workers.model.packed_weights.store import keep_packed, packed_file, read_packed
from workers.model.stored_choice import settled
from workers.ranks import bound_collectives, failing_together, is_equal_on_all, least_of_all_ranks
from workers.sampling.acceptance import create_rule
from workers.verify.decider import Decider, LocalDecider, decider_of_model
from workers.verify.engine import EngineOptions, TargetEngine
from workers.verify.evidence import Fuse
from workers.verify.group_decider import GroupDecider

logger = logging.getLogger(__name__)


def build_engine(
    section: TargetSection, rank: int = 0, method: DraftMethod | None = None, profile: Sequence[StepSample] = ()
) -> TargetEngine:
    """Load this rank's part of the target and warm it up. With several ranks, call `join_group` on each of them first:
    it returns on all of them at once, and from then on `target.step_timeout_seconds` bounds their collectives.
    `method` drafts on this rank after each step. `profile` is what an earlier warm-up measured, the same on all ranks.

    Raises `ModelLoadError`, `ConfigurationError`.
    """
    section = settled(section)
    file = packed_file(section)
    packed = None if file is None else read_packed(section, file)
    with failing_together(section.tensor_parallel):
        engine, model, pool = _make(section, rank, packed, method)
    try:
        engine.warm_up(profile)
    except BaseException:
        engine.close()
        raise
    if section.kv.pool_bytes is not None and model.device.type == "cpu":
        populate(pool)  # after the warm-up, which measures steps; a share of free memory is taken as it is used
    else:
        release_free_memory()
    if file is not None and packed is None:
        keep_packed(section, file, model)  # after the warm-up, whose times it would lengthen
    bound_collectives(section.step_timeout_seconds, section.tensor_parallel)
    return engine


def _make(
    section: TargetSection, rank: int, packed: LoadedModel | None, method: DraftMethod | None
) -> tuple[TargetEngine, LoadedModel, KvPool]:
    """An engine that has not computed yet. `packed` is its model, if it was read from a file of packed weights."""
    rule = create_rule(section)
    if section.tensor_parallel > 1 and not is_equal_on_all(weights_digest(Path(section.path)), section.tensor_parallel):
        raise ConfigurationError(f"target.path: {section.path!r} is refused; it must hold the same files for all ranks")
    model = packed or _load(section, rank)
    if model.source is not None and section.kv.window is not None:
        raise ConfigurationError(
            f"target.kv.window: {section.kv.window} is refused; it must be unset for an encoder-decoder model"
        )
    if model.source is not None and section.kv.dtype != "auto":
        raise ConfigurationError(
            f"target.kv.dtype: {section.kv.dtype} is refused; it must be auto for an encoder-decoder model"
        )
    state_kv_effect(section, model, rank)
    if section.symmetric_memory == "on":
        _reduce_through_symmetric_memory(section, model, rank)
    fuse = None if rank else _fusion(section, model.device)  # before the pool takes the memory that is left
    blocks = blocks_that_fit(model.kv_spec, section.kv)
    decider: Decider = LocalDecider()
    if section.tensor_parallel > 1:
        blocks = least_of_all_ranks(blocks, section.tensor_parallel)  # block tables are equal on all of them
        decider = GroupDecider(model, rank)
    pool = KvPool(model.kv_spec, section.kv, blocks)
    attention = choose_attention(model, pool, section.attention_backend)
    options = EngineOptions(
        served_name=section.served_name,
        rule=rule,
        method=method,
        evidence=section.evidence,
        fuse=fuse,
        attention=attention,
        fingerprint=fingerprint(section, model, attention),
        directory=Path(section.path),
        is_tried=section.trial == "on",
        goes_ahead=goes_ahead(section, model.device),
    )
    return TargetEngine(model, pool, decider_of_model(model, decider), options), model, pool


def goes_ahead(section: TargetSection, device: torch.device) -> bool:
    """Whether steps are launched before their rows come: a CPU computes when it launches, and ranks would not agree."""
    return section.step_ahead == "on" and device.type == "cuda" and section.tensor_parallel == 1


def _reduce_through_symmetric_memory(section: TargetSection, model: LoadedModel, rank: int) -> None:
    """Do what `target.symmetric_memory` asks for, or let rank 0 say why nothing comes of it. All ranks call it."""
    if section.tensor_parallel == 1:
        reason = "target.tensor_parallel is 1, so there is nothing to sum"
    elif model.device.type != "cuda":
        reason = f"it is for GPUs, and the target is on {model.device.type}"
    elif section.compile == "off":
        reason = "target.compile is off"
    elif not model.uses_cuda_graphs:
        reason = "the model's recurrent layers run without CUDA graphs"
    else:
        reduce_through_symmetric_memory(model.dtype, model.device, section.tensor_parallel)
        return
    if rank == 0:
        logger.warning("target.symmetric_memory: on has no effect: %s", reason)


def _fusion(section: TargetSection, device: torch.device) -> Fuse | None:
    """What the target applies to the taps before the first rank sends them."""
    evidence = section.evidence
    if evidence.fusion is None or not evidence.is_sent:
        return None
    return load_fusion(Path(evidence.fusion), evidence.taps, device)


def _load(section: TargetSection, rank: int) -> LoadedModel:
    """This rank's part of the target, from the files of its model."""
    from workers.model.loading import load_model  # imports transformers, which takes seconds

    return load_model(
        section,
        rank=rank,
        tensor_parallel=section.tensor_parallel,
        max_context_len=section.max_context_len,
        trial=section.trial == "on",
    )
