"""API keys in the chart: where the Secret goes, and who presents the key of an operator."""

from __future__ import annotations

from tests.support.chart.rendering import render, render_ci


def test_ingress_pods_read_the_keys_from_the_secret_and_no_other_pod_does() -> None:
    found = render_ci("two-by-eight")
    (application,) = found.serve_config["applications"]
    directory = application["args"]["server"]["api_key_file"]
    for role, template in found.pod_templates.items():
        (container,) = template["spec"]["containers"]
        mounts = [one for one in container["volumeMounts"] if one["mountPath"] == directory]
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        if role != "ingress":
            assert not mounts and "api-keys" not in volumes
            continue
        (mount,) = mounts
        assert mount["readOnly"]
        assert volumes[mount["name"]]["secret"]["secretName"] == "api-keys"
        assert volumes[mount["name"]]["secret"]["defaultMode"] == 0o440


def test_prometheus_and_the_test_pod_present_the_key_of_an_operator() -> None:
    values = {"metrics": {"serviceMonitor": {"enabled": True}}}
    locked = render(values | {"apiKeys": {"existingSecret": "keys", "operator": {"existingSecret": "ops"}}})
    (endpoint,) = locked.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": {"name": "ops", "key": "api-key"}}
    (container,) = locked.one("Pod", "-test")["spec"]["containers"]
    (key,) = [one for one in container["env"] if one["name"] == "PILOTFISH_API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "ops", "key": "api-key"}
    (unlocked,) = render(values).one("ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in unlocked


def test_without_a_secret_no_key_file_is_set() -> None:
    (application,) = render().serve_config["applications"]
    assert "api_key_file" not in application["args"]["server"]
