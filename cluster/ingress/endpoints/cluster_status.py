"""The HTTP routes for operators, load balancers, the page and `pilotfish top`.

`GET /cluster` says what every coordinator does. Its numbers are read from the metrics. Those that end in `_total` count
since the coordinator's start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client.parser import text_string_to_metric_families

from cluster.ingress.client import ServiceClient
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from cluster.ingress.router.metrics_text import LABEL

_FIELDS: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:num_preemptions_total": "preemptions_total",
    "vllm:prefix_cache_queries_total": "prefix_queries_total",
    "vllm:prefix_cache_hits_total": "prefix_hits_total",
    "vllm:spec_decode_num_draft_tokens_total": "drafted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens_total",
    "pilotfish:committed_tokens_per_step_sum": "committed_tokens_total",
    "pilotfish:committed_tokens_per_step_count": "verdicts_total",
    "pilotfish:step_tokens_count": "steps_total",
    "pilotfish:drafter_fallback_total": "drafter_fallbacks_total",
    "pilotfish:lossless": "lossless",
    "pilotfish:draft_version": "draft_version",
    "pilotfish:draft_learned_clients": "draft_learned_clients",
    "pilotfish:draft_learned_texts": "draft_learned_texts",
}
"""Names of series, and what they are called in the answer. Series that differ in other labels add up."""
_TRAINED = "pilotfish:draft_tokens_per_step"
_TRAINED_FIELDS: Mapping[str, str] = {"before": "draft_tokens_per_step_before", "after": "draft_tokens_per_step_after"}
"""What the series of the last training are called in the answer, by the label `weights`."""
_DRAFTERS = "pilotfish:drafters"
_DRAFTER_FIELDS: Mapping[str, str] = {
    "pilotfish:drafter_available": "available",
    "pilotfish:drafter_sequences": "sequences",
    "pilotfish:drafter_proposed_tokens_total": "proposed_tokens_total",
    "pilotfish:drafter_busy_seconds_total": "busy_seconds_total",
}
"""Names of the series of each drafter, and what they are called in its entry of `drafting`."""


def add_cluster_status(app: FastAPI, client: ServiceClient) -> None:
    """Add `GET /cluster`."""

    @app.get("/cluster")
    async def cluster() -> Response:
        exposition, _ = await client.metrics()
        return JSONResponse({"replicas": read_replicas(exposition.decode())})


def read_replicas(exposition: str) -> list[dict[str, Any]]:
    """Return one entry per coordinator. `exposition` is the text of their metrics."""
    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            field, of_drafter = _FIELDS.get(sample.name), _DRAFTER_FIELDS.get(sample.name)
            if sample.name == _TRAINED:
                field = _TRAINED_FIELDS.get(sample.labels.get("weights", ""))
            if field is None and of_drafter is None and sample.name != _DRAFTERS:
                continue
            name = sample.labels.get(LABEL, "")
            replica = found.setdefault(name, _empty(name, sample.labels.get("model_name", "")))
            if field is not None:
                replica[field] += sample.value
            elif of_drafter is not None:
                _drafter(replica, sample.labels.get("drafter", ""))[of_drafter] = sample.value
            else:
                replica["drafters"][sample.labels.get("state", "")] = int(sample.value)
    return list(found.values())


def _empty(name: str, model: str) -> dict[str, Any]:
    numbers = dict.fromkeys((*_FIELDS.values(), *_TRAINED_FIELDS.values()), 0.0)
    return {"id": name, "model": model, "drafters": {}, "drafting": [], **numbers}


def _drafter(replica: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry of a drafter among those that draft for a replica."""
    entry = next((one for one in replica["drafting"] if one["id"] == name), None)
    if entry is None:
        entry = {"id": name, **dict.fromkeys(_DRAFTER_FIELDS.values(), 0.0)}
        replica["drafting"].append(entry)
    found: dict[str, Any] = entry
    return found


def add_operations(
    app: FastAPI, client: ServiceClient, own_metrics: IngressMetrics, running: Callable[[], int]
) -> None:
    """Add the other routes. `running` returns the number of requests that the application is answering."""

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        is_reachable = await client.is_reachable()
        return JSONResponse({"status": "alive" if is_reachable else "no coordinator"}, 200 if is_reachable else 503)

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        return Response(status_code=200 if await client.is_reachable() else 503)

    @app.get("/ready")
    async def ready() -> Response:
        is_ready = await client.is_ready()
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        exposition, content_type = await client.metrics()
        return Response(own_metrics.appended_to(exposition), headers={"content-type": content_type})

    @app.get("/version")
    async def server_version() -> Response:
        return JSONResponse({"version": version("pilotfish")})

    @app.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": running()})
