"""The application: its arguments, what its replicas receive, and the options with which Ray starts the actors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.config.server import ServerSection
from cluster.core.errors import ConfigurationError
from cluster.wire.peer_access import OPEN
from deploy.placement import Bundle, Placement, Resources, RolePlacement, plan
from deploy.preflight import memory_problems
from deploy.ray import application, running_serve
from deploy.ray.application import ApplicationArguments, actor_options, build_app
from deploy.ray.running_serve import application_problems
from tests.unit.deploy.test_preflight import model_directory
from workers.serve.configuration import load_configuration


def built(**arguments: object) -> dict[str, Any]:
    """The configuration that the target's replicas receive."""
    given = {key.replace("__", "."): value for key, value in arguments.items()}
    ingress = build_app(ApplicationArguments.model_validate({"config": "cpu"} | given))._bound_deployment
    target = ingress.init_args[3]._bound_deployment
    values: dict[str, Any] = target.init_args[0]
    return values


def test_serve_recognizes_the_typed_argument() -> None:
    (parameter,) = inspect.signature(build_app).parameters.values()
    assert parameter.annotation is ApplicationArguments


def test_the_module_has_an_application_for_serve_build_and_nothing_else_unknown() -> None:
    assert type(application.app).__name__ == "Application"
    with pytest.raises(AttributeError, match="no attribute 'application'"):
        application.application  # noqa: B018


def test_dotted_and_nested_arguments_are_settings() -> None:
    values = built(target__threads="3", server={"grpc_port": 9100})
    assert (values["target"]["threads"], values["server"]["grpc_port"]) == (3, 9100)


def test_null_unsets_what_the_file_sets_in_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("scheduler: {max_prompt_tokens: 64}\n")
    assert built(config=str(file))["scheduler"]["max_prompt_tokens"] == 64
    dotted: dict[str, object] = {"scheduler__max_prompt_tokens": None}
    nested: dict[str, object] = {"scheduler": {"max_prompt_tokens": None}}
    for arguments in (dotted, nested):
        assert built(config=str(file), **arguments)["scheduler"]["max_prompt_tokens"] is None


def test_targets_find_the_drafters_of_another_number_of_targets() -> None:
    def version(**arguments: object) -> str:
        draft = {"config": "cpu", "draft.method": "mtp", "draft.placement": "drafter"}
        ingress = build_app(ApplicationArguments.model_validate(draft | arguments))._bound_deployment
        common: str = ingress.init_args[3]._bound_deployment.init_args[1]
        return common

    nodes = [{"cpus": 64, "resource": "all"}]
    one, ninety = (version(target={"replicas": number}, nodes=nodes) for number in (1, 90))
    assert one == ninety != version(target={"replicas": 1, "dtype": "bfloat16"}, nodes=nodes)
    assert one == version(target={"threads": 2}, draft={"threads": 3}, nodes=nodes)


@pytest.mark.parametrize(
    ("draft", "deployments"),
    [
        ({"draft.method": "none"}, ["Target"]),
        ({"draft.method": "ngram", "draft.placement": "target"}, ["Target"]),
        ({"draft.method": "ngram", "draft.placement": "drafter"}, ["Target", "Draft"]),
    ],
    ids=str,
)
def test_drafters_are_deployed_only_where_drafts_come_from_them(draft: dict[str, Any], deployments: list[str]) -> None:
    arguments = ApplicationArguments.model_validate({"config": "cpu", "draft.methods": [], **draft})
    others = build_app(arguments)._bound_deployment.init_args[3:]
    assert [other._bound_deployment.name for other in others] == deployments


def test_a_wrong_argument_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigurationError, match=r"the nearest valid one is server\.http_port"):
        built(server__http_prot=1)


def test_processes_are_planned_for_nodes_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """KubeRay has the application built while the Ray cluster has its head alone, which offers no core."""
    monkeypatch.setattr(application, "cluster_nodes", lambda: (Resources(0, 0, 4 << 30, node="head"),))
    draft = {"draft.method": "model", "draft.placement": "drafter", "draft.node_resource": "drafters"}
    own = draft | {"target.node_resource": "targets", "target.device": "cpu"}
    pods = [{"cpus": 6, "resource": "targets"}, {"cpus": 3, "gpus": 1, "count": 2, "resource": "drafters"}]

    def bound(**arguments: object) -> tuple[Any, Any]:
        ingress = build_app(ApplicationArguments.model_validate({"config": "cpu"} | own | arguments))._bound_deployment
        return ingress.init_args[3]._bound_deployment, ingress.init_args[4]._bound_deployment

    target, drafter = bound(nodes=pods)
    assert target.init_args[2] == 6
    assert target._replica_config.placement_group_bundles[1]["CPU"] > 5.0
    assert drafter.ray_actor_options["num_gpus"] == 1
    alone, _ = bound()
    assert alone.init_args[2] == 1  # nobody says what will come
    with pytest.raises(ValueError, match="resource"):
        bound(nodes=[{"cpus": 6}])


@pytest.mark.parametrize("is_running", [False, True])
def test_an_application_that_is_deployed_again_is_not_refused_for_the_memory_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_running: bool
) -> None:
    """The running replicas fill the GPU, and end before the new ones start."""
    full = Resources(8, 1, 1 << 30, 1 << 10, "gpu-1", "id")
    problems: list[str] = []

    def check(configuration: Configuration, placement: Placement, nodes: Sequence[Resources]) -> None:
        model = model_directory(tmp_path / "model", rows=1 << 10)
        problems.extend(map(str, memory_problems(configuration, placement, nodes, model, None)))

    monkeypatch.setattr(application, "cluster_nodes", lambda: (full,))
    monkeypatch.setattr(application, "check_models", check)
    monkeypatch.setattr(application, "has_replicas", lambda: is_running)
    built(target__device="cuda", target__kv={"pool_bytes": 1 << 20})
    assert len(problems) == (0 if is_running else 1)


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        (None, False),
        ({"applications": {}}, False),
        ({"applications": {"pilotfish": {"deployments": {}}}}, False),  # it is being built for the first time
        ({"applications": {"pilotfish": {"deployments": {"Target": {}}}}}, True),
    ],
)
def test_replicas_run_once_an_application_has_deployments(
    running: dict[str, Any] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_serve, "_details", lambda: running)
    assert running_serve.has_replicas() is expected


def test_without_a_ray_cluster_models_are_not_looked_for_and_keep_their_names() -> None:
    values = built(target__path="owner/model", draft__method="heads", draft__heads__path="smollm2-135m-heads")
    assert (values["target"]["path"], values["target"]["served_name"]) == ("owner/model", "model")
    assert values["draft"]["heads"]["path"] == "smollm2-135m-heads"
    assert values["target"]["evidence"]["taps"]  # those of the module


@pytest.mark.parametrize(("worker_host", "starts"), [(None, None), ("127.0.0.1", 1)])
def test_in_a_ray_cluster_a_failed_start_is_repeated_as_serve_does_by_default(
    worker_host: str | None, starts: int | None
) -> None:
    """Where `serve` starts Ray, it ends with the reason of the first one instead."""
    configuration = load_configuration({"draft": {"method": "ngram", "placement": "drafter"}})
    placement = plan(configuration, [Resources(8, 0, 1 << 40)])
    ingress: Any = application.bind(configuration, placement, worker_host, OPEN)._bound_deployment
    deployments = [ingress, *(one._bound_deployment for one in ingress.init_args[3:])]
    assert [one.name for one in deployments] == ["Ingress", "Target", "Draft"]
    for one in deployments:
        config = one._deployment_config
        default = type(config)().max_constructor_retry_count
        assert config.max_constructor_retry_count == (default if starts is None else starts)
        assert default >= 3


def test_names_and_route_prefixes_of_other_applications_are_refused() -> None:
    server = ServerSection(application="large", route_prefix="/large")
    assert not list(application_problems(server, {"small": "/", "internal": None}))
    (name,) = application_problems(server, {"large": "/other"})
    assert str(name).startswith("server.application: needed a name that no application of the Ray cluster has, found")
    (prefix,) = application_problems(server, {"other": "/large"})
    assert "'/large' taken by 'other'" in str(prefix)


@pytest.mark.parametrize("prefix", ["large", "/large/", "/a b", "//"])
def test_a_route_prefix_has_slashes_before_its_parts_only(prefix: str) -> None:
    with pytest.raises(ValueError, match="route_prefix"):
        ServerSection(route_prefix=prefix)


def test_every_thread_of_a_role_on_cpu_may_use_the_planned_number_of_openmp_threads() -> None:
    options = actor_options(RolePlacement("draft", "cpu", (Bundle(0.4),), threads=2))

    assert options["runtime_env"]["env_vars"] == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    assert options["num_cpus"] == 0.4


def test_a_role_on_a_gpu_keeps_the_environment_of_the_node() -> None:
    assert actor_options(RolePlacement("target", "cuda", (Bundle(1.0, 1),), threads=1)) == {
        "num_cpus": 1.0,
        "num_gpus": 1.0,
    }


def test_a_role_without_a_model_keeps_the_environment_so_that_ray_gives_it_a_process_that_has_started() -> None:
    assert "runtime_env" not in actor_options(RolePlacement("coordinator", "cpu", (Bundle(0.1),), threads=1))


def test_a_draft_model_without_a_gpu_of_its_own_drafts_on_the_targets() -> None:
    given = {"draft.method": "model", "draft.model.path": "somewhere", "target.device": "auto"}
    configuration = load_configuration({}, given)
    for gpus, place in ((1, "target"), (2, "drafter")):
        settled = application._on_devices(configuration, plan(configuration, [Resources(8, gpus, 1 << 40)]))
        assert (settled.draft.placement, settled.draft.is_colocated) == (place, place == "target")
        assert settled.draft.weights is not None
        assert (settled.target.device, settled.draft.weights.device) == ("cuda", "cuda")
