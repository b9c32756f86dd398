"""What KubeRay hands to Ray Serve: Serve's schema and Pilotfish's settings accept every key of it."""

from __future__ import annotations

from typing import Any

import helm_python
import jsonschema
import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from deploy.settings import presets, read_values, settings_from_arguments
from tests.chart.settings_schema import generated, settings_schemas
from tests.support.chart.rendering import Object, Rendered, render, render_ci
from workers.serve.configuration import load_configuration

SETTINGS: Object = {"$ref": "#/$defs/settings", "$defs": settings_schemas()}
GPU: Object = {
    "preset": "gpu",
    "image": {"tag": "0.1.0-cuda"},
    "workers": {"target": {"gpus": 1, "memory": "32Gi"}},
}
"""The fewest values with which the preset `gpu` runs."""


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
        for preset in ({"preset": "cpu"}, GPU):
            (found,) = checked(render(preset | {"settings": {"draft": draft}}).serve_config)
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
    assert (large.target.replicas, large.target.autoscaling.max_replicas) == (1, 2)
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


def test_options_of_deployments_reach_serve() -> None:
    scaling = {"name": "Target", "autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}
    found = render({"serve": {"deployments": [scaling]}})
    assert found.serve_config["applications"][0]["deployments"] == [scaling]
    with pytest.raises(ValueError, match="num_replica"):
        checked(render({"serve": {"deployments": [{"name": "Target", "num_replica": 2}]}}).serve_config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": {"tensor_paralel": 2}}, "'/settings/target': additional properties 'tensor_paralel' not allowed"),
        ({"tarjet": {"path": "x"}}, "'/settings': additional properties 'tarjet' not allowed"),
        ({"draft": {"method": "ngran"}}, "'/settings/draft/method': value must be one of .*'ngram'"),
        ({"draft": {"ngram": {"longest": 3}}}, "'/settings/draft/ngram': additional properties 'longest' not allowed"),
        ({"target": {"kv": {"block_size": 0}}}, "'/settings/target/kv/block_size': minimum: got 0, want 1"),
        ({"target": {"tensor_parallel": "two"}}, "'/settings/target/tensor_parallel': got string, want integer"),
        ({"target": {"acceptance": "lucky"}}, "'/settings/target/acceptance': value must be one of"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_chart_is_rendered(settings: Object, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render({"settings": settings})
    further = {"name": "small", "routePrefix": "/small", "settings": settings}
    with pytest.raises(helm_python.HelmError, match=message.replace("/settings", "/applications/0/settings", 1)):
        render({"applications": [further]})


def test_every_setting_of_the_configuration_passes_the_schema() -> None:
    for preset in presets():
        values = load_configuration(read_values(preset)).model_dump(mode="json", exclude_none=True)
        jsonschema.Draft7Validator(SETTINGS).validate(values)


def test_what_is_generated_is_up_to_date() -> None:
    for file, text in generated().items():
        assert file.read_text("utf-8") == text, "run `make chart` and commit"


@pytest.mark.parametrize(
    ("values", "faults"),
    [
        ({}, ("image.tag: pilotfish:0.1.0 has no CUDA", "workers.target.gpus: is 0, and a target needs 1")),
        ({"image": GPU["image"]}, ("workers.target.memory: is 6Gi, and Qwen/Qwen3-8B needs 24Gi",)),
        (GPU | {"settings": {"target": {"tensor_parallel": 2}}}, ("workers.target.gpus: is 1, and a target needs 2",)),
    ],
)
def test_a_model_on_gpus_is_refused_without_what_it_needs(values: Object, faults: tuple[str, ...]) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render({"preset": "gpu"} | values)
    for fault in faults:
        assert fault in str(refused.value)


def test_the_preset_for_gpus_runs_its_own_model_with_lookups() -> None:
    for values in (GPU, GPU | {"image": {"digest": f"sha256:{'0' * 64}"}}):
        (found,) = checked(render(values).serve_config)
        assert (found.target.path, found.target.tensor_parallel) == ("Qwen/Qwen3-8B", 1)
        assert found.draft.name == "suffix+recycling"
    render({"preset": "gpu", "settings": {"target": {"device": "cpu"}}})
    assert checked(render_ci("one-gpu").serve_config)[0].target.path == "Qwen/Qwen3-8B"
