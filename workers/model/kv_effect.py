"""How much keys and values in 8 bits change what a model computes: measured when it is loaded, logged and kept.

The trial's texts are read twice, with keys and values of the model's own type and with stored ones of `kv.dtype`. All
else is equal, so the difference of the logits comes from the stored type alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from cluster.core.config.target_section import KvSection, TargetSection
from workers.forward.loaded_model import LoadedModel
from workers.model.trial_steps import run_steps
from workers.model.verdicts import keep_verdict, read_verdict, verdict_file
from workers.ranks import largest_over_ranks, least_of_all_ranks

logger = logging.getLogger(__name__)

_SEQUENCES = 8
"""Sequences with recurrent states in the measuring pool: as many as the trial has."""
_FURTHER: dict[str, Any] = {"attention_backend": True, "native": True, "kv": {"block_size", "dtype", "sinks", "window"}}
"""Settings on which the effect depends, and the weights and their trial do not."""
_MOVES = "moves_logits_by"


def state_kv_effect(section: TargetSection, model: LoadedModel, rank: int = 0) -> None:
    """Log how far `target.kv.dtype` moves the logits, unless it is `auto`: measured now, or at an earlier start.

    All ranks of a model call this together, before its runner is made. The first one logs.
    """
    if section.kv.dtype == "auto":
        return
    further = section.model_dump(mode="json", include=_FURTHER)
    file = verdict_file(section, model.tensor_parallel, model.device, further)
    kept = (read_verdict(file) or {}).get(_MOVES)
    if least_of_all_ranks(int(isinstance(kept, float)), model.tensor_parallel):
        share = float(kept or 0.0)
    else:
        share = kv_effect(model, section.kv)
        keep_verdict(file, {"model": model.name, "kv.dtype": section.kv.dtype, _MOVES: share})
    if rank == 0:
        logger.info(
            "target.kv.dtype: keys and values in %s move logits by at most %.2g%% of their range",
            section.kv.dtype,
            100 * share,
        )


@torch.inference_mode()
def kv_effect(model: LoadedModel, kv: KvSection) -> float:
    """The largest change of a logit by `kv.dtype` in the trial's steps, as a share of the range of all logits there.

    All ranks of a model call this together.
    """
    alone = {"prefix_cache": False, "host_bytes": 0, "disk_directory": None, "sequences": _SEQUENCES}
    small = kv.model_copy(update=alone)
    full = small.model_copy(update={"dtype": "auto"})
    expected = torch.stack([step.logits.clone() for step in run_steps(model, full)])
    largest = expected.new_zeros(())
    for own, step in zip(expected, run_steps(model, small), strict=True):
        largest = largest.maximum((step.logits - own).abs().max())
    found = torch.stack([largest, expected.max(), -expected.min()])
    if model.tensor_parallel > 1:
        largest_over_ranks(found)
    least = torch.finfo(torch.float32).tiny
    return float(found[0] / (found[1] + found[2]).clamp(min=least))
