"""Conversion between protobuf and types, for formats of answers that a checkpoint describes itself.

Only what reading an answer needs is sent. Decoding checks every bound, and that a reader finds what it relies on.
"""

from __future__ import annotations

from cluster.core import bounds
from cluster.core.answer_format import OWN_FORMAT, CallFormat, Field, Literal, ReasoningFormat, Tags, literal_of
from cluster.core.errors import InvalidRequest
from pilotfish.v1 import generation_pb2 as pb

_FIELDS = {
    Field.NAME: pb.CALL_FIELD_NAME,
    Field.ID: pb.CALL_FIELD_ID,
    Field.ARGUMENTS: pb.CALL_FIELD_ARGUMENTS,
    Field.CALL: pb.CALL_FIELD_CALL,
    Field.LIST: pb.CALL_FIELD_LIST,
    Field.TAGS: pb.CALL_FIELD_TAGS,
    Field.BRACES: pb.CALL_FIELD_BRACES,
}
_BY_NUMBER = {number: field for field, number in _FIELDS.items()}
_NAMED = (Field.ARGUMENTS, Field.TAGS, Field.BRACES)
"""Fields that follow the name of the tool."""


def encode_call_format(form: CallFormat) -> pb.CallFormat:
    """Encode what reading calls needs of a format that is one pattern without a section."""
    tags = form.tags
    return pb.CallFormat(
        parts=[_encode_part(part) for part in form.call],
        object=form.object,
        tags=None
        if tags is None
        else pb.ArgumentTags(
            key=tags.key, key_end=tags.key_end, value=tags.value, value_end=tags.value_end, strips=tags.strips
        ),
        quote=form.quote,
    )


def decode_call_format(message: pb.CallFormat) -> CallFormat:
    """Decode a format for reading calls. Raises `InvalidRequest` (`own_call_format…`)."""
    field = "own_call_format"
    bounds.count(f"{field}.parts", message.parts, 2, bounds.MAX_FORMAT_PARTS, "parts")
    parts = tuple(_decode_part(part, f"{field}.parts[{place}]") for place, part in enumerate(message.parts))
    fields = [part for part in parts if isinstance(part, Field)]
    if isinstance(parts[0], Field) or not fields or set(fields) <= {Field.NAME, Field.ID}:
        raise InvalidRequest(f"{field}.parts", [_shown(part) for part in parts], "a literal first, and then a call")
    for place, part in enumerate(parts):
        if part in _NAMED and Field.NAME not in parts[:place]:
            raise InvalidRequest(f"{field}.parts[{place}]", _shown(part), "after the name")
        is_first = not any(isinstance(one, Field) for one in parts[:place])
        if is_first and not isinstance(part, Field) and literal_of(part).text.split()[0].startswith("*"):
            raise InvalidRequest(f"{field}.parts[{place}].literal", literal_of(part).text, "without * at its beginning")
    tags = _decode_tags(message.tags, f"{field}.tags") if message.HasField("tags") else None
    if (Field.TAGS in parts) != (tags is not None):
        raise InvalidRequest(f"{field}.tags", tags, "sent if and only if parts has CALL_FIELD_TAGS")
    if Field.BRACES in parts:
        _marker(f"{field}.quote", message.quote)
    return CallFormat(
        OWN_FORMAT,
        parts,
        object=bounds.text(f"{field}.object", message.object, bounds.MAX_FORMAT_OBJECT_BYTES),
        tags=tags,
        quote=message.quote if Field.BRACES in parts else "",
    )


def encode_reasoning_format(form: ReasoningFormat) -> pb.ReasoningFormat:
    """Encode what reading reasoning and content needs of a format."""
    return pb.ReasoningFormat(
        opening=form.opening,
        closing=form.closing,
        repeats=form.repeats,
        markers_left_out=form.markers_left_out,
    )


def decode_reasoning_format(message: pb.ReasoningFormat) -> ReasoningFormat:
    """Decode a format for reading reasoning and content. Raises `InvalidRequest` (`own_reasoning_format…`)."""
    field = "own_reasoning_format"
    if bool(message.opening) != bool(message.closing):
        raise InvalidRequest(f"{field}.opening", message.opening, "sent if and only if closing is")
    if message.opening:
        _marker(f"{field}.opening", message.opening)
        _marker(f"{field}.closing", message.closing)
    if "*" in message.closing:
        raise InvalidRequest(f"{field}.closing", message.closing, "without *")
    bounds.count(f"{field}.markers_left_out", message.markers_left_out, 0, bounds.MAX_FORMAT_PARTS, "markers")
    markers = tuple(
        _marker(f"{field}.markers_left_out[{place}]", text) for place, text in enumerate(message.markers_left_out)
    )
    return ReasoningFormat(
        OWN_FORMAT,
        message.opening,
        message.closing,
        repeats=message.repeats,
        markers_left_out=markers,
    )


def _encode_part(part: str | Literal | Field) -> pb.CallPart:
    if isinstance(part, Field):
        return pb.CallPart(field=_FIELDS[part])
    literal = literal_of(part)
    return pb.CallPart(literal=literal.text, is_optional=literal.is_optional)


def _decode_part(message: pb.CallPart, field: str) -> Literal | Field:
    if message.WhichOneof("part") == "field":
        found = _BY_NUMBER.get(message.field)
        if found is None:
            raise InvalidRequest(f"{field}.field", message.field, "a CallField but CALL_FIELD_UNSPECIFIED")
        return found
    text = bounds.text(f"{field}.literal", message.literal, bounds.MAX_FORMAT_TEXT_BYTES)
    if not text.split():
        raise InvalidRequest(f"{field}.literal", text, "a text with other characters than white space")
    return Literal(text, is_optional=message.is_optional)


def _decode_tags(message: pb.ArgumentTags, field: str) -> Tags:
    key, key_end, value_end = (
        _marker(f"{field}.{name}", text)
        for name, text in (("key", message.key), ("key_end", message.key_end), ("value_end", message.value_end))
    )
    value = bounds.text(f"{field}.value", message.value, bounds.MAX_FORMAT_TEXT_BYTES)
    return Tags(key, key_end, value, value_end, strips=message.strips)


def _marker(field: str, value: str) -> str:
    bounds.text(field, value, bounds.MAX_FORMAT_TEXT_BYTES)
    if not value.split() or value.split()[0].startswith("*"):
        raise InvalidRequest(field, value, "a text that begins neither with * nor is white space alone")
    return value


def _shown(part: str | Literal | Field) -> str:
    return part.value if isinstance(part, Field) else literal_of(part).text
