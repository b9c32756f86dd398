"""What the learner's process does: it reads a task, trains a copy of the weights, and measures both on held-back texts.

It computes with one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftModuleSection
from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget, DraftRow, Evidence, HiddenStates
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from workers.distill.online import OnlinePlan, ServedText, train_online
from workers.distill.online_model import load_served_student, train_model_online
from workers.draft.common.learning import CollectedText, LearnsOnline, salt_key
from workers.draft.registry import create
from workers.model.draft_card import LAYERS
from workers.model.drafting.files import load_drafter, parameters_of
from workers.sampling.acceptance import DecidedTree
from workers.serve.configuration import load_configuration
from workers.serve.learning.messages import NOISE, Candidate, Task, steps_saved

_STEPS = {"heads": 200, "eagle": 100, "block": 100, LAYERS: 100}
"""Steps of a training by the kind of the draft. Those with layers take longer."""


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
    parameters, train = _trainable(configuration, task.seed)
    original = _rounded(parameters)
    before, first = (_rounds(configuration, weights, task.held_back) for weights in (task.weights, original))
    tokens = tuple(max(0, len(text.tokens) - text.base_len) for text in task.held_back)
    saved = steps_saved(before, first)
    if saved > NOISE:
        return Candidate(original, before, first, tokens)
    best, after = (original, first) if saved > 0 else (task.weights, before)
    texts, left_out = (
        [ServedText(text.tokens, text.base_len, text.first, text.hidden) for text in part]
        for part in (task.training, task.left_out)
    )
    with torch.enable_grad():
        trained = _rounded(train(parameters=best, texts=texts, left_out=left_out))
    rounds = _rounds(configuration, trained, task.held_back)
    if steps_saved(after, rounds) >= 0:
        best, after = trained, rounds
    return Candidate(best, before, after, tokens)


def _trainable(configuration: Configuration, seed: int) -> tuple[Mapping[str, Tensor], partial[Mapping[str, Tensor]]]:
    """The parameters of the draft's files, and the training that `parameters`, `texts` and `left_out` are given to."""
    target = Path(configuration.target.path)
    if (model := configuration.draft.weights) is not None:
        student = load_served_student(Path(model.path), target)
        plan = OnlinePlan(_STEPS[model.draft_kind], seed=seed)
        return student.own_parameters(), partial(train_model_online, student, plan=plan)
    (settings,) = configuration.draft.modules.values()
    kind, taps = settings.draft_kind, settings.taps if isinstance(settings, DraftModuleSection) else ()
    loaded = load_drafter(Path(settings.path), target, torch.float32, torch.device("cpu"), kind, taps=taps)
    plan = OnlinePlan(_STEPS[kind], seed=seed)
    return parameters_of(loaded.module), partial(train_online, loaded.module, ends=loaded.ends, plan=plan)


def _rounds(
    configuration: Configuration, weights: Mapping[str, Tensor], texts: Sequence[CollectedText]
) -> tuple[int, ...]:
    """The steps of each text with these weights, drafted by a method that has drafted nothing before."""
    method = create(configuration.draft, configuration.target)
    if not isinstance(method, LearnsOnline) or method.weights is None:
        raise ConfigurationError(f"draft.learn: the method {configuration.draft.name} does not learn")
    for key in {salt_key(text.start.cache_salt) for text in texts}:
        method.weights.replace(key, weights)
    return tuple(rounds_of(method, configuration, text) for text in texts)


def rounds_of(method: LearnsOnline, configuration: Configuration, text: CollectedText) -> int:
    """The steps that the target needs for a text if the method drafts: the verifier's walk, from draft to draft.

    The target decides a token by its position alone, so its decisions along a right path are the tokens of the text.
    """
    tokens = text.tokens
    name, draft = SequenceId("text"), configuration.draft
    synced, length, rounds = 0, text.base_len, 0
    while length < len(tokens):
        shown = max(0, synced - 1 - text.first)
        rows = text.hidden[shown : length - 1 - text.first]
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()
        hidden = HiddenStates(text.first + shown, rows.shape[1], data) if data else None
        evidence = Evidence(length, hidden=hidden)
        row = DraftRow(
            name,
            length,
            tokens[synced:length],
            DraftBudget(draft.max_nodes, draft.max_depth),
            text.start if synced == 0 else None,
            (evidence,),
        )
        (proposal,) = method.propose([row])
        tree = proposal.tree
        # Beyond the text, and below a wrong node, nothing is decided.
        decisions = [tokens[length]]
        for node, depth in enumerate(tree.depths()):
            end = length + depth
            is_right = end < len(tokens) and tree.path_tokens(node) == tokens[length:end]
            decisions.append(tokens[end] if is_right else -1)
        synced, length, rounds = length, length + len(DecidedTree(tree, decisions).walk().tokens), rounds + 1
    method.release([name])
    return rounds


def _rounded(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights, rounded to the type that they are stored in."""
    return {name: value.detach().bfloat16().float() for name, value in weights.items()}
