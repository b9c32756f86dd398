"""How much of the hidden states of a step its verdicts bring to drafters in other processes."""

from __future__ import annotations

import pytest

from cluster.core.drafting import Evidence, HiddenStates
from cluster.core.ids import SequenceId
from cluster.core.verification import Verdict
from workers.verify.evidence import within_bytes

WIDTH = 5
"""Values per position: a position takes ten bytes."""


@pytest.mark.parametrize(
    ("lens", "sent"),
    [
        ((97, 1, 1, 1), (97, 1, 1, 1)),
        ((500, 1, 1, 1), (97, 1, 1, 1)),
        ((1, 500, 1, 60), (1, 49, 1, 49)),
        ((50, 50, 50), (33, 33, 33)),
        ((), ()),
    ],
)
def test_a_chunk_of_a_prompt_has_the_bytes_that_short_rows_leave(lens: tuple[int, ...], sent: tuple[int, ...]) -> None:
    """A thousand bytes are sent. Of a row with too many the last positions are, because drafts read those first."""
    verdicts = [
        Verdict(SequenceId(str(index)), n, evidence=Evidence(n, hidden=HiddenStates(0, WIDTH, bytes(2 * WIDTH * n))))
        for index, n in enumerate(lens)
    ]
    found = [one.hidden for one in within_bytes(verdicts, 1000) if one is not None]
    assert [(one.end, len(one)) for one in found if one] == list(zip(lens, sent, strict=True))


def test_rows_without_hidden_states_need_no_bytes() -> None:
    verdicts = [Verdict(SequenceId("s"), 3), Verdict(SequenceId("t"), 3, evidence=Evidence(3))]
    assert within_bytes(verdicts, 1000) == [None, Evidence(3)]
