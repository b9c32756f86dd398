"""The resources of the nodes of a Ray cluster, or of this machine."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.machine import free_gpu_memory, free_memory, local_resources
from deploy.placement import Resources
from deploy.ray.start_ray import join_ray

_MEASURE_SECONDS = 20.0
"""Longest wait for the nodes to measure their memory."""


def joined_nodes(address: str, *, demands_token: bool) -> tuple[Resources, ...]:
    """The nodes of the Ray cluster at an address. Joins the cluster for that time, as `join_ray` does."""
    join_ray(address, demands_token=demands_token)
    try:
        return cluster_nodes()
    finally:
        ray.shutdown()


def cluster_nodes() -> tuple[Resources, ...]:
    """The nodes of the Ray cluster that this process has joined, or this machine if it has not joined one."""
    if not ray.is_initialized():
        return (local_resources(),)
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    shared = {address for address, count in Counter(map(_address, alive)).items() if count > 1}
    measured = _measured([str(node["NodeID"]) for node in alive])
    unclaimed = _unclaimed()
    nodes = []
    for node in alive:
        name = f"{_address(node)} ({node['NodeID'][:8]})" if _address(node) in shared else _address(node)
        memory, of_gpus = measured.get(str(node["NodeID"]), (int(node["Resources"].get("memory", 0)), []))
        cpus, gpus = (float(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        custom = tuple(sorted(set(node["Resources"]) - {"CPU", "GPU", "memory", "object_store_memory"}))
        # Others fill the GPUs that they claim, as does an application's former version: they have the least memory.
        free = sorted(of_gpus, reverse=True)[: int(unclaimed.get(str(node["NodeID"]), {}).get("GPU", 0))]
        nodes.append(Resources(cpus, int(gpus), memory, min(free, default=0), name, node["NodeID"], custom))
    return tuple(sorted(nodes, key=lambda node: node.node))


def without_claims(nodes: tuple[Resources, ...]) -> tuple[Resources, ...]:
    """The nodes with the cores and GPUs that no other application of the Ray cluster claims."""
    if not ray.is_initialized():
        return nodes
    free = _unclaimed()
    return tuple(
        replace(node, cpus=free.get(node.id, {}).get("CPU", 0.0), gpus=int(free.get(node.id, {}).get("GPU", 0)))
        for node in nodes
    )


def _unclaimed() -> Mapping[str, Mapping[str, float]]:
    """By node, the resources that nobody in the Ray cluster claims."""
    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def _address(node: Mapping[str, Any]) -> str:
    return str(node["NodeManagerAddress"])


def _measured(node_ids: list[str]) -> dict[str, tuple[int, list[int]]]:
    """The free memory of each node and of its GPUs, in bytes. Nodes that do not answer in time are left out."""
    calls = {}
    for node_id in node_ids:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        calls[ray.remote(_measure).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote()] = node_id
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=_MEASURE_SECONDS)
    for call in late:
        ray.cancel(call, force=True)
    found = {}
    for call in done:
        try:
            found[calls[call]] = ray.get(call)
        except RayError:
            logging.getLogger(__name__).warning("node %s cannot measure its memory", calls[call])
    return found


def _measure() -> tuple[int, list[int]]:
    return free_memory(), free_gpu_memory()
