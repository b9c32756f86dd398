"""The learner counts a text's steps as the target takes them: drafted anew, each round decides what it decided."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from deploy.distillation.learner_task import rounds_of
from tests.support.engines.colocated_decoding import Decoded, decode_together
from tests.unit.serve.learning.served import METHODS, TOKENS, Served
from workers.draft.common.learning import LearnsOnline
from workers.draft.common.trees.pass_cost import PassCost
from workers.draft.registry import create

ALLOWED = (6, 9, 15, 24)
"""Few tokens, of which drafts that know nothing are right now and then."""
PROMPTS = [
    (tuple(range(7 + seed, 13 + seed)), SamplingParameters(temperature, seed=seed, allowed_token_ids=ALLOWED))
    for seed, temperature in enumerate((0.0, 0.7, 1.0, 0.0))
]


def rounds(one: Decoded) -> list[int]:
    """The tokens that each step with a draft decided."""
    return [end - begin for begin, end in pairwise([*(draft.base_len for draft in one.proposals), len(one.tokens)])]


@pytest.mark.parametrize("kind", ["heads", "eagle", "eagle3", "block", "dspark", "model"])
def test_a_replay_decides_in_each_round_what_was_served(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of a fixed size, as with `draft.controller: off`, one sequence after another.

    A method learns from its drafts which nodes are right, so a text's trees depend on all drafts before. What is served
    has the trees of a draft whose passes take no time beside a step: a replay has no steps whose time it could measure.
    """
    torch.set_num_threads(1)
    served = Served(tmp_path, kind)
    draft, method = served.values["draft"], METHODS.get(kind, kind)
    draft[method] |= dict.fromkeys(draft[method].keys() & {"candidates", "width"}, 3)
    budget = DraftBudget(9, 3)
    draft |= {"controller": "off", "max_nodes": budget.max_nodes, "max_depth": budget.max_depth}
    served.restart()

    found: list[Decoded] = []
    with monkeypatch.context() as patched:
        patched.setattr(PassCost, "record_pass", lambda *_: None)
        for prompt in PROMPTS:
            found += decode_together(served.step(), {f"a/:{prompt[1].seed}": prompt}, TOKENS, budget).values()
            served.engine.release([SequenceId(f"a/:{prompt[1].seed}")])
    (salt,) = served.reservoir.salts()
    texts = {text.start.sampling.seed: text for text in (*salt.training, *salt.left_out, *salt.held_back)}
    configuration = served.configuration
    replaying = create(configuration.draft, configuration.target)
    assert isinstance(replaying, LearnsOnline)
    replaying.ignore_times()
    replayed = [rounds_of(replaying, configuration, texts[prompt[1].seed]) for prompt in PROMPTS]

    assert replayed == [rounds(one) for one in found]
    assert sum(one.accepted for one in found) == sum(count - 1 for counts in replayed for count in counts) > 5
    assert any(len(proposal.tree) == budget.max_nodes for one in found for proposal in one.proposals)
