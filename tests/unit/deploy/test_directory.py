"""The directory and its clients, without Ray: an actor that is called directly, and one that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from ray.exceptions import RayError

from cluster.core.errors import WorkerUnavailable
from cluster.core.membership import Load, Member, MemberRole, View
from deploy.ray import directory
from deploy.ray.directory import Directory, DirectoryClient

MEMBER = Member(MemberRole.TARGET, "target-1", "10.0.0.1:1", "v1")
OTHER = Member(MemberRole.DRAFTER, "draft-1", "10.0.0.2:2", "v1")


@dataclass
class Reference:
    """What a call to an actor returns."""

    outcome: Future[Any]

    def future(self) -> Future[Any]:
        return self.outcome


class Method:
    """A method of an actor. It answers at once, fails while the actor is `away`, and never answers while `frozen`."""

    def __init__(self, actor: ActorHandle, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: object) -> Reference:
        outcome: Future[Any] = Future()
        if self._actor.is_away:
            outcome.set_exception(RayError("the actor died"))
        elif not self._actor.is_frozen:
            outcome.set_result(getattr(self._actor.directory, self._name)(*arguments))
        return Reference(outcome)


class ActorHandle:
    """The handle of a directory that runs in this process."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.is_away = self.is_frozen = False

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> ActorHandle:
    handle = ActorHandle()
    monkeypatch.setattr(directory, "_find_or_make", lambda _: handle)
    return handle


def ids(view: View) -> list[str]:
    return [member.id for member in view.members]


def client_of(member: Member | None, on_drain: Callable[[float], None] = lambda _: None) -> DirectoryClient:
    return DirectoryClient("app", lambda: member, on_drain=on_drain)


async def test_members_see_each_other_and_their_loads(actor: ActorHandle) -> None:
    load = Load(waiting=1, running=2, kv_usage=0.5)
    busy = Member(MemberRole.TARGET, "target-1", "10.0.0.1:1", "v1", load)
    first, second, follower = client_of(busy), client_of(OTHER), client_of(None)
    for client in (first, second, follower, first):
        await client.beat()

    assert follower.view.members == first.view.members == (busy, OTHER)


async def test_a_member_that_stops_leaves_at_once(actor: ActorHandle) -> None:
    leaving, staying = client_of(MEMBER), client_of(OTHER)
    await leaving.beat()
    leaving.start()
    await leaving.stop()
    await leaving.stop()
    await staying.beat()

    assert ids(staying.view) == ["draft-1"]


async def test_the_last_view_stays_while_the_directory_is_away_and_after_it_lost_everything(actor: ActorHandle) -> None:
    first, second = client_of(MEMBER), client_of(OTHER)
    for client in (first, second, first):
        await client.beat()
    actor.is_away = True
    await first.beat()
    assert ids(first.view) == ["target-1", "draft-1"]

    actor.directory, actor.is_away = Directory(), False
    await first.beat()
    assert sorted(ids(first.view)) == ["draft-1", "target-1"]
    await second.beat()
    assert sorted(member.id for member in actor.directory.exchange(None)[0].members) == ["draft-1", "target-1"]


async def test_a_directory_that_never_answers_is_restarted(actor: ActorHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[object, bool]] = []
    monkeypatch.setattr(directory, "_CALL_SECONDS", 0.01)
    monkeypatch.setattr(directory.ray, "kill", lambda handle, *, no_restart: killed.append((handle, no_restart)))
    client = client_of(MEMBER)
    actor.is_frozen = True
    for _ in range(directory._MOST_TIMEOUTS - 1):
        await client.beat()
    assert killed == []
    await client.beat()

    assert killed == [(actor, False)]


async def test_members_are_told_once_how_many_seconds_they_have_to_drain(actor: ActorHandle) -> None:
    told: list[float] = []
    client = client_of(MEMBER, told.append)
    await client.beat()
    assert told == []
    actor.directory.drain(30.0)
    await client.beat()
    await client.beat()
    assert told == [30.0]
    actor.directory.drain(0.0)
    await client.beat()
    assert told == [30.0, 0.0]


async def test_a_client_that_sends_no_heartbeats_any_more_is_unhealthy(actor: ActorHandle) -> None:
    def broken(_: View) -> bool:
        raise ZeroDivisionError("a bug")

    client = DirectoryClient("app", lambda: MEMBER, is_complete=broken)
    client.check_health()
    client.start()
    with pytest.raises(WorkerUnavailable, match="no heartbeats"):  # noqa: PT012 - the task ends a little later
        async with asyncio.timeout(10):
            while True:
                await asyncio.sleep(0.001)
                client.check_health()
    await client.stop()
