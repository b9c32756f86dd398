"""A tensor-parallel group of one rank, whose steps run the collectives of a larger group, without a peer."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import nn

from cluster.core.config.target_section import TargetSection
from workers.forward import replace_linear
from workers.forward.loaded_model import LoadedModel
from workers.serve.node import free_port
from workers.verify import build
from workers.verify.decider import Decider
from workers.verify.group import join_group, leave_group
from workers.verify.group_decider import GroupDecider


@contextmanager
def group_of_one(device: str) -> Iterator[None]:
    """Join a group of one rank: NCCL for `cuda`, gloo for `cpu`.

    A model that is loaded inside sums the outputs of its row-parallel layers over all ranks, as its `tp_plan` says. An
    engine that `build_engine` builds inside decides with the other ranks. The weights are whole. Drop every engine
    before the end: NCCL waits for the CUDA graphs with its collectives when a group ends.
    """
    join_group(TargetSection.model_validate({"device": device}), 0, "127.0.0.1", free_port("127.0.0.1"))
    try:
        with (
            patch.object(replace_linear, "_style", _planned_style),
            patch.object(build, "decider_of_model", _with_the_group),
        ):
            yield
    finally:
        gc.collect()
        leave_group()


def _planned_style(layer: nn.Module, path: str, plan: dict[str, str]) -> str:
    """How the plan shards a layer whose weights are whole: by its inputs, or in a way that needs no all-reduce."""
    style = plan.get(re.sub(r"\d+", "*", path.removeprefix(".")))
    return "rowwise" if style == "rowwise" else "whole"


def _with_the_group(model: LoadedModel, decider: Decider) -> Decider:
    return GroupDecider(model, 0)
