"""Decides where every role runs: pure functions from a configuration and the resources of the cluster's nodes.

One Serve replica is one placement group. The ranks of a target are packed on one node, because they all-reduce in every
layer. A draft model takes a GPU that no rank uses, so that drafting and verifying can overlap. Where none is left, it
drafts on the GPU of the target's rank 0, after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from cluster.core.config.sections import Configuration
from workers.draft.registry import can_share_gpu, placement_of

Device = Literal["cpu", "cuda"]

HELPER_CPUS = 0.1
"""Number of cores (a fraction) that a role without a model claims."""


def strategy(*, spans_nodes: bool) -> str:
    """Ray's placement strategy for the bundles of a replica: on one node, or on as few as possible."""
    return "PACK" if spans_nodes else "STRICT_PACK"


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one node."""

    cpus: float
    gpus: int
    memory_bytes: int
    """Free main memory, in bytes."""
    gpu_memory_bytes: int = 0
    """Free memory of the GPU with the least free memory among those that nobody claims, in bytes; 0 if it is unknown,
    and where all are claimed."""
    node: str = "this machine"
    """Name of the node, unlike that of any other node."""
    id: str = ""
    """The node's id in Ray; empty outside of a Ray cluster."""
    custom: tuple[str, ...] = ()
    """Custom Ray resources of the node."""

    def has(self, resource: str | None) -> bool:
        """Whether the node has a custom resource; true for `None`."""
        return resource is None or resource in self.custom


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
    """The device and threads of one role, and the bundles of each of its replicas.

    A replica of the target has one bundle per rank. Drafts on the target have no replica and no bundle.
    """

    role: str
    device: Device
    bundles: tuple[Bundle, ...]
    threads: int
    """Intra-op threads of each process."""
    replicas: int = 1
    node_resource: str | None = None
    """Custom Ray resource of the nodes that the role runs on; `None`: any node."""
    spans_nodes: bool = False
    """Whether the bundles of a replica may be on several nodes."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the role's processes."""
        if self.device != "cpu" or self.role not in ("target", "draft"):
            return {}
        # Target and drafters share cores: threads that spin while they wait would slow each other down.
        # torch.set_num_threads does not reach threads that start later, and Ray sets one OpenMP thread for them.
        return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(self.threads)}


@dataclass(frozen=True, slots=True)
class Group:
    """The bundles of a replica, which are on one node unless it spans nodes. A target's begins with its coordinator."""

    role: str
    replica: int
    bundles: tuple[Bundle, ...]
    node_resource: str | None = None
    spans_nodes: bool = False
    """Whether the bundles may be on several nodes, where no node has room for all."""
    cpus: float = field(init=False)
    """Number of cores that all bundles claim."""
    gpus: int = field(init=False)
    """Number of GPUs that all bundles claim."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cpus", sum(bundle.cpus for bundle in self.bundles))
        object.__setattr__(self, "gpus", sum(bundle.gpus for bundle in self.bundles))


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
    def drafts_on_target(self) -> bool:
        """Whether no drafter has a process of its own: the target's rank 0 drafts, or nothing does."""
        return self.draft.replicas == 0

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of bundles of all replicas."""
        whole_target = (*self.coordinator.bundles, *self.target.bundles)
        of_roles = ((self.ingress, self.ingress.bundles), (self.draft, self.draft.bundles), (self.target, whole_target))
        return tuple(
            Group(role.role, replica, bundles, role.node_resource, role.spans_nodes)
            for role, bundles in of_roles
            for replica in range(role.replicas)
        )

    @property
    def cpus(self) -> float:
        """Number of cores that all roles claim."""
        return sum(group.cpus for group in self.groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs that all roles claim."""
        return sum(group.gpus for group in self.groups)


def plan(configuration: Configuration, nodes: Sequence[Resources]) -> Placement:
    """Place every role on at least one node. Never fails: `preflight` reports what they lack.

    A drafter whose method loads a model claims cores or a GPU; any other drafter claims `HELPER_CPUS`. On CPU, the
    target and the drafters each use all cores: drafting and verifying mostly alternate, and cores reserved for an idle
    drafter would slow plain decoding down. The bundles divide Ray's logical cores and do not affect thread counts. A
    role with configured threads claims at most one core for each.

    On CPU, the replicas of a role are spread over those of its nodes that have the most cores. A role that has nodes of
    its own, by its `node_resource`, claims what they have.
    """
    target, draft = configuration.target, configuration.draft
    ranks, ingresses = target.tensor_parallel, configuration.server.ingress_replicas
    target_hosts, draft_hosts = _Hosts.of(nodes, target.node_resource), _Hosts.of(nodes, draft.node_resource)
    ingress_hosts = _Hosts.of(nodes, configuration.server.ingress_node_resource)
    target_device = _device(target.device, target_hosts.gpus)
    either = {node.node: node.gpus for node in (*target_hosts.nodes, *draft_hosts.nodes)}
    unused = sum(either.values()) - (ranks * target.replicas if target_device == "cuda" else 0)
    gpus_left = min(draft_hosts.gpus, unused)
    # Drafters are identical replicas: either each has a GPU or none has.
    draft_device = _device(draft.weights.device, gpus_left // draft.replicas) if draft.weights is not None else "cpu"

    shares_gpu = target_device == "cuda" and draft_device == "cpu" and target_hosts.gpus > 0 and can_share_gpu(draft)
    on_target = shares_gpu or placement_of(draft, target) == "target"
    if on_target and draft.weights is not None and draft.weights.device != "cpu":
        draft_device = target_device
    drafters = draft.replicas if draft.is_enabled and not on_target else 0
    shares_node = on_target or target_hosts.has_room_for(draft_hosts)
    # The replicas of each role on one node, if they run on CPU.
    targets_here = ceil(target.replicas / len(target_hosts.largest))
    drafters_here = ceil(draft.replicas / len(draft_hosts.largest))
    helpers = targets_here + (ingresses if target_hosts.has_room_for(ingress_hosts) else 0)
    if draft.weights is None and shares_node:
        helpers += ceil(drafters / len(draft_hosts.largest))
    cpus_left = max(0.0, target_hosts.cpus - helpers * HELPER_CPUS)
    draft_bundle = Bundle(HELPER_CPUS)
    if draft.weights is not None and not (on_target and draft_device == "cuda"):
        left, share = cpus_left, _draft_share(target_device) / drafters_here
        if not shares_node:
            others = ingresses if draft_hosts.has_room_for(ingress_hosts) else 0
            left, share = max(0.0, draft_hosts.cpus - others * HELPER_CPUS), 1 / drafters_here
        draft_bundle = Bundle(1.0, 1) if draft_device == "cuda" else Bundle(_share(left, share, draft.threads))
        if shares_node:
            cpus_left = max(0.0, cpus_left - draft_bundle.cpus * drafters_here)
    share = 1 / (ranks * targets_here)
    target_bundle = Bundle(1.0, 1) if target_device == "cuda" else Bundle(_share(cpus_left, share, target.threads))
    cores = max(1, int(target_hosts.cpus))
    drafts_on_cpu = draft.weights is not None and draft_device == "cpu"
    computes_on_cpu = target_device == "cpu" or (on_target and drafts_on_cpu)
    target_threads = target.threads or (_threads(cores, ranks * targets_here) if computes_on_cpu else 1)
    draft_cores = cores if target_device == "cpu" else cores - 1
    if not shares_node:
        draft_cores = max(1, int(draft_hosts.cpus))
    draft_threads = draft.threads or (_threads(draft_cores, drafters_here) if drafts_on_cpu else 1)
    helper = (Bundle(HELPER_CPUS),)
    return Placement(
        target=RolePlacement(
            "target",
            target_device,
            (target_bundle,) * ranks,
            target_threads,
            target.replicas,
            target.node_resource,
            target.span_nodes,
        ),
        draft=RolePlacement(
            "draft", draft_device, (draft_bundle,) if drafters else (), draft_threads, drafters, draft.node_resource
        ),
        coordinator=RolePlacement("coordinator", "cpu", helper, 1, target.replicas),
        ingress=RolePlacement("ingress", "cpu", helper, 1, ingresses, configuration.server.ingress_node_resource),
    )


@dataclass(frozen=True, slots=True)
class _Hosts:
    """The nodes that a role may run on."""

    nodes: tuple[Resources, ...]

    @classmethod
    def of(cls, nodes: Sequence[Resources], resource: str | None) -> _Hosts:
        """The nodes that have a custom resource; all nodes if none has it, which `preflight` reports."""
        return cls(tuple(node for node in nodes if node.has(resource)) or tuple(nodes))

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @property
    def largest(self) -> tuple[Resources, ...]:
        """The nodes that have the most cores."""
        cpus = max(node.cpus for node in self.nodes)
        return tuple(node for node in self.nodes if node.cpus == cpus)

    @property
    def cpus(self) -> float:
        """Number of cores of each of the largest nodes."""
        return self.largest[0].cpus

    def has_room_for(self, others: _Hosts) -> bool:
        """Whether a role with the nodes `others` may run on one of the largest nodes."""
        names = {node.node for node in others.nodes}
        return any(node.node in names for node in self.largest)


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


def _share(cpus: float, fraction: float, threads: int) -> float:
    """A fraction of the cores, rounded down to hundredths, so that the sum of all claims fits; at most `threads`."""
    share = max(0.01, int(cpus * fraction * 100) / 100)
    return min(share, float(threads)) if threads else share
