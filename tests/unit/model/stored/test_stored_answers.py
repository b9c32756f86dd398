"""Greedy texts of stored checkpoints are those of their de-quantized weights: alone, batched, with drafts, on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedConfig, PreTrainedModel

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
from tests.support.engines.stored_model import check_greedy
from tests.support.models import quantized, stored_gguf, tiny
from tests.support.models.draft_model import first_row as draft_row
from tests.support.slow import slow_but
from tests.unit.model.stored.test_stored_checkpoints import AWQ, CHECKPOINTS, FAMILIES, FEW, FP8
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
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Widths that blocks of k-quants (256 inputs) and of FP8 (128 × 128) divide."""
SIZES_OF_RANKS = {
    "hidden_size": 768,
    "intermediate_size": 768,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 128,
}
"""Widths whose thirds they divide, too."""
WINDOWS: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "query_pre_attn_scalar": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 2,
}
WIDE: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": tiny.llama,
    "qwen2": tiny.qwen2,
    "qwen3": tiny.qwen3,
    "phi3": tiny.phi3,
    "gemma3": partial(Gemma3TextConfig, **WINDOWS),
}
K_QUANTS: dict[str, dict[str, str]] = {
    "Q2_K": {"v_proj": "Q4_K", "down_proj": "Q3_K", "lm_head": "Q6_K"},
    "Q3_K": {"v_proj": "Q5_K", "down_proj": "Q5_K", "lm_head": "Q6_K"},
    "Q4_K": {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"},
    "Q5_K": {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"},
    "Q6_K": {"embed_tokens": "Q8_0"},
}
"""Types of matrices as files of each kind have them (Q4_K_M and its like), beside the one that gives its name."""
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types of blocks of 32 inputs. All matrices of a file have one, the embedding and the head too."""
WIDE_CHECKPOINTS: dict[str, tuple[quantized.Quantize, dict[str, Any]]] = {
    "awq": (quantized.awq(128), AWQ | {"group_size": 128}),
    "fp8": (quantized.fp8(128, 128), FP8 | {"weight_block_size": [128, 128]}),
}
CASES_OF_RANKS = [("llama", name) for name in (*K_QUANTS, *GGUF)] + [("qwen3", "fp8")]
CASES_OF_RANKS += [("phi3", name) for name in ("Q4_K", "awq", "fp8")]
"""Ranks divide the projections of `phi3`, of which several are one matrix."""
WIDE_CASES = [("llama", name) for name in (*K_QUANTS, *GGUF, "fp8")]
WIDE_CASES += [(family, name) for family in WIDE if family != "llama" for name in ("Q3_K", "Q4_K", "awq", "fp8")]


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


def check_batched_and_drafted(engine: TargetEngine, expected: list[list[int]]) -> None:
    """Check that neither neighbours nor drafts, trees or chains, change the texts of `PROMPTS`."""
    assert batched(engine) == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        whole = [*prompt, *answer]
        assert generate(engine, prompt, TOKENS, propose=drafts_near(whole)) == answer
        assert generate(engine, prompt, TOKENS, propose=lambda text, whole=whole: chain(whole[len(text) :])) == answer


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
    check_batched_and_drafted(engine, expected)


def written(directory: Path, family: str, name: str, sizes: Mapping[str, int] = SIZES) -> tuple[Path, PreTrainedModel]:
    """A wide model's directory with stored weights, and the model with the de-quantized ones in float32."""
    config = WIDE[family](**sizes)
    if name in K_QUANTS or name in GGUF:
        return stored_gguf.convert(directory, family, config, K_QUANTS.get(name, {}), default=name)
    source = tiny.save(directory / "plain", config, sharpness=2.0)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    plain = quantized.save(source, directory / "model", *WIDE_CHECKPOINTS[name])
    reference.load_state_dict(plain, strict=False)
    return directory / "model", reference


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("case", slow_but([("llama", "Q4_K"), ("llama", "Q2_K")], WIDE_CASES), ids="-".join)
def test_wide_models_write_what_their_dequantized_weights_decide(
    case: tuple[str, str], native: str, tmp_path: Path
) -> None:
    path, reference = written(tmp_path, *case)
    engine = open_engine(path, native)
    texts = [generate(engine, prompt, TOKENS) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        check_greedy(reference, prompt, text)
    check_batched_and_drafted(engine, texts)


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


def form(group: RankGroup, path: Path) -> Any:
    """An engine of all ranks. It has what an engine of one process has."""
    target: dict[str, Any] = {"path": str(path), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    target |= {"quantization": "stored", "tensor_parallel": RANKS, "kv": {"pool_bytes": 1 << 20, "block_size": 4}}
    return group.form(load_configuration({"target": target}))


def check_texts_of_ranks(engine: Any, reference: PreTrainedModel) -> None:
    """Check texts, alone and with drafts, against the de-quantized weights in float32."""
    for prompt in PROMPTS:
        text = generate(engine, prompt, TOKENS)
        check_greedy(reference, prompt, text)
        assert generate(engine, prompt, TOKENS, propose=drafts_near([*prompt, *text])) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_three_ranks_write_the_same_texts(name: str, source: Path, group: RankGroup, tmp_path: Path) -> None:
    expected = answers(source, tmp_path / "model", name)
    engine = form(group, tmp_path / "model")
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert generate(engine, prompt, TOKENS) == answer
        assert generate(engine, prompt, TOKENS, propose=drafts_near([*prompt, *answer])) == answer


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES_OF_RANKS, ids="-".join)
def test_three_ranks_write_what_the_dequantized_weights_of_a_wide_model_decide(
    case: tuple[str, str], group: RankGroup, tmp_path: Path
) -> None:
    path, reference = written(tmp_path, *case, SIZES_OF_RANKS)
    check_texts_of_ranks(form(group, path), reference)
