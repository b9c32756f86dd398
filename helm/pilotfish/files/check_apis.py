"""Ask a running cluster over both of its APIs, and exit with status 1 at the first wrong answer.

A cluster that has just started gets a minute until it is ready.
"""

import os
import time

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

READY_SECONDS = 60.0

url, address = os.environ["HTTP_URL"], os.environ["GRPC_ADDRESS"]
until = time.monotonic() + READY_SECONDS
key = os.environ.get("PILOTFISH_API_KEY")
headers = {"authorization": f"Bearer {key}"} if key else {}
with httpx.Client(timeout=120.0, headers=headers) as client:
    for path in ("/health", "/ready"):
        while (reply := client.get(f"{url}{path}")).status_code == httpx.codes.SERVICE_UNAVAILABLE:
            if time.monotonic() > until:
                break
            time.sleep(0.5)
        reply.raise_for_status()
    name = client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": name, "prompt": "The", "max_tokens": 4, "temperature": 0}
    answer = client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
    if answer["usage"]["completion_tokens"] < 1:
        raise SystemExit(f"{url}/v1/completions: no token in {answer}")

service = "pilotfish.v1.GenerationService"
with grpc.insecure_channel(address) as channel:
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        for state in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=READY_SECONDS, wait_for_ready=True):
            if state.status == health_pb2.HealthCheckResponse.SERVING:
                break
    except grpc.RpcError as error:
        raise SystemExit(f"{address}: {service} does not serve: {error.details()}") from error
