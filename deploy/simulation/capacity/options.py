"""The options of `pilotfish simulate capacity`. Each is declared once, with its type, default and help text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.core.config.draft_section import MOST_DEPTH
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from deploy.dataclass_options import check_at_least, check_directory, refuse

PREDICTED = "predicted"
"""The step times that are not in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """A cluster, its machines and its load. Raises `ConfigurationError` for a value out of bounds."""

    targets: Annotated[int, "Number of target replicas."] = 4
    drafters: Annotated[int, "Number of drafters; 0 decodes without drafts."] = 4
    ranks: Annotated[int, "Ranks that share a target, a GPU each; one of them is predicted."] = 1
    arrivals: Annotated[
        float, typer.Option(metavar="RATE", help="Requests per second on the whole cluster, at random intervals.")
    ] = 8.0
    in_flight: Annotated[int, "Keep this many requests in flight instead of random arrivals; 0: arrivals."] = 0
    lengths: Annotated[
        str,
        typer.Option(metavar="PROMPT:ANSWER[:SPREAD]", help="Mean lengths in tokens; standard deviation ÷ mean."),
    ] = "512:128:0.5"
    acceptance: Annotated[float, "Probability that a drafted token is right after right ones."] = 0.7
    max_nodes: Annotated[int, "Most drafted tokens in a tree."] = 8
    placement: Annotated[
        Literal["drafter", "target"], "As `draft.placement`; drafts on a target's rank 0 take no further GPU."
    ] = "drafter"
    controller: Annotated[Literal["auto", "off"], "As `draft.controller`."] = "auto"
    alternate: Annotated[bool, "As `draft.alternate`: drafters draft for one half while the other is verified."] = False
    ahead: Annotated[bool, "Drafters draft on below their proposals while the target verifies them."] = False
    network_delay: Annotated[float, "Time of a message, in seconds."] = 0.0002
    drafter_delay: Annotated[float, "Further time of a message to or from a drafter, in seconds."] = 0.0
    step_times: Annotated[
        str,
        typer.Option(
            metavar="predicted|FILE",
            help="`predicted`: the steps of --model on --device, as `simulate step` predicts them, from their kernels; "
            "or a JSON file of measured times.",
        ),
    ] = PREDICTED
    model: Annotated[str, "Predicted: the target, by the name of a model whose configuration is known."] = (
        "Llama-3.1-8B"
    )
    draft: Annotated[
        str, "Predicted: the draft model, by such a name, or `eagle`, a head of the target with one layer."
    ] = "Llama-3.2-1B"
    device: Annotated[Literal["H100", "H200"], "Predicted: the GPU of each rank and of each drafter."] = "H100"
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"], "Predicted: as `target.kv.dtype`."] = "auto"
    symmetric_memory: Annotated[Literal["off", "on"], "Predicted: as `target.symmetric_memory`, how ranks sum."] = (
        TargetSection.model_fields["symmetric_memory"].default
    )
    kv_tokens: Annotated[int, "Tokens whose keys and values a target stores."] = 200_000
    max_sequences: Annotated[int, "Most sequences that a target computes at once."] = 64
    seconds: Annotated[float, "Virtual time of the run, in seconds; the first fifth warms up."] = 20.0
    sample: Annotated[int, "Simulate only this many targets with their share of the rest, and scale; 0: all."] = 0
    plain: Annotated[bool, "Simulate plain decoding too, for comparison."] = True
    seed: Annotated[int, "Seed of arrivals and lengths."] = 0
    out: Annotated[Path | None, "Directory for capacity.json, capacity.md and capacity.png."] = None

    def __post_init__(self) -> None:
        not_negative = ("drafters", "in_flight", "max_nodes")
        least = {"targets": 1, "ranks": 1, "max_sequences": 1, "kv_tokens": 1024, "sample": 0, "seed": 0}
        check_at_least(self, least | dict.fromkeys(not_negative, 0))
        check_directory(self, "out")
        for name in ("arrivals", "seconds"):
            if not getattr(self, name) > 0:
                refuse(self, name, "it must be above 0")
        for name in ("arrivals", "seconds", "network_delay", "drafter_delay"):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(self, name, "it must be finite and at least 0")
        if not 0 <= self.acceptance <= 1:
            refuse(self, "acceptance", "it must be within 0 and 1")
        if self.max_nodes > MOST_DEPTH:
            refuse(self, "max_nodes", f"it must be at most {MOST_DEPTH}, the largest draft.max_depth")
        if self.sample > self.targets:
            refuse(self, "sample", f"it must be at most --targets, {self.targets}")
        for name in ("ahead", "drafter_delay"):
            if self.placement == "target" and getattr(self, name):
                refuse(self, name, "it is for drafters, and --placement target has none")
        self.mean_lengths()

    @property
    def simulated_targets(self) -> int:
        """Number of targets that are simulated."""
        return self.sample or self.targets

    @property
    def share(self) -> float:
        """Share of the cluster that is simulated."""
        return self.simulated_targets / self.targets

    @property
    def simulated_drafters(self) -> int:
        """Number of drafters that are simulated."""
        return max(1, round(self.drafters * self.share)) if self.has_drafts and self.placement == "drafter" else 0

    def mean_lengths(self) -> tuple[float, float, float]:
        """Mean tokens of prompt and answer, and their standard deviation ÷ mean."""
        try:
            prompt, answer, *spread = (float(part) for part in self.lengths.split(":"))
        except ValueError:
            raise ConfigurationError(
                f"--lengths: {self.lengths!r} is refused; it must be PROMPT:ANSWER[:SPREAD]"
            ) from None
        is_length = 1 <= prompt < math.inf and 1 <= answer < math.inf
        if not is_length or len(spread) > 1 or any(not 0 <= value <= 2 for value in spread):
            raise ConfigurationError(f"--lengths: {self.lengths!r} is refused; at least 1:1, spread within 0 and 2")
        return prompt, answer, spread[0] if spread else 0.0

    @property
    def has_drafts(self) -> bool:
        """Whether anything drafts."""
        return self.drafters > 0

    @property
    def is_predicted(self) -> bool:
        """Whether the times of steps and proposals are predicted."""
        return self.step_times == PREDICTED
