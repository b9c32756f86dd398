"""A target with keys and values in 8 bits: one text, whatever drafts, neighbors, evictions and repeated prompts do."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.config.target_section import TargetSection, answer_version
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_sequence import GREEDY, drafts_near, generate, sequence_on, some_tokens
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_group import rank_group
from tests.support.models import tiny
from tests.support.models.model_cases import WINDOW, ModelCase, gemma3
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

MODELS = {
    "kernels": (tiny.llama, {}),
    "modules": (gemma3, {}),
    "bfloat16": (lambda: tiny.llama(head_dim=64), {"dtype": "bfloat16"}),
    "latents": (tiny.deepseek_v3, {}),
    "fp8": (lambda: tiny.mistral(sliding_window=WINDOW), {"kv.dtype": "fp8"}),
    "fp8, modules": (gemma3, {"kv.dtype": "fp8"}),
}


def section_of(directory: Path, **values: object) -> TargetSection:
    """The target's section as the command line sets it."""
    defaults = {
        "path": str(directory),
        "device": "cpu",
        "kv.dtype": "int8",
        "kv.block_size": 4,
        "kv.pool_bytes": 1 << 20,
    }
    return load_configuration({}, {f"target.{key}": value for key, value in (defaults | values).items()}).target


@pytest.fixture(scope="module", params=sorted(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A saved model, and settings."""
    make, settings = MODELS[request.param]
    return tiny.save(tmp_path_factory.mktemp(request.param), make(), sharpness=4.0), settings


def accepted_by(engine: TargetEngine, prompt: Sequence[int], expected: Sequence[int]) -> int:
    """Decode the prompt with drafts, compare the text, and count accepted nodes."""
    sequence, steps = sequence_on(engine, prompt, "drafted"), 0
    sequence.open()
    propose = drafts_near([*prompt, *expected], seed=3)
    while len(sequence.tokens) < len(prompt) + len(expected):
        sequence.step(propose)
        steps += 1
    found = sequence.tokens[len(prompt) : len(prompt) + len(expected)]
    assert found == list(expected)
    engine.release([sequence.name])
    return len(expected) - steps


def test_one_text_plain_drafted_in_chunks_batched_forked_and_repeated(case: tuple[Path, dict[str, object]]) -> None:
    directory, settings = case
    engine = build_engine(section_of(directory, **settings))
    prompts = [some_tokens(21, seed) for seed in range(3)]
    texts = [generate(engine, prompt, 40, salt=f"plain {index}") for index, prompt in enumerate(prompts)]
    assert accepted_by(engine, prompts[0], texts[0]) > 5
    again = sequence_on(engine, prompts[0], "again")
    assert again.open() == 20  # from the prefix cache
    assert again.decode(40) == texts[0]
    fork = sequence_on(engine, [*prompts[0], *texts[0][:9]], "fork")
    assert fork.open(parent="again") > 20
    assert fork.decode(31) == texts[0][9:]
    chunked = sequence_on(engine, prompts[1], "chunked", salt="chunks")
    chunked.chunk = 5
    chunked.open()
    assert chunked.decode(40, drafts_near([*prompts[1], *texts[1]])) == texts[1]
    engine.release([SequenceId(name) for name in ("again", "fork", "chunked")])
    assert batched(engine, prompts, texts) == texts
    assert not engine.info().is_lossless
    engine.close()


def batched(engine: TargetEngine, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[list[int]]:
    """Decode all prompts in the same steps, with drafts."""
    start = SequenceStart(len(prompts[0]), GREEDY, "batched")
    written = [list(prompt) for prompt in prompts]
    stored = [0] * len(prompts)
    while min(map(len, written)) < len(prompts[0]) + len(texts[0]):
        rows = []
        for index, tokens in enumerate(written):
            answer = [*prompts[index], *texts[index]]
            tree = TokenTree.chain(answer[len(tokens) : len(tokens) + 2 + index])
            begin = stored[index]
            row = VerifyRow(
                SequenceId(f"b{index}"),
                len(tokens),
                tuple(tokens[begin:]),
                tree,
                True,
                start=start if not begin else None,
            )
            rows.append(row)
        for index, verdict in enumerate(engine.step(StepBatch(tuple(rows))).verdicts):
            assert verdict.fault is None, verdict.fault
            stored[index] = len(written[index]) + verdict.accepted
            written[index].extend(verdict.tokens)
    engine.release([SequenceId(f"b{index}") for index in range(len(prompts))])
    return [tokens[len(prompt) : len(prompt) + len(texts[0])] for tokens, prompt in zip(written, prompts, strict=True)]


@pytest.mark.parametrize("stored", ["int8"])
def test_a_preempted_sequence_resumes_from_the_host_and_from_nothing(stored: str, tmp_path: Path) -> None:
    model = ModelCase(tiny.save(tmp_path, tiny.llama(), sharpness=4.0))
    prompt = some_tokens(22)
    expected = generate(model.engine(dtype=stored), prompt, 60)
    for host_bytes in (1 << 20, 0):
        engine, pool = model.engine_and_pool(24, dtype=stored, host_bytes=host_bytes)
        sequence = sequence_on(engine, prompt)
        sequence.open()
        sequence.decode(25)
        engine.release([sequence.name])
        for seed in (3, 4):
            generate(engine, some_tokens(90, seed), 2)  # uses nearly every block
        assert sequence.open() == (44 if host_bytes else 0)
        assert pool.tiers is None or pool.tiers.host.loaded > 0
        sequence.decode(35)
        assert sequence.tokens[22:] == expected
        engine.close()


def test_a_stream_never_resumes_on_a_target_of_another_kv_type(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    sections = [section_of(directory, **{"kv.dtype": kv}) for kv in ("auto", "int8", "fp8")]
    assert len({answer_version(section) for section in sections}) == 3
    names = []
    for section in sections:
        engine = build_engine(section)
        names.append(engine.info().fingerprint)
        engine.close()
    assert len(set(names)) == 3


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.t5())
    with pytest.raises(ConfigurationError, match=r"target\.kv\.dtype: int8 is refused; it must be auto for an encoder"):
        build_engine(section_of(directory))


@pytest.mark.parametrize("value", ["int4", "fp8_e5m2", "8"])
def test_another_value_is_refused_by_the_fields_name(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"target\.kv\.dtype.*'auto', 'int8' or 'fp8'"):
        load_configuration({}, {"target.kv.dtype": value})


def test_logits_are_nearly_those_of_full_keys_and_values(case: tuple[Path, dict[str, object]]) -> None:
    directory, settings = case
    prompt = tuple(some_tokens(60))
    full, small = (logits_of(section_of(directory, **(settings | kv)), prompt) for kv in ({"kv.dtype": "auto"}, {}))
    difference = float((small - full).norm() / full.norm())
    assert 1e-4 < difference < (0.06 if settings.get("kv.dtype") == "fp8" else 0.02)


def logits_of(section: TargetSection, tokens: tuple[int, ...]) -> torch.Tensor:
    """The logits of all tokens but those of the first step, which read what it stored."""
    model = load_model(section)
    pool = KvPool(model.kv_spec, section.kv)
    runner, table = ModelRunner(model, pool), pool.new_table()
    found = []
    for part in (tokens[:40], tokens[40:]):
        row = ForwardRow(table, part, select=tuple(range(len(part))))
        pool.reserve(table, row.end)
        found.append(runner.forward([row]).float().clone())
        runner.commit(row)
    return found[1]


EFFECT = re.compile(r"keys and values in (\w+) move logits by at most ([0-9.e-]+)% of their range")
MOST_PERCENT = {"int8": 2.0, "fp8": 6.0}


def stated_at_load(section: TargetSection, caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What a start says of each type of stored keys and values: the type, and percent of the logits' range."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        build_engine(section).close()
    for thread in threading.enumerate():
        if thread.name == "packed-weights":
            thread.join()  # the next start reads them
    return EFFECT.findall(caplog.text)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_a_start_states_how_far_the_type_moves_logits_and_the_next_one_repeats_it(
    kv: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.save(tmp_path, tiny.llama(), sharpness=4.0)
    code = {"compile_directory": str(KEPT)}
    assert stated_at_load(section_of(directory, **code, **{"kv.dtype": "auto"}), caplog) == []
    section = section_of(directory, **code, **{"kv.dtype": kv})
    ((named, percent),) = stated_at_load(section, caplog)
    assert "packed weights read" in caplog.text  # so that no trial was run
    assert named == kv
    assert 0.01 < float(percent) < MOST_PERCENT[kv]

    def measured(*_: object) -> float:
        raise RuntimeError("it was measured already")

    monkeypatch.setattr("workers.model.kv_effect.kv_effect", measured)
    assert stated_at_load(section, caplog) == [(kv, percent)]
    with pytest.raises(RuntimeError, match="measured already"):
        build_engine(section_of(directory, **code, **{"kv.dtype": {"int8": "fp8", "fp8": "int8"}[kv]}))


@pytest.mark.slow
def test_ranks_measure_together_and_write_the_text_of_one(tmp_path: Path) -> None:
    directory, prompt = tiny.save(tmp_path, tiny.llama(), sharpness=4.0), some_tokens(21)
    usual: dict[str, Any] = {"path": str(directory), "device": "cpu", "compile_directory": str(KEPT)}
    usual["kv"] = {"dtype": "int8", "block_size": 4, "pool_bytes": 1 << 20}
    engine = build_engine(load_configuration({"target": usual}).target)
    text = generate(engine, prompt, 40)
    engine.close()
    with rank_group(3) as group:
        ranks: Any = group.form(load_configuration({"target": usual | {"tensor_parallel": 3}}))
        assert generate(ranks, prompt, 40) == text
