"""Decides where every role runs: a pure function from a configuration and a node's resources.

One Serve replica is one placement group. The ranks of a target are packed on one node, because they all-reduce in every
layer. A draft model takes a GPU that no rank uses, so that drafting and verifying can overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.core.config.sections import Configuration
from workers.draft.registry import placement_of

Device = Literal["cpu", "cuda"]

HELPER_CPUS = 0.1
"""Number of cores (a fraction) that a role without a model claims."""

STRATEGY = "STRICT_PACK"
"""Ray's placement strategy: all bundles of a replica are on one node."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one node."""

    cpus: float
    gpus: int
    memory_bytes: int
    """Free main memory, in bytes."""
    gpu_memory_bytes: int = 0
    """Free memory of the GPU with the least free memory, in bytes."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The resources that one process claims."""

    cpus: float
    gpus: int = 0

    def claims(self) -> dict[str, float]:
        """The claims in Ray's form."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """The device, bundles and threads of one role. There is one bundle per rank of a target, and one per drafter.

    A drafter on the target has no bundle.
    """

    role: str
    device: Device
    bundles: tuple[Bundle, ...]
    threads: int
    """Intra-op threads of each process."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of all roles."""

    target: RolePlacement
    draft: RolePlacement
    coordinator: RolePlacement
    ingress: RolePlacement

    @property
    def roles(self) -> tuple[RolePlacement, ...]:
        """All roles, in the order in which they are shown."""
        return (self.ingress, self.coordinator, self.draft, self.target)

    @property
    def cpus(self) -> float:
        """Number of cores that all roles claim."""
        return sum(bundle.cpus for role in self.roles for bundle in role.bundles)

    @property
    def gpus(self) -> int:
        """Number of GPUs that all roles claim."""
        return sum(bundle.gpus for role in self.roles for bundle in role.bundles)


def plan(configuration: Configuration, resources: Resources) -> Placement:
    """Place every role. Never fails: `preflight` reports what the node lacks.

    A drafter whose method loads a model claims cores or a GPU; any other drafter claims `HELPER_CPUS`. On CPU, the
    target and the drafters each use all cores: drafting and verifying mostly alternate, and cores reserved for an idle
    drafter would slow plain decoding down. The bundles divide Ray's logical cores and do not affect thread counts.
    """
    target, draft = configuration.target, configuration.draft
    ranks = target.tensor_parallel
    target_device = _device(target.device, resources.gpus)
    gpus_left = resources.gpus - (ranks if target_device == "cuda" else 0)
    # Drafters are identical replicas: either each has a GPU or none has.
    draft_device = _device(draft.weights.device, gpus_left // draft.replicas) if draft.weights is not None else "cpu"

    drafts_on_cpu = draft.weights is not None and draft_device == "cpu"
    drafters = 0 if placement_of(draft) == "target" else draft.replicas
    helpers = 2 if draft.weights is not None else 2 + drafters
    cpus_left = max(0.0, resources.cpus - helpers * HELPER_CPUS)
    draft_bundle = Bundle(HELPER_CPUS)
    if draft.weights is not None:
        share = _draft_share(target_device) / draft.replicas
        draft_bundle = Bundle(1.0, 1) if draft_device == "cuda" else Bundle(_share(cpus_left, share))
        cpus_left = max(0.0, cpus_left - draft_bundle.cpus * draft.replicas)
    target_bundle = Bundle(1.0, 1) if target_device == "cuda" else Bundle(_share(cpus_left, 1 / ranks))
    cores = max(1, int(resources.cpus))
    target_threads = target.threads or (_threads(cores, ranks) if target_device == "cpu" else 1)
    draft_cores = cores if target_device == "cpu" else cores - 1
    draft_threads = draft.threads or (_threads(draft_cores, draft.replicas) if drafts_on_cpu else 1)
    return Placement(
        target=RolePlacement("target", target_device, (target_bundle,) * ranks, target_threads),
        draft=RolePlacement("draft", draft_device, (draft_bundle,) * drafters, draft_threads),
        coordinator=RolePlacement("coordinator", "cpu", (Bundle(HELPER_CPUS),), 1),
        ingress=RolePlacement("ingress", "cpu", (Bundle(HELPER_CPUS),), 1),
    )


def _device(asked: str, gpus_left: int) -> Device:
    """The device of a role. `auto` takes a GPU if one is left."""
    if asked == "auto":
        return "cuda" if gpus_left > 0 else "cpu"
    return "cuda" if asked == "cuda" else "cpu"


def _threads(cores: int, processes: int) -> int:
    """Threads of each of several processes that compute at the same time."""
    return max(1, cores // processes)


def _draft_share(target_device: Device) -> float:
    """Fraction of Ray's logical cores that all drafters on CPU claim together."""
    return 0.25 if target_device == "cpu" else 0.9


def _share(cpus: float, fraction: float) -> float:
    """A fraction of the cores, rounded down to hundredths, so that the sum of all claims fits."""
    return max(0.01, int(cpus * fraction * 100) / 100)
