"""Greedy texts of stored checkpoints are those of their de-quantized weights: alone, batched, with drafts, on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_rows import first_row, reference
from tests.support.engines.engine_sequence import drafts_near, generate
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_group import RankGroup, rank_group
from tests.support.models import quantized, tiny
from tests.support.models.draft_model import first_row as draft_row
from tests.support.slow import slow_but
from tests.unit.model.stored.test_stored_checkpoints import CHECKPOINTS, FAMILIES, FEW
from workers.draft.model import DraftModelSettings, create_model
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.model.model_files import resolve_model_directory
from workers.serve.configuration import load_configuration
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine

PROMPTS = ((5, 17, 33, 8, 60, 41, 41, 9), (70, 3, 12), tuple(range(20, 50)))
TOKENS = 24
RANKS = 3
OF_RANKS = ("awq", "gptq 4 bits", "compressed-tensors 4 bits", "compressed-tensors int8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("plain") / "llama", FAMILIES["llama"], sharpness=2.0)


def answers(source: Path, directory: Path, name: str) -> list[list[int]]:
    """Write the checkpoint to `directory`. Returns the greedy texts of its de-quantized weights by `transformers`."""
    quantized.save(source, directory, *CHECKPOINTS[name])
    plain = resolve_model_directory(str(directory), directory.parent / "dequantized")
    return [reference(plain, prompt, TOKENS) for prompt in PROMPTS]


def open_engine(directory: Path, native: str) -> TargetEngine:
    section = ModelSection(
        path=str(directory),
        device="cpu",
        compile="off",
        quantization="stored",
        native=native,
        compile_directory=str(KEPT),
    )
    model = load_model(section)
    return TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), 200), LocalDecider(), EngineOptions())


def batched(engine: TargetEngine) -> list[list[int]]:
    """The texts of all prompts, each step with a row of every sequence."""
    texts = [[*prompt] for prompt in PROMPTS]
    rows = tuple(first_row(str(index), prompt) for index, prompt in enumerate(PROMPTS))
    for _ in range(TOKENS):
        for text, verdict in zip(texts, engine.step(StepBatch(rows)).verdicts, strict=True):
            assert verdict.fault is None
            text.extend(verdict.tokens)
        rows = tuple(VerifyRow(SequenceId(str(index)), len(text), (text[-1],)) for index, text in enumerate(texts))
    engine.release([SequenceId(str(index)) for index in range(len(PROMPTS))])
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


def chain(answer: list[int]) -> TokenTree:
    """Five tokens in a row, of which the last is wrong."""
    right = answer[:4]
    return TokenTree.from_candidates([[*right, (right[-1] + 1) % 90 + 3]], 5) if right else TokenTree((), ())


@pytest.mark.parametrize(
    "name_and_kernels",
    slow_but(
        [*((name, "auto") for name in FEW), *((name, "off") for name in FEW[:2])],
        [(name, native) for name in CHECKPOINTS for native in ("auto", "off")],
    ),
    ids="-".join,
)
def test_texts_are_those_of_the_dequantized_weights(
    name_and_kernels: tuple[str, str], source: Path, tmp_path: Path
) -> None:
    name, native = name_and_kernels
    expected = answers(source, tmp_path / "model", name)
    engine = open_engine(tmp_path / "model", native)
    assert [generate(engine, prompt, TOKENS) for prompt in PROMPTS] == expected
    assert batched(engine) == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        whole = [*prompt, *answer]
        assert generate(engine, prompt, TOKENS, propose=drafts_near(whole)) == answer
        assert generate(engine, prompt, TOKENS, propose=lambda text, whole=whole: chain(whole[len(text) :])) == answer


def test_a_draft_model_is_stored_in_4_bits(source: Path, tmp_path: Path) -> None:
    expected = answers(source, tmp_path / "model", "awq")
    path = str(tmp_path / "model")
    draft = DraftModelSettings(
        path=path, device="cpu", compile="off", compile_directory=str(KEPT), quantization="stored", candidates=1
    )
    target = TargetSection(path=path, device="cpu")
    method = create_model(draft, DraftSection(method="model", max_nodes=4, max_depth=4), target)
    tree = method.propose([draft_row(PROMPTS[0], budget=DraftBudget(4, 4))])[0].tree
    assert list(tree.path_tokens(len(tree) - 1)) == expected[0][: len(tree)]
    assert len(tree) > 1


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with rank_group(RANKS) as group:
        yield group


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_RANKS)
def test_three_ranks_write_the_same_texts(name: str, source: Path, group: RankGroup, tmp_path: Path) -> None:
    expected = answers(source, tmp_path / "model", name)
    target = {"path": str(tmp_path / "model"), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    target |= {"quantization": "stored", "tensor_parallel": RANKS, "kv": {"pool_bytes": 1 << 20, "block_size": 4}}
    engine = group.form(load_configuration({"target": target}))
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert generate(engine, prompt, TOKENS) == answer  # type: ignore[arg-type] # it has what an engine has
        found = generate(engine, prompt, TOKENS, propose=drafts_near([*prompt, *answer]))  # type: ignore[arg-type]
        assert found == answer
