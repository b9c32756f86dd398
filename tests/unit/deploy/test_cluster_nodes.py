"""What the nodes of a Ray cluster have for one more application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from deploy.ray import nodes

GIB = 1 << 30


def node(name: str, gpus: int) -> dict[str, Any]:
    return {"NodeID": name, "Alive": True, "NodeManagerAddress": name, "Resources": {"CPU": 16.0, "GPU": float(gpus)}}


@pytest.mark.parametrize(("unclaimed", "memory"), [
    ({"one": {"CPU": 16.0, "GPU": 4.0}}, 3 * GIB),  # by what Ray does not know of
    ({"one": {"CPU": 12.0, "GPU": 2.0}}, 70 * GIB),
    ({"one": {"CPU": 12.0, "GPU": 1.0}}, 79 * GIB),
    ({"one": {"CPU": 12.0}}, 0),
    ({}, 0),
], ids=["none claimed", "two claimed", "three claimed", "all claimed", "a node that has just come"])  # fmt: skip
def test_gpus_that_others_claim_do_not_count_as_full(
    unclaimed: Mapping[str, Mapping[str, float]], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second application, or a new version of a running one, would be refused for the memory of the first."""
    measured = 100 * GIB, [4 * GIB, 79 * GIB, 3 * GIB, 70 * GIB]
    monkeypatch.setattr(nodes.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(nodes.ray, "nodes", lambda: [node("one", 4), node("two", 0)])
    monkeypatch.setattr(nodes, "available_resources_per_node", lambda: unclaimed)
    monkeypatch.setattr(nodes, "_measured", lambda _: {"one": measured, "two": (50 * GIB, [])})
    one, two = nodes.cluster_nodes()
    assert (one.gpus, one.gpu_memory_bytes, one.memory_bytes) == (4, memory, 100 * GIB)
    assert (two.gpus, two.gpu_memory_bytes) == (0, 0)
