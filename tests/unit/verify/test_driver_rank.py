"""A call that fails on the driver rank alone ends its group: the other ranks may hold other sequences from then on."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from cluster.core.errors import TargetUnavailable
from workers.verify import group


@pytest.mark.parametrize(("call", "arguments"), [("open", ([],)), ("release", (["a"],)), ("release_all", ())])
def test_after_a_call_that_failed_nothing_is_sent(
    call: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, engine = Mock(), Mock(**{f"{call}.side_effect": RuntimeError("freed twice")})
    monkeypatch.setattr(group, "connect_commands", lambda _: commands)
    driver = group.DriverRank(engine, 60.0)
    for _ in range(2):
        with pytest.raises(TargetUnavailable, match=r"group is broken: .*freed twice"):
            getattr(driver, call)(*arguments)
    assert commands.send.call_count == 1
    assert driver.failure is not None
