"""Who counts as a member, by heartbeats on a simulated clock."""

from __future__ import annotations

import pickle
from dataclasses import MISSING, fields, replace

import pytest

from cluster.core.membership import Load, Member, MemberRole, Membership, View, merged

EXPIRY = 10.0


def member(name: str, role: MemberRole = MemberRole.TARGET) -> Member:
    return Member(role, name, f"10.0.0.1:{len(name)}", "v1")


def names(view: View) -> list[str]:
    return [member.id for member in view.members]


def test_members_are_seen_in_the_order_in_which_they_came() -> None:
    membership = Membership(0.0, EXPIRY)
    membership.beat(member("b"), 1.0)
    membership.beat(member("a"), 2.0)
    membership.beat(member("b"), 3.0)

    assert names(membership.view(4.0)) == ["b", "a"]


def test_a_silent_member_is_gone_after_the_expiry_time_and_back_with_its_next_heartbeat() -> None:
    membership = Membership(0.0, EXPIRY)
    membership.beat(member("a"), 1.0)
    membership.beat(member("b"), 5.0)

    assert names(membership.view(10.9)) == ["a", "b"]
    assert names(membership.view(11.0)) == ["b"]
    membership.beat(member("a"), 12.0)
    assert names(membership.view(12.0)) == ["b", "a"]


def test_a_member_that_leaves_is_gone_at_once() -> None:
    membership = Membership(0.0, EXPIRY)
    membership.beat(member("a"), 1.0)
    membership.leave("a")
    membership.leave("never seen")

    assert names(membership.view(1.0)) == []


def test_a_heartbeat_replaces_the_load() -> None:
    membership = Membership(0.0, EXPIRY)
    membership.beat(member("a"), 1.0)
    busy = replace(member("a"), load=Load(waiting=3, running=8, kv_usage=0.5), is_draining=True)
    membership.beat(busy, 2.0)

    assert membership.view(2.0).members == (busy,)


@pytest.mark.parametrize("kind", [Load, Member, View])
def test_what_an_earlier_version_lacks_has_its_default_and_what_a_later_one_adds_is_left_out(
    kind: type[Load | Member | View],
) -> None:
    """Processes of two versions share a directory while an application in a running Ray cluster is updated."""
    needed = {one.name: "v" for one in fields(kind) if one.default is MISSING}
    whole = kind(**needed)  # type: ignore[arg-type]
    for values in ([*needed.values()], [*(getattr(whole, one.name) for one in fields(kind)), "later"]):
        read = object.__new__(kind)
        read.__setstate__(values)
        assert read == whole
    assert pickle.loads(pickle.dumps(whole)) == whole  # noqa: S301 - its own bytes


def test_a_view_is_filtered_by_role() -> None:
    view = View((member("a"), member("d", MemberRole.DRAFTER)))

    assert [one.id for one in view.of(MemberRole.DRAFTER)] == ["d"]
    assert [one.id for one in view.of(MemberRole.TARGET)] == ["a"]


def test_a_directory_is_settled_once_every_member_had_the_time_to_register() -> None:
    membership = Membership(100.0, EXPIRY)

    assert not membership.view(109.9).is_settled
    assert membership.view(110.0).is_settled


def test_after_a_restart_of_the_directory_nobody_is_forgotten_until_it_has_settled() -> None:
    last = View((member("a"), member("b"), member("dead")), is_settled=True)
    restarted = Membership(100.0, EXPIRY)
    first = merged(last, restarted.view(100.0))
    assert names(first) == ["a", "b", "dead"]

    restarted.beat(replace(member("b"), is_draining=True), 101.0)
    second = merged(first, restarted.view(101.0))
    assert names(second) == ["a", "dead", "b"]
    assert second.members[-1].is_draining

    restarted.beat(member("a"), 109.0)
    restarted.beat(member("b"), 109.0)
    assert names(merged(second, restarted.view(110.0))) == ["b", "a"]
