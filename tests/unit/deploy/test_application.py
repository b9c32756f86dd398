"""The application: its arguments, what its replicas receive, and the options with which Ray starts the actors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cluster.core.config.server import ServerSection
from cluster.core.errors import ConfigurationError
from deploy.placement import Bundle, Resources, RolePlacement, plan
from deploy.ray import application
from deploy.ray.application import ApplicationArguments, actor_options, build_app
from deploy.ray.running_serve import application_problems
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


def test_a_wrong_argument_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigurationError, match=r"the nearest valid one is server\.http_port"):
        built(server__http_prot=1)


def test_without_a_ray_cluster_models_are_not_looked_for_and_keep_their_names() -> None:
    values = built(target__path="owner/model", draft__method="heads", draft__heads__path="smollm2-135m-heads")
    assert (values["target"]["path"], values["target"]["served_name"]) == ("owner/model", "model")
    assert values["draft"]["heads"]["path"] == "smollm2-135m-heads"
    assert values["target"]["evidence"]["taps"]  # those of the module


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
