"""Further models and further groups: which pods run which model, and how each model is reached."""

from __future__ import annotations

import helm_python
import pytest

from tests.chart.test_serve_config import checked, replicas
from tests.support.chart.network import selects
from tests.support.chart.rendering import Object, Rendered, render
from tests.support.chart.schemas import check

SMALL: Object = {"name": "small", "routePrefix": "/small", "settings": {"target": {"path": "tiny"}}}
OWN: Object = {
    "workers": {
        "target": {"replicas": 2, "memory": "8Gi", "nodeSelector": {"disk": "fast"}},
        "target-small": {"role": "target", "replicas": 3, "memory": "4Gi"},
        "edge-small": {"role": "ingress", "replicas": 2},
    },
    "applications": [SMALL | {"groups": {"target": "target-small", "ingress": "edge-small"}}],
}
"""A further model with pods of its own."""


def selected(found: Rendered, service: Object) -> set[str]:
    """The groups whose pods a Service selects, if they have its port."""
    spec = service["spec"]
    ports = {spec["ports"][0]["targetPort"]}
    return {
        name
        for name, template in found.pod_templates.items()
        if selects({"matchLabels": spec["selector"]}, template["metadata"]["labels"])
        and ports <= {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    }


def test_a_further_model_is_an_application_with_its_own_settings() -> None:
    first, second = checked(render({"applications": [SMALL]}).serve_config)
    assert (first.target.path, second.target.path) == ("smollm2-135m-instruct", "tiny")
    assert (first.server.grpc_port, second.server.grpc_port) == (9000, 9001)
    applications = render({"applications": [SMALL]}).serve_config["applications"]
    assert [(one["name"], one["route_prefix"]) for one in applications] == [("pilotfish", "/"), ("small", "/small")]
    assert first.server.allowed_hosts == second.server.allowed_hosts


def test_without_groups_a_further_model_shares_the_pods_of_the_first() -> None:
    found = render({"workers": {"target": {"replicas": 2}}, "applications": [SMALL]})
    first, second = checked(found.serve_config)
    assert [replicas(one)["Target"] for one in found.serve_config["applications"]] == [2, 1]
    assert second.target.node_resource == first.target.node_resource == "pilotfish-target"
    for suffix in ("-grpc", "-grpc-small"):
        assert selected(found, found.one("Service", suffix)) == {"ingress"}


def test_a_model_with_groups_of_its_own_has_a_replica_in_each_of_their_pods() -> None:
    found = render(OWN)
    first, second = checked(found.serve_config)
    own, further = map(replicas, found.serve_config["applications"])
    assert (own, further) == ({"Target": 2, "Ingress": 1}, {"Target": 3, "Ingress": 2})
    assert first.target.node_resource == "pilotfish-target"
    assert second.target.node_resource == "pilotfish-target-small"
    assert second.server.ingress_node_resource == second.draft.node_resource == "pilotfish-edge-small"
    offered = {group["groupName"]: group["resources"] for group in found.cluster["workerGroupSpecs"]}
    assert {name: set(resources) for name, resources in offered.items()} == {
        name: {f"pilotfish-{name}"} for name in ("target", "ingress", "target-small", "edge-small")
    }
    assert selected(found, found.one("Service", "-grpc")) == {"ingress"}
    assert selected(found, found.one("Service", "-grpc-small")) == {"edge-small"}
    assert selected(found, found.one("Service", "-http")) == {"ingress", "edge-small"}  # each proxy knows every path
    for one in found.objects:
        check(one)


def test_an_ingress_pod_is_ready_with_the_model_that_it_serves() -> None:
    templates = render(OWN | {"serve": {"routePrefix": "/large"}}).pod_templates
    paths = {
        name: templates[name]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
        for name in ("ingress", "edge-small")
    }
    assert paths == {"ingress": "/large/ready", "edge-small": "/small/ready"}


def test_a_further_group_takes_what_it_does_not_name_from_the_group_of_its_role() -> None:
    template = render(OWN).pod_templates["target-small"]
    assert template["spec"]["nodeSelector"] == {"disk": "fast"}
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == "target"


def test_a_group_that_no_further_model_names_serves_the_first() -> None:
    spot = {"role": "target", "replicas": 2, "tolerations": [{"key": "spot", "operator": "Exists"}]}
    found = render({"workers": {"spot": spot}})
    checked(found.serve_config)
    assert replicas(found.serve_config["applications"][0])["Target"] == 3
    groups = {one["groupName"]: one for one in found.cluster["workerGroupSpecs"]}
    assert groups["spot"]["resources"] == {"pilotfish-target": "1"}
    assert found.pod_templates["spot"]["spec"]["tolerations"] == spot["tolerations"]


def test_disruption_budgets_and_spread_are_those_of_a_group() -> None:
    found = render(OWN)
    for name in ("target-small", "edge-small"):
        budget = found.one("PodDisruptionBudget", f"-{name}")["spec"]
        labels = found.pod_templates[name]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        (spread,) = found.pod_templates[name]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"]["pilotfish-group"] == name


def test_models_in_pods_of_their_own_may_have_the_same_port() -> None:
    found = render(OWN | {"settings": {"server": {"grpc_port": 9001}}})
    assert [one.server.grpc_port for one in checked(found.serve_config)] == [9001, 9001]
    assert selected(found, found.one("Service", "-grpc")) == {"ingress"}
    assert selected(found, found.one("Service", "-grpc-small")) == {"edge-small"}


def test_pods_may_begin_at_none_where_rays_autoscaler_adds_them() -> None:
    workers = {"target": {"replicas": 0, "minReplicas": 0, "maxReplicas": 2}}
    (configuration,) = checked(render({"autoscaling": {"enabled": True}, "workers": workers}).serve_config)
    assert (configuration.target.replicas, configuration.target.autoscaling.max_replicas) == (1, 2)


def test_every_model_s_metrics_are_read() -> None:
    found = render(OWN | {"metrics": {"serviceMonitor": {"enabled": True}}})
    endpoints = found.one("ServiceMonitor")["spec"]["endpoints"]
    assert [one["path"] for one in endpoints] == ["/metrics", "/small/metrics"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"applications": [SMALL | {"groups": {"target": "large"}}]}, "there is no group large in workers"),
        ({"workers": {"spot": {"replicas": 1}}}, "missing property 'role'"),
        ({"workers": {"Spot": {"role": "target", "replicas": 1}}}, "Spot"),
        ({"applications": [SMALL | {"routePrefix": "small"}]}, "routePrefix"),
        ({"applications": [SMALL | {"routePrefix": "/small/"}]}, "routePrefix"),
        ({"serve": {"routePrefix": "/v1/"}}, "routePrefix"),
        ({"applications": [SMALL, SMALL | {"name": "other"}]}, "two models have the routePrefix /small"),
        ({"serve": {"application": "small"}, "applications": [SMALL]}, "two models have the name small"),
        (
            {"settings": {"server": {"grpc_port": 9001}}, "applications": [SMALL]},
            "settings.server.grpc_port of small: is 9001, the port of settings.server.grpc_port of pilotfish in",
        ),
        ({"settings": {"server": {"grpc_port": 8000}}}, "is 8000, the port of HTTP in the same pods"),
        ({"settings": {"server": {"grpc_port": 0}}}, "grpc_port of pilotfish: is 0; it must be the number of a port"),
        (
            {"settings": {"server": {"operations_port": 9000}}},
            "operations_port of pilotfish: is 9000, the port of settings.server.grpc_port of pilotfish in the same",
        ),
        ({"workers": {"ingress": {"replicas": 0}}}, "workers.ingress.replicas: has no pod for the ingress of"),
        ({"workers": {"target": {"replicas": 0}}}, "workers.target.replicas: has no pod for the target of"),
        (
            {
                "workers": {"edge": {"role": "ingress", "replicas": 1}},
                "applications": [SMALL | {"groups": {"target": "edge"}}],
            },
            "workers.edge.replicas: has no pod for the target of small; it needs at least 1, with the role target",
        ),
        (
            {"autoscaling": {"enabled": True}, "workers": {"target": {"replicas": 3, "maxReplicas": 2}}},
            "workers.target: at least 3 pods .* is more than at most 2",
        ),
    ],
)
def test_a_group_or_model_that_cannot_be_is_refused(values: Object, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)
