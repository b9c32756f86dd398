"""Engines over tiny encoder-decoder models, sequences with a source, and the answers of `transformers`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.engines.engine_sequence import GREEDY, EngineSequence, Propose, no_draft
from tests.support.engines.kv_tiers import always_load
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.verify.decider import LocalDecider, decider_of_model
from workers.verify.engine import TargetEngine

SOURCE = (5, 17, 33, 8, 60, 41, 41, 9, 2)
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)


@dataclass(frozen=True)
class SourcedModel:
    """A saved encoder-decoder model."""

    directory: Path

    def with_generation_config(self, directory: Path, **values: object) -> SourcedModel:
        """A copy of the model in `directory`, whose generation_config.json has these values."""
        shutil.copytree(self.directory, directory)
        file = directory / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values))
        return SourcedModel(directory)

    def reference(self) -> Any:
        """The model as `transformers` loads it."""
        return AutoModelForSeq2SeqLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    def engine(self, blocks: int = 300, **section: Any) -> TargetEngine:
        """An engine of its own."""
        return self.engine_and_pool(blocks, **section)[0]

    def engine_and_pool(self, blocks: int = 300, device: str = "cpu", **section: Any) -> tuple[TargetEngine, KvPool]:
        """An engine and its pool. Computing a token costs 1 s, so that stored blocks are always loaded."""
        model = load_model(ModelSection.model_validate({"path": str(self.directory), "device": device}))
        pool = KvPool(model.kv_spec, KvSection(block_size=4, **section), blocks)
        always_load(pool)
        return TargetEngine(model, pool, decider_of_model(model, LocalDecider())), pool


def greedy_answer(reference: Any, source: Sequence[int], count: int) -> list[int]:
    """The tokens of `transformers` after the decoder's start, apart from how an answer ends."""
    start = 1 if reference.generation_config.forced_bos_token_id is None else 2
    output = reference.generate(
        torch.tensor([list(source)], device=reference.device),
        max_new_tokens=count + start - 1,
        min_new_tokens=count + start - 1,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    return output[0, start:].tolist()


def sourced(
    engine: TargetEngine,
    source: Sequence[int] = SOURCE,
    name: str = "a",
    sampling: SamplingParameters = GREEDY,
    salt: str = "",
    answer: Sequence[int] = (),
) -> EngineSequence:
    """A sequence that reads `source`, with the first tokens of its answer."""
    info = engine.info()
    start = SequenceStart(
        len(info.decoder_start), replace(sampling, bad_words=info.bad_words), salt, source=tuple(source)
    )
    return EngineSequence(engine, [*info.decoder_start, *answer], start, SequenceId(name))


def translate(
    engine: TargetEngine,
    count: int,
    source: Sequence[int] = SOURCE,
    sampling: SamplingParameters = GREEDY,
    propose: Propose = no_draft,
) -> list[int]:
    """Decode one sequence from its start to its release."""
    sequence = sourced(engine, source, sampling=sampling)
    sequence.open()
    tokens = sequence.decode(count, propose)
    engine.release([sequence.name])
    return tokens
