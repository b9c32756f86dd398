"""The key under which a resumable answer is kept: which fields of the request it contains."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor

from cluster.core.ids import RequestId
from cluster.core.request import GenerationRequest
from cluster.generation.recent_answers import request_key
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.fake_engine import MODEL, fake_service

UNCOUNTED = {
    "deadline",
    "priority",
    "traceparent",
    "max_draft_tokens",
    "prediction",
    "returns_drafts",
    "streams",
    "allows_learning",
    "resumed",
    "client",
    "stopping.max_tokens",
}
"""Fields of an admitted request on which the tokens of its answers do not depend. All others count."""


def another(kind: Any, value: Any) -> Any:
    """A value of a type that differs from `value`."""
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
        return another(kind, value) if value is not None else filled(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(one for one in kind if one is not value)
    if kind in (bool, int, float):
        return (not value) if kind is bool else kind(value + 1)
    if getattr(kind, "__supertype__", kind) is str:
        return value + "x"
    (item, *_) = typing.get_args(kind)
    return type(value)([*value, filled(item)])


def filled(kind: Any) -> Any:
    """Any value of a type."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{one.name: filled(hints[one.name]) for one in fields(kind)})
    origin = typing.get_origin(kind)
    if origin is tuple and typing.get_args(kind)[-1] is not Ellipsis:
        return tuple(map(filled, typing.get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    return another(
        kind, None if isinstance(kind, types.UnionType) else (origin or getattr(kind, "__supertype__", kind))()
    )


def changed(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The name of each field, nested ones with their path, and the value in which this field alone differs."""
    hints = typing.get_type_hints(type(value))
    for one in fields(value):
        name, held = f"{prefix}{one.name}", getattr(value, one.name)
        if is_dataclass(held):
            yield from ((path, replace(value, **{one.name: inner})) for path, inner in changed(held, f"{name}."))
        else:
            yield name, replace(value, **{one.name: another(hints[one.name], held)})


def test_every_field_of_an_admitted_request_counts_but_those_named_here() -> None:
    request = GenerationRequest(RequestId("r"), (1, 2, 3))
    found = {name: request_key(other) == request_key(request) for name, other in changed(request)}
    assert {name for name, is_equal in found.items() if is_equal} == UNCOUNTED
    assert {"sampling.grammar", "beam", "n", "text.include_stop", "stopping.stop_token_ids"} <= found.keys()


def test_every_field_of_a_value_inside_counts_too() -> None:
    request = replace(
        GenerationRequest(RequestId("r"), (1, 2, 3)), **{name: filled(kind) for name, kind in INNER.items()}
    )
    for name in INNER:
        for path, inner in changed(getattr(request, name)):
            assert request_key(replace(request, **{name: inner})) != request_key(request), path


INNER: dict[str, Any] = {
    name: kind
    for name, kind in typing.get_type_hints(GenerationRequest).items()
    for kind in [next((one for one in typing.get_args(kind) if is_dataclass(one)), kind)]
    if is_dataclass(kind) and name not in {"stopping", *UNCOUNTED}
}


def test_the_length_counts_where_the_last_token_is_forced() -> None:
    request = GenerationRequest(RequestId("r"), (1, 2, 3))
    forced = replace(request, stopping=replace(request.stopping, forced_eos_token_id=2))
    longer = replace(forced, stopping=replace(forced.stopping, max_tokens=99))
    assert request_key(longer) != request_key(forced)


# --- the public schema ---

Sampling = common_pb2.SamplingParameters


def words(*texts: str) -> list[generation_pb2.ChatMessage]:
    return [generation_pb2.ChatMessage(role="user", content=text) for text in texts]


def request_of(**values: Any) -> generation_pb2.GenerateRequest:
    """A request with a seed. Fields of nested messages have a dot in their names."""
    message = generation_pb2.GenerateRequest(request_id="r", sampling=Sampling(seed=1))
    for path, value in values.items():
        part = generation_pb2.GenerateRequest()
        *outer, name = path.split("__")
        target: Any = part
        for one in outer:
            target = getattr(target, one)
        if isinstance(value, list):
            getattr(target, name).extend(value)
        elif hasattr(value, "DESCRIPTOR"):
            getattr(target, name).CopyFrom(value)
            getattr(target, name).SetInParent()
        else:
            setattr(target, name, value)
        message.MergeFrom(part)
    if message.WhichOneof("input") is None:
        message.text = "hi"
    return message


CHAT = {"chat__messages": words("hi")}
BEAMS: dict[str, Any] = {"sampling__temperature": 0.0, "best_of": 2, "beam_search": generation_pb2.BeamSearch()}
COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "request_id": ({}, {"request_id": "other"}),
    "text": ({}, {"text": "ho"}),
    "token_ids": ({}, {"token_ids": common_pb2.TokenIds(ids=[7])}),
    "chat.messages": (CHAT, {"chat__messages": words("ho")}),
    "chat.continue_final_message": (CHAT, CHAT | {"chat__continue_final_message": True}),
    "chat.add_generation_prompt": (CHAT, CHAT | {"chat__add_generation_prompt": False}),
    "n": ({}, {"n": 2}),
    "best_of": ({}, {"best_of": 2}),
    "beam_search.length_penalty": (BEAMS, BEAMS | {"beam_search__length_penalty": 2.0}),
    "beam_search.early_stopping": (BEAMS, BEAMS | {"beam_search__early_stopping": 2}),
    "cache_salt": ({}, {"cache_salt": "mine"}),
    "client": ({}, {"client": "alice"}),
    "prompt_options.truncate": (
        {"text": "hello the world"},
        {"text": "hello the world", "prompt_options__truncate": 1},
    ),
    "prompt_options.keep_start": (
        {"text": "hello the world", "prompt_options__truncate": 1},
        {"text": "hello the world", "prompt_options__truncate": 1, "prompt_options__keep_start": True},
    ),
    "skip_special_tokens": ({}, {"skip_special_tokens": False}),
    "bad_words": ({}, {"bad_words": ["world"]}),
    "stopping.stop": ({}, {"stopping__stop": ["x"]}),
    "stopping.stop_token_ids": ({}, {"stopping__stop_token_ids": [9]}),
    "stopping.ignore_eos": ({}, {"stopping__ignore_eos": True}),
    "stopping.min_tokens": ({}, {"stopping__min_tokens": 2}),
    "stopping.include_stop": ({}, {"stopping__include_stop": True}),
    "sampling.temperature": ({}, {"sampling__temperature": 0.5}),
    "sampling.top_k": ({}, {"sampling__top_k": 3}),
    "sampling.top_p": ({}, {"sampling__top_p": 0.5}),
    "sampling.min_p": ({}, {"sampling__min_p": 0.5}),
    "sampling.repetition_penalty": ({}, {"sampling__repetition_penalty": 2.0}),
    "sampling.presence_penalty": ({}, {"sampling__presence_penalty": 1.0}),
    "sampling.frequency_penalty": ({}, {"sampling__frequency_penalty": 1.0}),
    "sampling.logit_bias": ({}, {"sampling__logit_bias": [common_pb2.LogitBias(token_id=5, bias=1.0)]}),
    "sampling.seed": ({}, {"sampling__seed": 2}),
    "sampling.logprobs": ({}, {"sampling__logprobs": 1}),
    "sampling.allowed_token_ids": ({}, {"sampling__allowed_token_ids": [5, 6]}),
    "sampling.bad_words": ({}, {"sampling__bad_words": [common_pb2.TokenIds(ids=[5])]}),
    "sampling.bad_texts": ({}, {"sampling__bad_texts": ["world"]}),
    "sampling.logprob_token_ids": (
        {"sampling__logprobs": 1},
        {"sampling__logprobs": 1, "sampling__logprob_token_ids": [5]},
    ),
    "sampling.prompt_logprobs": ({}, {"sampling__prompt_logprobs": 1}),
    "sampling.grammar": ({}, {"sampling__grammar": common_pb2.Grammar(regex="a")}),
    "sampling.no_repeat_ngram_size": ({}, {"sampling__no_repeat_ngram_size": 2}),
}
"""By field: a request and the same with another value of the field, which may have other answers."""
NOT_COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({}, {"model": MODEL}),
    "max_draft_tokens": ({}, {"max_draft_tokens": 0}),
    "prediction_text": ({}, {"prediction_text": "hello"}),
    "prediction_token_ids": ({}, {"prediction_token_ids": common_pb2.TokenIds(ids=[7])}),
    "resume": ({}, {"resume": [generation_pb2.ResumedAnswer(index=0)]}),
    "coordinator": ({}, {"coordinator": "c:1"}),
    "store": ({}, {"store": False}),
    "client_allows_learning": ({}, {"client_allows_learning": True}),
    "prompt_options.report": ({}, {"prompt_options__report": True}),
    "prompt_options.echo": ({}, {"prompt_options__echo": True}),
    "stopping.max_tokens": ({}, {"stopping__max_tokens": 5}),
    "return_drafts": ({}, {"return_drafts": True}),
    "stream": ({}, {"stream": False}),
    "traceparent": ({}, {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}),
}
"""By field: a request and the same with another value of the field, which has the same answers."""
ELSEWHERE = {
    "chat.tools": "a part of the prompt of models that call tools",
    "chat.template_arguments": "a part of the prompt where the template has variables",
    "chat.required_tool": "a grammar",
    "prompt_options.add_special_tokens": "a part of the prompt where the tokenizer has such tokens",
    "chat.single_call": "a part of the grammar of required tools",
    "sampling.thinking": "for models that think",
    "priority": "refused by the default policy",
}


def paths(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """The fields of a request. Messages of one level are entered."""
    for field in message.fields:
        inner = field.message_type
        if inner is not None and not prefix and inner.name not in ("TokenIds", "ResumedAnswer"):
            yield from paths(inner, f"{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_every_field_of_the_schema_is_named_here() -> None:
    assert set(paths(generation_pb2.GenerateRequest.DESCRIPTOR)) == {*COUNTED, *NOT_COUNTED, *ELSEWHERE}


async def test_a_field_counts_as_it_changes_the_answer(tmp_path: Path) -> None:
    service, engine, _ = fake_service(tmp_path)

    async def key(values: dict[str, Any]) -> bytes:
        assert [event async for event in service.generate(request_of(**values))]
        return request_key(engine.requests[-1])

    equal = set()
    for field, (before, after) in (COUNTED | NOT_COUNTED).items():
        assert request_of(**before) != request_of(**after)
        keys = [await key(values) for values in (before, after, before)]
        assert keys[0] == keys[2]
        if keys[0] == keys[1]:
            equal.add(field)
    assert equal == set(NOT_COUNTED)
