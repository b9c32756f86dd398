"""A format of answers that a checkpoint describes: it arrives as it was sent, and is refused out of bounds."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.answer_format import OWN_FORMAT, CallFormat, Field, Literal, ReasoningFormat, Tags, maybe
from cluster.wire.codec.answer_format import (
    decode_call_format,
    decode_reasoning_format,
    encode_call_format,
    encode_reasoning_format,
)
from pilotfish.v1 import generation_pb2 as pb
from tests.support.refusals import assert_refused

TAGGED = "sent if and only if parts has CALL_FIELD_TAGS"
MARKER = "a text that begins neither with * nor is white space alone"
TAGS = pb.ArgumentTags(key="<a=", key_end=">", value_end="</a>")


def parts(*values: str | int, **changes: Any) -> pb.CallFormat:
    listed = [pb.CallPart(literal=one) if isinstance(one, str) else pb.CallPart(field=one) for one in values]  # type: ignore[arg-type]
    return pb.CallFormat(parts=listed, **changes)


@pytest.mark.parametrize(
    "form",
    [
        CallFormat(OWN_FORMAT, (Literal("<c>"), Field.NAME, Literal("*>"), Field.ID, Field.ARGUMENTS, maybe("</c>"))),
        CallFormat(OWN_FORMAT, (Literal("<c>"), Field.LIST), object='{"tool": NAME, "input": ARGUMENTS}'),
        CallFormat(
            OWN_FORMAT,
            (Literal("<c>"), Field.NAME, Field.TAGS),
            tags=Tags("<a>", "</a>", "<b>", "</b>", strips=True),
        ),
        CallFormat(OWN_FORMAT, (Literal("<c>"), Field.NAME, Field.BRACES), quote="<q>"),
    ],
)
def test_a_format_of_calls_arrives_as_it_was_sent(form: CallFormat) -> None:
    assert decode_call_format(encode_call_format(form)) == form


def test_a_format_of_reasoning_arrives_as_it_was_sent() -> None:
    form = ReasoningFormat(OWN_FORMAT, "<t*>", "</t>", repeats=True, markers_left_out=("<a>", "</a>"))
    assert decode_reasoning_format(encode_reasoning_format(form)) == form
    assert decode_reasoning_format(pb.ReasoningFormat()) == ReasoningFormat(OWN_FORMAT)


@pytest.mark.parametrize(
    ("message", "field", "bound"),
    [
        (parts("<c>"), "own_call_format.parts", "between 2 and 32 parts"),
        (parts(*(["<c>"] * 33)), "own_call_format.parts", "between 2 and 32 parts"),
        (parts(pb.CALL_FIELD_CALL, "<c>"), "own_call_format.parts", "a literal first, and then a call"),
        (parts("<c>", pb.CALL_FIELD_NAME), "own_call_format.parts", "a literal first, and then a call"),
        (parts("<c>", pb.CALL_FIELD_ARGUMENTS), "own_call_format.parts[1]", "after the name"),
        (parts("<c>", pb.CALL_FIELD_TAGS, tags=TAGS), "own_call_format.parts[1]", "after the name"),
        (parts("<c>", 9), "own_call_format.parts[1].field", "a CallField but CALL_FIELD_UNSPECIFIED"),
        (
            parts(" ", pb.CALL_FIELD_CALL),
            "own_call_format.parts[0].literal",
            "a text with other characters than white space",
        ),
        (parts("*c", pb.CALL_FIELD_CALL), "own_call_format.parts[0].literal", "without * at its beginning"),
        (parts("c" * 257, pb.CALL_FIELD_CALL), "own_call_format.parts[0].literal", "at most 256 bytes"),
        (parts("<c>", pb.CALL_FIELD_CALL, object="x" * 1025), "own_call_format.object", "at most 1024 bytes"),
        (
            parts("<c>", pb.CALL_FIELD_CALL, tags=TAGS),
            "own_call_format.tags",
            TAGGED,
        ),
        (
            parts("<c>", pb.CALL_FIELD_NAME, pb.CALL_FIELD_TAGS),
            "own_call_format.tags",
            TAGGED,
        ),
        (
            parts("<c>", pb.CALL_FIELD_NAME, pb.CALL_FIELD_TAGS, tags=pb.ArgumentTags(key="<a=", key_end=">")),
            "own_call_format.tags.value_end",
            MARKER,
        ),
        (parts("<c>", pb.CALL_FIELD_NAME, pb.CALL_FIELD_BRACES), "own_call_format.quote", MARKER),
        (pb.ReasoningFormat(opening="<t>"), "own_reasoning_format.opening", "sent if and only if closing is"),
        (pb.ReasoningFormat(opening="*", closing="a"), "own_reasoning_format.opening", MARKER),
        (pb.ReasoningFormat(opening="<t>", closing="a*"), "own_reasoning_format.closing", "without *"),
        (
            pb.ReasoningFormat(markers_left_out=["<t>"] * 33),
            "own_reasoning_format.markers_left_out",
            "between 0 and 32 markers",
        ),
        (pb.ReasoningFormat(markers_left_out=["a", " "]), "own_reasoning_format.markers_left_out[1]", MARKER),
    ],
)
def test_a_format_out_of_bounds_is_refused_by_field_value_and_bound(message: Any, field: str, bound: str) -> None:
    decode = decode_call_format if isinstance(message, pb.CallFormat) else decode_reasoning_format
    assert_refused(decode, message, field, bound)
