"""Who sits where: a pure function from a configuration and a node's resources to bundles and threads.

One Serve replica is one placement group. A target's ranks are packed on one node (their all-reduces
cross it at every layer); a draft model takes a GPU that no rank uses, so that both can run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.core.config import Configuration

Device = Literal["cpu", "cuda"]

HELPER_CPUS = 0.1
"""What a role that only waits, sends and looks up claims of a core."""

STRATEGY = "STRICT_PACK"
"""All bundles of a replica on one node."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one node offers."""

    cpus: float
    gpus: int
    memory_bytes: int
    """Free main memory."""
    gpu_memory_bytes: int = 0
    """Free memory of the fullest GPU."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one process claims."""

    cpus: float
    gpus: int = 0

    def claims(self) -> dict[str, float]:
        """As Ray writes it."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """One role: a bundle per process. Of a target, the first is for the replica itself; each drafter has one."""

    role: str
    device: Device
    bundles: tuple[Bundle, ...]
    threads: int
    """Intra-op threads of each process."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Every role."""

    target: RolePlacement
    draft: RolePlacement
    coordinator: RolePlacement
    ingress: RolePlacement

    @property
    def roles(self) -> tuple[RolePlacement, ...]:
        return (self.ingress, self.coordinator, self.draft, self.target)

    @property
    def cpus(self) -> float:
        """All cores claimed."""
        return sum(bundle.cpus for role in self.roles for bundle in role.bundles)

    @property
    def gpus(self) -> int:
        """All GPUs claimed."""
        return sum(bundle.gpus for role in self.roles for bundle in role.bundles)


def plan(configuration: Configuration, resources: Resources) -> Placement:
    """Place every role. Never fails: `preflight` reports what the node lacks.

    A drafter computes if its method loads a model; any other drafter claims next to nothing. On CPU, the target has a
    thread on every core and so have the drafters: drafting and verifying mostly alternate, and a core that waits for a
    resting drafter would slow plain decoding down. The bundles divide Ray's logical cores and have no influence on
    threads.
    """
    target, draft = configuration.target, configuration.draft
    ranks = target.tensor_parallel
    target_device = _device(target.device, resources.gpus)
    gpus_left = resources.gpus - (ranks if target_device == "cuda" else 0)
    # Several drafters are alike: all of them have a GPU, or none.
    draft_device = _device(draft.weights.device, gpus_left // draft.replicas) if draft.weights is not None else "cpu"

    drafts_on_cpu = draft.weights is not None and draft_device == "cpu"
    helpers = 2 if draft.weights is not None else 2 + draft.replicas
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
        draft=RolePlacement("draft", draft_device, (draft_bundle,) * draft.replicas, draft_threads),
        coordinator=RolePlacement("coordinator", "cpu", (Bundle(HELPER_CPUS),), 1),
        ingress=RolePlacement("ingress", "cpu", (Bundle(HELPER_CPUS),), 1),
    )


def _device(asked: str, gpus_left: int) -> Device:
    """`auto` takes a GPU where one is left."""
    if asked == "auto":
        return "cuda" if gpus_left > 0 else "cpu"
    return "cuda" if asked == "cuda" else "cpu"


def _threads(cores: int, processes: int) -> int:
    """Threads of each of several processes that compute at the same time."""
    return max(1, cores // processes)


def _draft_share(target_device: Device) -> float:
    """Share of Ray's logical cores that the drafters on CPU claim together."""
    return 0.25 if target_device == "cpu" else 0.9


def _share(cpus: float, fraction: float) -> float:
    """A part of the cores, rounded down to hundredths so that the parts never add up to more than the whole."""
    return max(0.01, int(cpus * fraction * 100) / 100)
