"""What a process still holds after requests: the attributes, variables and caches whose content they have changed.

Names are those of classes and functions, without their modules.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch

PACKAGES = ("cluster", "workers", "deploy")
"""The packages whose objects, functions and modules are looked at."""

_Owned = tuple[object, str, object]
"""Who holds something, its name, and what it is."""


class Snapshot:
    """The content of everything that the product holds at the moment, numbers aside.

    A value that never changes (a frozen dataclass, a tuple) belongs to whoever holds it.
    """

    def __init__(self) -> None:
        gc.unfreeze()  # what was there before the first test counts too
        gc.collect()
        self._kept: list[object] = []  # no other object gets the address of one of these
        self._held: dict[str, dict[int, bytes]] = {}
        for owner, name, value in _everything():
            if not isinstance(value, int | float | None):
                self._kept.append(owner)
                self._held.setdefault(name, {})[id(owner)] = _digest(value)

    def changed_since(self, before: Snapshot) -> set[str]:
        """Where something is now that was not there before."""
        return {
            name
            for name, found in self._held.items()
            if any(content != before._held.get(name, {}).get(owner) for owner, content in found.items())
        }


def _everything() -> Iterator[_Owned]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES:
            for variable, value in vars(module).items():
                if not isinstance(value, ModuleType | type | FunctionType) and not variable.startswith("__"):
                    yield module, f"{name}.{variable}", value
    looks: dict[type, Callable[[Any], Iterator[_Owned]]] = {}
    for found in gc.get_objects():
        kind = type(found)
        look = looks.get(kind)
        if look is None:
            look = looks[kind] = _look_at(kind)
        yield from look(found)


def _look_at(kind: type) -> Callable[[Any], Iterator[_Owned]]:
    """How to find what an object of a class holds."""
    if kind is functools._lru_cache_wrapper:
        return _cached
    if kind is FunctionType:
        return _variables
    if kind in (CoroutineType, GeneratorType, AsyncGeneratorType):
        return _locals
    return _attributes if _is_ours(kind.__module__) and not _is_value(kind) else _nothing


def _nothing(_: object) -> Iterator[_Owned]:
    return iter(())


def _cached(function: Any) -> Iterator[_Owned]:
    """That a function has kept further results."""
    if _is_ours(function.__module__):
        yield function, function.__qualname__, [function.cache_info().misses]


def _variables(function: FunctionType) -> Iterator[_Owned]:
    """What a function has of the functions around it, and as defaults of its parameters."""
    if not _is_ours(function.__module__):
        return
    held: dict[object, object] = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name, value in held.items():
        yield function, f"{function.__qualname__}.{name}", value


def _locals(running: Any) -> Iterator[_Owned]:
    """What a suspended function holds."""
    frame = (
        getattr(running, "cr_frame", None) or getattr(running, "gi_frame", None) or getattr(running, "ag_frame", None)
    )
    if frame is not None and _is_ours(frame.f_globals.get("__name__")):
        for name, value in list(frame.f_locals.items()):
            yield running, f"{running.__qualname__}.{name}", value


def _attributes(found: object) -> Iterator[_Owned]:
    """The attributes of an object, in its dictionary and in slots; the items of one that is a container itself."""
    kind = type(found)
    name = kind.__qualname__
    for attribute, value in list(getattr(found, "__dict__", {}).items()):
        yield found, f"{name}.{attribute}", value
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(found, slot):
                yield found, f"{name}.{slot}", getattr(found, slot)
    if isinstance(found, Mapping | list | set):
        yield found, f"{name}.items", list(found.items()) if isinstance(found, Mapping) else list(found)


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in PACKAGES


def _is_value(kind: Any) -> bool:
    """Whether objects of a class are frozen, so that only who holds one can hold another one."""
    return issubclass(kind, Enum | tuple | str) or (is_dataclass(kind) and kind.__dataclass_params__.frozen)


def _digest(value: object) -> bytes:
    digest = blake2b(digest_size=12)
    _add(value, digest, frozenset())
    return digest.digest()


def _add(value: Any, digest: Any, around: frozenset[int]) -> None:
    """Add the content of plain values, of containers and of what never changes, and the address of other objects."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, int | float | str | bytes | Enum | None):
        digest.update(repr(value).encode(errors="surrogatepass"))
    elif isinstance(value, np.ndarray):
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_quantized:
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif id(value) in around:
        digest.update(b"around")
    elif is_dataclass(value) and _is_value(type(value)):
        for field in fields(value):
            _add(getattr(value, field.name, None), digest, around | {id(value)})
    elif isinstance(value, Iterable) and _is_container(value):
        for item in list(value.items()) if isinstance(value, Mapping) else list(value):
            _add(item, digest, around | {id(value)})
        digest.update(b"end")
    else:
        digest.update(id(value).to_bytes(8, "little"))


def _is_container(value: object) -> bool:
    return isinstance(value, tuple) or (
        type(value).__module__ in ("builtins", "collections", "array") and not hasattr(value, "__next__")
    )
