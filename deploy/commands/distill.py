"""`pilotfish distill`: train a draft model for a target."""

from __future__ import annotations

from deploy.commands.options import ConfigOption, SetOption
from deploy.dataclass_options import command_with_options
from deploy.distillation.options import DistillOptions
from deploy.settings import load_settings
from workers.model.draft_card import LAYERS


@command_with_options(DistillOptions)
def distill(options: DistillOptions, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Train a draft: the target answers prompts, and a small model or a module learns to predict the answers."""
    chosen = tuple(assignments or ())
    settings = load_settings(config, chosen)
    # These import torch, once all options are checked.
    if options.kind == LAYERS:
        from deploy.distillation.pipeline import run
    else:
        from deploy.distillation.modules import run_module as run

    run(settings, options, options.command_line(config, chosen))
