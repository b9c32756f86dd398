"""Ask a running cluster over both of its APIs, and exit with status 1 at the first wrong answer."""

import os

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

url, address = os.environ["HTTP_URL"], os.environ["GRPC_ADDRESS"]
with httpx.Client(timeout=120.0) as client:
    for path in ("/health", "/ready"):
        client.get(f"{url}{path}").raise_for_status()
    name = client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": name, "prompt": "The", "max_tokens": 4, "temperature": 0}
    answer = client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
    if answer["usage"]["completion_tokens"] < 1:
        raise SystemExit(f"{url}/v1/completions: no token in {answer}")

service = "pilotfish.v1.GenerationService"
with grpc.insecure_channel(address) as channel:
    health = health_pb2_grpc.HealthStub(channel)
    reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=30.0)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise SystemExit(f"{address}: {service} does not serve")
