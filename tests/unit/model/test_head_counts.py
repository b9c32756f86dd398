"""Ranks that share a KV head divide the query heads that read it, also where these do not divide evenly."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from transformers import FalconConfig, GPTBigCodeConfig, PreTrainedConfig, Qwen2Config

from cluster.core.errors import ConfigurationError
from workers.model.head_counts import describe_shared_heads, most_held, ranks_that_divide, stated_counts
from workers.model.sharding import head_counts
from workers.model.share import Share

QWEN = (28, 4)
"""Query heads and KV heads of Qwen2.5-7B."""
GROUPS: dict[str, Any] = {"hidden_size": 8192, "new_decoder_architecture": True}


def test_ranks_divide_the_kv_heads_or_are_a_multiple_of_them() -> None:
    assert ranks_that_divide(*QWEN) == [1, 2, 4, 8, 12, 16, 20, 24, 28]
    assert ranks_that_divide(6, 3) == [1, 3, 6]
    assert ranks_that_divide(6, 6) == [1, 2, 3, 6]
    assert ranks_that_divide(5, 1) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (Qwen2Config(hidden_size=3584, num_attention_heads=28, num_key_value_heads=4), QWEN),
        (FalconConfig(num_attention_heads=71), (71, 1)),
        (FalconConfig(num_attention_heads=71, multi_query=False), (71, 71)),
        (FalconConfig(num_attention_heads=128, num_kv_heads=8, **GROUPS), (128, 8)),
        (GPTBigCodeConfig(n_head=48), (48, 1)),
        (GPTBigCodeConfig(n_head=48, multi_query=False), (48, 48)),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_commands_count_the_heads_of_a_file_as_loading_does(config: PreTrainedConfig, counts: tuple[int, int]) -> None:
    """Else `plan` and the checks before a start refuse ranks that can divide them."""
    assert head_counts(config) == counts
    assert stated_counts(json.loads(config.to_json_string()), 2) == counts


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12, 24, 28])
def test_each_query_head_is_on_one_rank_which_holds_its_kv_head(ranks: int) -> None:
    heads, kv_heads = QWEN
    shares = [Share(rank, ranks) for rank in range(ranks)]
    own = [range(heads)[share.query_heads(*QWEN)] for share in shares]
    assert [head for part in own for head in part] == list(range(heads))
    assert {len(part) for part in own} <= {heads // ranks, -(-heads // ranks)}
    for share, part in zip(shares, own, strict=True):
        assert {head // (heads // kv_heads) for head in part} == set(range(kv_heads)[share.kv_heads(kv_heads)])


@pytest.mark.parametrize("ranks", [3, 32])
def test_other_numbers_of_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{ranks} does not divide num_attention_heads = 28"):
        Share(0, ranks).query_heads(*QWEN)


def test_matrices_are_counted_on_the_rank_that_has_most_heads() -> None:
    assert most_held(*QWEN, 8)["q_proj"] == most_held(*QWEN, 8)["o_proj"] == Fraction(4, 28)
    assert most_held(*QWEN, 8)["k_proj"] == most_held(*QWEN, 8)["v_proj"] == Fraction(1, 4)
    assert set(most_held(*QWEN, 2).values()) == {Fraction(1, 2)}


@pytest.mark.parametrize(("counts", "ranks", "told"), [
    (QWEN, 8, "8 ranks hold 4 KV heads, each on 2 of them: a rank has 3 or 4 of 28 query heads; memory is counted for "
     "4"),
    ((32, 4), 8, "8 ranks hold 4 KV heads, each on 2 of them: a rank has 4 of 32 query heads"),
    (QWEN, 4, None),
    (QWEN, 9, None),
])  # fmt: skip
def test_it_is_told_how_ranks_share_kv_heads(counts: tuple[int, int], ranks: int, told: str | None) -> None:
    assert describe_shared_heads(*counts, ranks) == told
