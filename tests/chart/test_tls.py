"""TLS in the chart: where the Secret goes, and who speaks TLS with the pods."""

from __future__ import annotations

from tests.support.chart.rendering import render

_MONITORED = {"metrics": {"serviceMonitor": {"enabled": True}}}
_DEMANDING = {"existingSecret": "tls", "clientCertificates": True, "client": {"existingSecret": "client"}}


def test_every_pod_with_a_proxy_has_the_certificate_and_both_apis_use_it() -> None:
    found = render({"tls": {"existingSecret": "tls"}})
    config = found.serve_config
    server = config["applications"][0]["args"]["server"]
    assert server["tls"] == {"certificate": "/etc/pilotfish/tls/tls.crt", "key": "/etc/pilotfish/tls/tls.key"}
    assert config["http_options"]["ssl_certfile"] == server["tls"]["certificate"]
    assert config["http_options"]["ssl_keyfile"] == server["tls"]["key"]
    assert "ssl_ca_certs" not in config["http_options"]
    for role, template in found.pod_templates.items():
        (container,) = template["spec"]["containers"]
        (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/etc/pilotfish/tls"]
        (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == "tls"
        if role == "ingress":
            assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert found.one("Service", "-http")["spec"]["ports"][0]["appProtocol"] == "https"


def test_clients_certificates_are_demanded_and_presented() -> None:
    found = render(_MONITORED | {"tls": _DEMANDING})
    config = found.serve_config
    assert config["applications"][0]["args"]["server"]["tls"]["client_ca"] == "/etc/pilotfish/tls/ca.crt"
    assert config["http_options"]["ssl_ca_certs"] == "/etc/pilotfish/tls/ca.crt"
    (endpoint,) = found.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "tls", "key": "ca.crt"}
    assert endpoint["tlsConfig"]["keySecret"] == {"name": "client", "key": "tls.key"}
    (container,) = found.one("Pod", "-test")["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["HTTP_URL"].startswith("https://")
    assert values["TLS_CERTIFICATE"] == "/etc/pilotfish/tls/client/tls.crt"
    (ingress,) = found.pod_templates["ingress"]["spec"]["containers"]
    assert ingress["readinessProbe"]["tcpSocket"] == {"port": "http"}


def test_a_certificate_that_the_settings_name_is_expected_by_prometheus() -> None:
    tls = {"certificate": "/certificates/tls.crt", "key": "/certificates/tls.key"}
    found = render(_MONITORED | {"settings": {"server": {"tls": tls}}, "tls": {"serverName": "llm.example.com"}})
    (endpoint,) = found.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"] == {"serverName": "llm.example.com"}


def test_without_a_secret_nothing_speaks_tls() -> None:
    found = render(_MONITORED)
    assert "tls" not in found.serve_config["applications"][0]["args"]["server"]
    assert set(found.serve_config["http_options"]) == {"host", "port"}
    assert "scheme" not in found.one("ServiceMonitor")["spec"]["endpoints"][0]
