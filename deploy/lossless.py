"""How the target accepts guesses: by right, unless an experiment was asked for."""

from __future__ import annotations

from cluster.core.config import Configuration
from cluster.core.errors import ConfigurationError

SYNTHETIC = "synthetic"
NOT_LOSSLESS = "NOT LOSSLESS: guesses are accepted by chance, so answers are not the model's"
"""What is written wherever an experiment's answers are."""


def with_acceptance(configuration: Configuration) -> Configuration:
    """The target told what `draft.method: synthetic` implies: it, not the drafter, accepts by chance.

    Raises `ConfigurationError` for a target that would accept by chance what a real drafter guesses.
    """
    target, draft = configuration.target, configuration.draft
    if draft.method == SYNTHETIC:
        rule = {"acceptance": SYNTHETIC, "acceptance_rates": draft.synthetic_acceptance}
        return configuration.model_copy(update={"target": target.model_copy(update=rule)})
    if target.acceptance == SYNTHETIC or target.acceptance_rates:
        raise ConfigurationError(
            f"target.acceptance: {target.acceptance} with rates {list(target.acceptance_rates)} is refused; "
            "draft.method: synthetic sets both"
        )
    return configuration


def is_lossless(configuration: Configuration) -> bool:
    """Whether answers are what the model alone would have written."""
    return configuration.draft.method != SYNTHETIC
