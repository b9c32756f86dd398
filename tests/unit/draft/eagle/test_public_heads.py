"""Heads of public checkpoints compute what their formats publish: hidden states, logits and greedy drafts are equal.

The references are plain torch and know the layouts alone. Wrong readings of a checkpoint, which raise no error in other
loaders, give other results here, so the tests can tell them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.errors import ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models import public_drafts
from tests.support.models.draft_references import Body, Eagle1, Eagle3
from tests.support.models.drafting_evidence import drafter_of, shown_states
from tests.support.models.model_cases import gemma3
from tests.support.models.public_drafts import DRAFTED, HIDDEN, LLAMA, Tensors
from tests.support.models.shown_target import Shown, shown_target
from tests.unit.draft.eagle.conftest import KNOWN, LAYERS, STEPS, TOKENS
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_pass import committed_piece
from workers.model.drafting.files import load_drafter
from workers.model.drafting.public import PublicModule
from workers.verify.evidence import resolve_taps

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


Passes = list[tuple[Tensor, Tensor]]
"""Outputs that are fed back, and logits, of the committed text and then of each step of a draft."""


def served(draft: Path, shown: Shown) -> Passes:
    """What is served: the committed text in three pieces, then steps that feed back their own outputs."""
    loaded = load_drafter(draft, shown.directory, torch.float32, CPU, "eagle")
    assert isinstance(loaded.module, PublicModule)
    head = FeaturePass(loaded.module, loaded.ends, "float32", scratch=KNOWN)
    window = ContextWindow(head.context_shape, CPU)
    taps = torch.stack([shown.states[tap] for tap in resolve_taps(loaded.card.taps, LAYERS)], dim=1)

    def run(features: Tensor, first: int) -> Tensor:
        end = first + len(features)
        piece = committed_piece(window, first, TOKENS[first + 1 : end + 1], 1 << 20)
        outputs = head.run(features, [replace(piece, wanted=range(len(features)))])
        window.mark(first, end)
        return outputs

    parts = [run(head.features(taps[first:end]), first) for first, end in ((0, 9), (9, 10), (10, KNOWN))]
    steps = [torch.cat(parts)]
    for position in range(KNOWN, KNOWN + STEPS):
        steps.append(run(steps[-1][-1:], position))
    return [(outputs, head.logits(outputs)) for outputs in steps]


def published(reference: Eagle1 | Eagle3, states: Sequence[Tensor]) -> Passes:
    """What the format's own forward pass computes from its features, without any cache."""
    features = reference.features(states)
    steps = []
    for length in range(KNOWN, KNOWN + STEPS + 1):
        outputs = reference.outputs(features, TOKENS[1 : length + 1])
        steps.append(outputs if length == KNOWN else outputs[-1:])
        features = torch.cat([features, outputs[-1:]])
    return [(outputs, reference.logits(outputs)) for outputs in steps]


def assert_equal(mine: Passes, wanted: Passes) -> None:
    """Assert that all hidden states and logits are equal, but for rounding."""
    for (outputs, logits), (wanted_outputs, wanted_logits) in zip(mine, wanted, strict=True):
        torch.testing.assert_close(outputs, wanted_outputs, **CLOSE)
        torch.testing.assert_close(logits, wanted_logits, **CLOSE)


def assert_differs(mine: Passes, wrong: Passes) -> None:
    """Assert that another reading gives other logits in the committed text or in a step of the draft."""
    assert any((one - other).abs().max() > 1e-2 for (_, one), (_, other) in zip(mine, wrong, strict=True))


@dataclass(frozen=True)
class Case:
    """A checkpoint, the published pass over it, and the hidden states that it reads."""

    config: dict[str, Any]
    tensors: Tensors
    reading: dict[str, Any]
    """Fields of the reference."""
    states: tuple[int, ...] | None = (2, LAYERS // 2, LAYERS - 3)
    """`None`: the last state after the final norm, which EAGLE-1 reads."""
    file: str = "model.safetensors"

    def write(self, directory: Path) -> Path:
        """Write the checkpoint."""
        return public_drafts.write(directory, self.config, self.tensors, self.file)

    def reference(self, shown: Shown) -> Eagle1 | Eagle3:
        """The published pass."""
        embedding = self.tensors.get("embed_tokens.weight", shown.embedding)
        if self.states is None:
            return Eagle1(self.tensors, embedding, shown.head, **self.reading)
        return Eagle3({"lm_head.weight": embedding, **self.tensors}, embedding, **self.reading)

    def read(self, shown: Shown) -> list[Tensor]:
        """The hidden states that the checkpoint was made for."""
        return [shown.final] if self.states is None else [shown.states[number] for number in self.states]


AUTHORS = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFTED)}
QWEN3 = {"model_type": "qwen3", "head_dim": public_drafts.WIDTH}
EACH = ("fc_norm.0", "fc_norm.1", "fc_norm.2")
LEGACY = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
OWN = {"embed_tokens.weight": public_drafts.Draw(9).matrix(public_drafts.VOCABULARY, HIDDEN)}
SPECULATORS = {"first": "layers.0.", "norm_before_residual": True}
speculators = public_drafts.speculators_config


def joint(tensors: Tensors) -> Tensors:
    return tensors | {"input_norm.weight": public_drafts.Draw(8).norm(3 * HIDDEN)}


def without_ends(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}


CASES = {
    "eagle 1": Case(LLAMA, public_drafts.eagle1(), {}, None),
    "eagle 1, own base": Case(
        LLAMA | {"bias": False, "rope_theta": 700.0},
        public_drafts.eagle1(has_bias=False) | OWN,
        {"body": Body(theta=700.0)},
        None,
        "pytorch_model.bin",
    ),
    "eagle 1, qwen2": Case(LLAMA | {"model_type": "qwen2"}, public_drafts.eagle1(biases="qkv"), {}, None),
    "eagle 1, qkv_bias": Case(LLAMA | {"qkv_bias": True}, public_drafts.eagle1(biases="qkv"), {}, None),
    "authors": Case(AUTHORS, public_drafts.eagle3(), {}),
    "authors, torch file": Case(AUTHORS, public_drafts.eagle3(), {}, file="pytorch_model.bin"),
    "own embedding": Case(AUTHORS, public_drafts.eagle3() | OWN, {}),
    "own embedding, tied": Case(LLAMA | {"tie_word_embeddings": True}, without_ends(public_drafts.eagle3()) | OWN, {}),
    "own base": Case(AUTHORS | {"rope_theta": 700.0}, public_drafts.eagle3(), {"body": Body(theta=700.0)}),
    "layers named": Case(
        AUTHORS | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, public_drafts.eagle3(), {}, (1, 3, 6)
    ),
    "layers named by outputs": Case(
        AUTHORS | QWEN3 | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 2, 5]},
        public_drafts.eagle3(head_norms=True),
        {},
        (1, 3, 6),
    ),
    "more layers, biases": Case(
        AUTHORS | {"num_hidden_layers": 2, "attention_bias": True},
        public_drafts.eagle3(layers=2, biases="qkvo"),
        {"layers": 2},
    ),
    "normalised queries": Case(AUTHORS | QWEN3, public_drafts.eagle3(head_norms=True), {}),
    "3.1": Case(
        AUTHORS | {"fc_norm": True, "norm_output": True},
        public_drafts.eagle3(norms=EACH),
        {"tap_norms": EACH, "norm_output": True},
    ),
    "legacy norms": Case(AUTHORS | {"use_aux_norm": True}, public_drafts.eagle3(norms=LEGACY), {"tap_norms": LEGACY}),
    "norm of all": Case(AUTHORS | {"norm_before_fc": True}, joint(public_drafts.eagle3()), {"joint_norm": True}),
    "nvidia": Case(AUTHORS | {"eagle_config": {"use_aux_hidden_state": True}}, public_drafts.eagle3(), {}),
    "nvidia, one head": Case(
        AUTHORS | {"eagle_config": {"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}},
        public_drafts.eagle3(),
        {},
    ),
    "speculators": Case(speculators(), public_drafts.eagle3("layers.0."), SPECULATORS),
    "speculators, layers named": Case(
        speculators(eagle_aux_hidden_state_layer_ids=[0, 4, 6, 7]),
        public_drafts.eagle3("layers.0.", taps=4),
        SPECULATORS,
        (0, 4, 6, 7),
    ),
    "speculators, residual": Case(
        speculators(norm_before_residual=False), public_drafts.eagle3("layers.0."), {"first": "layers.0."}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits_are_those_of_the_published_pass(name: str, shown: Shown, tmp_path: Path) -> None:
    case = CASES[name]
    draft = case.write(tmp_path)

    assert_equal(served(draft, shown), published(case.reference(shown), case.read(shown)))


class TestWrongReadings:
    """What loads without an error elsewhere, and drafts badly."""

    def test_the_layer_after_each_one(self, shown: Shown, tmp_path: Path) -> None:
        case = CASES["authors"]
        after = replace(case, states=tuple(number + 1 for number in case.states or ()))
        assert_differs(served(case.write(tmp_path), shown), published(case.reference(shown), after.read(shown)))

    @pytest.mark.parametrize(
        ("name", "reading"),
        [
            ("authors", {"body": Body(theta=5e5)}),  # that of the target
            ("authors", {"norm_before_residual": True}),
            ("authors", {"norm_output": True}),
            ("speculators", {"norm_before_residual": False}),
            ("3.1", {"norm_output": False}),
            ("own base", {"body": Body()}),
            ("eagle 1", {"is_feature_first": True}),
            ("eagle 1", {"body": Body(theta=5e5)}),
        ],
    )
    def test_another_arithmetic(self, name: str, reading: dict[str, Any], shown: Shown, tmp_path: Path) -> None:
        case = CASES[name]
        wrong = case.reference(shown).changed(**reading)
        assert_differs(served(case.write(tmp_path), shown), published(wrong, case.read(shown)))


def greedy_drafts(draft: Path, shown: Shown, count: int, *, is_fused: bool = False) -> tuple[int, ...]:
    """The chain of tokens that the method drafts after the first `KNOWN + 1` tokens, from the target's evidence.

    With `is_fused`, the evidence has the features that a target makes of its taps.
    """
    settings = {"path": str(draft), "candidates": 1, "width": 1}
    drafter, taps = drafter_of(shown.directory, LAYERS, "eagle", settings)
    evidence = (shown_states(torch.cat([shown.states[tap] for tap in taps], dim=1)),)
    start, budget = SequenceStart(4, SamplingParameters(temperature=0.0)), DraftBudget(count, count)
    row = DraftRow(SequenceId("a"), KNOWN + 1, tuple(TOKENS[: KNOWN + 1]), budget, start, evidence)
    (proposal,) = drafter.propose([row])
    assert proposal.fault is None and proposal.tree.is_chain
    return proposal.tree.tokens


def published_drafts(
    reference: Eagle1 | Eagle3, states: Sequence[Tensor], vocabulary: Sequence[int], count: int
) -> list[int]:
    """The greedy chain of the published pass. Row i of the head is the token `vocabulary[i]`."""
    features = reference.features([one.bfloat16().float() for one in states])
    tokens, drafted = TOKENS[: KNOWN + 1], []
    for _ in range(count):
        outputs = reference.outputs(features, tokens[1:])
        drafted.append(vocabulary[int(reference.logits(outputs[-1]).argmax())])
        tokens = [*tokens, drafted[-1]]
        features = torch.cat([features, outputs[-1:]])
    return drafted


@pytest.mark.parametrize("is_fused", [False, True], ids=["taps", "features"])
@pytest.mark.parametrize("name", ["authors", "speculators", "3.1", "norm of all"])
def test_a_method_drafts_the_tokens_of_the_published_pass(
    name: str, is_fused: bool, shown: Shown, tmp_path: Path
) -> None:
    case = CASES[name]
    drafted = greedy_drafts(case.write(tmp_path), shown, 3, is_fused=is_fused)

    count = len(drafted)  # an improbable depth is left out
    assert count >= 2
    assert list(drafted) == published_drafts(case.reference(shown), case.read(shown), DRAFTED, count)
    absolute = [int(one) for one in case.tensors["d2t"]]
    assert list(drafted) != published_drafts(case.reference(shown), case.read(shown), absolute, count)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A target that scales its embeddings, and whose final norm adds 1 to its weights."""
    config = gemma3(num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS)
    return shown_target(tmp_path_factory.mktemp("gemma"), LAYERS, TOKENS[:KNOWN], config)


def test_a_head_with_ends_of_its_own_drafts_for_gemma(gemma: Shown, tmp_path: Path) -> None:
    case = CASES["own embedding"]
    draft = case.write(tmp_path)

    assert_equal(served(draft, gemma), published(case.reference(gemma), case.read(gemma)))
    drafted = list(greedy_drafts(draft, gemma, 3))
    assert drafted and drafted == published_drafts(case.reference(gemma), case.read(gemma), DRAFTED, len(drafted))


@pytest.mark.parametrize("name", ["authors", "eagle 1, own base"])
def test_a_head_that_reads_ends_of_gemma_is_refused(name: str, gemma: Shown, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="ends with a norm other than a plain RMS norm"):
        served(CASES[name].write(tmp_path), gemma)


def test_eagle_1_reads_the_last_state_after_the_final_norm(shown: Shown, tmp_path: Path) -> None:
    case = CASES["eagle 1"]
    assert_differs(served(case.write(tmp_path), shown), published(case.reference(shown), [shown.states[-1]]))
