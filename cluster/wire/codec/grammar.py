"""Conversion between protobuf and types, for grammars. Decoding checks every bound."""

from __future__ import annotations

import json

from cluster.core import bounds
from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.json_text import WHOLE, find_half
from pilotfish.v1 import common_pb2 as pb


def encode_grammar(grammar: Grammar) -> pb.Grammar:
    """Encode a grammar."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return pb.Grammar(json_object=True)
        case GrammarKind.JSON_SCHEMA:
            return pb.Grammar(json_schema=grammar.text)
        case GrammarKind.REGEX:
            return pb.Grammar(regex=grammar.text)
        case GrammarKind.CHOICE:
            return pb.Grammar(choice=pb.Choices(texts=grammar.choices))
        case GrammarKind.GRAMMAR:
            return pb.Grammar(grammar=grammar.text)


def decode_grammar(message: pb.Grammar, field: str) -> Grammar:
    """Decode a grammar. It is not compiled. Raises `InvalidRequest`."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(field, None, "one of json_object, json_schema, regex, choice and grammar")
    if kind == "json_object":
        if not message.json_object:
            raise InvalidRequest(f"{field}.json_object", False, "true")
        return Grammar(GrammarKind.JSON_OBJECT)
    if kind == "choice":
        return _decode_choices(message.choice, f"{field}.choice")
    text: str = getattr(message, kind)
    check_grammar_size(f"{field}.{kind}", text)
    if not text:
        raise InvalidRequest(f"{field}.{kind}", text, "of at least one character")
    if kind == "json_schema":
        _check_schema(f"{field}.{kind}", text)
    return Grammar(GrammarKind(kind), text)


def _decode_choices(message: pb.Choices, field: str) -> Grammar:
    bounds.count(field, message.texts, 1, bounds.MAX_CHOICES, "texts")
    if "" in message.texts:
        raise InvalidRequest(field, "", "without empty texts")
    grammar = Grammar.of_choices(message.texts)
    check_grammar_size(field, grammar.text)
    return grammar


def check_grammar_size(field: str, text: str) -> None:
    """Raise `InvalidRequest` for the text of a grammar that is too long."""
    size = len(text.encode())
    if size > bounds.MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"{size} bytes", f"at most {bounds.MAX_GRAMMAR_BYTES} bytes")


def _check_schema(field: str, text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not (isinstance(value, dict) or value is True):
        raise InvalidRequest(field, text, "a JSON schema: a JSON object")
    if find_half(value) is not None:
        raise InvalidRequest(field, text, WHOLE)
