"""Passes of a drafting module by salt: each salt may have learned weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

PassType_co = TypeVar("PassType_co", covariant=True)
RowType = TypeVar("RowType")
ValueType = TypeVar("ValueType")


class PassOfSalt(Generic[PassType_co]):
    """The pass that drafts for the requests of a salt: one for all."""

    def __init__(self, own: PassType_co) -> None:
        """`own` computes with the weights of the draft's files."""
        self.own = own

    def of_salt(self, salt: str) -> PassType_co:  # noqa: ARG002 - one for all
        """The pass that drafts for the requests of a salt."""
        return self.own

    def version(self, salt: str) -> int:  # noqa: ARG002
        """A number of the weights of that pass: 0 until they are replaced, and never that of former weights.

        A sequence that has begun with weights goes on with those that replace them, so what it keeps is of both.
        """
        return 0

    def groups(
        self, rows: Iterable[RowType], salt_of: Callable[[RowType], str]
    ) -> list[tuple[PassType_co, list[RowType]]]:
        """The rows in order, those with the same pass together."""
        found: dict[int, tuple[PassType_co, list[RowType]]] = {}
        for row in rows:
            one = self.of_salt(salt_of(row))
            found.setdefault(id(one), (one, []))[1].append(row)
        return list(found.values())


class ValueOfSalt(Generic[ValueType]):
    """A value for each pass, such as how often the target takes what its weights draft."""

    def __init__(self, passes: PassOfSalt[Any], make: Callable[[], ValueType]) -> None:
        """`make` makes the first value of a pass."""
        self._passes = passes
        self._make = make
        self._values: WeakKeyDictionary[object, ValueType] = WeakKeyDictionary()

    def of_salt(self, salt: str) -> ValueType:
        """The value of the pass that drafts for the requests of a salt."""
        one = self._passes.of_salt(salt)
        if one not in self._values:
            self._values[one] = self._make()
        return self._values[one]
