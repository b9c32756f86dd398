"""Groups of ranks write the texts of one rank with hybrid models: every rank has the states of all recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.request import SamplingParameters
from tests.support.engines.colocated_decoding import plain_answers, through_trees
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_group import RankGroup, rank_group
from tests.support.models.hybrids import save_hybrid
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine

pytestmark = pytest.mark.slow

COUNT = 16
REQUESTS = {
    "greedy": ((5, 17, 33, 8, 60, 41, 41, 9), SamplingParameters(temperature=0.0)),
    "sampled": ((7, 7, 20), SamplingParameters(temperature=0.9, seed=4)),
}
WIDTHS = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 96)
SIX = {"num_attention_heads": 6, "num_key_value_heads": 3} | WIDTHS
FAMILIES = {2: ("qwen3_next", "falcon_h1", "nemotron_h", "lfm2", "jamba"), 3: ("qwen3_next", "nemotron_h")}


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with rank_group(request.param) as group:
        yield group


def configure(directory: Path, ranks: int) -> Configuration:
    target: dict[str, Any] = {"path": str(directory), "device": "cpu", "compile": "off", "tensor_parallel": ranks}
    target |= {"compile_directory": str(KEPT), "kv": {"block_size": 4, "pool_bytes": 8 << 20}}
    return load_configuration({"target": target})


@pytest.mark.parametrize(
    ("group", "family"),
    [(ranks, family) for ranks, families in FAMILIES.items() for family in families],
    indirect=["group"],
)
def test_the_texts_are_those_of_one_rank_in_chains_and_trees(group: RankGroup, family: str, tmp_path: Path) -> None:
    directory = save_hybrid(tmp_path, family, **(SIX if group.ranks == 3 else {})).directory
    expected = plain_answers(build_engine(configure(directory, 1).target).step, REQUESTS, COUNT)
    assert all(len(set(text)) > 3 for text in expected.values())
    formed = group.form(configure(directory, group.ranks))
    for branches in (False, True):
        for name, (answer, accepted) in through_trees(formed.step, REQUESTS, expected, branches=branches).items():
            assert answer[:COUNT] == expected[name]
            assert accepted >= COUNT // 2
        formed.release_all()
    assert plain_answers(formed.step, REQUESTS, COUNT) == expected
