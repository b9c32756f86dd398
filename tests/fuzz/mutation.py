"""Wrong messages, made of right ones: bytes of protobufs, values of their fields, and values in JSON bodies."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.message import Message

from pilotfish.v1 import common_pb2, generation_pb2, operations_pb2

_TEXTS = ("", "hi", "\x00", "🐟" * 50, "a" * 5000, "<tool_call>{", "\u202e", "token_id:1", "-1", "NaN", "*" * 300)
_NUMBERS = (0, 1, -1, 2, 7, 64, 255, 256, 319, 320, 2**31 - 1, -(2**31), 2**32 - 1, 2**32, 2**53, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-9, 1e9, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_JSON: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    *_TEXTS,
    *_NUMBERS,
    0.5,
    -0.5,
    1e400,
    2**70,
)
_DELETED = object()


def protobufs() -> dict[str, list[Message]]:
    """Right requests to the methods of the public services, by the methods' paths."""
    generation, turn = "/pilotfish.v1.GenerationService/", generation_pb2.ChatMessage
    chat = generation_pb2.ChatInput(messages=[turn(role="user", content="hi"), turn(role="assistant", content="ho")])
    sampling = common_pb2.SamplingParameters(temperature=0.7, top_k=5, top_p=0.9, seed=3, logprobs=2)
    stopping = generation_pb2.StoppingCriteria(max_tokens=4, stop=["x"], stop_token_ids=[5], min_tokens=1)
    requests: list[Message] = [
        generation_pb2.GenerateRequest(text="hi", sampling=sampling, stopping=stopping),
        generation_pb2.GenerateRequest(chat=chat, stopping=stopping, n=2, request_id="one"),
        generation_pb2.GenerateRequest(text="a b a b", prediction_text="a b", max_draft_tokens=3, stopping=stopping),
    ]
    return {
        f"{generation}Generate": requests,
        f"{generation}Abort": [generation_pb2.AbortRequest(request_id="one")],
        f"{generation}Tokenize": [
            generation_pb2.TokenizeRequest(text="hi there", return_bytes=True),
            generation_pb2.TokenizeRequest(chat=chat),
        ],
        f"{generation}Detokenize": [generation_pb2.DetokenizeRequest(token_ids=[1, 2, 3])],
        f"{generation}ListModels": [generation_pb2.ListModelsRequest()],
        f"{generation}GetModel": [generation_pb2.GetModelRequest(model="tiny")],
        "/pilotfish.v1.OperationsService/GetMetrics": [operations_pb2.GetMetricsRequest()],
    }


def bodies() -> dict[str, list[dict[str, Any]]]:
    """Right JSON bodies, by the routes' paths."""
    turns = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "swim", "parameters": {"type": "object", "properties": {}}}}
    return {
        "/v1/chat/completions": [
            {"messages": turns, "max_tokens": 4, "temperature": 0.5, "seed": 1, "logprobs": True, "top_logprobs": 2},
            {"messages": turns, "max_tokens": 4, "priority": 0, "thinking_token_budget": 2},
            {"messages": turns, "max_tokens": 4, "tools": [tool], "tool_choice": "auto", "stream": True, "n": 2},
        ],
        "/v1/completions": [
            {"prompt": "hi", "max_tokens": 4, "echo": True, "logprobs": 1, "stop": ["x"], "logit_bias": {"5": 1.0}},
            {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        ],
        "/v1/responses": [{"input": "hi", "max_output_tokens": 4}, {"input": turns, "stream": True}],
        "/v1/messages": [
            {"messages": turns, "max_tokens": 4, "stop_sequences": ["x"]},
            {"messages": turns, "max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 2}},
        ],
        "/v1/verify": [{"request": {"prompt": "hi", "max_tokens": 2}, "receipt": {"seed": 1}, "text": "x"}],
        "/tokenize": [{"prompt": "hi"}, {"messages": turns}],
        "/detokenize": [{"tokens": [1, 2, 3]}],
    }


def mutated_protobuf(message: Message, rng: random.Random) -> bytes:
    """Return the bytes of a message with other values, with other bytes, or with both."""
    changed = type(message)()
    changed.CopyFrom(message)
    kind = rng.randrange(3)
    if kind != 0:
        for _ in range(rng.randint(1, 3)):
            _change_field(changed, rng)
    data = bytearray(changed.SerializeToString())
    if kind != 1:
        for _ in range(rng.randint(1, 4)):
            _change_bytes(data, rng)
    return bytes(data)


def mutated_json(body: dict[str, Any], rng: random.Random) -> bytes:
    """Return a JSON body with other values, or as bytes that are cut or changed."""
    changed = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        changed = _changed(changed, rng)
        if changed is _DELETED:
            changed = None
    data = bytearray(json.dumps(changed).encode())
    if rng.random() < 0.2:
        _change_bytes(data, rng)
    return bytes(data)


def _change_field(message: Any, rng: random.Random) -> None:
    """Set one field of the message, or of a message in it, to a value of its type."""
    field = rng.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
    if field is None:
        return
    if field.message_type is not None:
        inner = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            return
        target = inner.add() if field.is_repeated else inner
        if not field.is_repeated:
            target.SetInParent()
        for _ in range(rng.randint(1, 3)):
            _change_field(target, rng)
        return
    values = [_value(field, rng) for _ in range(rng.choice((1, 1, 2, 20)) if field.is_repeated else 1)]
    if field.is_repeated:
        getattr(message, field.name).extend(values)
    else:
        setattr(message, field.name, values[0])


def _value(field: Any, rng: random.Random) -> Any:
    """Return a value that the type of the field holds."""
    kinds = type(field)
    if field.cpp_type == kinds.CPPTYPE_STRING:
        text = rng.choice(_TEXTS)
        return text.encode() if field.type == kinds.TYPE_BYTES else text
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type in (kinds.CPPTYPE_DOUBLE, kinds.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    if field.cpp_type == kinds.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 99))
    bits = 64 if field.cpp_type in (kinds.CPPTYPE_INT64, kinds.CPPTYPE_UINT64) else 32
    if field.cpp_type in (kinds.CPPTYPE_UINT32, kinds.CPPTYPE_UINT64):
        return rng.choice(_NUMBERS) % (1 << bits)
    return (rng.choice(_NUMBERS) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _change_bytes(data: bytearray, rng: random.Random) -> None:
    """Flip, insert, repeat or cut bytes."""
    place = rng.randint(0, len(data))
    kind = rng.randrange(5)
    if kind == 0 and place < len(data):
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[place:place] = rng.randbytes(rng.randint(1, 8))
    elif kind == 2:
        del data[place:]
    elif kind == 3:
        data[place:place] = data[max(0, place - rng.randint(1, 16)) : place] * rng.randint(1, 20)
    elif place < len(data):
        data[place] = rng.choice((0, 0x7F, 0x80, 0xFF))


def _changed(value: Any, rng: random.Random) -> Any:
    """Return a JSON value of which one part is replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {**value, rng.choice(_TEXTS): rng.choice(_JSON)}
        inner = _changed(value[name], rng)
        return {key: one for key, one in value.items() if key != name} | ({} if inner is _DELETED else {name: inner})
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        inner = _changed(value[place], rng)
        return [*value[:place], *([] if inner is _DELETED else [inner]), *value[place + 1 :]]
    return _DELETED if isinstance(value, (str, int)) and rng.random() < 0.1 else rng.choice(_JSON)
