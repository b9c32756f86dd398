"""Two ranks have the logits of one where the family's code zeroes the padding row that was read, tied to the head."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.ranks import TwoRanks
from tests.zoo.verdict import save

pytestmark = pytest.mark.slow


def test_two_ranks_have_the_padding_row_of_one(tmp_path: Path) -> None:
    save("youtu", tmp_path)  # the padding row in its file is not zero
    with TwoRanks() as ranks:
        assert ranks.serve(tmp_path) == "yes"
