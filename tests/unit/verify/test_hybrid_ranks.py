"""Groups of ranks write the texts of one rank with hybrid models: every rank has the states of all recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.engines.colocated_decoding import plain_answers, through_trees
from tests.support.engines.rank_group import REQUESTS, RankGroup, configure_ranks, rank_group
from tests.support.models.hybrids import save_hybrid
from workers.verify.build import build_engine

pytestmark = pytest.mark.slow

COUNT = 16
POOL_BYTES = 8 << 20
WIDTHS = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 96)
SIX = {"num_attention_heads": 6, "num_key_value_heads": 3} | WIDTHS
FOUR = {"num_attention_heads": 4, "num_key_value_heads": 1} | WIDTHS
"""Three ranks share a KV head, and one of them has two query heads."""
CASES: list[tuple[int, str, dict[str, int]]] = [
    (2, family, {}) for family in ("qwen3_next", "falcon_h1", "nemotron_h", "lfm2", "jamba")
]
CASES += [(3, family, SIX) for family in ("qwen3_next", "nemotron_h")]
CASES += [(3, family, FOUR) for family in ("qwen3_next", "nemotron_h")]


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with rank_group(request.param) as group:
        yield group


@pytest.mark.parametrize(
    ("group", "family", "changes"),
    CASES,
    indirect=["group"],
    ids=[f"{family}, {changes.get('num_attention_heads')} heads, on {ranks} ranks" for ranks, family, changes in CASES],
)
def test_the_texts_are_those_of_one_rank_in_chains_and_trees(
    group: RankGroup, family: str, changes: Mapping[str, int], tmp_path: Path
) -> None:
    directory = save_hybrid(tmp_path, family, **changes).directory
    expected = plain_answers(
        build_engine(configure_ranks(directory, 1, pool_bytes=POOL_BYTES).target).step, REQUESTS, COUNT
    )
    assert all(len(set(text)) > 3 for text in expected.values())
    formed = group.form(configure_ranks(directory, group.ranks, pool_bytes=POOL_BYTES))
    for branches in (False, True):
        for name, (answer, accepted) in through_trees(formed.step, REQUESTS, expected, branches=branches).items():
            assert answer[:COUNT] == expected[name]
            assert accepted >= COUNT // 2
        formed.release_all()
    assert plain_answers(formed.step, REQUESTS, COUNT) == expected
