"""Ask a running cluster over both of its APIs, and exit with status 1 at the first wrong answer.

A cluster that has just started gets `READY_SECONDS` until it is ready. Until then, its Services have no pod and refuse
connections.
"""

import os
import ssl
import time
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

READY_SECONDS = float(os.environ.get("READY_SECONDS", "60"))

url, address = os.environ["HTTP_URL"], os.environ["GRPC_ADDRESS"]
until = time.monotonic() + READY_SECONDS
key = os.environ.get("PILOTFISH_API_KEY")
headers = {"authorization": f"Bearer {key}"} if key else {}
authority, name = os.environ.get("TLS_CA"), os.environ.get("TLS_SERVER_NAME", "")
certificate, private_key = os.environ.get("TLS_CERTIFICATE"), os.environ.get("TLS_KEY")
context: ssl.SSLContext | bool = True
if authority:
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False  # gRPC checks the name
    if certificate and private_key:
        context.load_cert_chain(certificate, private_key)
timeout = httpx.Timeout(120.0, connect=5.0)
with httpx.Client(timeout=timeout, headers=headers, verify=context) as client:
    for path in ("/health", "/ready"):
        while True:
            try:
                status = client.get(f"{url}{path}").status_code
                found = f"status {status}"
            except httpx.TransportError as error:
                status, found = httpx.codes.SERVICE_UNAVAILABLE, str(error)
            if status == httpx.codes.OK:
                break
            if status != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > until:
                raise SystemExit(f"{url}{path}: {found}")
            time.sleep(0.5)
    model = client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "prompt": "The", "max_tokens": 4, "temperature": 0}
    answer = client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
    if answer["usage"]["completion_tokens"] < 1:
        raise SystemExit(f"{url}/v1/completions: no token in {answer}")

service = "pilotfish.v1.GenerationService"
if authority:
    pair = [Path(file).read_bytes() if file else None for file in (private_key, certificate)]
    credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes(), *pair)
    opened = grpc.secure_channel(address, credentials, options=(("grpc.ssl_target_name_override", name),))
else:
    opened = grpc.insecure_channel(address)
with opened as channel:
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        for state in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=READY_SECONDS, wait_for_ready=True):
            if state.status == health_pb2.HealthCheckResponse.SERVING:
                break
    except grpc.RpcError as error:
        raise SystemExit(f"{address}: {service} does not serve: {error.details()}") from error
