"""The options of `pilotfish simulate capacity`. Each is declared once, with its type, default and help text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.core.errors import ConfigurationError
from deploy.dataclass_options import check_at_least, check_directory, refuse
from deploy.simulation.capacity.step_times import Times, measured_times
from deploy.simulation.device.speeds import H100, PRODUCTS
from deploy.simulation.simulated_drafter import DrafterSpeed

ROOFLINE = "roofline"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """A cluster, its machines and its load. Raises `ConfigurationError` for a value out of bounds."""

    targets: Annotated[int, "Number of target replicas."] = 4
    drafters: Annotated[int, "Number of drafters; 0 decodes without drafts."] = 4
    target_gpus: Annotated[int, "GPUs of one target."] = 1
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
        str, typer.Option(metavar="FILE|roofline", help="A JSON file of measured times, or the roofline options.")
    ] = ROOFLINE
    target_parameters: Annotated[float, "Roofline: parameters of the target."] = 8e9
    draft_parameters: Annotated[float, "Roofline: parameters of the draft model."] = 3e8
    bytes_per_parameter: Annotated[float, "Roofline: bytes of a parameter."] = 2.0
    bandwidth: Annotated[float, "Roofline: bytes per second that a GPU reads."] = round(
        H100.bytes_per_second * PRODUCTS.bytes, -10
    )
    flops: Annotated[float, "Roofline: operations per second of a GPU."] = round(
        H100.flops_per_second * PRODUCTS.flops, -12
    )
    kv_bytes_per_token: Annotated[float, "Roofline: bytes of keys and values of a token."] = 131072.0
    pass_seconds: Annotated[
        float, "Roofline: time of a pass that neither reading nor computing explains, in seconds."
    ] = 0.0005
    kv_tokens: Annotated[int, "Tokens whose keys and values a target stores."] = 200_000
    max_sequences: Annotated[int, "Most sequences that a target computes at once."] = 64
    seconds: Annotated[float, "Virtual time of the run, in seconds; the first fifth warms up."] = 20.0
    sample: Annotated[int, "Simulate only this many targets with their share of the rest, and scale; 0: all."] = 0
    plain: Annotated[bool, "Simulate plain decoding too, for comparison."] = True
    seed: Annotated[int, "Seed of arrivals and lengths."] = 0
    out: Annotated[Path | None, "Directory for capacity.json, capacity.md and capacity.png."] = None

    def __post_init__(self) -> None:
        not_negative = ("drafters", "in_flight", "max_nodes")
        least = {"targets": 1, "target_gpus": 1, "max_sequences": 1, "kv_tokens": 1024, "sample": 0, "seed": 0}
        check_at_least(self, least | dict.fromkeys(not_negative, 0))
        check_directory(self, "out")
        positive = ("arrivals", "seconds", "target_parameters", "bytes_per_parameter")
        for name in (*positive, "bandwidth", "flops"):
            if not getattr(self, name) > 0:
                refuse(self, name, "it must be above 0")
        others = ("network_delay", "drafter_delay", "pass_seconds", "draft_parameters", "kv_bytes_per_token")
        for name in (*positive, *others):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(self, name, "it must be finite and at least 0")
        if not 0 <= self.acceptance <= 1:
            refuse(self, "acceptance", "it must be within 0 and 1")
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
        return max(1, round(self.drafters * self.share)) if self.drafters and self.placement == "drafter" else 0

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

    def times(self) -> Times:
        """How long steps and proposals take."""
        return self._roofline() if self.step_times == ROOFLINE else measured_times(Path(self.step_times))

    def _roofline(self) -> Times:
        """A step takes the longer of reading memory and computing, and a constant."""
        bandwidth, flops = self.bandwidth * self.target_gpus, self.flops * self.target_gpus

        def step(rows: int, tokens: int, held: int) -> float:  # noqa: ARG001 - rows share one pass
            read = self.target_parameters * self.bytes_per_parameter + held * self.kv_bytes_per_token
            return max(read / bandwidth, 2 * self.target_parameters * tokens / flops) + self.pass_seconds

        one_pass = self.draft_parameters * self.bytes_per_parameter / self.bandwidth + self.pass_seconds
        per_token = 2 * self.draft_parameters / self.flops
        return Times(step, DrafterSpeed(0.0, per_token, one_pass, per_token))
