"""The description of a target, which coordinators and ingresses read."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.verification import TargetInfo
from workers.forward.loaded_model import LoadedModel
from workers.kv.pool import KvPool


def describe_target(model: LoadedModel, pool: KvPool, name: str, *, is_lossless: bool) -> TargetInfo:
    """Describe a target that serves this model from this pool."""
    info = TargetInfo(
        model=name,
        vocabulary_size=model.vocabulary_size,
        max_context_len=model.max_context_len,
        layout=pool.layout,
        kv=pool.occupancy(),
        eos_token_ids=model.eos_token_ids,
        tensor_parallel=model.tensor_parallel,
        dtype=str(model.dtype).removeprefix("torch."),
        is_lossless=is_lossless and pool.is_lossless,
    )
    if model.source is None:
        return info
    return replace(
        info,
        decoder_start=model.source.decoder_start,
        max_source_len=model.source.max_source_len,
        forced_eos_token_id=model.source.forced_eos_token_id,
        bad_words=model.source.bad_words,
        no_repeat_ngram_size=model.source.no_repeat_ngram_size,
        min_tokens=model.source.min_tokens,
        beam_scoring=model.source.beam_scoring,
    )
