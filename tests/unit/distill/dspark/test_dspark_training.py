"""A DSpark drafter is trained on blocks of text, written as a public checkpoint, read back and served equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models import tiny
from tests.support.models.computed_states import ComputedStates, computed_target
from tests.support.models.drafting_evidence import drafter_of, shown_states
from tests.unit.distill.training_folder import LAYERS, LENGTH, PROMPT, ROWS
from workers.distill.answers import Answer
from workers.distill.dspark import rows
from workers.distill.dspark.loss import SlotGoals, head_loss
from workers.distill.dspark.measure import Ranker
from workers.distill.dspark.module import SECOND, Blocks, SparkModule
from workers.distill.dspark.rows import TextRows
from workers.distill.dspark.training import BlockPlan, BlockTraining
from workers.distill.target_model import load_target
from workers.draft.block.markov_ranker import MarkovRanker
from workers.draft.block.masked_pass import MaskedBlockPass
from workers.draft.common.modules import ranked_paths
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.served_module import load_served_module
from workers.draft.common.trees.calibration import Calibration
from workers.model.draft_card import DraftDescription, is_written_here
from workers.model.drafting.files import load_ends
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import DraftWeights, read_draft
from workers.model.formats.speculators import write_dspark
from workers.model.public_shapes import DecoderShape, MarkovShape, MaskedBlockShape, RopeShape
from workers.model.target_ends import scaled_head
from workers.sampling.context import DecisionContext

CPU = torch.device("cpu")
TAPS, SLOTS, RANK, ROW = (1, 3, 5), 4, 8, 48
GREEDY = SamplingParameters(temperature=0.0)
SOME = torch.arange(0, tiny.VOCABULARY, 3)
"""The vocabulary of a drafter that proposes some tokens alone."""


@pytest.fixture(scope="module")
def texts(target: PreTrainedModel, answers: tuple[Answer, ...]) -> TextRows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_BATCH_TOKENS", 64)  # states in several parts
        return TextRows(computed_target(target, TAPS), answers, length=ROW)


def random_module(
    target: Any,
    texts: TextRows,
    kind: Literal["vanilla", "gated", "rnn"] = "rnn",
    kv_heads: int = 3,
    vocabulary: Tensor | None = None,
) -> SparkModule:
    """A drafter of random numbers that bfloat16 holds, so that writing it changes none."""
    body = DecoderShape(48, 6, kv_heads, 8, 40, 2, 1e-5, RopeShape(700.0, most_positions=256), has_head_norms=True)
    markov = MarkovShape(RANK, kind, tiny.VOCABULARY, tiny.VOCABULARY if vocabulary is None else len(vocabulary))
    shape = MaskedBlockShape(body, SLOTS, len(TAPS), 95, predicts_next=True, markov=markov, confidence="markov")
    torch.manual_seed(3)
    scale = 2.0 ** texts.tap_scale().log2().round()
    module = SparkModule(shape, target.get_input_embeddings().weight.detach(), scale)
    with torch.no_grad():
        for value in module.parameters():
            drawn = torch.randn_like(value) * value.shape[-1] ** -0.5
            value.copy_((1 + 0.2 * torch.randn_like(value) if value.dim() == 1 else drawn).bfloat16())
    return module


def head_of(target: Any) -> Tensor:
    head: Tensor = target.get_output_embeddings().weight
    return head


def write(module: SparkModule, directory: Path, weights: DraftWeights | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    weights = weights or module.weights()
    size = None if weights.vocabulary is None else len(weights.vocabulary)
    card = DraftDescription("tiny", tiny.VOCABULARY, 48, (), size, kind="block", taps=TAPS, shape=module.shape)
    write_dspark(directory, card, weights, architectures=["LlamaForCausalLM"])
    return directory


def chain(module: SparkModule, head: Tensor, hidden: Tensor, last: int, vocabulary: Tensor | None = None) -> list[int]:
    """The greedy chain of one block [slots, hidden size] by the arithmetic of the training."""
    path = [last]
    for slot in range(SLOTS):
        before = torch.tensor(path + [0] * (SLOTS - len(path)))
        mixed, _ = module.mixed(hidden, before)
        logits = hidden[slot] @ head.T + mixed[slot] @ module.get_parameter("markov_head.markov_w2.weight").T
        row = int(logits.argmax())
        path.append(row if vocabulary is None else int(vocabulary[row]))
    return path[1:]


@pytest.mark.parametrize(("kind", "kv_heads"), [("vanilla", 3), ("gated", 6), ("rnn", 2)])
def test_what_is_trained_is_what_is_served(
    kind: Literal["vanilla", "gated", "rnn"],
    kv_heads: int,
    directory: Path,
    target: PreTrainedModel,
    answers: tuple[Answer, ...],
    texts: TextRows,
    tmp_path: Path,
) -> None:
    """Slots, chains and confidences in packed texts are those that the served drafter has in each text alone."""
    module = random_module(target, texts, kind, kv_heads)
    draft = write(module, tmp_path / "draft")
    loaded = load_served_module(
        ModuleSettings(path=str(draft), weights="float32"),
        TargetSection(path=str(directory), device="cpu"),
        "block",
        (PublicModule,),
    )
    passes = MaskedBlockPass(loaded.module, loaded.ends, "float32")
    ranker = MarkovRanker(loaded.module, loaded.ends, loaded.make, loaded.shortlist)
    rows = torch.arange(texts.rows)
    anchors = torch.tensor([one[3:5] + one[-1:] for one in texts.all_anchors(rows)])
    blocks, _ = texts.blocks(rows, anchors, SLOTS)
    with torch.no_grad():
        hidden = module(texts.taps(rows), blocks)
    by_text = {(*answer.prompt, *answer.answer): answer for answer in answers}
    seen = 0
    for row, number in [(0, 0), (1, 1), (2, 2)]:
        start, place = int(blocks.starts[row, number]), int(anchors[row, number])
        text = next(one for one in by_text if list(one) == texts.text(row, start)[: len(one)])
        known = place - start
        found = target.get_decoder()(torch.tensor([text]), output_hidden_states=True)
        taps = torch.stack([found.hidden_states[tap][0] for tap in loaded.card.taps], dim=1)
        window = ContextWindow(passes.context_shape, CPU)
        window.store(0, passes.context(taps[:known], torch.arange(known)))
        served = passes.draft([text[known]], [known], [window])[0]
        torch.testing.assert_close(served, hidden[row, number], rtol=1e-4, atol=1e-4)
        contexts = [DecisionContext(GREEDY, (0,) * (known + 1 + depth), 1) for depth in range(SLOTS)]
        ranked = ranker.rank(served.unsqueeze(0), [text[known]], contexts, 1)[0]
        wanted = chain(module, loaded.ends.head, hidden[row, number], text[known])
        assert [level[0] for level in ranked.tokens] == wanted
        _, embedded = module.mixed(hidden[row, number], torch.tensor([text[known], *wanted[:-1]]))
        sure = module.sureness(hidden[row, number], embedded).sigmoid()
        confidences = torch.tensor([level[0][0] for level in ranked.confidences])
        torch.testing.assert_close(confidences, sure.detach(), rtol=1e-4, atol=1e-4)
        seen += 1
    assert seen == 3


def test_served_trees_have_the_nodes_that_the_training_counts(
    directory: Path,
    target: PreTrainedModel,
    answers: tuple[Answer, ...],
    texts: TextRows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Round after round of a sequence, as long as no decision of the target changes the trust in confidences."""
    monkeypatch.setattr(ranked_paths, "Calibration", lambda: Calibration(trust=1.0))
    monkeypatch.setattr(ranked_paths.PathCalibration, "observe", lambda *_: True)
    nodes, module = 9, random_module(target, texts)
    settings = {"path": str(write(module, tmp_path / "draft"))}
    drafter, _ = drafter_of(directory, LAYERS, "block", settings, max_nodes=nodes, max_depth=SLOTS)
    ranker, depths = Ranker(module, head_of(target), None), set()
    for answer in answers[:3]:
        text = (*answer.prompt, *answer.answer)
        states = ComputedStates(target, TAPS).of(answer)[:, : len(TAPS) * 48].bfloat16().float()
        held = 0
        for last in (PROMPT, PROMPT + 1, PROMPT + 4):
            start = None if held else SequenceStart(PROMPT, GREEDY)
            shown = (shown_states(states[max(0, held - 1) : last], max(0, held - 1)),)
            budget = DraftBudget(nodes, SLOTS)
            row = DraftRow(SequenceId(answer.key), last + 1, text[held : last + 1], budget, start, shown)
            (found,) = drafter.propose([row])
            held = last + 1

            with torch.no_grad():
                own = torch.tensor([[text[last], *[0] * (SLOTS - 1)]])
                blocks = Blocks(torch.tensor([[last]]), torch.tensor([[0]]), own.unsqueeze(0))
                hidden = module(states.unsqueeze(0), blocks)[0].expand(nodes, -1, -1)
                paths = [found.tree.path_tokens(node) for node in range(len(found.tree))]
                padded = torch.tensor([[text[last], *path, *[-1] * (SLOTS - len(path))] for path in paths])
                scores, is_on_path = ranker.ranked(hidden, padded, parents=4, siblings=8)
            counted = is_on_path.gather(1, scores.topk(nodes).indices).sum(dim=1)
            assert len(found.tree) == nodes and counted.tolist() == [len(path) for path in paths]
            depths.add(found.tree.depth())
    assert max(depths) > 1


def test_goals_and_trained_logits_have_the_factor_of_the_target(tmp_path: Path) -> None:
    """The goals are the target's probabilities, and the head is the one that the served drafter has."""
    directory = tiny.save(tmp_path / "target", tiny.granite(num_hidden_layers=LAYERS, logits_scaling=6.0))
    target = load_target(directory, CPU)
    text = (3, 9, 4, 8, 11, 30, 41, 7)
    texts = TextRows(computed_target(target, TAPS), [Answer("one", "", 0.0, False, text[:3], text[3:])], length=ROW)

    _, goal = texts.blocks(torch.tensor([0]), torch.tensor([[3]]), 1)

    with torch.inference_mode():
        wanted = target(torch.tensor([text])).logits[0, 3].softmax(-1).topk(goal.probabilities.shape[-1])
    torch.testing.assert_close(goal.probabilities[0, 0, 0], wanted.values, rtol=1e-3, atol=1e-5)
    card = DraftDescription("tiny", tiny.VOCABULARY, 48, (), None, kind="block", taps=TAPS)
    torch.testing.assert_close(scaled_head(target), load_ends(directory, card, None, torch.float32, CPU).head)


def test_the_checkpoint_is_one_of_the_library_speculators(
    target: PreTrainedModel, texts: TextRows, tmp_path: Path
) -> None:
    module = random_module(target, texts)

    card = read_draft(write(module, tmp_path / "draft"))

    assert card.kind == "block" and card.taps == TAPS and card.shape == module.shape and card.target == "tiny"
    assert is_written_here(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark" and config["sample_from_anchor"] is True


def test_rows_hold_whole_texts_with_the_states_of_the_target(
    target: PreTrainedModel, answers: tuple[Answer, ...], texts: TextRows
) -> None:
    assert texts.tokens == ROWS * (PROMPT + LENGTH) and texts.anchors == ROWS * (LENGTH - 1)
    assert texts.rows == ROWS // (ROW // (PROMPT + LENGTH))
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([3, 1])

    anchors, is_drawn = texts.drawn(rows, 20, generator)
    blocks, goal = texts.blocks(rows, anchors, SLOTS)

    assert bool(is_drawn.all()) and all(len(set(row)) == 20 for row in anchors.tolist())
    row, number = 1, 7
    start, place = int(blocks.starts[row, number]), int(anchors[row, number])
    text = texts.text(1, start)[: PROMPT + LENGTH]
    assert tuple(text) in {(*one.prompt, *one.answer) for one in answers}
    found = target(torch.tensor([text]), output_hidden_states=True)
    wanted = torch.cat([found.hidden_states[tap][0] for tap in TAPS], dim=-1)
    torch.testing.assert_close(texts.taps(rows)[row, start : start + len(text)], wanted, rtol=1e-4, atol=1e-4)
    known = place - start
    assert PROMPT <= known <= len(text) - 2
    after = text[known : known + SLOTS + 1]
    assert blocks.tokens[row, number].tolist()[: len(after)] == after[:SLOTS]
    assert goal.is_text[row, number].tolist() == [known + 1 + slot < len(text) for slot in range(SLOTS)]
    assert goal.following[row, number, 0] == text[known + 1] == goal.tokens[row, number, 0, 0]
    shares = found.logits[0, known].softmax(dim=-1).topk(64).values
    torch.testing.assert_close(goal.probabilities[row, number, 0], shares, rtol=1e-2, atol=1e-3)


def test_rows_of_states_that_are_known_are_those_of_computed_ones(
    target: PreTrainedModel, answers: tuple[Answer, ...], texts: TextRows
) -> None:
    """Both kinds of rows differ in the goal alone: the token that was written is certain."""

    def states(answer: Answer) -> Tensor:
        found = target(torch.tensor([[*answer.prompt, *answer.answer]]), output_hidden_states=True)
        return torch.cat([found.hidden_states[tap][0] for tap in TAPS], dim=-1)

    with torch.no_grad():
        found = TextRows.shown(answers, states, length=ROW)

    rows = torch.arange(texts.rows)
    torch.testing.assert_close(found.taps(rows), texts.taps(rows), rtol=1e-4, atol=1e-4)
    anchors = torch.tensor([one[:20] for one in texts.all_anchors(rows)])
    (blocks, goal), (wanted, computed) = (one.blocks(rows, anchors, SLOTS) for one in (found, texts))
    for name in ("anchors", "starts", "tokens"):
        assert torch.equal(getattr(blocks, name), getattr(wanted, name))
    assert torch.equal(goal.following, computed.following) and torch.equal(goal.is_text, computed.is_text)
    assert torch.equal(goal.tokens[..., 0][goal.is_text], goal.following[goal.is_text])
    assert goal.probabilities.shape == (*goal.is_text.shape, 1) and bool((goal.probabilities[goal.is_text] == 1).all())


def test_stored_weights_are_loaded_again(target: PreTrainedModel, texts: TextRows) -> None:
    module, other = (random_module(target, texts) for _ in range(2))
    other.load({name: value + 1 for name, value in module.weights().tensors.items()})
    assert not torch.equal(other.fc.weight, module.fc.weight)
    other.load(module.weights().tensors)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in other.state_dict().items())


def test_the_loss_has_the_gradient_of_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    vectors, second = draw(10, 6).requires_grad_(), draw(20, 2).requires_grad_()
    head, weights = draw(20, 4), draw(10).abs()
    shares, leading = draw(10, 20).softmax(dim=-1).topk(5)

    found = head_loss(vectors, head, second, SlotGoals(leading, shares, weights, 0.7))
    mine = torch.autograd.grad(found.loss, (vectors, second))

    logits = vectors[:, :4] @ head.T + vectors[:, 4:] @ second.T
    drafted = logits.softmax(dim=-1).gather(1, leading)
    each = -(shares * drafted.log()).sum(dim=1) - 0.7 * torch.minimum(shares, drafted).sum(dim=1)
    loss = (weights * each).sum()
    torch.testing.assert_close(found.loss, loss)
    for one, wanted in zip(mine, torch.autograd.grad(loss, (vectors, second)), strict=True):
        torch.testing.assert_close(one, wanted)
    assert found.is_right.tolist() == (logits.argmax(dim=-1) == leading[:, 0]).tolist()


class Calls(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.names.add(str(function))
        return function(*arguments, **(keywords or {}))


def test_a_step_reads_nothing_back_from_the_device(target: Any, texts: TextRows) -> None:
    """Each of these operations waits for a GPU: a step of a few milliseconds would take many times as long."""
    plan = BlockPlan(rows=2, blocks=8, is_bfloat16=False)
    training = BlockTraining(head_of(target), random_module(target, texts), plan)

    with Calls() as calls:
        training._step(texts, next(training._batches(texts))[1], ())

    assert "aten.mm.default" in calls.names
    assert not {name for name in calls.names if "_local_scalar_dense" in name or "nonzero" in name or "equal" in name}


def test_activations_that_are_computed_again_give_the_same_gradients(target: Any, texts: TextRows) -> None:
    found = []
    for recomputes in (False, True):
        module = random_module(target, texts)
        plan = BlockPlan(rows=2, blocks=8, recomputes=recomputes, is_bfloat16=False)
        training = BlockTraining(head_of(target), module, plan)
        loss, _ = training._losses(texts, next(training._batches(texts))[1])
        found.append(torch.autograd.grad(loss, tuple(module.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_drafter_of_all_tokens_by_name_learns_and_measures_as_one_of_all(target: Any, texts: TextRows) -> None:
    module, plan = random_module(target, texts), BlockPlan(rows=2, blocks=8, is_bfloat16=False)
    every = torch.arange(tiny.VOCABULARY)
    of_all, named = (BlockTraining(head_of(target), module, plan, vocabulary=one) for one in (None, every))
    batch = next(of_all._batches(texts))[1]

    assert named._losses(texts, batch)[0].item() == of_all._losses(texts, batch)[0].item()
    assert named.measure(texts) == of_all.measure(texts)


def test_a_drafter_of_some_tokens_learns_the_target_s_probabilities_of_these_alone(
    target: Any, texts: TextRows
) -> None:
    module = random_module(target, texts, vocabulary=SOME)
    plan = BlockPlan(rows=2, blocks=8, is_bfloat16=False, overlap=0.0)
    training = BlockTraining(head_of(target)[SOME], module, plan, vocabulary=SOME)
    batch = next(training._batches(texts))[1]
    blocks, goal = texts.blocks(batch.rows, batch.places, SLOTS)
    wanted = torch.zeros(*goal.tokens.shape[:-1], tiny.VOCABULARY).scatter_(-1, goal.tokens, goal.probabilities)
    weights = (goal.is_text & batch.is_drawn.unsqueeze(2)) * plan.decay ** torch.arange(SLOTS)
    hidden = module(texts.taps(batch.rows), blocks)
    mixed, embedded = module.mixed(hidden, blocks.tokens)
    logits = hidden @ head_of(target)[SOME].T + mixed @ module.get_parameter(SECOND).T
    entropy = -(wanted[..., SOME] * logits.softmax(dim=-1).clamp(min=1e-9).log()).sum(dim=-1)
    knows_first = (goal.tokens[..., :1] == SOME).any(dim=-1)
    is_right = (SOME[logits.argmax(dim=-1)] == goal.tokens[..., 0]) & knows_first
    doubt = torch.nn.functional.binary_cross_entropy_with_logits(
        module.sureness(hidden, embedded), is_right.float(), reduction="none"
    )
    expected = ((entropy + doubt) * weights / weights.sum()).sum()

    loss, _ = training._losses(texts, batch)

    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)  # probabilities are stored as float16
    assert knows_first.any() and not knows_first.all()


def test_a_drafter_of_some_tokens_is_stored_and_served_with_their_rows_of_the_head(
    directory: Path, target: Any, texts: TextRows, tmp_path: Path
) -> None:
    module = random_module(target, texts, vocabulary=SOME)
    head = head_of(target)[SOME]
    found = replace(module.weights(), vocabulary=SOME, head=head)
    draft = write(module, tmp_path / "draft", found)

    loaded = load_served_module(
        ModuleSettings(path=str(draft), weights="float32"),
        TargetSection(path=str(directory), device="cpu"),
        "block",
        (PublicModule,),
    )

    assert loaded.card.vocabulary_size == len(SOME) and loaded.card.shape == module.shape
    torch.testing.assert_close(loaded.ends.head, head.bfloat16().float())
    blocks, _ = texts.blocks(torch.tensor([0]), torch.tensor([texts.all_anchors(torch.tensor([0]))[0][3:5]]), SLOTS)
    with torch.no_grad():
        hidden = module(texts.taps(torch.tensor([0])), blocks)[0]
    last = blocks.tokens[0, :, 0].tolist()
    ranker = MarkovRanker(loaded.module, loaded.ends, loaded.make, loaded.shortlist)
    contexts = [DecisionContext(GREEDY, (0,), 1)] * (len(last) * SLOTS)
    ranked = ranker.rank(hidden, last, contexts, siblings=1)
    stored = head.bfloat16().float()
    for row, one in enumerate(ranked):
        assert [of_depth[0] for of_depth in one.tokens] == chain(module, stored, hidden[row], last[row], SOME)


def test_the_number_of_blocks_of_a_row_changes_no_measure(target: Any, texts: TextRows) -> None:
    module = random_module(target, texts)
    plans = (BlockPlan(rows=4, blocks=blocks, trees=(4,), is_bfloat16=False) for blocks in (1, 16))

    one, many = (BlockTraining(head_of(target), module, plan).measure(texts) for plan in plans)

    assert one == many


@pytest.mark.slow
def test_a_drafter_learns_to_draft_the_texts(target: Any, texts: TextRows) -> None:
    torch.manual_seed(0)
    module = random_module(target, texts)
    layers = [dict(target.get_decoder().layers[number].named_parameters()) for number in (0, LAYERS - 1)]
    module.start(layers, target.get_decoder().norm.weight)
    plan = BlockPlan(steps=60, rows=4, blocks=16, trees=(4, 8), learning_rate=1e-2, is_bfloat16=False)
    training = BlockTraining(head_of(target), module, plan)
    before = training.measure(texts)
    losses: list[float] = []

    state = training.run(texts, lambda found: losses.append(found.loss), report_seconds=0.0)

    after = training.measure(texts)
    assert state.step == 60 and len(losses) == 60 and losses[-1] < losses[0] - 1
    assert after.slots[0] > before.slots[0] + 0.1
    assert after.trees[8] >= after.trees[4] > after.chain > before.chain + 0.1
    assert after.chain == pytest.approx(tokens_per_step(module, target, texts))


def tokens_per_step(module: SparkModule, target: Any, texts: TextRows) -> float:
    """Tokens per step of greedy chains, step by step through each text."""
    head = target.get_output_embeddings().weight
    tokens = steps = 0
    for row, anchors in enumerate(texts.all_anchors(torch.arange(texts.rows))):
        places = torch.tensor([anchors])
        blocks, goal = texts.blocks(torch.tensor([row]), places, SLOTS)
        with torch.no_grad():
            hidden = module(texts.taps(torch.tensor([row])), blocks)[0]
        waiting = {place: number for number, place in enumerate(anchors)}
        while waiting:
            place = min(waiting)
            number = waiting[place]
            drafted = chain(module, head, hidden[number], int(blocks.tokens[0, number, 0]))
            right = [
                bool(is_text) and one == int(wanted)
                for one, wanted, is_text in zip(
                    drafted, goal.following[0, number], goal.is_text[0, number], strict=True
                )
            ]
            taken = 1 + (right.index(False) if False in right else SLOTS)
            tokens, steps = tokens + taken, steps + 1
            for index in range(place, place + taken):
                waiting.pop(index, None)
    return tokens / steps
