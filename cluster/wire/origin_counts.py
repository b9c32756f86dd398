"""Accepted draft tokens by origin, as the events of an answer carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import cast

from cluster.core.draft_origin import DraftOrigin
from pilotfish.v1 import common_pb2

ORIGIN_NAMES: Mapping[int, str] = MappingProxyType({int(origin): origin.name.lower() for origin in DraftOrigin})
"""The name of each origin, for clients, and of its field in `OriginCounts`."""


def encode_origins(origins: Iterable[DraftOrigin]) -> Iterable[common_pb2.DraftOrigin.ValueType]:
    """Return origins as the messages take them: their numbers are those on the wire."""
    return cast("Iterable[common_pb2.DraftOrigin.ValueType]", origins)


def count_origins(counts: common_pb2.OriginCounts, origins: Iterable[int]) -> None:
    """Add the origins of accepted draft tokens to counts. An origin that this program does not know is not counted."""
    for origin in origins:
        name = ORIGIN_NAMES.get(origin)
        if name is not None:
            setattr(counts, name, getattr(counts, name) + 1)


def origins_as_json(counts: common_pb2.OriginCounts) -> dict[str, int]:
    """Return the counts of all origins, by name."""
    return {name: getattr(counts, name) for name in ORIGIN_NAMES.values()}
