"""Coordinators as a directory names them."""

from __future__ import annotations

from typing import Any

from cluster.core.membership import Load, Member, MemberRole


def coordinator(name: str, address: str, **load: Any) -> Member:
    """A coordinator with an id and an address; `waiting=1` and the like are its load."""
    return Member(MemberRole.TARGET, name, address, "", Load(**load))
