"""What grpcurl does, with the Python library of gRPC's reflection: no stubs, the schemas come from the server."""

from __future__ import annotations

import json
import shutil
import subprocess

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from checks import MESSAGES, arguments, check, require, run

_, ADDRESS, MODEL = arguments()
CHANNEL = grpc.insecure_channel(ADDRESS)
DATABASE = ProtoReflectionDescriptorDatabase(CHANNEL)
POOL = descriptor_pool.DescriptorPool(DATABASE)
SERVICE = "pilotfish.v1.GenerationService"


def call(method: str, body: dict[str, object], *, streams: bool = False) -> list[dict[str, object]]:
    """Call a method with a JSON message. Returns its responses as JSON values."""
    found = POOL.FindServiceByName(SERVICE).FindMethodByName(method)
    request = json_format.ParseDict(body, message_factory.GetMessageClass(found.input_type)())
    kind = message_factory.GetMessageClass(found.output_type)
    make = CHANNEL.unary_stream if streams else CHANNEL.unary_unary
    stub = make(
        f"/{SERVICE}/{method}",
        request_serializer=lambda each: each.SerializeToString(),
        response_deserializer=kind.FromString,
    )
    answer = stub(request, timeout=300.0)
    return [json_format.MessageToDict(each) for each in (answer if streams else [answer])]


@check("list the services")
def services() -> str:
    names = list(DATABASE.get_services())
    require(SERVICE in names and "grpc.health.v1.Health" in names, names)
    return ", ".join(names)


@check("ListModels")
def models() -> str:
    (found,) = call("ListModels", {})
    require(found["models"][0]["id"] == MODEL, found)
    return MODEL


@check("Generate, stream")
def generate() -> str:
    body = {"chat": {"messages": MESSAGES}, "sampling": {"temperature": 0}, "stopping": {"max_tokens": 16}}
    events = call("Generate", body, streams=True)
    require("started" in events[0] and "finished" in events[-1], events[:1])
    text = "".join(event.get("delta", {}).get("text", "") for event in events)
    require(text, json.dumps(events[:2]))
    return f"{len(events)} events, {text[:30]!r}"


@check("Tokenize and Detokenize")
def tokens() -> str:
    (found,) = call("Tokenize", {"text": "Hello there"})
    (back,) = call("Detokenize", {"token_ids": found["tokenIds"]})
    require(back["text"] == "Hello there", back)
    return f"{len(found['tokenIds'])} tokens"


@check("grpcurl itself, where it is installed")
def grpcurl() -> str:
    program = shutil.which("grpcurl")
    if program is None:
        return "not installed here"
    found = subprocess.run([program, "-plaintext", ADDRESS, "list"], capture_output=True, text=True, check=True).stdout
    require(SERVICE in found.split(), found)
    return "lists the services"


if __name__ == "__main__":
    run("grpcio", "grpcio-reflection")
