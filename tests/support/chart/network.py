"""Decides what NetworkPolicies allow, as a network plugin of Kubernetes does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.support.chart.rendering import NAMESPACE, Object


@dataclass(frozen=True)
class Pod:
    """One end of a connection."""

    labels: dict[str, str]
    namespace: str = NAMESPACE


def allows(policies: Iterable[Object], source: Pod, destination: Pod, port: int | str, names: dict[str, int]) -> bool:
    """Whether `source` may open a TCP connection to a port of `destination`, whose named ports are `names`."""
    number = names[port] if isinstance(port, str) else port
    return _passes(policies, "Egress", source, destination, number, names) and _passes(
        policies, "Ingress", destination, source, number, names
    )


def _passes(
    policies: Iterable[Object], direction: str, here: Pod, there: Pod, port: int, names: dict[str, int]
) -> bool:
    """Whether the policies of one end let a connection with the other end pass."""
    rules, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    specs = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == here.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], here.labels)
    ]
    if not specs:
        return True  # no policy selects the pod
    return any(
        _matches_port(rule.get("ports"), port, names) and _matches_peer(rule.get(peers), there, here.namespace)
        for spec in specs
        for rule in spec.get(rules, [])
    )


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector selects a pod with these labels."""
    expressions = selector.get("matchExpressions", [])
    if any(one["operator"] != "In" for one in expressions):
        raise NotImplementedError("only the operator In is used")
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def _matches_port(ports: list[Any] | None, port: int, names: dict[str, int]) -> bool:
    if ports is None:
        return True
    return any(one.get("protocol", "TCP") == "TCP" and port == (names.get(one["port"], one["port"])) for one in ports)


def _matches_peer(peers: list[Any] | None, pod: Pod, namespace: str) -> bool:
    """Whether a pod is among the peers; without any, every pod is. An address block holds no pod."""
    if not peers:
        return True
    for peer in peers:
        if "ipBlock" in peer:
            continue
        where = peer.get("namespaceSelector")
        in_namespace = (
            pod.namespace == namespace
            if where is None
            else selects(where, {"kubernetes.io/metadata.name": pod.namespace})
        )
        if in_namespace and selects(peer.get("podSelector", {}), pod.labels):
            return True
    return False
