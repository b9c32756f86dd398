"""What the learner's process does: it reads a task, trains a copy of the weights, and measures both on held-back texts.

It computes with one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftModuleSection
from cluster.core.config.sections import Configuration
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Evidence, HiddenStates
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from workers.distill.online import OnlinePlan, ServedText, train_online
from workers.distill.online_model import load_served_student, train_model_online
from workers.distill.target_head import TargetHead, read_target_head
from workers.draft.common.learning import CollectedText, LearnsOnline, salt_key
from workers.draft.registry import create
from workers.model.draft_card import LAYERS
from workers.model.drafting.files import load_drafter, parameters_of
from workers.model.weight_files import stated_layers
from workers.sampling.acceptance import DecidedTree
from workers.serve.configuration import load_configuration
from workers.serve.learning.messages import NOISE, Candidate, Task, steps_saved

_STEPS = {"heads": 200, "eagle": 100, "block": 100, LAYERS: 100}
"""Steps of a training by the kind of the draft. Those with layers take longer."""
_MOST_PRODUCTS = 2e12
"""Most products of two numbers by which one training learns the target's probabilities: about a minute of one core."""


def run() -> None:
    """Read a task from standard input, a file, and write the candidate to standard output."""
    torch.set_num_threads(1)
    learn(Task.read(Path("/proc/self/fd/0"))).write(sys.stdout.buffer)


def learn(task: Task) -> Candidate:
    """Train and measure; see `Candidate`.

    Where the traffic has changed, the weights of the draft's files may be better than those that are served. If that is
    beyond the noise, they are the candidate at once; else the training begins with the better ones of both.
    """
    configuration = load_configuration(task.configuration)
    trainable = _trainable(configuration, task.seed)
    original = _rounded(trainable.parameters)
    before, first = (_rounds(configuration, weights, task.held_back) for weights in (task.weights, original))
    tokens = tuple(max(0, len(text.tokens) - text.base_len) for text in task.held_back)
    saved = steps_saved(before, first)
    if saved > NOISE:
        return Candidate(original, before, first, tokens)
    best, after = (original, first) if saved > 0 else (task.weights, before)
    texts = _goals_of(trainable, task.training)
    left_out = [trainable.text(text) for text in task.left_out]
    with torch.enable_grad():
        trained = _rounded(trainable.train(parameters=best, texts=texts, left_out=left_out))
    rounds = _rounds(configuration, trained, task.held_back)
    if steps_saved(after, rounds) >= 0:
        best, after = trained, rounds
    return Candidate(best, before, after, tokens)


def _goals_of(trainable: _Trainable, texts: Sequence[CollectedText]) -> list[ServedText]:
    """The texts to take steps on, with the target's probabilities of as many of the latest ones as there is time for.

    With a large vocabulary, those of all texts would take longer than the whole training may.
    """
    left, found = _MOST_PRODUCTS, list[ServedText]()
    for text in reversed(texts):
        left -= trainable.position_products * (1 + len(text.tokens) - text.base_len)
        found.append(trainable.goals(text) if left >= 0 else trainable.text(text))
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a module finds what it reads among the hidden states that the target showed of a text."""

    hidden_size: int
    own: tuple[int, ...]
    """The taps that the module reads."""
    last: int | None
    """The last layer's output; `None` where the target did not show it."""

    def text(self, text: CollectedText) -> ServedText:
        """The text with the taps of the module alone."""
        taps = text.hidden.view(len(text.hidden), -1, self.hidden_size)
        own = taps[:, list(self.own)].flatten(1)
        return ServedText(text.tokens, text.base_len, text.first, own, failures=text.failures)

    def goals(self, head: TargetHead | None, text: CollectedText) -> ServedText:
        """A text to learn from, with the target's most probable tokens where its head and last layer are known."""
        found = self.text(text)
        if head is None or self.last is None:
            return found
        written = text.base_len - 1
        states = text.hidden.view(len(text.hidden), -1, self.hidden_size)[written - 1 - text.first :, self.last]
        return replace(found, leading=head.leading(states, torch.tensor(text.tokens[written:]), text.start.sampling))


@dataclass(frozen=True, slots=True)
class _Trainable:
    """A draft that is trained."""

    parameters: Mapping[str, Tensor]
    """The parameters that the draft's files have, by name."""
    train: Callable[..., Mapping[str, Tensor]]
    """The training that `parameters`, `texts` and `left_out` are given to."""
    text: Callable[[CollectedText], ServedText]
    """What the training reads of a text that it measures on."""
    goals: Callable[[CollectedText], ServedText]
    """What it reads of a text that it takes steps on."""
    position_products: int = 0
    """Products of two numbers that `goals` takes for each token of an answer."""


def _trainable(configuration: Configuration, seed: int) -> _Trainable:
    """The draft of the configuration."""
    target, taken = Path(configuration.target.path), configuration.target.evidence.taps
    if (model := configuration.draft.weights) is not None:
        student = load_served_student(Path(model.path), target)
        plan = OnlinePlan(_STEPS[model.draft_kind], seed=seed)
        return _Trainable(student.own_parameters(), partial(train_model_online, student, plan=plan), _tokens, _tokens)
    (settings,) = configuration.draft.modules.values()
    kind, taps = settings.draft_kind, settings.taps if isinstance(settings, DraftModuleSection) else ()
    loaded = load_drafter(Path(settings.path), target, torch.float32, torch.device("cpu"), kind, taps=taps)
    plan = OnlinePlan(_STEPS[kind], seed=seed)
    layers = stated_layers(target)
    last = next((column for column, tap in enumerate(taken) if tap in (-1, layers)), None)
    columns = _Columns(loaded.card.hidden_size, tuple(taken.index(tap) for tap in loaded.card.taps), last)
    head = None if last is None else read_target_head(target, loaded.card, loaded.ends.vocabulary)
    train = partial(train_online, loaded.module, ends=loaded.ends, plan=plan)
    products = 0 if head is None else head.position_products
    return _Trainable(parameters_of(loaded.module), train, columns.text, partial(columns.goals, head), products)


def _tokens(text: CollectedText) -> ServedText:
    """What a draft model reads of a text."""
    return ServedText(text.tokens, text.base_len, text.first, text.hidden)


def _rounds(
    configuration: Configuration, weights: Mapping[str, Tensor], texts: Sequence[CollectedText]
) -> tuple[int, ...]:
    """The steps of each text with these weights, drafted by a method that has drafted nothing before."""
    method = create(configuration.draft, configuration.target)
    if not isinstance(method, LearnsOnline) or method.weights is None:
        raise ConfigurationError(f"draft.learn: the method {configuration.draft.name} does not learn")
    method.ignore_times()
    for key in {salt_key(text.start.cache_salt) for text in texts}:
        method.weights.replace(key, weights)
    return tuple(len(rounds_of(method, configuration, text)) for text in texts)


def rounds_of(method: LearnsOnline, configuration: Configuration, text: CollectedText) -> list[int]:
    """The tokens that each step decides of a text if the method drafts: the verifier's walk, from draft to draft.

    The target decides a token by its position alone, so its decisions along a right path are the tokens of the text.
    """
    tokens = text.tokens
    name, draft = SequenceId("text"), configuration.draft
    synced, length, rounds = 0, text.base_len, list[int]()
    while synced < len(tokens):
        shown = max(0, synced - 1 - text.first)
        rows = text.hidden[shown : length - 1 - text.first]
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()
        hidden = HiddenStates(text.first + shown, rows.shape[1], data) if data else None
        evidence = Evidence(length, hidden=hidden)
        row = DraftRow(
            name,
            length,
            tokens[synced:length],
            # After the last step, the method is still shown what became of its last draft.
            DraftBudget(draft.max_nodes, draft.max_depth) if length < len(tokens) else NO_DRAFT,
            text.start if synced == 0 else None,
            (evidence,),
        )
        (proposal,) = method.propose([row])
        synced = length
        if length < len(tokens):
            rounds.append(_decided(proposal.tree, tokens, length))
            length += rounds[-1]
    method.release([name])
    return rounds


def _decided(tree: TokenTree, tokens: Sequence[int], length: int) -> int:
    """The tokens of a text that the step decides which verifies the tree, drafted after `length` of them."""
    # Beyond the text, and below a wrong node, nothing is decided.
    decisions = [tokens[length]]
    for node, depth in enumerate(tree.depths()):
        end = length + depth
        is_right = end < len(tokens) and tree.path_tokens(node) == tokens[length:end]
        decisions.append(tokens[end] if is_right else -1)
    return len(DecidedTree(tree, decisions).walk().decided().tokens)


def _rounded(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights, rounded to the type that they are stored in."""
    return {name: value.detach().bfloat16().float() for name, value in weights.items()}
