"""What KubeRay hands to Ray Serve: Serve's schema and Pilotfish's settings accept every key of it."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from deploy.settings import settings_from_arguments
from tests.support.chart.rendering import CI_VALUES, Object, Rendered, render, render_ci


@pytest.fixture(params=CI_VALUES)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render_ci(request.param)


def checked(config: Object) -> list[Configuration]:
    """The configuration of each Pilotfish application. Raises `ValueError` for a key that Serve would ignore."""
    parsed = ServeDeploySchema.model_validate(config)
    ignored = _missing(config, parsed.model_dump(mode="json", exclude_unset=True))
    if ignored:
        raise ValueError(f"Serve ignores {', '.join(ignored)}")
    return [settings_from_arguments(one["args"], {}).configuration for one in config["applications"]]


def _missing(given: Any, kept: Any, path: str = "") -> list[str]:
    """The paths of keys in `given` that are not in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        found = [f"{path}{key}" for key in given if key not in kept]
        both = given.keys() & kept.keys()
        return found + [name for key in both for name in _missing(given[key], kept[key], f"{path}{key}.")]
    if isinstance(given, list) and isinstance(kept, list):
        return [name for pair in zip(given, kept, strict=True) for name in _missing(*pair, path)]
    return []


def test_serve_and_pilotfish_accept_every_key(rendered: Rendered) -> None:
    (configuration,) = checked(rendered.serve_config)
    assert configuration.server.grpc_host == "0.0.0.0"  # other pods reach it


def test_the_settings_are_those_of_the_values() -> None:
    (smoke,) = checked(render_ci("cpu-smoke").serve_config)
    assert smoke.target.path == "smollm2-135m-instruct" and smoke.target.kv.pool_bytes == 64 << 20
    (large,) = checked(render_ci("two-by-eight").serve_config)
    assert (large.target.tensor_parallel, large.target.autoscaling.sequences_per_replica) == (4, 64)
    assert large.server.drain_timeout_seconds == 120.0


def test_a_drafting_method_in_the_values_replaces_that_of_the_preset() -> None:
    for draft, name in (
        ({"method": "lookahead"}, "lookahead"),
        ({"methods": ["ngram", "prediction"]}, "ngram+prediction"),
    ):
        for preset in ("cpu", "gpu"):
            (found,) = checked(render({"preset": preset, "settings": {"draft": draft}}).serve_config)
            assert found.draft.name == name
    both = render({"settings": {"draft": {"method": "ngram", "methods": ["suffix", "prediction"]}}})
    with pytest.raises(ConfigurationError, match=r"method \(ngram\) and methods \(suffix, prediction\) must not both"):
        checked(both.serve_config)


def test_the_http_api_answers_under_the_names_of_services_and_routes() -> None:
    values = {"ingress": {"enabled": True, "http": {"host": "a.example.com"}}}
    (through_ingress,) = checked(render(values).serve_config)
    found = render(values)
    hosts = through_ingress.server.allowed_hosts
    assert "a.example.com" in hosts
    for service in found.of_kind("Service"):
        if service["spec"]["ports"][0]["name"] != "grpc":
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            assert {name, f"{name}.{namespace}", f"{name}.{namespace}.svc"} <= set(hosts)
    gateway = {"enabled": True, "parentRefs": [{"name": "g"}], "http": {"host": "*.example.com"}}
    (through_gateway,) = checked(render({"gateway": gateway}).serve_config)
    assert "*.example.com" in through_gateway.server.allowed_hosts
    assert "pilotfish.example.com" not in through_gateway.server.allowed_hosts
    (chosen,) = checked(render({"settings": {"server": {"allowed_hosts": ["*"]}}}).serve_config)
    assert chosen.server.allowed_hosts == ("*",)


def test_each_pod_has_one_replica_of_its_role_by_default() -> None:
    (large,) = checked(render_ci("two-by-eight").serve_config)
    assert (large.target.replicas, large.target.autoscaling.max_replicas) == (1, 3)
    assert (large.draft.replicas, large.server.ingress_replicas) == (2, 2)
    groups = {"target": {"replicas": 2}, "ingress": {"replicas": 3}}
    (fixed,) = checked(render({"workers": groups}).serve_config)
    assert (fixed.target.replicas, fixed.target.autoscaling.max_replicas, fixed.server.ingress_replicas) == (2, 0, 3)
    (chosen,) = checked(render({"workers": groups, "settings": {"target": {"replicas": 4}}}).serve_config)
    assert chosen.target.replicas == 4


def test_large_numbers_keep_their_value() -> None:
    found = render({"settings": {"target": {"kv": {"disk_bytes": 2**53 - 1}}}})
    (configuration,) = checked(found.serve_config)
    assert configuration.target.kv.disk_bytes == 2**53 - 1


def test_the_pods_of_a_role_have_the_gpus_that_it_claims(rendered: Rendered) -> None:
    (configuration,) = checked(rendered.serve_config)
    claims = {"target": configuration.target.tensor_parallel, "draft": 1}
    devices = {"target": configuration.target.device}
    devices["draft"] = configuration.draft.weights.device if configuration.draft.weights else "cpu"
    for role, device in devices.items():
        if device == "cuda":
            limits = rendered.pod_templates[role]["spec"]["containers"][0]["resources"]["limits"]
            assert int(limits["nvidia.com/gpu"]) >= claims[role]


def test_further_applications_and_deployment_options_reach_serve() -> None:
    scaling = {"name": "Target", "autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}
    other = {
        "name": "small",
        "route_prefix": "/small",
        "import_path": "deploy.ray.application:build_app",
        "args": {"config": "cpu", "server": {"grpc_port": 9001}},
    }
    found = render({"serve": {"deployments": [scaling], "extraApplications": [other]}})

    first, second = checked(found.serve_config)

    assert (first.server.grpc_port, second.server.grpc_port) == (9000, 9001)
    applications = found.serve_config["applications"]
    assert applications[0]["deployments"] == [scaling] and applications[1]["route_prefix"] == "/small"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"target": {"tensor_paralel": 2}}}, "target.tensor_paralel: unknown key"),
        ({"settings": {"tarjet": {"path": "x"}}}, "tarjet.*unknown key"),
        ({"settings": {"draft": {"method": "ngran"}}}, "ngran"),
        ({"serve": {"deployments": [{"name": "Target", "num_replica": 2}]}}, "num_replica"),
    ],
)
def test_a_planted_typo_in_the_serve_config_fails(values: Object, message: str) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=message):
        checked(render(values).serve_config)
