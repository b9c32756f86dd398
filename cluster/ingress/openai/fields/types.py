"""Types of the fields of OpenAI's requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from cluster.core.json_text import WHOLE, has_half
from cluster.core.nearest import nearest
from cluster.ingress.openai.fields.unsupported import UnsupportedParameters

MAX_UINT32 = 2**32 - 1
IN_VOCABULARY = "a token id of the model's vocabulary"
"""The bound of a token id, as clients are told it."""
MAX_INT32 = 2**31 - 1
_MAX_UINT64 = 2**64 - 1
_MAX_UNKNOWN_FIELDS = 16
_MAX_NAME_CHARS = 64


def _encodable(text: str) -> str:
    if has_half(text):
        raise PydanticCustomError("surrogate", WHOLE)
    return text


_FREE = frozenset({"arguments", "input", "input_schema", "json", "parameters", "schema"})
"""Entries of untyped objects whose values are the client's own, nulls included."""


def without_nulls(value: Any) -> Any:
    """Return an untyped object without the entries that are null, at every level: they count as left out."""
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        present = {name: entry for name, entry in value.items() if entry is not None}
        return {name: entry if name in _FREE else without_nulls(entry) for name, entry in present.items()}
    return value


class FirstErrorOnly(FailFast):
    """Stop reading a list at its first error. The errors of a million entries would not fit in memory."""

    __hash__ = object.__hash__  # unions of annotated types are compared by hash


Text = Annotated[str, AfterValidator(_encodable)]
Untyped = Annotated[dict[str, Any], AfterValidator(without_nulls)]
"""An object whose entries are read later."""
Untypeds = Annotated[list[Untyped], FirstErrorOnly()]
UInt32 = Annotated[int, Field(ge=0, le=MAX_UINT32)]
Seed = Annotated[int, Field(ge=-(2**63), le=_MAX_UINT64)]
"""Any 64-bit integer. A negative one is the unsigned one with the same bits."""
Texts = Annotated[list[Text], FirstErrorOnly()]
UInt32s = Annotated[list[UInt32], FirstErrorOnly()]


class UnknownFields:
    """The names of the unknown fields of one request, which are left out of it."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}

    def add(self, name: str, known: Iterable[str] = ()) -> None:
        """Note a name, and which of the `known` ones was meant. Of many names, the first ones are kept.

        A long name is cut.
        """
        if len(self._names) < _MAX_UNKNOWN_FIELDS:
            shown = re.sub(r"[^\w.-]", "?", name[:_MAX_NAME_CHARS], flags=re.ASCII)
            self._names[shown] = nearest(shown, known)

    @property
    def misspelt(self) -> tuple[tuple[str, str], ...]:
        """The names that are misspellings, each with the known name that was meant."""
        return tuple((name, meant) for name, meant in self._names.items() if meant is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, with letters, digits and `_.-?` only."""
        return tuple(self._names)


def _has_no_effect(field: FieldInfo) -> bool:
    return field.description is not None and field.description.startswith("No effect")


class StrictModel(BaseModel):
    """A model with strict types. Unknown fields are refused, or noted in the `UnknownFields` that are the context."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
    path: ClassVar[str] = ""
    """Where the object is in the body, with a dot at the end."""
    unsupported: ClassVar[UnsupportedParameters] = {}
    """Parameters that are refused with a reason."""

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """The names of the fields that were sent and have no effect: none ever, or none beside the others."""
        fields = type(self).model_fields
        return tuple(name for name in fields if name in self.model_fields_set and _has_no_effect(fields[name]))

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_fields(cls, value: object, info: ValidationInfo) -> object:
        """Leave out nulls and unknown fields. To refuse those, keep one: a million errors would not fit in memory."""
        if not isinstance(value, dict):
            return value
        known = {name: entry for name, entry in value.items() if name in cls.model_fields and entry is not None}
        unknown = (name for name, entry in value.items() if name not in cls.model_fields and entry is not None)
        if isinstance(info.context, UnknownFields):
            for name in islice(unknown, _MAX_UNKNOWN_FIELDS):
                info.context.add(cls.path + name, (cls.path + one for one in cls.model_fields))
            return known
        first = next(unknown, None)
        return known if first is None else {**known, first: value[first]}
