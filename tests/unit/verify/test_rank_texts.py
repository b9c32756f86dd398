"""Groups of ranks write the texts of one rank, whatever the family is and however many ranks share a KV head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget, DraftDistribution
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.colocated_decoding import Step, decode_together, plain_answers
from tests.support.engines.rank_group import REQUESTS, RankGroup, configure_ranks, rank_group
from tests.support.models import tiny
from tests.zoo.configs import tiny_config
from workers.verify.build import build_engine

pytestmark = pytest.mark.slow

COUNT = 16
BUDGET = DraftBudget(4, 4)


def adapted(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A family whose attention is code of its own."""
    found = tiny_config(model_type)
    for name, value in (changes | {"num_hidden_layers": 2, "tie_word_embeddings": False}).items():
        setattr(found, name, value)
    return found


FALCON_WITH_GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
SIX = {"hidden_size": 48, "num_attention_heads": 6}
EIGHT = {"num_attention_heads": 8, "hidden_size": 64}
SEVEN = {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112}
"""Seven query heads read each KV head, as in Qwen2.5-7B: of four ranks, two have three of them, and two have four."""
FAMILIES: Mapping[int, Mapping[str, PreTrainedConfig]] = {
    2: {
        "phi": tiny.phi(num_key_value_heads=6),
        "mixtral": tiny.mixtral(num_key_value_heads=2, sliding_window=None),
        "qwen3_moe": tiny.qwen3_moe(num_key_value_heads=2),
        "gpt_oss": tiny.gpt_oss(num_key_value_heads=2),
        "deepseek_v3": tiny.deepseek_v3(),
        "deepseek_v2": tiny.deepseek_v2(),
        "falcon with alibi and one KV head": adapted("falcon", **SIX, alibi=True),
        "bloom": adapted("bloom", **SIX),
        "codegen": adapted("codegen"),
        "mpt": adapted("mpt", **SIX),
        "gpt_bigcode": adapted("gpt_bigcode", multi_query=False),
    },
    3: {
        "phi3": tiny.phi3(),
        "gpt2": tiny.gpt2(),
        "opt": tiny.opt(),
        "falcon with alibi": adapted(
            "falcon", **SIX, alibi=True, multi_query=False, num_kv_heads=6, parallel_attn=False, bias=True
        ),
    },
    4: {
        "llama": tiny.llama(**EIGHT, num_key_value_heads=2),
        "qwen2": tiny.qwen2(**EIGHT, num_key_value_heads=1),
        "qwen3": tiny.qwen3(**EIGHT, num_key_value_heads=2),
        "phi3": tiny.phi3(**EIGHT, num_key_value_heads=2),
        "gpt_oss": tiny.gpt_oss(**EIGHT, num_key_value_heads=2),
        "falcon with groups": adapted("falcon", **FALCON_WITH_GROUPS),
        "falcon with alibi and one KV head": adapted("falcon", **SIX, alibi=True),
        "gpt_bigcode with one KV head": adapted("gpt_bigcode", **SIX),
        "qwen2 with seven heads": tiny.qwen2(**SEVEN),
        "qwen3 with seven heads": tiny.qwen3(**SEVEN),
        "phi3 with seven heads": tiny.phi3(**SEVEN),
        "gpt_oss with seven heads": tiny.gpt_oss(**SEVEN),
    },
}
"""Families by the number of ranks. With four ranks, two or four of them share each KV head."""
CASES = [(ranks, name, "none") for ranks, families in FAMILIES.items() for name in families]
CASES += [(2, name, "int8") for name in ("phi", "mixtral", "gpt_oss", "bloom")]
CASES += [(3, "gpt2", "int8"), (4, "phi3", "int8"), (4, "qwen2 with seven heads", "int8")]


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with rank_group(request.param) as group:
        yield group


def configure(directory: Path, ranks: int, **target: str) -> Configuration:
    """All layers draft."""
    return configure_ranks(directory, ranks, layers=2, **target)


@pytest.mark.parametrize(
    ("group", "name", "quantization"),
    sorted(CASES),
    indirect=["group"],
    ids=[f"{name}, {quantization}, on {ranks} ranks" for ranks, name, quantization in sorted(CASES)],
)
def test_the_texts_are_those_of_one_rank_and_drafts_are_accepted(
    group: RankGroup, name: str, quantization: str, tmp_path: Path
) -> None:
    ranks = group.ranks
    directory = tiny.shift(tiny.save(tmp_path, FAMILIES[ranks][name]))
    expected = plain_answers(
        build_engine(configure(directory, 1, quantization=quantization).target).step, REQUESTS, COUNT
    )
    formed = group.form(configure(directory, ranks, quantization=quantization))
    found = decode_together(formed.step, REQUESTS, COUNT, BUDGET)
    assert {one: decoded.answer[:COUNT] for one, decoded in found.items()} == expected
    assert all(decoded.accepted for decoded in found.values())


WIDE = TokenTree(tuple(range(3, 43)), (-1,) * 40)
UNIFORM = DraftDistribution(WIDE.tokens, (1 / 40,) * 40)
RULED = {
    "greedy": (SamplingParameters(temperature=0.0), ()),
    "sampled": (SamplingParameters(temperature=0.9, seed=4, top_k=30), ()),
    "drawn": (SamplingParameters(temperature=1.2, seed=5), (UNIFORM,) * 40),
}
"""Sampling, and the distributions that the tree's tokens were drawn from, if they were."""


def ruled(step: Step) -> dict[str, tuple[list[int], int]]:
    """The text of each request, and how many drafted tokens were accepted. Half of all likely tokens are drafted."""
    texts: dict[str, tuple[list[int], int]] = {}
    for name, (sampling, distributions) in RULED.items():
        tokens, accepted = [5, 17, 33, 8], 0
        start = SequenceStart(len(tokens), sampling)
        row = VerifyRow(SequenceId(name), len(tokens), tuple(tokens), start=start)
        for _ in range(12):
            (verdict,) = step(StepBatch((row,))).verdicts
            assert verdict.fault is None
            tokens += verdict.tokens
            accepted += verdict.accepted
            row = VerifyRow(SequenceId(name), len(tokens), (tokens[-1],), WIDE, distributions=distributions)
        texts[name] = tokens, accepted
    return texts


@pytest.mark.parametrize(("group", "acceptance"), [(2, "rejection"), (3, "block")], indirect=["group"])
def test_rules_that_read_distributions_accept_what_they_accept_on_one_rank(
    group: RankGroup, acceptance: str, tmp_path: Path
) -> None:
    shape = {"num_key_value_heads": 6, "vocab_size": 95}
    directory = tiny.save(tmp_path, tiny.llama(**shape), sharpness=2.0)
    expected = ruled(build_engine(configure(directory, 1, acceptance=acceptance).target).step)
    found = ruled(group.form(configure(directory, group.ranks, acceptance=acceptance)).step)
    assert found == expected
    assert any(accepted for _, accepted in found.values())
