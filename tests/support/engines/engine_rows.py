"""Rows for a target engine over a tiny model, and decoding one sequence row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.verification import OpenRow, StepBatch, Verdict, VerifyRow
from tests.support.engines.engine_sequence import GREEDY, Propose, no_draft
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine

SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)
PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)


def open_engine(path: Path, blocks: int = 200, directory: Path | None = None) -> TargetEngine:
    """The engine of the model at `path`. `directory` has the tokenizer, if it needs one."""
    model = load_model(ModelSection(path=str(path), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=blocks)
    return TargetEngine(model, pool, LocalDecider(), EngineOptions(directory=directory))


def first_row(name: str, prompt: Sequence[int], sampling: SamplingParameters = GREEDY) -> VerifyRow:
    return VerifyRow(SequenceId(name), len(prompt), tuple(prompt), start=SequenceStart(len(prompt), sampling))


def open_row(name: str, tokens: Sequence[int], parent: str | None = None, salt: str = "") -> OpenRow:
    start = SequenceStart(1, GREEDY, salt)
    return OpenRow(SequenceId(name), tuple(tokens), start, None if parent is None else SequenceId(parent))


def verify(engine: TargetEngine, row: VerifyRow) -> Verdict:
    """The verdict on a row, which is sent again while its grammar is compiled."""
    while True:
        verdict = engine.step(StepBatch((row,))).verdicts[0]
        if verdict.fault is None or verdict.fault.code is not RowFaultCode.NOT_READY:
            return verdict


def decode(
    engine: TargetEngine,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParameters = GREEDY,
    propose: Propose = no_draft,
) -> list[int]:
    tokens = list(prompt)
    verdict = verify(engine, first_row("a", prompt, sampling))
    while True:
        assert verdict.fault is None
        tokens.extend(verdict.tokens)
        if len(tokens) >= len(prompt) + count:
            break
        verdict = verify(engine, VerifyRow(SequenceId("a"), len(tokens), (tokens[-1],), propose(tokens)))
    engine.release([SequenceId("a")])
    return tokens[len(prompt) : len(prompt) + count]


def reference(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    output = model.generate(
        torch.tensor([list(prompt)]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return output[0, len(prompt) :].tolist()
