"""The HTTP routes for operators and load balancers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from cluster.ingress.client import StatusClient
from cluster.ingress.observability.ingress_metrics import IngressMetrics


def add_operations(app: FastAPI, client: StatusClient, own_metrics: IngressMetrics, running: Callable[[], int]) -> None:
    """Add the routes. `running` returns the number of requests that the application is answering."""

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
