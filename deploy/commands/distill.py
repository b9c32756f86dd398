"""`pilotfish distill`: train a draft model for a target."""

from __future__ import annotations

from deploy.commands.options import ConfigOption, SetOption
from deploy.dataclass_options import command_with_options
from deploy.distillation.options import DistillOptions
from deploy.settings import load_settings


@command_with_options(DistillOptions)
def distill(options: DistillOptions, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Train a draft model: the target answers prompts, and a student learns to predict the answers (Seq-KD)."""
    chosen = tuple(assignments or ())
    settings = load_settings(config, chosen)
    from deploy.distillation.pipeline import run  # imports torch, once all options are checked

    run(settings, options, options.command_line(config, chosen))
