"""Who may talk to whom: Services find the ingress, policies let the roles talk, and everything else is denied."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import product
from threading import Thread

import pytest

from tests.support.chart.network import Pod, allows, selects
from tests.support.chart.rendering import CHART, Object, Rendered, render, render_ci

FREE_PORT = 43121
"""A port that a process chose: the roles' own gRPC servers, Ray's workers and the ranks' rendezvous have such ports."""
STRANGER = Pod({"app": "web"}, "shop")
NEIGHBOUR = Pod({"app": "web"})
OPERATOR = Pod({"app.kubernetes.io/name": "kuberay-operator"}, "kuberay")
PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, "monitoring")
GATEWAY = Pod({"app.kubernetes.io/name": "envoy"}, "envoy-gateway-system")


NGINX = Pod({"app.kubernetes.io/name": "ingress-nginx"}, "ingress-nginx")


def pods(rendered: Rendered) -> dict[str, Pod]:
    return {role: Pod(template["metadata"]["labels"]) for role, template in rendered.pod_templates.items()}


def may(rendered: Rendered, source: Pod, role: str, port: int | str) -> bool:
    container = rendered.pod_templates[role]["spec"]["containers"][0]
    names = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    return allows(rendered.of_kind("NetworkPolicy"), source, pods(rendered)[role], port, names)


def test_every_role_reaches_every_role_on_any_port(rendered: Rendered) -> None:
    for source, role in product(pods(rendered).values(), pods(rendered)):
        assert may(rendered, source, role, FREE_PORT)
        assert may(rendered, source, role, "metrics")


def test_a_stranger_reaches_nothing(rendered: Rendered) -> None:
    for role, template in rendered.pod_templates.items():
        ports = [entry["name"] for entry in template["spec"]["containers"][0]["ports"]]
        assert not any(may(rendered, STRANGER, role, port) for port in (FREE_PORT, *ports))


def test_clients_reach_both_apis_and_nothing_else() -> None:
    for name, client in (("cpu-smoke", NEIGHBOUR), ("two-by-eight", GATEWAY)):
        found = render_ci(name)
        assert may(found, client, "ingress", "http") and may(found, client, "ingress", "grpc")
        assert not may(found, client, "ingress", FREE_PORT)
        for role in {"head", "target"}:
            assert not any(may(found, client, role, port) for port in ("http", "metrics", FREE_PORT))
    assert not may(render_ci("two-by-eight"), NEIGHBOUR, "ingress", "http")


def test_the_controller_of_an_ingress_or_a_gateway_reaches_both_apis() -> None:
    for name, controller in (("one-gpu", NGINX), ("two-by-eight", GATEWAY)):
        found = render_ci(name)
        assert may(found, controller, "ingress", "http") and may(found, controller, "ingress", "grpc")
        assert not may(found, controller, "ingress", FREE_PORT) and not may(found, controller, "target", "http")
    assert not may(render(), NGINX, "ingress", "http")
    elsewhere = render({"ingress": {"enabled": True, "controllerNamespace": "traefik"}})
    assert not may(elsewhere, NGINX, "ingress", "http") and may(elsewhere, Pod({}, "traefik"), "ingress", "grpc")


def test_nginx_is_told_how_long_and_how_large_requests_are() -> None:
    prefix = "nginx.ingress.kubernetes.io/"
    values = {"enabled": True, "nginx": {"timeoutSeconds": 900, "bodySize": "8m"}}
    expected = {f"{prefix}proxy-{one}-timeout": "900" for one in ("read", "send")}
    expected |= {f"{prefix}proxy-body-size": "8m", f"{prefix}proxy-buffering": "off"}
    for tls, protocols in (("", ("HTTP", "GRPC")), ("tls", ("HTTPS", "GRPCS"))):
        found = render({"ingress": values, "tls": {"existingSecret": tls}})
        for api, protocol in zip(("http", "grpc"), protocols, strict=True):
            annotations = found.one("Ingress", f"-{api}")["metadata"]["annotations"]
            assert annotations == expected | {f"{prefix}backend-protocol": protocol}
    month = render({"ingress": {"enabled": True, "nginx": {"timeoutSeconds": 2592000}}}).one("Ingress", "-grpc")
    assert month["metadata"]["annotations"][f"{prefix}proxy-read-timeout"] == "2592000"
    own = {"http": {"annotations": {f"{prefix}proxy-body-size": "1g"}}}
    chosen = render({"ingress": values | own}).one("Ingress", "-http")["metadata"]["annotations"]
    assert chosen[f"{prefix}proxy-body-size"] == "1g" and chosen[f"{prefix}proxy-read-timeout"] == "900"


def test_the_test_pod_of_helm_reaches_both_apis(rendered: Rendered) -> None:
    test = Pod(rendered.one("Pod")["metadata"]["labels"])
    assert may(rendered, test, "ingress", "http") and may(rendered, test, "ingress", "grpc")
    assert not may(rendered, test, "target", FREE_PORT)


@pytest.fixture
def late_service() -> Iterator[str]:
    """The URL of a Service whose pods are not ready at first: it refuses connections, then answers with status 418."""
    server = HTTPServer(("127.0.0.1", 0), Teapot, bind_and_activate=False)
    server.server_bind()

    def serve() -> None:
        time.sleep(1.0)
        server.server_activate()
        server.serve_forever()

    thread = Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Teapot(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(418)


def check_apis(url: str, seconds: float) -> str:
    """Run the script of the test pod against an HTTP API, and return its last line of errors."""
    script = CHART / "files" / "check_apis.py"
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HTTP_URL": url, "GRPC_ADDRESS": "127.0.0.1:1", "READY_SECONDS": str(seconds)}
    command = [sys.executable, script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 1
    return run.stderr.splitlines()[-1]


def test_the_test_of_helm_waits_for_the_first_pod_of_the_service(late_service: str) -> None:
    assert check_apis(late_service, 60) == f"{late_service}/health: status 418"


def test_the_test_of_helm_says_that_no_pod_is_ready() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert check_apis(url, 0.5).startswith(f"{url}/health: ")


def test_the_test_of_helm_waits_for_most_of_its_time() -> None:
    (container,) = render({"tests": {"timeoutSeconds": 900}}).one("Pod")["spec"]["containers"]
    assert {"name": "READY_SECONDS", "value": "840"} in container["env"]


def test_without_a_listed_address_the_head_reaches_no_api_server() -> None:
    listed: list[Object] = [{"namespaceSelector": {}}]
    for peers in (listed, []):
        found = render({"autoscaling": {"enabled": True}, "networkPolicy": {"apiServer": peers}})
        may_call = allows(found.of_kind("NetworkPolicy"), pods(found)["head"], STRANGER, 6443, {})
        assert may_call is bool(peers)


def test_the_operator_reaches_the_head_alone(rendered: Rendered) -> None:
    assert may(rendered, OPERATOR, "head", "dashboard") and may(rendered, OPERATOR, "head", "http")
    assert not may(rendered, OPERATOR, "head", "gcs")
    assert not may(rendered, OPERATOR, "target", FREE_PORT)


def test_prometheus_reaches_metrics_alone(rendered: Rendered) -> None:
    assert may(rendered, PROMETHEUS, "head", "http")
    for role in pods(rendered):
        assert may(rendered, PROMETHEUS, role, "metrics")
        assert not may(rendered, PROMETHEUS, role, FREE_PORT)


def test_pods_of_the_cluster_reach_no_other_pod(rendered: Rendered) -> None:
    for source in pods(rendered).values():
        for other in (NEIGHBOUR, STRANGER):
            assert not allows(rendered.of_kind("NetworkPolicy"), source, other, 5432, {})
            assert allows(rendered.of_kind("NetworkPolicy"), source, other, 53, {})  # names are resolved anywhere


def test_redis_is_reached_where_it_is_listed() -> None:
    redis = Pod({"app.kubernetes.io/name": "redis"})
    for name, expected in (("two-by-eight", True), ("one-gpu", False)):
        found = render_ci(name)
        assert allows(found.of_kind("NetworkPolicy"), pods(found)["head"], redis, 6379, {}) is expected


def test_policies_can_be_left_out() -> None:
    assert not render({"networkPolicy": {"enabled": False}}).of_kind("NetworkPolicy")


def test_services_select_the_ingress_and_its_ports(rendered: Rendered) -> None:
    for api in ("http", "grpc"):
        spec = rendered.one("Service", f"-{api}")["spec"]
        selector = {"matchLabels": spec["selector"]}
        chosen = [role for role, pod in pods(rendered).items() if selects(selector, pod.labels)]
        assert chosen == ["ingress"]
        container = rendered.pod_templates["ingress"]["spec"]["containers"][0]
        assert spec["ports"][0]["targetPort"] in {entry["name"] for entry in container["ports"]}
    assert rendered.one("Service", "-grpc")["spec"]["clusterIP"] == "None"


def test_the_grpc_port_is_the_one_of_the_settings() -> None:
    found = render({"settings": {"server": {"grpc_port": 9555}}})
    assert found.one("Service", "-grpc")["spec"]["ports"][0]["port"] == 9555
    ports = found.pod_templates["ingress"]["spec"]["containers"][0]["ports"]
    assert {"name": "grpc", "containerPort": 9555} in ports
    assert found.serve_config["applications"][0]["args"]["server"]["grpc_port"] == 9555


def test_routes_and_ingresses_end_at_the_services_with_their_certificates() -> None:
    found = render_ci("two-by-eight")
    listeners = {one["name"]: one for one in found.one("Gateway")["spec"]["listeners"]}
    for api, kind in (("http", "HTTPRoute"), ("grpc", "GRPCRoute")):
        spec = found.one(kind)["spec"]
        service = found.one("Service", f"-{api}")
        assert spec["rules"][0]["backendRefs"] == [
            {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
        ]
        (parent,) = spec["parentRefs"]
        listener = listeners[parent["sectionName"]]
        assert [listener["hostname"]] == spec["hostnames"]
        assert listener["tls"]["certificateRefs"][0]["name"] == f"pilotfish-{api}-tls"
    for api, secret in (("http", "llm-tls"), ("grpc", "grpc-llm-tls")):
        spec = render_ci("one-gpu").one("Ingress", f"-{api}")["spec"]
        assert spec["tls"][0]["secretName"] == secret
        assert spec["rules"][0]["http"]["paths"][0]["backend"]["service"]["port"] == {"name": api}
