"""Trains a drafting module on stored hidden states, and measures it: in the engine and on text."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import torch

from cluster.core.errors import ConfigurationError, PilotfishError
from workers.distill.answers import Answer
from workers.distill.budget import MEASURED, Budget
from workers.distill.checkpoints import Progress
from workers.distill.data import DistillData, budgeted
from workers.distill.job import DistillJob, ReadStates, ServedTokens
from workers.distill.loop import EarlyStopping, long_steps
from workers.distill.modules.learner import Acceptance, ModuleTraining, TappedModule, measure
from workers.distill.modules.module_plan import checkpoint_of, module_training_plan
from workers.distill.modules.tap_cache import TapCache, states_of
from workers.distill.modules.tree_search import MOST_NODES, greedy_tree, rank_accuracies
from workers.distill.options import DistillOptions
from workers.model.draft_card import DraftCard
from workers.model.drafting.files import DraftingModule, save_drafter

Tokens = tuple[int, ...]

HELD_OUT = "held-out prompts"
MAX_STORED_LENGTH = 4096
"""Most tokens of a prompt and its answer whose states are stored, or `--max-length` if that is more: evaluated prompts
are longer than training rows."""
_PROMPTS, _MAX_TOKENS = 8, 64
"""Most prompts that the served module answers in one measurement, and most tokens of each answer."""
_WITH_TREES = ("heads", "block")
"""The kinds that predict all depths at once, so that a tree may be static."""


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """What all stages of one module share."""

    job: DistillJob
    options: DistillOptions
    """The options of the job, with the defaults of the module's kind."""
    data: DistillData
    budget: Budget
    device: torch.device

    def write(self, directory: Path, card: DraftCard, module: DraftingModule, vocabulary: torch.Tensor | None) -> None:
        """Write a module into an existing directory, in the format that describes it. Raises `ModelLoadError`."""
        save_drafter(directory, card, module, vocabulary, target_directory=self.job.target, int8=self.options.int8)

    @property
    def evaluation(self) -> str:
        """The name of the prompts of `--evaluate`."""
        return "evaluation" if self.options.evaluate is None else self.options.evaluate.name

    @property
    def is_bfloat16(self) -> bool:
        """Whether matrices are multiplied in bfloat16."""
        return self.options.precision == "bfloat16"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training found."""

    card: DraftCard
    """The card of the trained module. It has a static tree if that commits more tokens per step."""
    progress: Progress = field(default_factory=Progress)
    accepted: Mapping[str, Acceptance] = field(default_factory=dict)
    served: Mapping[str, ServedTokens] = field(default_factory=dict)
    notes: str = ""


class ServedMeasure:
    """Serves modules of one kind, and counts the tokens of each step of the target."""

    def __init__(self, job: DistillJob, kind: str, max_prompt: int) -> None:
        """Prompts of more than `max_prompt` tokens are left out."""
        self._job = job
        self._kind = kind
        self._max_prompt = max_prompt

    def chosen(self, answers: Sequence[Answer]) -> tuple[Tokens, ...]:
        """The prompts to answer: at most eight, evenly spread, the same ones for the same answers."""
        prompts = [answer.source or answer.prompt for answer in sorted(answers, key=lambda each: each.key)]
        prompts = [prompt for prompt in prompts if len(prompt) <= self._max_prompt]
        step = max(1.0, len(prompts) / _PROMPTS)
        return tuple(prompts[int(place * step)] for place in range(min(_PROMPTS, len(prompts))))

    def measure(self, write: Callable[[Path], None], prompts: Sequence[Tokens]) -> ServedTokens | None:
        """Serve the module that `write` stores in an empty directory, and answer the prompts.

        Returns `None` without prompts, or, with a notice, where the cluster does not serve it.
        """
        if not prompts:
            return None
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch))
            try:
                return self._job.served.draft_with(Path(scratch), self._kind, prompts, _MAX_TOKENS)
            except (PilotfishError, OSError, torch.OutOfMemoryError) as error:
                self._job.notices.print(f"tokens per step were not measured: {error}")
                return None
            finally:
                gc.collect()  # the memory of the cluster's KV, before the training goes on

    def identity(self, prompts: Sequence[Tokens]) -> str:
        """A hash of what a measure depends on besides the module."""
        values = self._job.configuration.model_dump(mode="json", include={"draft", "target"})
        digest = blake2b(json.dumps([self._kind, values, prompts], sort_keys=True).encode(), digest_size=8)
        return digest.hexdigest()


def stored_length(options: DistillOptions) -> int:
    """Most tokens of a prompt and its answer whose hidden states are stored."""
    return max(MAX_STORED_LENGTH, options.max_length)


def states_that_fit(run: ModuleRun, card: DraftCard, settings: str = "") -> TapCache:
    """The stored hidden states of the target with settings of that name; empty for those with all defaults.

    If the disk has no room for all others, it raises `ConfigurationError`, or with `--minutes`, which may end before
    they are computed, it prints a notice.
    """
    directory = states_of(run.job.target, run.options.work_directory / settings)
    cache = TapCache(directory, card.taps, card.hidden_size, stored_length(run.options))
    if run.options.minutes is None:
        cache.check_space(answers_of(run), "--work")
    elif lack := cache.lack_of_space(answers_of(run)):
        run.job.notices.print(f"--work: {directory}: {lack}; --minutes has to end before the disk is full")
    return cache


def fill_states(run: ModuleRun, read: ReadStates, cache: TapCache) -> None:
    """Compute the target's hidden states of all answers where they are missing, while the budget lasts."""
    longest = max(0.0, run.budget.states_end - run.budget.clock())
    with run.job.notices.stage("hidden states", longest) as stage:

        def report(done: int, wanted: int) -> None:
            stage(done / max(1, wanted), f"{done:,} of {wanted:,} tokens")

        ends = run.budget.states_end if run.options.minutes is not None else None
        cache.fill(read, answers_of(run), report, ends)


def answers_of(run: ModuleRun) -> tuple[Answer, ...]:
    """All answers. Held-out ones come first: without them nothing is measured."""
    return (*run.data.held_out, *run.data.train, *run.data.evaluation)


def served_tokens(run: ModuleRun, card: DraftCard, module: DraftingModule, vocabulary: torch.Tensor | None) -> Trained:
    """What the engine measures of a module that needs no training, on the held-out prompts."""
    engine = ServedMeasure(run.job, card.kind, run.options.max_length)

    def write(directory: Path) -> None:
        run.write(directory, card, module, vocabulary)

    found = engine.measure(write, engine.chosen(run.data.held_out))
    return Trained(card, served={} if found is None else {HELD_OUT: found})


class ModuleTrainer:
    """Trains one module as the options say."""

    def __init__(
        self,
        run: ModuleRun,
        card: DraftCard,
        tapped: TappedModule,
        vocabulary: torch.Tensor | None,
    ) -> None:
        self._run, self._card, self._vocabulary = run, card, vocabulary
        self._tapped = tapped
        self._held_out = [answer for answer in run.data.held_out if tapped.cache.has(answer)]
        self._plan = module_training_plan(run.options)
        self._engine = ServedMeasure(run.job, card.kind, run.options.max_length)
        self._prompts = self._engine.chosen(run.data.held_out)
        self._cost = 0.0  # seconds of the longest measurement
        self._best: ServedTokens | None = None  # of the best state that this run measured

    def train(self) -> Trained:
        """Train, measure on the way, and keep the best state. Raises `ConfigurationError` without hidden states."""
        run, prompts = self._run, self._engine.chosen(self._run.data.evaluation)
        progress = self._trained()
        is_older = self._best is None or self._best.tokens_per_step < progress.best_served
        if progress.served and is_older and self._has_time():
            self._best = self._serve(self._card, self._prompts)  # an earlier run measured the best state
        card, notes = self._with_tree(self._best)
        found = self._serve(card, prompts) if self._has_time() else None
        served = {name: each for name, each in ((HELD_OUT, self._best), (run.evaluation, found)) if each is not None}
        accepted = {
            HELD_OUT: self._accepted(self._held_out, run.options.max_length),
            run.evaluation: self._accepted(run.data.evaluation, MAX_STORED_LENGTH),
        }
        return Trained(card, progress, {key: each for key, each in accepted.items() if each.paths}, served, notes)

    def _trained(self) -> Progress:
        run, options = self._run, self._run.options
        answers = [answer for answer in run.data.train if self._tapped.cache.has(answer)]
        if not answers:
            raise ConfigurationError(
                f"--minutes: {options.minutes} is refused; its share of {run.budget.state_seconds:.0f} s gave the "
                f"hidden states of no answer to train on"
            )
        checkpoint = checkpoint_of(options)
        plan = budgeted(self._plan.training, checkpoint, run.budget)
        training = ModuleTraining(
            self._tapped,
            answers,
            self._held_out,
            replace(self._plan, training=plan),
            checkpoint,
            early_stopping=EarlyStopping(self._measure, self._engine.identity(self._prompts), cost=MEASURED),
        )
        with run.job.notices.stage("training", run.budget.left_for_training()) as stage:

            def report(progress: Progress, done: float) -> None:
                loss = f", loss {progress.losses[-1][2]:.3f}" if progress.losses else ""
                tokens = f", {progress.served[-1][-1]:.2f} tokens per step" if progress.served else ""
                stage(done, f"epoch {progress.epoch}, step {progress.step}{loss}{tokens}")

            progress = training.run(report)
        if note := long_steps(progress, plan):
            run.job.notices.print(note)
        return progress

    def _measure(self) -> float | None:
        found = self._serve(self._card, self._prompts)
        if found is None:
            return None
        if self._best is None or found.tokens_per_step > self._best.tokens_per_step:
            self._best = found
        return found.tokens_per_step

    def _serve(self, card: DraftCard, prompts: Sequence[Tokens]) -> ServedTokens | None:
        def write(directory: Path) -> None:
            self._run.write(directory, card, self._tapped.module, self._vocabulary)

        begun = time.monotonic()
        found = self._engine.measure(write, prompts)
        self._cost = max(self._cost, time.monotonic() - begun)
        return found

    def _has_time(self) -> bool:
        """Whether one more measurement ends within the budget."""
        return self._run.budget.left() > self._cost

    def _with_tree(self, dynamic: ServedTokens | None) -> tuple[DraftCard, str]:
        """The card with the static tree of the highest expected accepted length, if the engine accepts more with it."""
        run, card, options = self._run, self._card, self._run.options
        if dynamic is None or card.kind not in _WITH_TREES or not self._has_time():
            return card, ""
        accuracies = rank_accuracies(self._tapped, self._held_out, options.max_length, autocast=self._run.is_bfloat16)
        tree = greedy_tree(accuracies, MOST_NODES)
        if len(tree) < run.job.configuration.draft.max_nodes:  # a target would draft the most probable nodes instead
            return card, ""
        static = self._serve(replace(card, tree=tree), self._prompts)
        if static is None:
            return card, ""
        is_better = static.tokens_per_step > dynamic.tokens_per_step
        return replace(card, tree=tree) if is_better else card, (
            f"## Static tree\n\nThe static tree of the highest expected accepted length (Medusa's greedy search on "
            f"held-out answers) has {static.tokens_per_step:.2f} tokens per step on the held-out prompts, the trees of "
            f"the most probable nodes {dynamic.tokens_per_step:.2f}. The draft uses the "
            f"{'static tree' if is_better else 'latter'}.\n"
        )

    def _accepted(self, answers: Sequence[Answer], max_length: int) -> Acceptance:
        depths = self._plan.measured_depths
        return measure(self._tapped, answers, max_length, depths, autocast=self._run.is_bfloat16)
