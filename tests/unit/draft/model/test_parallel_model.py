"""PARD models draft all depths in one pass over mask tokens, as the model itself computes them in `transformers`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models import tiny
from workers.draft.common.modules.shortlist import Shortlist
from workers.draft.model import parallel_model
from workers.draft.model.drawing_drafter import DrawingDrafter
from workers.draft.model.parallel_model import ParallelModelDrafter, mask_token_of
from workers.draft.registry import create
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling.noise import gumbel
from workers.serve.configuration import load_configuration

MASK, DEPTHS = tiny.VOCABULARY - 1, 5
PROMPT = tuple(int(one) for one in torch.randint(3, 90, (17,), generator=torch.Generator().manual_seed(1)))
GREEDY = SamplingParameters(temperature=0.0)
BUDGET = DraftBudget(DEPTHS, DEPTHS)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.save(tmp_path_factory.mktemp("draft"), tiny.llama(), sharpness=2.0)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": MASK, "spd_type": "pard"}))
    return directory


def drafter(draft: Path, *, candidates: int = 1, blocks: int = 64) -> ParallelModelDrafter:
    model = load_model(ModelSection(path=str(draft), device="cpu", compile="off"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=blocks, truncatable=True)
    token = mask_token_of(draft)
    assert token is not None
    section = DraftSection(max_nodes=16, max_depth=8)
    return ParallelModelDrafter(model, pool, token, section, candidates, Shortlist(None, knows_noise=True))


def test_the_mask_token_of_the_configuration_chooses_the_drafter(draft: Path) -> None:
    values: dict[str, Any] = {
        "target": {"path": str(draft), "device": "cpu"},
        "draft": {"method": "model", "controller": "off", "model": {"path": str(draft), "device": "cpu"}},
    }
    configuration = load_configuration(values)
    assert isinstance(create(configuration.draft, configuration.target), ParallelModelDrafter)
    plain = configuration.target.model_copy(update={"acceptance": "rejection"})
    assert isinstance(create(configuration.draft, plain), DrawingDrafter)


def published(draft: Path, tokens: Sequence[int], depths: int = DEPTHS) -> Tensor:
    """Logits [depths, vocabulary] after the text and after each mask token behind it, in one causal pass."""
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = model(torch.tensor([[*tokens, *[MASK] * (depths - 1)]])).logits
    return found[0, -depths:]


def row(name: str = "a", sampling: SamplingParameters = GREEDY, budget: DraftBudget = BUDGET) -> DraftRow:
    return DraftRow(SequenceId(name), len(PROMPT), PROMPT, budget, SequenceStart(len(PROMPT), sampling))


def chain(proposal: Proposal) -> list[int]:
    assert proposal.fault is None and proposal.tree.is_chain
    return list(proposal.tree.tokens)


def test_a_chain_is_that_of_one_pass_and_mask_tokens_leave_nothing_behind(draft: Path) -> None:
    """The second round follows two accepted tokens and another one; the third replaces what a late row took back."""
    method = drafter(draft)

    first = chain(method.propose([row()])[0])
    assert first == published(draft, PROMPT).argmax(-1).tolist()

    taken = (*first[:2], 40)
    second = method.propose([DraftRow(SequenceId("a"), len(PROMPT) + 3, taken, BUDGET)])
    assert chain(second[0]) == published(draft, [*PROMPT, *taken]).argmax(-1).tolist()

    again = method.propose([row()])
    assert chain(again[0]) == first


def test_sampled_chains_are_drawn_with_the_shared_noise(draft: Path) -> None:
    samplings = [SamplingParameters(temperature=1.3, seed=seed) for seed in range(3)]

    found = drafter(draft).propose([row(str(index), one) for index, one in enumerate(samplings)])

    logits = published(draft, PROMPT)
    for seed, one in enumerate(found):
        places = [len(PROMPT) + depth for depth in range(DEPTHS)]
        noise = gumbel([seed] * DEPTHS, places, 0, tiny.VOCABULARY, torch.device("cpu"))
        assert chain(one) == (logits / 1.3 + noise).argmax(-1).tolist()


def test_rows_do_not_change_each_others_trees(draft: Path) -> None:
    samplings = (GREEDY, SamplingParameters(temperature=0.8, seed=5), SamplingParameters(temperature=1.2, seed=6))
    budget = DraftBudget(9, 4)
    rows = [row(str(index), one, budget) for index, one in enumerate(samplings)]

    together = drafter(draft, candidates=3).propose(rows)

    alone = [drafter(draft, candidates=3).propose([one])[0] for one in rows]
    assert [one.tree for one in together] == [one.tree for one in alone]
    assert all(len(one.tree) == 9 and not one.tree.is_chain for one in together)


def test_sequences_without_room_are_evicted_and_a_row_alone_always_drafts(draft: Path) -> None:
    method = drafter(draft, blocks=8)  # one text of 17 tokens and its mask tokens take six of them

    for name in ("a", "b", "a"):
        assert len(method.propose([row(name)])[0].tree) == DEPTHS


def test_a_long_prompt_takes_several_passes(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_model, "MOST_FORWARD_TOKENS", 4)
    method = drafter(draft)

    found = method.propose([row("a"), row("b")])

    assert [chain(one) for one in found] == [published(draft, PROMPT).argmax(-1).tolist()] * 2


def test_no_mask_token_lies_beyond_the_context_of_the_model(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text leaves room for two drafted tokens, the other for more than the budget."""
    shutil.copytree(draft, tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": len(PROMPT) + 1}))
    method, forward, ends = drafter(tmp_path / "short"), ModelRunner.forward, list[int]()

    def noted(runner: ModelRunner, rows: Sequence[ForwardRow]) -> Tensor:
        ends.extend(one.end for one in rows)
        return forward(runner, rows)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    short = DraftRow(SequenceId("b"), 8, PROMPT[:8], BUDGET, SequenceStart(8, GREEDY))

    found = method.propose([row("a"), short])

    assert chain(found[0]) == published(draft, PROMPT, 2).argmax(-1).tolist()
    assert chain(found[1]) == published(draft, PROMPT[:8]).argmax(-1).tolist()
    assert ends == [len(PROMPT) + 1, 8 + DEPTHS - 1]


@pytest.mark.parametrize(("token", "message"), [(96, "must be below vocab_size, 96"), (-1, "a whole number")])
def test_a_mask_token_out_of_bounds_is_refused(token: int, message: str, draft: Path, tmp_path: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pard_token": token}))

    with pytest.raises(ModelLoadError, match=f"pard_token in config.json: {token} is refused; .*{message}"):
        mask_token_of(tmp_path)
