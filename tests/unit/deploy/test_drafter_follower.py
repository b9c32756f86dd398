"""The drafters of a coordinator follow the directory's view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.membership import Member, MemberRole, View
from cluster.core.ports import Drafter
from deploy.ray.drafter_follower import DrafterFollower


class ConnectedDrafter:
    """A drafter that only records whether its connection is closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        return ()

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


class RecordingCoordinator:
    """Records its drafters by name."""

    def __init__(self) -> None:
        self.drafters: dict[str, Drafter] = {}

    def add_drafter(self, name: str, drafter: Drafter) -> None:
        assert name not in self.drafters
        self.drafters[name] = drafter

    async def remove_drafter(self, name: str) -> None:
        del self.drafters[name]


def drafter(name: str, version: str = "v1") -> Member:
    return Member(MemberRole.DRAFTER, name, f"{name}:1", version)


async def test_drafters_join_and_leave_with_the_view_and_their_connections_are_closed() -> None:
    user, made = RecordingCoordinator(), []

    def connect(address: str) -> ConnectedDrafter:
        made.append(ConnectedDrafter(address))
        return made[-1]

    follower = DrafterFollower(user, "v1", connect)
    follower.follow(View((drafter("a"), drafter("b"))))
    follower.follow(View((drafter("b"), drafter("a"))))
    assert sorted(one.address for one in made) == ["a:1", "b:1"]
    assert sorted(user.drafters) == ["a", "b"]

    follower.follow(View((drafter("b"), drafter("c"))))
    await follower.close()

    assert user.drafters == {}
    assert len(made) == 3
    assert all(one.is_closed for one in made)


async def test_drafters_of_another_version_targets_and_draining_members_are_not_used() -> None:
    user = RecordingCoordinator()
    follower = DrafterFollower(user, "v1", ConnectedDrafter)
    draining = replace(drafter("c"), is_draining=True)
    follower.follow(View((drafter("a", "v2"), Member(MemberRole.TARGET, "b", "b:1", "v1"), draining)))
    assert user.drafters == {}
    await follower.close()
