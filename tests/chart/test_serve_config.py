"""What KubeRay hands to Ray Serve: Serve's schema and Pilotfish's settings accept every key of it."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import jsonschema
import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from deploy.fitting import fit
from deploy.placement import Placement, plan
from deploy.ray.application import ApplicationArguments
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


def replicas(application: Object) -> dict[str, int]:
    """The numbers of replicas that the options of an application's deployments say."""
    return {one["name"]: one["num_replicas"] for one in application.get("deployments", ()) if "num_replicas" in one}


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


def test_names_in_the_settings_are_further_ones() -> None:
    (own,) = checked(render().serve_config)
    (more,) = checked(render({"settings": {"server": {"allowed_hosts": ["chat.example.com"]}}}).serve_config)
    assert more.server.allowed_hosts == (*own.server.allowed_hosts, "chat.example.com")
    many = {"settings": {"server": {"allowed_hosts": [f"h{number}.example.com" for number in range(60)]}}}
    with pytest.raises(helm_python.HelmError, match="has 72 names with those of the Services; it must have at most 64"):
        render(many)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"server": {"http_port": 8080}}, "settings.server.http_port: has no effect here; pods listen on port 8000"),
        ({"server": {"route_prefix": "/v"}}, "settings.server.route_prefix: has no effect here; it is serve.route"),
        ({"server": {"application": "x"}}, "settings.server.application: has no effect here; it is serve.application"),
        ({"cluster": {"token_file": "x"}}, "settings.cluster.token_file: has no effect here; secrets.cluster has"),
    ],
)
def test_a_setting_that_the_chart_decides_is_refused(settings: Object, fault: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(fault)):
        render({"settings": settings})
    further = {"name": "small", "routePrefix": "/small", "settings": settings}
    with pytest.raises(helm_python.HelmError, match=re.escape(f"applications[0].{fault}")):
        render({"applications": [further]})


def test_the_threshold_of_memory_is_that_of_the_first_models_settings() -> None:
    further = {"name": "small", "routePrefix": "/small", "settings": {"cluster": {"memory_threshold": 0.8}}}
    fault = (
        "applications[0].settings.cluster.memory_threshold: has no effect here; settings.cluster has that of all pods"
    )
    with pytest.raises(helm_python.HelmError, match=re.escape(fault)):
        render({"applications": [further]})


def test_the_address_of_http_is_that_of_the_first_models_settings() -> None:
    assert render().serve_config["http_options"]["host"] == "0.0.0.0"
    everywhere = {"settings": {"server": {"http_host": "::", "grpc_host": "::"}}}
    assert render(everywhere).serve_config["http_options"]["host"] == "::"
    (configuration,) = checked(render(everywhere).serve_config)
    assert configuration.server.grpc_host == "::"
    further = {"name": "small", "routePrefix": "/small"} | everywhere
    with pytest.raises(helm_python.HelmError, match="all models have the HTTP address of the first"):
        render({"applications": [further]})


def test_each_pod_has_one_replica_of_its_role_by_default() -> None:
    (large,) = checked(render_ci("two-by-eight").serve_config)
    assert (large.target.replicas, large.target.autoscaling.max_replicas) == (1, 2)
    assert large.draft.replicas == 2
    assert replicas(render_ci("two-by-eight").serve_config["applications"][0]) == {"Ingress": 2}
    groups = {"target": {"replicas": 2}, "ingress": {"replicas": 3}}
    (fixed,) = render({"workers": groups}).serve_config["applications"]
    assert replicas(fixed) == {"Target": 2, "Ingress": 3}
    own = {"target": {"replicas": 4}, "server": {"ingress_replicas": 5}}
    found = render({"workers": groups, "settings": own}).serve_config
    (chosen,) = checked(found)
    assert (chosen.target.replicas, chosen.server.ingress_replicas) == (4, 5)
    assert replicas(found["applications"][0]) == {}


def test_each_ingress_pod_has_one_ingress_whichever_joins_first() -> None:
    (application,) = render({"workers": {"ingress": {"replicas": 3}}}).serve_config["applications"]
    (options,) = [one for one in application["deployments"] if one["name"] == "Ingress"]
    assert options == {"name": "Ingress", "num_replicas": 3, "max_replicas_per_node": 1}


def test_another_number_of_pods_replaces_no_replica() -> None:
    """Serve replaces all replicas of an application when one of its arguments changes."""

    def arguments(**groups: Object) -> Object:
        (application,) = render({"workers": groups}).serve_config["applications"]
        checked(render({"workers": groups}).serve_config)
        found: Object = application["args"]
        return found

    assert arguments(target={"replicas": 3}, ingress={"replicas": 4}) == arguments()
    assert arguments(target={"cpu": "4"}) != arguments()


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
    ingress = {"name": "Ingress", "num_replicas": 1}  # a new one starts beside the former one
    assert found.serve_config["applications"][0]["deployments"] == [scaling, ingress]
    crowded = {"name": "Ingress", "max_replicas_per_node": 3}
    more = render({"serve": {"deployments": [crowded]}, "workers": {"ingress": {"replicas": 2}}}).serve_config
    assert crowded | {"num_replicas": 2} in more["applications"][0]["deployments"]
    assert replicas(more["applications"][0]) == {"Target": 1, "Ingress": 2}
    checked(more)
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


SPANNING: Object = {"target": {"tensor_parallel": 8, "span_nodes": True}}


def four_pods(settings: Object, **target: Any) -> Object:
    """Four pods with four GPUs each."""
    target = {"replicas": 4, "gpus": 4, "cpu": "6", "memory": "32Gi"} | target
    return GPU | {"workers": {"target": target}, "settings": settings}


def test_a_target_that_may_span_nodes_and_fits_into_a_pod_has_one() -> None:
    settings = {"target": {"tensor_parallel": 2, "span_nodes": True}}
    found = render(four_pods(settings))
    assert replicas(found.serve_config["applications"][0])["Target"] == 4


def test_more_targets_than_pods_have_parts_of_the_cores() -> None:
    found = render({"serve": {"deployments": [{"name": "Target", "num_replicas": 4}]}})
    (configuration,) = checked(found.serve_config)
    assert configuration.target.replicas == 4
    assert replicas(found.serve_config["applications"][0])["Target"] == 4


def test_a_target_that_spans_nodes_has_the_gpus_of_several_pods() -> None:
    (found,) = checked(render(four_pods(SPANNING)).serve_config)
    assert (found.target.tensor_parallel, found.target.replicas) == (8, 2)
    (placement,) = placements(render(four_pods(SPANNING)))
    assert placement.gpus == 16 and placement.target.spans_nodes
    scaled = four_pods(SPANNING, minReplicas=2) | {"autoscaling": {"enabled": True}}
    (scaling,) = checked(render(scaled).serve_config)
    assert (scaling.target.replicas, scaling.target.autoscaling.max_replicas) == (1, 2)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (four_pods({"target": {"tensor_parallel": 8}}), "workers.target.gpus: is 4, and a target needs 8"),
        (four_pods(SPANNING, replicas=1), "is 1 with 8 ranks each, and the pods of the targets have 4 GPUs together"),
        (four_pods(SPANNING, gpus=0), "workers.target.gpus: is 0, and a target needs 8"),
        (four_pods(SPANNING, cpu="4"), "workers.target.cpu: is 4, and 4 ranks on GPUs need more than 4 cores"),
        (GPU | {"workers": {"target": GPU["workers"]["target"] | {"cpu": "1"}}}, "workers.target.cpu: is 1, and 1"),
        (
            four_pods({"target": SPANNING["target"] | {"replicas": 3}}),
            "settings.target.replicas: is 3 with 8 ranks each, and the pods of the targets have 16 GPUs together",
        ),
    ],
)
def test_too_few_gpus_for_ranks_are_refused(values: Object, fault: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(fault)):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        {"workers": {"target": {"replicas": 3}}, "settings": {"target": {"autoscaling": {"max_replicas": 2}}}},
        {
            "autoscaling": {"enabled": True},
            "workers": {"target": {"replicas": 1, "maxReplicas": 2}},
            "serve": {"deployments": [{"name": "Target", "num_replicas": 3}]},
        },
    ],
)
def test_fewer_targets_at_most_than_at_least_are_refused(values: Object) -> None:
    fault = "settings.target.autoscaling.max_replicas of pilotfish: is 2; it must be 0 or at least the 3 replicas"
    with pytest.raises(helm_python.HelmError, match=re.escape(fault)):
        render(values)


def test_the_preset_for_gpus_runs_its_own_model_with_lookups() -> None:
    for values in (GPU, GPU | {"image": {"digest": f"sha256:{'0' * 64}"}}):
        (found,) = checked(render(values).serve_config)
        assert (found.target.path, found.target.tensor_parallel) == ("Qwen/Qwen3-8B", 1)
        assert found.draft.name == "suffix+recycling"
    render({"preset": "gpu", "settings": {"target": {"device": "cpu"}}})
    assert checked(render_ci("one-gpu").serve_config)[0].target.path == "Qwen/Qwen3-8B"


def placements(found: Rendered) -> list[Placement]:
    """Where the processes of each model run in the pods. KubeRay has them planned before these are there."""
    planned = []
    for application in found.serve_config["applications"]:
        nodes = ApplicationArguments.model_validate(application["args"]).resources()
        planned.append(plan(settings_from_arguments(application["args"], {}).configuration, nodes))
        assert not fit(planned[-1], nodes).unplaced
    return planned


def test_processes_are_planned_for_the_pods(rendered: Rendered) -> None:
    (placement,) = placements(rendered)
    (application,) = rendered.serve_config["applications"]
    offered = {node["resource"]: node for node in application["args"]["nodes"]}
    groups = {group["groupName"]: group for group in rendered.cluster["workerGroupSpecs"]}
    assert offered.keys() == {resource for group in groups.values() for resource in group["resources"]}
    for name, group in groups.items():
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        node = offered[f"pilotfish-{name}"]
        assert (node["cpus"], node["gpus"]) == (int(limits["cpu"]), int(limits.get("nvidia.com/gpu", 0)))
    if placement.target.device == "cpu":
        assert placement.target.threads == offered["pilotfish-target"]["cpus"]


def test_a_draft_model_with_pods_on_gpus_drafts_there() -> None:
    (placement,) = placements(render_ci("two-by-eight"))
    assert (placement.target.device, placement.draft.device) == ("cuda", "cuda")
    assert [bundle.gpus for bundle in placement.draft.bundles] == [1]


def test_a_target_has_all_cores_of_its_pod_whatever_other_pods_have() -> None:
    for ingress in ("1", "16"):
        found = render({"workers": {"target": {"cpu": "7500m"}, "ingress": {"cpu": ingress}}})
        (placement,) = placements(found)
        assert placement.target.threads == 7  # more would wait for each other beyond the limit of the pod
        assert placement.target.bundles[0].cpus > 6.0, "two targets fit into one pod"
    chosen = {"workers": {"target": {"rayStartParams": {"num-cpus": "4"}}}}
    assert placements(render(chosen))[0].target.threads == 4


def test_models_in_the_same_pods_share_their_cores() -> None:
    small = {"name": "small", "routePrefix": "/small", "settings": {"target": {"path": "tiny"}}}
    found = placements(render({"workers": {"target": {"cpu": "4"}}, "applications": [small]}))
    assert [placement.target.threads for placement in found] == [2, 2]
    assert sum(group.cpus for one in found for group in one.groups if group.role == "target") <= 4


def test_a_replica_fits_into_each_pod_of_groups_with_one_resource() -> None:
    workers = {"target": {"cpu": "8"}, "spot": {"role": "target", "replicas": 1, "cpu": "4"}}
    (placement,) = placements(render({"workers": workers}))
    assert placement.target.threads == 4
    assert sum(group.cpus for group in placement.groups if group.role == "target") <= 4
