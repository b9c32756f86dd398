"""A draft model over a tiny Llama: its drafter, its rows, and the same weights as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.model.model_expander import ModelExpander
from workers.forward.loaded_model import LoadedModel
from workers.kv.pool import KvPool
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)
PENALISED = SamplingParameters(
    temperature=0.8, top_k=40, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
)
PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)
CONTEXT = 48
BLOCK = 4
BUDGET = DraftBudget(8, 8)

Mode = Literal["serial", "run_ahead", "enumerate"]

MODES: tuple[Mode, ...] = ("serial", "run_ahead", "enumerate")


class ReferenceModel:
    """A reference for a draft model: `transformers` runs its weights one token at a time."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._known: dict[tuple[object, ...], int] = {}

    def continued(self, tokens: Sequence[int], count: int, sampling: SamplingParameters, prompt_len: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            key = (tuple(found), sampling, prompt_len)
            if key not in self._known:
                with torch.inference_mode():
                    logits = self._model(torch.tensor([found])).logits[0, -1:]  # [1, vocabulary]
                self._known[key] = decide(logits, [DecisionContext(sampling, found, prompt_len)])[0]
            found.append(self._known[key])
        return found[len(tokens) :]


class DraftModelHarness:
    """A drafter with a draft model, its KV pool, and a record of its forward passes."""

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: int = 100,
        most_forward_tokens: int = 64,
        candidates: int = 1,
        mode: Mode = "serial",
    ) -> None:
        self.pool = KvPool(loaded.kv_spec, KvSection(block_size=BLOCK), blocks=blocks, truncatable=True)
        settings, draft = ExpansionSettings(mode=mode), DraftSection(max_nodes=16, max_depth=16)
        self.expander = ModelExpander(loaded, self.pool, candidates)
        self.drafter = TreeDrafter(
            self.expander, settings, draft, most_forward_tokens=most_forward_tokens, clock=lambda: 0.0
        )
        self.row_lengths: list[list[int]] = []
        """Number of tokens of each row, for each forward pass of the last call."""
        runner = self.expander._runner
        forward = runner.forward

        def count_failures(rows):
            self.row_lengths.append([len(row.tokens) for row in rows])
            return forward(rows)

        runner.forward = count_failures

    def propose(self, *rows: DraftRow) -> tuple[Proposal, ...]:
        self.row_lengths.clear()
        return self.drafter.propose(rows)

    def release_all(self) -> None:
        self.drafter.release([SequenceId(name) for name in ("a", "b", "c", "d", "lost", "fine", "wrong", "broken")])

    @property
    def blocks_held(self) -> int:
        return self.pool.blocks_total - self.pool.blocks_free


def first_row(
    tokens: Sequence[int],
    name: str = "a",
    sampling: SamplingParameters = GREEDY,
    budget: DraftBudget = BUDGET,
    prompt_len: int | None = None,
) -> DraftRow:
    start = SequenceStart(prompt_len or len(tokens), sampling)
    return DraftRow(SequenceId(name), len(tokens), tuple(tokens), budget, start)


def next_row(tokens: Sequence[int], new: int, name: str = "a", budget: DraftBudget = BUDGET) -> DraftRow:
    return DraftRow(SequenceId(name), len(tokens), tuple(tokens[len(tokens) - new :]), budget)
