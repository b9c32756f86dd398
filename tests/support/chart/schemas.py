"""Checks objects against schemas that refuse unknown fields.

Kubernetes' own kinds: the schemas in `kubernetes-validate`. RayService: an extract of KubeRay's resource definition.
Other kinds: `FIELDS`, the fields that the chart may use.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils

from tests.support.chart.rendering import Object

KUBERNETES = "1.28"
"""The oldest version that the chart supports."""
RAYSERVICE = Path(__file__).parent / "rayservice_v1.json"
"""Version v1 of KubeRay's resource definition of RayService (Apache-2.0). Descriptions, status and pod templates are
left out."""

utils.schema_contents = cache(utils.schema_contents)  # it would read a megabyte for each object

FIELDS: dict[str, Any] = {
    "gateway.networking.k8s.io/v1/Gateway": {
        "gatewayClassName": str,
        "listeners": [
            {
                "name": str,
                "hostname": str,
                "port": int,
                "protocol": str,
                "tls": {"mode": str, "certificateRefs": [{"kind": str, "name": str}]},
            }
        ],
    },
    "gateway.networking.k8s.io/v1/HTTPRoute": {
        "parentRefs": [{"name": str, "namespace": str, "sectionName": str}],
        "hostnames": [str],
        "rules": [{"backendRefs": [{"name": str, "port": int}], "timeouts": {"request": str}}],
    },
    "gateway.networking.k8s.io/v1/GRPCRoute": {
        "parentRefs": [{"name": str, "namespace": str, "sectionName": str}],
        "hostnames": [str],
        "rules": [{"backendRefs": [{"name": str, "port": int}]}],
    },
    "monitoring.coreos.com/v1/ServiceMonitor": {
        "selector": {"matchLabels": dict},
        "endpoints": [
            {
                "port": str,
                "path": str,
                "interval": str,
                "authorization": {"type": str, "credentials": {"name": str, "key": str}},
            }
        ],
    },
    "monitoring.coreos.com/v1/PodMonitor": {
        "selector": {"matchLabels": dict, "matchExpressions": [{"key": str, "operator": str, "values": [str]}]},
        "podMetricsEndpoints": [{"port": str, "interval": str}],
    },
    "monitoring.coreos.com/v1/PrometheusRule": {
        "groups": [
            {
                "name": str,
                "interval": str,
                "rules": [
                    {"record": str, "alert": str, "expr": str, "for": str, "labels": dict, "annotations": dict},
                ],
            }
        ]
    },
}
"""The specification of custom kinds: the type of each field."""


def check(found: Object) -> None:
    """Raise `jsonschema.ValidationError` if the object has an unknown field or a wrong type.

    Of a RayService, the pod templates are checked as Kubernetes' own kind.
    """
    kind = f"{found['apiVersion']}/{found['kind']}"
    if kind == "ray.io/v1/RayService":
        cluster = found["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            template = {"metadata": {"name": "pod"}, "template": group["template"]}
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "PodTemplate"} | template, KUBERNETES, strict=True
            )
        rayservice_validator().validate(found)
    elif kind in FIELDS:
        jsonschema.validate(found["spec"], _schema(FIELDS[kind]))
    else:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


@cache
def rayservice_validator() -> jsonschema.Draft202012Validator:
    """A validator of `ray.io/v1` RayService, in which every object refuses unknown fields."""
    schema = _strict(json.loads(RAYSERVICE.read_text("utf-8")))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """A JSON schema from Kubernetes' dialect of OpenAPI."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may be called as a keyword of the schema is, so that properties are walked by themselves.
    strict = {key: _strict(value) for key, value in schema.items() if key not in ("properties", "format")}
    if "properties" in schema:
        strict["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        strict.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return strict


def _schema(fields: Any) -> Object:
    """The JSON schema for an entry of `FIELDS`."""
    if isinstance(fields, dict):
        properties = {name: _schema(field) for name, field in fields.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}
    if isinstance(fields, list):
        return {"type": "array", "items": _schema(fields[0]), "minItems": 1}
    return {"type": {str: "string", int: "integer", dict: "object"}[fields]}
