"""Block drafters of public checkpoints compute what DFlash and DSpark publish: hidden states, probabilities, drafts.

The references are plain torch and know the layouts alone. Wrong readings of a checkpoint, which raise no error in other
loaders, give other results here, so the tests can tell them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models import public_drafts, tiny
from tests.support.models.draft_references import Body, MaskedBlock
from tests.support.models.drafting_evidence import drafter_of, shown_states
from tests.support.models.public_drafts import (
    DFLASH,
    DFLASH2,
    DRAFTED,
    DSPARK,
    GROUP,
    HIDDEN,
    MASK,
    RANK,
    RANKED,
    SLOTS,
    VOCABULARY,
    Tensors,
    speculators_block,
)
from tests.support.models.shown_target import Shown, shown_target
from workers.draft.block.markov_ranker import MarkovRanker
from workers.draft.block.masked_pass import MaskedBlockPass
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.ranked_paths import RankedPaths
from workers.draft.common.modules.served_module import load_served_module
from workers.forward.native.markov import load_markov_slots
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft
from workers.sampling.context import DecisionContext
from workers.sampling.noise import gumbel
from workers.verify.evidence import resolve_taps

WRITTEN = Path(__file__).parent / "speculators"
CPU = torch.device("cpu")
LAYERS, KNOWN = 8, 23
TOKENS = [int(one) for one in torch.randint(0, 96, (KNOWN + 1,), generator=torch.Generator().manual_seed(4))]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A target and its hidden states over all tokens but the last."""
    return shown_target(tmp_path_factory.mktemp("target"), LAYERS, TOKENS[:KNOWN])


@dataclass(frozen=True)
class Case:
    """A checkpoint, the published pass over it, and the hidden states that it reads."""

    config: dict[str, Any]
    tensors: Tensors
    reading: dict[str, Any]
    """Fields of the reference."""
    states: tuple[int, ...] = (2, 4, 6)
    mask: Tensor | None = None
    """A file with an embedding for the mask token."""

    def write(self, directory: Path) -> Path:
        """Write the checkpoint."""
        if self.mask is not None:
            torch.save({"embedding": self.mask, "mask_token_id": MASK}, directory / "mask_embedding.pt")
        return public_drafts.write(directory, self.config, self.tensors)

    def reference(self, shown: Shown) -> MaskedBlock:
        """The published pass."""
        embedding = self.tensors.get("embed_tokens.weight", shown.embedding)
        mask = embedding[MASK] if self.mask is None else self.mask
        head = embedding if self.config.get("tie_word_embeddings") else shown.head
        return MaskedBlock(self.tensors, embedding, head, mask, **self.reading)

    def read(self, shown: Shown) -> list[Tensor]:
        """The hidden states that the checkpoint was made for."""
        return [shown.states[number] for number in self.states]

    @property
    def vocabulary(self) -> Sequence[int]:
        """The tokens of the rows of the head."""
        return DRAFTED if "d2t" in self.tensors else range(VOCABULARY)


def changed(config: dict[str, Any], **nested: Any) -> dict[str, Any]:
    """The configuration of DFlash with other nested keys."""
    return config | {"dflash_config": config["dflash_config"] | nested}


OWN = {"embed_tokens.weight": public_drafts.Draw(9).matrix(VOCABULARY, HIDDEN)}
OWN_HEAD = {"lm_head.weight": 4 * public_drafts.Draw(12).matrix(VOCABULARY, HIDDEN)}
SPARK: dict[str, Any] = {"predicts_next": True, "markov": "vanilla"}
REDUCED = {"draft_vocab_size": len(DRAFTED)}
PLAIN = DSPARK | {"markov_rank": 0, "enable_confidence_head": False}
SECOND: dict[str, Any] = {"convolved": GROUP, "candidates": RANKED}
SPECFORGE = changed(
    DFLASH | {"architectures": ["DSparkDraftModel"]},
    projector_type="dspark",
    attention_mode="gqa",
    markov_rank=RANK,
    markov_head_type="gated",
)
CASES = {
    "dflash": Case(DFLASH, public_drafts.block(), {}),
    "dflash, keys nested": Case(
        changed({key: value for key, value in DFLASH.items() if key != "block_size"}, block_size=SLOTS),
        public_drafts.block(),
        {},
    ),
    "dflash, layers by default": Case(
        changed(DFLASH, target_layer_ids=None), public_drafts.block(taps=2), {}, (2, LAYERS - 2)
    ),
    "dflash, layers by DSpark's name": Case(
        changed(DFLASH | {"dspark_target_layer_ids": [0, 4]}, target_layer_ids=None),
        public_drafts.block(taps=2),
        {},
        (1, 5),
    ),
    "dflash, layers by their inputs": Case(
        changed(DFLASH | {"eagle_aux_hidden_state_layer_ids": [1, 5]}, target_layer_ids=None),
        public_drafts.block(taps=2),
        {},
        (1, 5),
    ),
    "dflash, own base and biases": Case(
        DFLASH | {"rope_parameters": {"rope_theta": 700.0, "rope_type": "default"}, "attention_bias": True},
        public_drafts.block(biases="qkvo"),
        {"body": Body(theta=700.0)},
    ),
    "dflash, mask embedding": Case(DFLASH, public_drafts.block(), {}, mask=public_drafts.Draw(13).matrix(HIDDEN)),
    "dflash, fewer tokens": Case(DFLASH | REDUCED, public_drafts.block(vocabulary=DRAFTED), {}),
    "dspark": Case(DSPARK, public_drafts.spark(), SPARK),
    "dflash, from anchor": Case(DFLASH | {"sample_from_anchor": True}, public_drafts.block(), {"predicts_next": True}),
    "dflash, from anchor, nested": Case(
        changed(DFLASH, sample_from_anchor=True), public_drafts.block(), {"predicts_next": True}
    ),
    "dspark, not from anchor": Case(
        DSPARK | {"sample_from_anchor": False}, public_drafts.spark(), {"markov": "vanilla"}
    ),
    "dspark, by vLLM's key": Case(DSPARK | {"dspark_bonus_anchor": True}, public_drafts.spark(), {"markov": "vanilla"}),
    "dspark, gated": Case(
        DSPARK | {"markov_head_type": "gated"}, public_drafts.spark("gated"), SPARK | {"markov": "gated"}
    ),
    "dspark, rnn": Case(DSPARK | {"markov_head_type": "rnn"}, public_drafts.spark("rnn"), SPARK | {"markov": "rnn"}),
    "dspark, own ends, embedding read": Case(
        DSPARK | {"target_layer_ids": [-1, 3, 5]}, public_drafts.spark() | OWN | OWN_HEAD, SPARK, (0, 4, 6)
    ),
    "dspark, confidence without token": Case(
        DSPARK | {"confidence_head_with_markov": False}, public_drafts.spark(confidence="hidden"), SPARK
    ),
    "dspark, fewer tokens": Case(DSPARK | REDUCED, public_drafts.spark(vocabulary=DRAFTED), SPARK),
    "dspark, no heads": Case(PLAIN, public_drafts.block(), {"predicts_next": True}),
    "dspark, no heads, tied": Case(
        PLAIN | {"tie_word_embeddings": True}, public_drafts.block() | OWN, {"predicts_next": True}
    ),
    "specforge, not from anchor": Case(
        changed(SPECFORGE, sample_from_anchor=False),
        public_drafts.spark("gated", confidence="none"),
        {"markov": "gated"},
    ),
    "specforge": Case(SPECFORGE, public_drafts.spark("gated", confidence="none"), SPARK | {"markov": "gated"}),
    "dflash2": Case(DFLASH2, public_drafts.second(), SECOND),
    "dflash2, scaled": Case(
        changed(DFLASH2, input_embedding_scale=2.0, final_logit_softcapping=5.0),
        public_drafts.second(),
        SECOND | {"scale": 2.0, "cap": 5.0},
    ),
    "speculators dflash2": Case(speculators_block("dflash2"), public_drafts.second(), SECOND),
    "speculators dflash": Case(speculators_block("dflash"), public_drafts.block(), {}),
    "speculators dflash, from anchor": Case(
        speculators_block("dflash", sample_from_anchor=True), public_drafts.block(), {"predicts_next": True}
    ),
    "speculators dspark": Case(speculators_block("dspark"), public_drafts.spark(), SPARK),
    "speculators dspark, not from anchor": Case(
        speculators_block("dspark", sample_from_anchor=False), public_drafts.spark(), {"markov": "vanilla"}
    ),
    "speculators dspark, fewer tokens": Case(
        speculators_block("dspark", **REDUCED), public_drafts.spark(vocabulary=DRAFTED), SPARK
    ),
}
CONDITIONED = [name for name, case in CASES.items() if case.reading.keys() & {"markov", "candidates"}]


@dataclass(frozen=True)
class Served:
    """A loaded drafter."""

    passes: MaskedBlockPass
    ranker: MarkovRanker
    taps: tuple[int, ...]


def served(draft: Path, shown: Shown) -> Served:
    return load_served(draft, shown.directory)


def load_served(draft: Path, target: Path) -> Served:
    settings = ModuleSettings(path=str(draft), weights="float32")
    section = TargetSection(path=str(target), device="cpu")
    loaded = load_served_module(settings, section, "block", (PublicModule,))
    load = partial(load_markov_slots, dtype=torch.float32, directory=section.compile_directory)
    return Served(
        MaskedBlockPass(loaded.module, loaded.ends, "float32"),
        MarkovRanker(loaded.module, loaded.ends, loaded.make, loaded.shortlist, load),
        resolve_taps(loaded.card.taps, LAYERS),
    )


def hidden_vectors(drafter: Served, shown: Shown, ends: Sequence[int] = (KNOWN,)) -> Tensor:
    """The vectors of the blocks after each of these lengths, in one pass; the context comes in three pieces."""
    windows = [ContextWindow(drafter.passes.context_shape, CPU) for _ in ends]
    taps = torch.stack([shown.states[tap] for tap in drafter.taps], dim=1)
    for window, end in zip(windows, ends, strict=True):
        for first, last in ((0, 9), (9, 10), (10, end)):
            window.store(first, drafter.passes.context(taps[first:last], torch.arange(first, last)))
    return drafter.passes.draft([TOKENS[end] for end in ends], ends, windows)


def ranked(drafter: Served, hidden: Tensor, siblings: int, sampling: SamplingParameters = GREEDY) -> RankedPaths:
    """The candidates of one row's block."""
    contexts = [DecisionContext(sampling, (0,) * (KNOWN + 1 + depth), 1) for depth in range(hidden.shape[1])]
    return drafter.ranker.rank(hidden, [TOKENS[KNOWN]], contexts, siblings)[0]


@pytest.mark.parametrize("name", CASES)
def test_hidden_vectors_are_those_of_the_published_pass(name: str, shown: Shown, tmp_path: Path) -> None:
    """Two rows of different lengths are in one pass."""
    case = CASES[name]
    reference, states, ends = case.reference(shown), case.read(shown), (KNOWN, KNOWN - 8)

    mine = hidden_vectors(served(case.write(tmp_path), shown), shown, ends)

    for row, end in zip(mine, ends, strict=True):
        torch.testing.assert_close(row, reference.hidden([one[:end] for one in states], TOKENS[end]), **CLOSE)


def paths(found: RankedPaths) -> Iterator[tuple[list[int], list[int], Sequence[float]]]:
    """All paths of candidates that have candidates below them, with their tokens and confidences."""
    waiting: list[tuple[list[int], int]] = [([], 0)]
    while waiting:
        path, candidate = waiting.pop()
        if len(path) < len(found.tokens):
            order, confidences = found.children(len(path), candidate)
            if order:
                yield path, [found.tokens[len(path)][one] for one in order], confidences
            waiting += [([*path, found.tokens[len(path)][one]], one) for one in order]


@pytest.mark.parametrize(
    ("keys", "factor", "cap"),
    [({}, 0.125, None), ({"output_multiplier": 0.5}, 0.5, None), ({"final_logit_softcapping": 5.0}, 1.0, 5.0)],
    ids=["none", "factor", "cap"],
)
def test_a_scale_of_the_draft_takes_the_place_of_the_targets_factor(
    keys: dict[str, float], factor: float, cap: float | None, tmp_path: Path
) -> None:
    target = tiny.save(tmp_path / "target", tiny.granite(num_hidden_layers=LAYERS, logits_scaling=8.0))
    draft = tmp_path / "draft"
    draft.mkdir()
    drafter = load_served(public_drafts.write(draft, changed(DFLASH, **keys), public_drafts.block()), target)
    hidden = torch.randn(1, SLOTS - 1, HIDDEN, generator=torch.Generator().manual_seed(6))
    logits = factor * hidden[0, 0] @ load_file(target / "model.safetensors")["lm_head.weight"].T
    wanted = (logits if cap is None else cap * torch.tanh(logits / cap)).softmax(-1).topk(5)

    found = ranked(drafter, hidden, 5)

    assert found.tokens[0][:5] == wanted.indices.tolist()
    torch.testing.assert_close(torch.tensor(found.confidences[0][0]), wanted.values, **CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("siblings", [1, 5])
def test_probabilities_along_all_paths_are_the_published_ones(
    name: str, siblings: int, shown: Shown, tmp_path: Path
) -> None:
    """Below each candidate, the ranked tokens are the most probable ones after its whole path."""
    case = CASES[name]
    drafter, reference = served(case.write(tmp_path), shown), case.reference(shown)
    hidden = hidden_vectors(drafter, shown)
    wanted = reference.hidden(case.read(shown), TOKENS[KNOWN])

    found = list(paths(ranked(drafter, hidden, siblings)))

    depths = SLOTS - (0 if reference.predicts_next else 1)
    assert [sum(len(path) == depth for path, _, _ in found) for depth in range(depths)] == [
        1,
        *[min(siblings, 4)] * (depths - 1),
    ]
    for path, tokens, confidences in found:
        logits = reference.logits(wanted, [TOKENS[KNOWN], *path])
        probabilities, rows = logits.softmax(-1).topk(siblings)
        assert tokens == [case.vocabulary[int(row)] for row in rows]
        sure = reference.confidence(wanted, [TOKENS[KNOWN], *path])
        if sure is not None:
            rest = 1 - probabilities[0]
            probabilities = torch.cat([torch.tensor([sure]), probabilities[1:] * (1 - sure) / rest])
            if rest < 1e-2:  # a difference to 1 has few digits
                tokens, confidences, probabilities = tokens[:1], confidences[:1], probabilities[:1]
        torch.testing.assert_close(torch.tensor(confidences), probabilities, **CLOSE)


@pytest.mark.parametrize("name", CONDITIONED)
def test_sampled_chains_are_drawn_with_the_shared_noise(name: str, shown: Shown, tmp_path: Path) -> None:
    """Each token is the target's rule on the drafter's own logits, given the tokens drawn before it."""
    case = CASES[name]
    drafter, reference = served(case.write(tmp_path), shown), case.reference(shown)
    wanted = reference.hidden(case.read(shown), TOKENS[KNOWN])
    chains = set()
    for seed in range(4):
        path = [TOKENS[KNOWN]]
        for depth in range(len(wanted)):
            noise = gumbel([seed], [KNOWN + 1 + depth], 0, VOCABULARY, CPU)[0]
            scores = reference.logits(wanted, path) / 1.5 + noise[list(case.vocabulary)]
            path.append(case.vocabulary[int(scores.argmax())])

        found = ranked(drafter, hidden_vectors(drafter, shown), 1, SamplingParameters(temperature=1.5, seed=seed))

        assert [level[0] for level in found.tokens] == path[1:]
        chains.add(tuple(path))
    assert len(chains) > 1


class TestWrongReadings:
    """What loads without an error elsewhere, and drafts badly."""

    @pytest.mark.parametrize(
        ("name", "reading"),
        [
            ("dflash", {"is_causal": True}),
            ("dflash", {"body": Body(theta=5e5)}),  # that of the target
            ("dflash, own base and biases", {"body": Body()}),
            ("speculators dspark", {"is_causal": True}),
            ("dflash2", {"convolved": 0}),
            ("dflash2, scaled", {"scale": 1.0}),
        ],
    )
    def test_another_arithmetic(self, name: str, reading: dict[str, Any], shown: Shown, tmp_path: Path) -> None:
        case = CASES[name]
        wrong = case.reference(shown).changed(**reading).hidden(case.read(shown), TOKENS[KNOWN])
        mine = hidden_vectors(served(case.write(tmp_path), shown), shown)[0]
        assert (mine - wrong).abs().max() > 1e-2

    @pytest.mark.parametrize("name", ["dflash", "dspark", "speculators dflash", "speculators dspark"])
    def test_the_layers_beside_the_named_ones(self, name: str, shown: Shown, tmp_path: Path) -> None:
        """`target_layer_ids` number outputs, and `aux_hidden_state_layer_ids` of speculators inputs."""
        case = CASES[name]
        mine = hidden_vectors(served(case.write(tmp_path), shown), shown)[0]
        for step in (-1, 1):
            beside = [shown.states[number + step] for number in case.states]
            assert (mine - case.reference(shown).hidden(beside, TOKENS[KNOWN])).abs().max() > 1e-2

    @pytest.mark.parametrize(("kind", "depths"), [("dflash", SLOTS - 1), ("dspark", SLOTS)])
    def test_which_slot_predicts_which_token(self, kind: str, depths: int, tmp_path: Path) -> None:
        """Without the key, DFlash's slots predict their own tokens, and DSpark's the next ones."""
        tensors = public_drafts.spark() if kind == "dspark" else public_drafts.block()
        public_drafts.write(tmp_path, speculators_block(kind, sample_from_anchor=None), tensors)
        shape = read_draft(tmp_path).shape
        assert getattr(shape, "depths", None) == depths


def of_the_library(directory: Path, target: Path) -> tuple[Served, Tensor, dict[str, Tensor]]:
    """A drafter that a file beside it wrote, its vectors [anchors, depths, hidden size], and the library's own."""
    expected = load_file(directory / "expected.safetensors")
    taps, text, size = expected["taps"], expected["tokens"].tolist(), 16
    config = tiny.llama(vocab_size=24, hidden_size=size, num_attention_heads=2, num_key_value_heads=1)
    weights = load_file(tiny.save(target, config) / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.arange(24 * size).view(24, size).sin()
    weights["lm_head.weight"] = expected.get("head", weights["lm_head.weight"])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    drafter = load_served(directory / "draft", target)
    anchors = expected["indices"].view(-1, SLOTS)[:, 0].tolist()
    windows = [ContextWindow(drafter.passes.context_shape, CPU) for _ in anchors]
    for window, anchor in zip(windows, anchors, strict=True):
        window.store(0, drafter.passes.context(taps[:anchor].view(anchor, 3, size), torch.arange(anchor)))
    return drafter, drafter.passes.draft([text[anchor] for anchor in anchors], anchors, windows), expected


@pytest.mark.parametrize(
    "directory", [WRITTEN / "dflash", WRITTEN.parent / "dflash_of_transformers"], ids=lambda one: one.name
)
def test_another_library_computes_the_same_for_dflash(directory: Path, tmp_path: Path) -> None:
    """`speculators` for its own layout, and `transformers` for that of the authors."""
    _, hidden, expected = of_the_library(directory, tmp_path)

    torch.testing.assert_close(hidden, expected["hidden"].view(len(hidden), SLOTS, -1)[:, 1:], **CLOSE)


def test_the_library_speculators_computes_the_same_for_dflash2(tmp_path: Path) -> None:
    drafter, hidden, expected = of_the_library(WRITTEN / "dflash2", tmp_path)

    wanted = expected["hidden"].view(len(hidden), SLOTS, -1)[:, 1:]  # the last token's slot predicts nothing
    torch.testing.assert_close(hidden, wanted, **CLOSE)
    contexts = [DecisionContext(GREEDY, (0,), 1)] * len(hidden)
    candidates, scores = (expected[name].view(len(hidden), SLOTS, -1) for name in ("candidates", "scores"))
    for slot in range(1, SLOTS):
        found = drafter.ranker.rank(hidden[:, slot - 1 : slot], expected["before"][:, slot].tolist(), contexts, 5)
        probabilities, order = scores[:, slot].softmax(-1).sort(descending=True)
        assert [one.tokens[0] for one in found] == candidates[:, slot].gather(1, order).tolist()
        torch.testing.assert_close(torch.tensor([one.confidences[0][0] for one in found]), probabilities, **CLOSE)


def test_the_library_speculators_computes_the_same_for_dspark(tmp_path: Path) -> None:
    """For three anchors of a random text."""
    drafter, hidden, expected = of_the_library(WRITTEN, tmp_path)

    torch.testing.assert_close(hidden.flatten(0, 1), expected["hidden"][0], **CLOSE)
    logits = expected["logits"].view_as(expected["bias"]) + expected["bias"]
    contexts = [DecisionContext(GREEDY, (0,), 1)] * len(hidden)
    for slot in range(SLOTS):
        found = drafter.ranker.rank(hidden[:, slot : slot + 1], expected["before"][:, slot].tolist(), contexts, 8)
        wanted, rows = logits[:, slot].softmax(-1).sort(descending=True)
        sure = expected["confidence"].view(-1, SLOTS)[:, slot : slot + 1].sigmoid()
        wanted = torch.cat([sure, wanted[:, 1:] * (1 - sure) / (1 - wanted[:, :1])], dim=1)
        assert [one.tokens[0] for one in found] == (3 * rows).tolist()  # the drafted tokens are 0, 3, 6, …
        torch.testing.assert_close(torch.tensor([one.confidences[0][0] for one in found]), wanted, **CLOSE)


def proposals(
    draft: Path,
    shown: Shown,
    budget: DraftBudget,
    *,
    candidates: int,
    samplings: Sequence[SamplingParameters] = (GREEDY,),
) -> Sequence[Proposal]:
    """What the method drafts from the target's evidence, all rows in one call."""
    bounds = {"max_nodes": budget.max_nodes, "max_depth": budget.max_depth}
    settings = {"path": str(draft), "candidates": candidates}
    drafter, taps = drafter_of(shown.directory, LAYERS, "block", settings, **bounds)
    evidence = (shown_states(torch.cat([shown.states[tap] for tap in taps], dim=1)),)
    rows = [
        DraftRow(SequenceId(str(index)), KNOWN + 1, tuple(TOKENS), budget, SequenceStart(4, sampling), evidence)
        for index, sampling in enumerate(samplings)
    ]
    return drafter.propose(rows)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark", "dspark, rnn", "speculators dspark, fewer tokens"])
def test_a_method_drafts_the_chain_of_the_published_pass(name: str, shown: Shown, tmp_path: Path) -> None:
    case = CASES[name]
    reference = case.reference(shown)
    wanted = reference.hidden([one.bfloat16().float() for one in case.read(shown)], TOKENS[KNOWN])
    path = [TOKENS[KNOWN]]
    for _ in wanted:
        path.append(case.vocabulary[int(reference.logits(wanted, path).argmax())])

    (found,) = proposals(case.write(tmp_path), shown, DraftBudget(SLOTS, SLOTS), candidates=1)

    assert found.fault is None and found.tree.is_chain
    assert list(found.tree.tokens) == path[1:]


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark", "dspark, gated"])
def test_a_method_drafts_trees_and_rows_do_not_change_each_other(name: str, shown: Shown, tmp_path: Path) -> None:
    samplings = (GREEDY, SamplingParameters(temperature=0.8, seed=5), SamplingParameters(temperature=1.2, seed=6))
    draft, budget = CASES[name].write(tmp_path), DraftBudget(12, SLOTS)

    together = proposals(draft, shown, budget, candidates=4, samplings=samplings)

    alone = [proposals(draft, shown, budget, candidates=4, samplings=(one,))[0] for one in samplings]
    assert [one.tree for one in together] == [one.tree for one in alone]
    assert len({one.tree.tokens for one in together}) == len(samplings)
    for one in together:
        assert len(one.tree) == budget.max_nodes and not one.tree.is_chain and one.tree.depth() > 1
