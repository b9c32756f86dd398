"""Who serves in the cluster: members register by heartbeat, and those that stay silent are gone.

The state is soft. It is lost with the process that holds it and comes back with the next heartbeats, so that everybody
goes on with the last members that they saw (`merged`) until all have had the time to register again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

BEAT_SECONDS = 1.0
"""Time between two heartbeats of a member, in seconds."""
EXPIRY_SECONDS = 10.0
"""Silence after which a member counts as gone, in seconds. A lost connection is noticed much sooner by its user."""


def _restore(message: Any, values: Sequence[object]) -> None:
    """Set the fields of a message that another process pickled, in their order.

    That process may run an earlier version, which lacks the last fields; they get their defaults. A later version has
    further fields, which are left out. So new fields have a default and come last, and none is removed.
    """
    for place, field in enumerate(fields(message)):
        object.__setattr__(message, field.name, values[place] if place < len(values) else field.default)


class MemberRole(StrEnum):
    """What a member serves."""

    TARGET = "target"
    """A coordinator with its target: it answers requests."""
    DRAFTER = "drafter"
    """A drafter: it proposes drafts to coordinators."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a member is."""

    waiting: int = 0
    """Number of requests that wait for their first step."""
    running: int = 0
    """Number of sequences that are generated."""
    kv_usage: float = 0.0
    """Used fraction of the KV blocks."""
    stalled_seconds: float = 0.0
    """How long no step has ended although there are requests, in seconds: the target is lost, frozen or slow."""

    __setstate__ = _restore


@dataclass(frozen=True, slots=True)
class Member:
    """A process that serves others at an address."""

    role: MemberRole
    id: str
    """Unique. A restarted process has another id."""
    address: str
    """`host:port` of its gRPC server, which every node of the cluster reaches."""
    version: str
    """Members of one version fit together: their models and settings are the same."""
    load: Load = Load()
    is_draining: bool = False
    """Whether it finishes its requests and takes no more."""

    __setstate__ = _restore


@dataclass(frozen=True, slots=True)
class View:
    """The members in a directory."""

    members: tuple[Member, ...] = ()
    is_settled: bool = False
    """Whether the directory is old enough that every living member has registered."""

    __setstate__ = _restore

    def of(self, role: MemberRole) -> tuple[Member, ...]:
        """The members of a role."""
        return tuple(member for member in self.members if member.role is role)


class Membership:
    """The members that have registered lately. `now` is the time of a monotonic clock, in seconds."""

    def __init__(self, now: float, expiry_seconds: float = EXPIRY_SECONDS) -> None:
        self._begun = now
        self._expiry = expiry_seconds
        self._entries: dict[str, tuple[Member, float]] = {}

    def beat(self, member: Member, now: float) -> None:
        """Register a member, or replace what it registered before."""
        self._entries[member.id] = (member, now)

    def leave(self, member_id: str) -> None:
        """Remove a member that ends. An unknown one is no error."""
        self._entries.pop(member_id, None)

    def view(self, now: float) -> View:
        """The members that were heard of within the expiry time, in the order in which they came first."""
        self._entries = {name: entry for name, entry in self._entries.items() if now - entry[1] < self._expiry}
        return View(tuple(member for member, _ in self._entries.values()), now - self._begun >= self._expiry)


def merged(last: View, new: View) -> View:
    """The view to use after `new` has arrived: members of the last view stay until the new directory has settled."""
    if new.is_settled:
        return new
    known = {member.id for member in new.members}
    kept = tuple(member for member in last.members if member.id not in known)
    return View((*kept, *new.members), is_settled=False)
