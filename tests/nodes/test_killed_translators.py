"""A drafter, a coordinator and the second rank of a translating cluster are killed, each with another family.

`tests/chaos/test_killed_translators.py` kills a target.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.test_killed_translators import PLAN, SENTENCES, answers, configure
from tests.support.translation.tiny_marian import save_translator
from tests.translations.run import translate

pytestmark = pytest.mark.ray  # whole clusters run one at a time


@pytest.mark.parametrize(
    ("family", "kill", "settings"),
    [
        ("marian", "draft", {"draft.placement": "drafter", "draft.timeout_seconds": 5.0}),
        ("t5_gated", "coordinator", {}),
        ("t5", "rank", {"target.tensor_parallel": 2}),
    ],
)
async def test_the_loss_of_any_process_changes_no_text(
    family: str, kill: str, settings: dict[str, object], tmp_path: Path
) -> None:
    directory = save_translator(tmp_path / family, family)
    outcome = await translate(configure(directory, **settings), replace(PLAN, kill=kill), SENTENCES, tmp_path)
    expected = answers(directory)
    assert outcome.answers == [expected[sentence.source] for sentence in SENTENCES]
    assert [kind for kind, _ in outcome.reasons] in ([kill], ["target"] if kill == "rank" else [kill])
    assert outcome.with_tokens
    assert outcome.accepted_before
