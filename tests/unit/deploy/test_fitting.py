"""A replica's bundles are on one node. A replica that fits on no node is reported with what the nodes have."""

from __future__ import annotations

import pytest

from cluster.core.config.sections import Configuration
from deploy.fitting import fit
from deploy.placement import Resources, plan
from deploy.preflight import capacity_problems
from workers.serve.configuration import load_configuration

MODEL = {"draft.method": "model", "draft.model.path": "somewhere"}


def gpu_nodes(count: int, gpus: int) -> list[Resources]:
    return [Resources(32, gpus, 1 << 40, 80 << 30, f"gpu-{number}") for number in range(count)]


def cpu_nodes(count: int, cpus: float = 8) -> list[Resources]:
    return [Resources(cpus, 0, 64 << 30, node=f"cpu-{number}") for number in range(count)]


def configured(ranks: int, targets: int, drafters: int = 0, **more: object) -> Configuration:
    values = {"target.tensor_parallel": ranks, "target.replicas": targets} | more
    return load_configuration({}, values | (MODEL | {"draft.replicas": drafters} if drafters else {}))


def lines(configuration: Configuration, nodes: list[Resources]) -> list[str]:
    return [str(problem) for problem in capacity_problems(plan(configuration, nodes), nodes)]


def test_ranks_of_a_replica_share_a_node_and_drafters_have_gpus_of_their_own() -> None:
    nodes = gpu_nodes(3, 4)
    found = fit(plan(configured(ranks=4, targets=2, drafters=2), nodes), nodes)
    assert not found.unplaced
    assert [sum(group.gpus for group in found.on(node.node)) for node in nodes] == [4, 4, 2]
    on_last = [group.role for group in found.on("gpu-2")]
    assert on_last.count("draft") == 2
    assert "target" not in on_last


def test_small_replicas_fill_what_large_ones_leave() -> None:
    nodes = [*gpu_nodes(1, 8), *gpu_nodes(2, 3)[1:]]
    found = fit(plan(configured(ranks=3, targets=3, drafters=2), nodes), nodes)
    assert not found.unplaced
    assert [node.gpus for node in found.left] == [0, 0]


def test_replicas_without_gpus_prefer_nodes_without_gpus() -> None:
    nodes = [*gpu_nodes(1, 2), *cpu_nodes(1)]
    found = fit(plan(configured(ranks=2, targets=1, **{"draft.placement": "drafter"}), nodes), nodes)
    assert [group.role for group in found.on("gpu-0")] == ["target"]
    assert sorted(group.role for group in found.on("cpu-0")) == ["draft", "ingress"]


@pytest.mark.parametrize(("nodes", "targets"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("drafters", [0, 1, 4])
def test_cpu_replicas_fit_on_equal_nodes(nodes: int, targets: int, drafters: int) -> None:
    cluster = cpu_nodes(nodes)
    configuration = configured(ranks=2, targets=targets, drafters=drafters)
    assert not fit(plan(configuration, cluster), cluster).unplaced
    assert not lines(configuration, cluster)


def test_replicas_on_several_cpu_nodes_use_the_cores_of_a_whole_node() -> None:
    assert plan(configured(ranks=1, targets=2), cpu_nodes(2)).target.threads == 8
    assert plan(configured(ranks=1, targets=2), cpu_nodes(1)).target.threads == 4


def test_a_head_without_cores_is_no_node_for_a_target() -> None:
    nodes = [Resources(0, 0, 4 << 30, node="head"), *cpu_nodes(1)]
    found = fit(plan(configured(ranks=1, targets=1), nodes), nodes)
    assert not found.unplaced
    assert not found.on("head")


def test_configured_threads_leave_cores_for_another_application() -> None:
    threads = {"target.threads": 2, "draft.threads": 1}
    nodes = cpu_nodes(1)
    placement = plan(configured(ranks=1, targets=1, drafters=1, **threads), nodes)
    assert placement.cpus == pytest.approx(2 + 1 + 0.2)
    assert not fit(placement, list(fit(placement, nodes).left)).unplaced


def test_a_role_with_a_node_resource_runs_on_nodes_that_have_it() -> None:
    nodes = [*cpu_nodes(2), Resources(8, 0, 64 << 30, node="own", custom=("targets",))]
    found = fit(plan(configured(ranks=1, targets=2, **{"target.node_resource": "targets"}), nodes), nodes)
    assert not found.unplaced
    assert [group.role for group in found.on("own")].count("target") == 2
    missing = configured(ranks=1, targets=1, **{"target.node_resource": "other"})
    assert [group.role for group in fit(plan(missing, nodes), nodes).unplaced] == ["target"]
    assert lines(missing, nodes) == [
        "nodes: needed one with the Ray resource 'other' for the target, found none; start a node with it"
    ]


def test_every_ingress_claims_its_share() -> None:
    nodes = cpu_nodes(1)
    placement = plan(configured(ranks=1, targets=1, **{"server.ingress_replicas": 3}), nodes)
    assert placement.ingress.replicas == 3
    assert not fit(placement, nodes).unplaced


def test_too_few_gpus_in_the_cluster_are_one_line() -> None:
    (line,) = lines(configured(ranks=4, targets=3, drafters=2, **{"draft.model.device": "cuda"}), gpu_nodes(3, 4))
    assert line.startswith("GPUs: needed 14 (2 for the draft, 12 for the target), found 12; lower")


def test_enough_gpus_on_too_small_nodes_are_one_line() -> None:
    (line,) = lines(configured(ranks=4, targets=1), gpu_nodes(3, 2))
    assert line == (
        "GPUs on one node: needed 4 for a replica of the target, "
        "found 2 on gpu-0, 2 on gpu-1, 2 on gpu-2 without the other replicas; "
        "lower target.tensor_parallel or the number of replicas, or add a node, "
        "or set target.span_nodes for ranks on several nodes"
    )


def test_gpus_left_on_different_nodes_are_one_line() -> None:
    (line,) = lines(
        configured(ranks=3, targets=3, **{"target.device": "cuda"}), gpu_nodes(3, 4)[:2] + gpu_nodes(3, 2)[2:]
    )
    assert "found 1 on gpu-0, 1 on gpu-1, 2 on gpu-2" in line


def test_enough_cores_on_too_small_nodes_are_one_line() -> None:
    nodes = [Resources(2, 4, 1 << 40, node="a"), Resources(8, 0, 1 << 40, node="b")]
    (line,) = lines(configured(ranks=4, targets=1), nodes)
    assert line.startswith("CPU cores on one node: needed 4.1 for a replica of the target, found 2 on a, 7.9 on b")
