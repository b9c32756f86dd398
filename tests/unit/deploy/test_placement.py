"""The placement of each role for several machines and configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.config.sections import Configuration
from deploy.fitting import fit
from deploy.placement import Bundle, Resources, RolePlacement, plan
from workers.serve.configuration import load_configuration

LAPTOP = Resources(cpus=2, gpus=0, memory_bytes=8 << 30)
SERVER = Resources(cpus=64, gpus=0, memory_bytes=256 << 30)
GPU_NODE = Resources(cpus=96, gpus=8, memory_bytes=1 << 40, gpu_memory_bytes=80 << 30)

DRAFT_MODEL = {"draft.method": "model", "draft.model.path": "somewhere"}


def configured(**changes: object) -> Configuration:
    return load_configuration({}, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("with_draft_model", [False, True])
@pytest.mark.parametrize("resources", [LAPTOP, SERVER])
def test_every_cpu_placement_fits_the_machine(resources: Resources, with_draft_model: bool, ranks: int) -> None:
    overrides = {"target.tensor_parallel": ranks} | (DRAFT_MODEL if with_draft_model else {})

    placement = plan(load_configuration({}, overrides), [resources])

    assert placement.cpus <= resources.cpus
    assert placement.gpus == 0
    assert len(placement.target.bundles) == ranks
    assert all(bundle.cpus > 0 for role in placement.roles for bundle in role.bundles)


def test_a_single_target_uses_all_cores() -> None:
    assert plan(configured(), [LAPTOP]).target.threads == 2
    assert plan(configured(), [SERVER]).target.threads == 64


@pytest.mark.parametrize(("ranks", "threads"), [(1, 64), (2, 32), (3, 21), (64, 1)])
def test_ranks_divide_the_cores(ranks: int, threads: int) -> None:
    assert plan(configured(target__tensor_parallel=ranks), [SERVER]).target.threads == threads


def test_a_rank_has_a_thread_even_where_cores_are_fewer_than_ranks() -> None:
    assert plan(configured(target__tensor_parallel=3), [LAPTOP]).target.threads == 1


@pytest.mark.parametrize("resources", [LAPTOP, SERVER])
def test_a_target_and_its_draft_model_both_use_all_cores(
    resources: Resources,
) -> None:
    placement = plan(load_configuration({}, DRAFT_MODEL), [resources])

    assert placement.target.threads == resources.cpus
    assert placement.draft.threads == resources.cpus


def test_configured_threads_are_used_unchanged() -> None:
    placement = plan(load_configuration({}, DRAFT_MODEL | {"target.threads": 5, "draft.threads": 4}), [LAPTOP])

    assert (placement.target.threads, placement.draft.threads) == (5, 4)


def test_ranks_take_a_gpu_each_and_the_draft_another() -> None:
    placement = plan(load_configuration({}, DRAFT_MODEL | {"target.tensor_parallel": 4}), [GPU_NODE])

    assert placement.target == RolePlacement("target", "cuda", (Bundle(1.0, 1),) * 4, threads=1)
    assert placement.draft == RolePlacement("draft", "cuda", (Bundle(1.0, 1),), threads=1)
    assert placement.gpus == 5


def test_a_lookup_drafter_takes_no_gpu() -> None:
    placement = plan(configured(target__tensor_parallel=4), [GPU_NODE])

    assert placement.draft.device == "cpu"
    assert placement.gpus == 4


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (8, 8)])
def test_a_draft_model_shares_the_gpu_of_rank_0_when_the_target_has_the_last_one(gpus: int, ranks: int) -> None:
    node = replace(GPU_NODE, gpus=gpus)
    for changes in ({}, {"draft.placement": "target"}):
        placement = plan(load_configuration({}, DRAFT_MODEL | {"target.tensor_parallel": ranks} | changes), [node])
        assert placement.drafts_on_target
        assert (placement.target.device, placement.draft.device) == ("cuda", "cuda")
        assert (placement.draft.bundles, placement.gpus) == ((), gpus)


@pytest.mark.parametrize("changes", [{"draft.placement": "drafter"}, {"draft.model.device": "cpu"}])
def test_a_draft_model_runs_on_cpu_where_a_setting_says_so(changes: dict[str, str]) -> None:
    placement = plan(load_configuration({}, DRAFT_MODEL | {"target.tensor_parallel": 8} | changes), [GPU_NODE])

    assert not placement.drafts_on_target
    assert (placement.target.device, placement.draft.device) == ("cuda", "cpu")
    assert placement.draft.threads == 95


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("with_draft_model", [False, True])
def test_each_of_several_drafters_has_its_share(replicas: int, with_draft_model: bool) -> None:
    overrides = {"draft.replicas": replicas} | (DRAFT_MODEL if with_draft_model else {})
    placement = plan(load_configuration({}, overrides), [SERVER])

    assert placement.draft.replicas == replicas
    assert placement.cpus <= SERVER.cpus
    assert placement.draft.threads == (64 // replicas if with_draft_model else 1)


@pytest.mark.parametrize(("ranks", "device"), [(6, "cuda"), (7, "cpu")])
def test_several_drafters_have_a_gpu_each_or_none(ranks: int, device: str) -> None:
    overrides = {"draft.replicas": 2, "target.tensor_parallel": ranks}
    placement = plan(load_configuration({}, DRAFT_MODEL | overrides), [GPU_NODE])

    assert placement.draft.device == device
    assert placement.gpus == (8 if device == "cuda" else 7)


def test_a_configured_device_is_claimed_even_if_it_is_missing() -> None:
    assert plan(configured(target__device="cuda", target__tensor_parallel=2), [LAPTOP]).gpus == 2


def test_a_configured_cpu_is_used_even_if_there_are_gpus() -> None:
    placement = plan(configured(target__device="cpu"), [GPU_NODE])

    assert placement.target.device == "cpu"
    assert placement.gpus == 0


def test_a_draft_model_on_cpu_that_learns_beside_a_gpu_has_the_cores() -> None:
    changes = DRAFT_MODEL | {"draft.learn": "on", "draft.model.device": "cpu"}
    placement = plan(load_configuration({}, changes), [replace(GPU_NODE, gpus=1)])
    assert (placement.gpus, placement.draft.bundles) == (1, ())
    assert placement.target.threads == GPU_NODE.cpus


def test_a_bundle_without_gpus_claims_none_of_ray() -> None:
    assert Bundle(0.5).claims() == {"CPU": 0.5}
    assert Bundle(1.0, 1).claims() == {"CPU": 1.0, "GPU": 1.0}


def test_neither_a_drafter_on_the_target_nor_plain_decoding_has_a_process() -> None:
    on_target = load_configuration({}, {"draft.method": "suffix", "draft.placement": "target"})
    plain = load_configuration({}, {"draft.method": "none", "draft.placement": "target"})
    disabled = on_target.model_copy(update={"draft": on_target.draft.disabled()})
    assert (plan(on_target, [LAPTOP]).draft.bundles, plan(on_target, [LAPTOP]).draft.replicas) == ((), 0)
    assert (plan(plain, [LAPTOP]).draft.bundles, plan(plain, [LAPTOP]).draft.replicas) == ((), 0)
    assert plan(disabled, [LAPTOP]) == plan(plain, [LAPTOP])


OWN = {
    "target.node_resource": "targets",
    "draft.node_resource": "drafters",
    "server.ingress_node_resource": "ingresses",
    "draft.placement": "drafter",
}
"""Each role has nodes of its own."""


def own_nodes(target: Resources, drafter: Resources, ingress: Resources) -> list[Resources]:
    """One node for each role, and a head that offers nothing."""
    named = (("targets", target), ("drafters", drafter), ("ingresses", ingress))
    head = Resources(0, 0, 4 << 30, node="head")
    return [head, *(replace(node, node=name, custom=(name,)) for name, node in named)]


def test_a_role_with_nodes_of_its_own_claims_what_these_have() -> None:
    """Not what the largest node of the cluster has, on which the role never runs."""
    nodes = own_nodes(replace(SERVER, cpus=4), LAPTOP, replace(SERVER, cpus=16))
    placement = plan(load_configuration({}, DRAFT_MODEL | OWN | {"server.ingress_replicas": 6}), nodes)
    assert (placement.target.threads, placement.draft.threads) == (4, 2)
    assert [bundle.cpus for bundle in placement.target.bundles] == [3.9]
    assert [bundle.cpus for bundle in placement.draft.bundles] == [2.0]
    found = fit(placement, nodes)
    assert not found.unplaced
    assert [group.role for group in found.on("ingresses")] == ["ingress"] * 6


@pytest.mark.parametrize(("gpus", "device"), [(1, "cuda"), (0, "cpu")])
def test_a_draft_model_takes_gpus_of_its_own_nodes_alone(gpus: int, device: str) -> None:
    nodes = own_nodes(GPU_NODE, replace(GPU_NODE, cpus=8, gpus=gpus), LAPTOP)
    placement = plan(load_configuration({}, DRAFT_MODEL | OWN | {"target.tensor_parallel": 4}), nodes)
    assert (placement.target.device, placement.draft.device) == ("cuda", device)
    assert not fit(placement, nodes).unplaced


def test_a_target_takes_gpus_of_its_own_nodes_alone() -> None:
    nodes = own_nodes(SERVER, GPU_NODE, LAPTOP)
    placement = plan(load_configuration({}, DRAFT_MODEL | OWN), nodes)
    assert (placement.target.device, placement.draft.device) == ("cpu", "cuda")
    assert not fit(placement, nodes).unplaced
