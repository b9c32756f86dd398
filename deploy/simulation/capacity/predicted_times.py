"""The times of steps and proposals in a capacity simulation, as `pilotfish simulate step` predicts them."""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.config.draft_section import DraftSection
from cluster.core.errors import ConfigurationError
from deploy.simulation.capacity.options import CapacityOptions
from deploy.simulation.capacity.step_times import Times
from deploy.simulation.device.drafting import count_eagle_drafts
from deploy.simulation.device.models import MODELS, RankModel, check_eagle, rank_model
from deploy.simulation.device.predicted_steps import PredictedSteps
from deploy.simulation.device.rounds import draft_seconds
from deploy.simulation.device.speeds import DEVICES, Device
from deploy.simulation.simulated_drafter import DrafterSpeed

EAGLE = "eagle"
"""A draft that is a head of the target."""
_MANY = 64
"""Rows of a proposal by which the time of a row is found."""
_TEXT = 512
"""Tokens of a text that a draft model has not seen, by which the time of a token is found."""


def predicted_times(options: CapacityOptions, report: Callable[[float], None] = lambda _: None) -> Times:
    """How long steps and proposals of the options' target and draft take on their device.

    To predict them takes seconds, of which `report` receives the share that is done. Raises `ConfigurationError` for a
    model that is not known or that the ranks cannot share.
    """
    target, device = rank_model(options.model, options.ranks, options.kv_dtype), DEVICES[options.device]
    if options.has_drafts and options.draft == EAGLE:
        check_eagle(RankModel(options.model))
    elif options.has_drafts and options.draft not in MODELS:
        raise ConfigurationError(f"--draft {options.draft}: unknown; it must be {EAGLE}, or {', '.join(MODELS)}")
    reduced = options.symmetric_memory == "on"
    steps = PredictedSteps(target, device, symmetric_memory=reduced, report=lambda done: report(done / 2))
    prompt, answer, _ = options.mean_lengths()
    stored = round(prompt + answer / 2)
    if not options.has_drafts:
        speed = DrafterSpeed()
    elif options.draft == EAGLE:
        speed = _eagle_speed(options.model, device, stored, options.max_nodes)
    else:
        draft = PredictedSteps(RankModel(options.draft), device, report=lambda done: report((1 + done) / 2))
        speed = model_speed(draft, stored)
    report(1.0)
    return Times(steps.seconds, speed)


def model_speed(draft: PredictedSteps, stored: int) -> DrafterSpeed:
    """The speed of a draft model that makes a pass for each level of its trees, after so many tokens."""
    one, many = (draft.seconds([(stored, 1)] * rows) for rows in (1, _MANY))
    text = draft.seconds([(stored, 1 + _TEXT)])
    return DrafterSpeed(
        call_seconds=0.0,
        depth_seconds=one,
        token_seconds=max(0.0, text - one) / _TEXT,
        level_row_seconds=max(0.0, many - one) / (_MANY - 1),
    )


def _eagle_speed(name: str, device: Device, stored: int, depth: int) -> DrafterSpeed:
    """The speed of a head of one layer, which drafts as many levels. It sees the accepted tokens in its first pass."""
    depth = max(1, depth)
    draft = DraftSection(max_nodes=depth, max_depth=depth)
    one, many = (
        draft_seconds(count_eagle_drafts(RankModel(name), rows, stored, draft), device) / depth for rows in (1, _MANY)
    )
    return DrafterSpeed(call_seconds=0.0, depth_seconds=one, level_row_seconds=max(0.0, many - one) / (_MANY - 1))
