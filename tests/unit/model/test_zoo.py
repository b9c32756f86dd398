"""The page of models says what becomes of each architecture of the installed `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.zoo.configs import architectures
from tests.zoo.page import PAGE, page, row, written
from tests.zoo.ranks import TwoRanks
from tests.zoo.verdict import save, verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma2", "deepseek_v3", "falcon_h1", "t5", "falcon", "bloom", "gemma4_unified", "umt5", "voxtral"],
)
def test_the_page_has_the_verdict_on_this_architecture(model_type: str) -> None:
    with TwoRanks() as two_ranks:
        found = row(verdict(model_type, two_ranks))
    assert found in PAGE.read_text("utf-8").splitlines()


@pytest.mark.slow
def test_ranks_have_the_norms_of_their_own_heads(tmp_path: Path) -> None:
    save("cohere", tmp_path, use_qk_norm=True)
    with TwoRanks() as two_ranks:
        assert two_ranks.serve(tmp_path) == "yes"


def test_the_page_has_every_architecture_and_none_is_wrong() -> None:
    known = written()
    assert known.keys() == architectures().keys()
    assert not [one for one in known.values() if one.is_wrong]
    assert f"`transformers` {transformers.__version__} " in PAGE.read_text("utf-8")
    assert page(known.values()) == PAGE.read_text("utf-8")
