"""The values: their schema knows each of them, and the chart's README lists them."""

from __future__ import annotations

import json
from typing import Any

import helm_python
import pytest
import yaml

from tests.chart.values_table import README, VALUES, document, with_values_table
from tests.support.chart.rendering import CHART, Object, Rendered, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
DEFAULTS = yaml.safe_load(VALUES.read_text("utf-8"))


def resolved(schema: Any) -> Any:
    reference = schema.get("$ref", "")
    return SCHEMA["$defs"][reference.removeprefix("#/$defs/")] if reference else schema


def differences(values: Object, schema: Any, path: str = "") -> list[str]:
    """Values without a schema, and schemas without a value."""
    if values == {}:
        return []  # each key is the user's choice: Pilotfish's settings, parts of another image
    schema = resolved(schema)
    if schema.get("additionalProperties") is not False:
        return []  # Kubernetes' own objects
    properties = schema["properties"]
    found = [f"{path}{key}" for key in values.keys() ^ (properties.keys() - {"global"})]
    return found + [
        name
        for key in values.keys() & properties.keys()
        if isinstance(values[key], dict)
        for name in differences(values[key], properties[key], f"{path}{key}.")
    ]


def test_the_schema_knows_exactly_the_values() -> None:
    assert differences(DEFAULTS, SCHEMA) == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"imagee": {"tag": "1"}}, "imagee"),
        ({"workers": {"target": {"gpu": 1}}}, "gpu"),
        ({"workers": {"drafts": {"replicas": 1}}}, "drafts"),
        ({"networkPolicy": {"client": []}}, "client"),
        ({"preset": "gpus"}, "preset"),
        ({"workers": {"target": {"replicas": -1}}}, "replicas"),
        ({"workers": {"target": {"memory": "6 GB"}}}, "memory"),
        ({"serve": {"routePrefix": "v1"}}, "routePrefix"),
        ({"workers": {"target": {"gpuResource": "nvidia.com/mig-1g.10gb"}}}, "gpuResource"),
    ],
)
def test_a_planted_typo_in_a_value_is_refused(values: Object, named: str) -> None:
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmError, match=named):
        chart.validate_schema(values)
    report = helm_python.lint(CHART, values, strict=True)
    assert named in str(report["errors"]) + str(report["messages"])


def test_a_gateway_needs_a_class_or_an_existing_one() -> None:
    with pytest.raises(helm_python.HelmError, match="a Gateway needs a class"):
        render({"gateway": {"enabled": True, "create": True}})
    with pytest.raises(helm_python.HelmError, match=r"name a Gateway, or set gateway\.create"):
        render({"gateway": {"enabled": True}})
    gateway = {"enabled": True, "parentRefs": [{"name": "public", "namespace": "infra"}]}
    assert render({"gateway": gateway}).one("GRPCRoute")["spec"]["parentRefs"] == gateway["parentRefs"]


@pytest.mark.parametrize("door", ["ingress", "gateway"])
def test_the_two_apis_have_different_hosts(door: str) -> None:
    """Controllers give one host to one of the two objects, and the other API is not reached."""
    values = {"enabled": True, "parentRefs": [{"name": "public"}]} if door == "gateway" else {"enabled": True}
    both = {api: {"host": "llm.example.com"} for api in ("http", "grpc")}
    with pytest.raises(helm_python.HelmError, match=rf"{door}\.grpc\.host: is that of {door}\.http"):
        render({door: values | both})
    render({door: values | {"http": {"host": "llm.example.com"}}})


def models_volume(found: Rendered) -> Object:
    (volume,) = [one for one in found.pod_templates["target"]["spec"]["volumes"] if one["name"] == "models"]
    return {key: value for key, value in volume.items() if key != "name"}


def test_by_default_each_pod_keeps_models_on_its_node() -> None:
    assert models_volume(render()) == {"emptyDir": {"sizeLimit": "100Gi"}}
    assert not render().of_kind("PersistentVolumeClaim")


def test_a_pod_may_keep_models_in_a_claim_of_its_own() -> None:
    found = render({"models": {"cache": {"volume": "ephemeral", "storageClassName": "fast", "size": "40Gi"}}})
    claim = models_volume(found)["ephemeral"]["volumeClaimTemplate"]["spec"]
    resources = {"requests": {"storage": "40Gi"}}
    assert claim == {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": resources}
    assert not found.of_kind("PersistentVolumeClaim")


def test_all_pods_may_share_a_claim_that_exists_or_is_made() -> None:
    made = render({"models": {"cache": {"volume": "shared"}}})
    assert made.one("PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]
    name = made.one("PersistentVolumeClaim")["metadata"]["name"]
    assert models_volume(made) == {"persistentVolumeClaim": {"claimName": name}}
    existing = render({"models": {"cache": {"volume": "shared", "existingClaim": "models"}}})
    assert models_volume(existing) == {"persistentVolumeClaim": {"claimName": "models"}}
    assert not existing.of_kind("PersistentVolumeClaim")


def test_an_upgrade_in_steps_needs_the_autoscaler_and_a_class_of_gateways() -> None:
    upgrade = {"upgrade": "NewClusterWithIncrementalUpgrade"}
    with pytest.raises(helm_python.HelmError, match=r"set autoscaling\.enabled to true"):
        render({"serve": upgrade})
    scaled = {"autoscaling": {"enabled": True}}
    with pytest.raises(helm_python.HelmError, match="needs the class of a Gateway"):
        render(scaled | {"serve": upgrade})
    chosen = {"gatewayClassName": "envoy", "maxSurgePercent": 20}
    found = render(scaled | {"serve": upgrade | {"incrementalUpgrade": chosen}}).one("RayService")["spec"]
    options = chosen | {"stepSizePercent": 10, "intervalSeconds": 30}
    assert found["upgradeStrategy"] == {"type": upgrade["upgrade"], "clusterUpgradeOptions": options}
    with pytest.raises(helm_python.HelmError, match="stepSizePercent must be at most maxSurgePercent"):
        render(scaled | {"serve": upgrade | {"incrementalUpgrade": chosen | {"maxSurgePercent": 5}}})


@pytest.mark.parametrize("name", ["unhealthySeconds", "deploymentUnhealthySeconds"])
def test_times_that_kuberay_ignores_are_no_values(name: str) -> None:
    with pytest.raises(helm_python.HelmError, match=name):
        render({"serve": {name: 60}})
    assert not any("Unhealthy" in key for key in render().one("RayService")["spec"])


def test_the_notes_say_how_to_reach_the_apis_and_that_no_key_is_demanded() -> None:
    notes = render().notes
    assert "service/demo-pilotfish-http 8000:80" in notes and "demand no key" in notes
    assert "demand no key" not in render({"apiKeys": {"existingSecret": "keys"}}).notes


def test_the_notes_say_that_the_policies_keep_spans_in() -> None:
    traced = {"settings": {"server": {"otlp_endpoint": "http://collector:4317"}}}
    assert "let the pods reach http://collector:4317" in render(traced).notes
    assert "no span arrives" not in render().notes
    reached = {"networkPolicy": {"extraEgress": [{"ports": [{"port": 4317}]}]}}
    assert "no span arrives" not in render(traced | reached).notes


def test_the_notes_have_a_request_that_the_installed_server_answers() -> None:
    assert "  curl http://127.0.0.1:8000/v1/models\n" in render().notes
    locked = {"apiKeys": {"existingSecret": "keys"}, "tls": {"existingSecret": "tls"}, "serve": {"routePrefix": "/a"}}
    request = '  curl --insecure https://127.0.0.1:8000/a/v1/models -H "Authorization: Bearer $PILOTFISH_API_KEY"\n'
    assert request in render(locked).notes


def test_every_value_has_a_comment_or_a_clear_name() -> None:
    undescribed = {key for key, _, text in document(VALUES.read_text("utf-8")) if not text}
    assert undescribed <= {
        *("image.pullPolicy", "podDisruptionBudget.enabled", "gcsFaultTolerance.enabled", "tests.enabled"),
        *("networkPolicy.enabled", "autoscaling.enabled", "ingress.enabled", "gateway.enabled"),
        *("serviceAccount.create", "serviceAccount.annotations"),
        *("service.http.type", "service.http.port", "service.http.annotations"),
        *("ingress.className", "ingress.http.host", "ingress.grpc.host"),
        *("gateway.http.host", "gateway.grpc.host"),
        *(f"metrics.{one}.{key}" for one in ("serviceMonitor", "podMonitor") for key in ("interval", "labels")),
        *("metrics.rules.labels", "metrics.dashboards.labels", "metrics.dashboards.annotations"),
    }


def test_the_readme_is_up_to_date() -> None:
    text = README.read_text("utf-8")
    assert text == with_values_table(text, VALUES.read_text("utf-8")), "run `make chart` and commit"
