"""A target and a draft model of each family of decoder-only models: drafts are accepted and change no token.

The other tests of the contract have Llama models.
"""

from __future__ import annotations

import pytest

from tests.support.models import tiny
from tests.unit.draft.contract.methods import make_directories
from tests.unit.draft.contract.test_streams import NEVER_RIGHT, RIGHT, answer_all, serving

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", sorted(set(tiny.FAMILIES) - {"llama"}))
async def test_a_draft_model_of_the_family_changes_no_token(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directories = make_directories(tmp_path_factory.mktemp(family), family)
    async with serving("none", directories) as client:
        plain = await answer_all(client)
    async with serving("model", directories) as client:
        answers = await answer_all(client)
    assert [one.tokens for one in answers] == [one.tokens for one in plain]
    usual = answers[len(RIGHT) + len(NEVER_RIGHT) :]
    assert all(one.accepted > 0 for one in answers[: len(RIGHT)])
    assert sum(one.drafted for one in usual) >= sum(one.accepted for one in usual) > 0
    assert len({one.tokens for one in usual}) > 1
