"""What trainings in one process on one device share: the target writes texts, and a draft is trained on its states.

A `TextWriter` has the target. The training itself reads stored hidden states, and of the target its ends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.dataclass_options import number_list
from deploy.distillation.begun_draft import begun_draft
from deploy.distillation.checkpoints import NO_CHECKPOINTS, STATE, Checkpoints, FileCheckpoints
from deploy.distillation.conversations import AnswerPlan, BatchedTarget, Write, prompt_tokens
from deploy.distillation.fitting import Fitting, Place, States
from deploy.distillation.training_card import TrainingCard, command_of
from deploy.distillation.training_directory import TrainingDirectory
from workers.distill.answers import Answer, AnswerFile, read_answers, trainable
from workers.distill.device_training import DeviceTraining
from workers.distill.eagle3.states import lengthened
from workers.distill.job import ReadStates
from workers.distill.memory import check_texts
from workers.distill.modules.tap_cache import Report, TapCache, states_of
from workers.distill.options import refuse_equal_names
from workers.distill.output import replaced_directory
from workers.distill.peers import ALONE, Peers
from workers.distill.prompts import Task, evaluation_tasks, read_prompts, schedule
from workers.distill.stored_target import StoredTarget, load_parts
from workers.distill.target_model import multiplies_bfloat16
from workers.distill.vocabulary import frequent_tokens
from workers.kv.pool_size import free_bytes
from workers.model.dequantized import weights_in_words
from workers.model.model_files import end_of_sequence_ids, resolve_model_directory
from workers.model.public_shapes import FeatureShape, MaskedBlockShape
from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint, is_dequantized
from workers.model.stored.source import stored_alone
from workers.model.target_ends import read_config

_REPORTS = 10
"""Reports of a training by several processes."""
_MOST_WORKERS = 1024
_TELL_SECONDS = 30.0
"""Pause between two lines on the hidden states that are stored, in seconds."""


def common_options(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of `python -m deploy.distillation.NAME`, with the options of all trainings."""
    parser = argparse.ArgumentParser(prog=f"python -m deploy.distillation.{name}", description=description)
    add = parser.add_argument
    add("--target", required=True, help="A model directory or a .gguf file.")
    add("--name", default="", help="The target's name in the checkpoint. Unset: that of the directory.")
    add("--prompts", type=Path, action="append", required=True, help="A file or data set of prompts. Repeatable.")
    add("--evaluate", type=Path, help="A file of prompts that are only measured on.")
    add("--evaluate-prompts", type=int, default=8, help="Evaluation prompts of each task.")
    add("--out", type=Path, required=True, help="Directory to write the checkpoint to.")
    add("--answers", type=Path, help="A file of answers. A repeated command goes on from there.")
    add("--write-seconds", type=float, default=120.0, help="Seconds in which the target writes texts.")
    add("--minutes", type=float, default=4.0, help="Minutes of training.")
    add("--end-seconds", type=float, help="Seconds after the start at which training ends, instead of --minutes.")
    add("--steps", type=int, help="Steps of training, instead of --minutes.")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=("auto", "bfloat16", "float32"), default="auto", help="Of products; auto: the device's.")
    add("--rows", type=int, default=2048, help="Conversations whose answers are stored together.")
    add("--max-tokens", type=int, default=384, help="Most tokens of an answer.")
    add("--max-prompt", type=int, default=320, help="Longer prompts, in tokens, are left out.")
    add("--max-length", type=int, default=1536, help="Most tokens of a text that is trained or measured on.")
    add("--long-share", type=float, default=0.25, help="Share of texts that get other texts before them, up to that.")
    add("--most-tokens", type=int, default=6_000_000, help="Most tokens of texts.")
    add("--temperatures", default="0,0.7,1", help="Temperatures of the first pass over a file, the second, and so on.")
    add("--held-out", type=int, default=48, help="Prompts of each file that are only measured on (a tenth at most).")
    add("--start", type=Path, help="A public draft to train further. Its sizes, taps and vocabulary stay.")
    add("--taps", default="", help="Hidden states that the draft reads. Unset: by the number of layers.")
    add("--decay", type=float, default=0.8, help="Weight of a depth relative to the one before.")
    add("--report-seconds", type=float, default=20.0, help="Seconds between two measures; the best state is kept.")
    add("--file-bytes", type=int, help="Most bytes of one file of weights. Unset: all weights are in one file.")
    add("--states", type=Path, help="Directory of the target's hidden states. Unset: beside the answers.")
    add("--workers", type=int, default=1, help="Processes that train, each with a GPU or a core; they need --steps.")
    add("--recompute", action="store_true", help="Compute activations again for the backward pass, to save memory.")
    add("--parts", type=int, default=0, help="Parts of each batch. Unset: one for each process.")
    add("--seed", type=int, default=0)
    add("--notes", type=Path, help="A Markdown file to append to the model card.")
    parser.set_defaults(command_line="", quantization="")
    return parser


def checked(chosen: argparse.Namespace, bounds: Mapping[str, tuple[int, int]]) -> argparse.Namespace:
    """The options of a command line, whose numbers have to be within bounds. Raises `ConfigurationError` for others."""
    for name, (least, most) in ({"workers": (1, _MOST_WORKERS)} | dict(bounds)).items():
        if not least <= (value := getattr(chosen, name)) <= most:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option}: {value} is refused; it must be within {least} and {most}")
    refuse_equal_names(chosen.prompts, chosen.evaluate)
    chosen.parts = chosen.parts or chosen.workers
    if chosen.workers > 1 and chosen.steps is None:
        raise ConfigurationError("--workers: needed --steps with several processes")
    return chosen


class TextWriter(Protocol):
    """Has the target in the place of the process that trains: it writes texts and computes hidden states."""

    @property
    def settings(self) -> str:
        """Names the settings that hidden states depend on beside weights; empty if all have their defaults."""

    def writing(self) -> Write:
        """What writes texts. Returns once the target can. Raises `PilotfishError`."""

    def reading(self, taps: Sequence[int]) -> ReadStates:
        """What computes these hidden states. Returns once the target can. Raises `PilotfishError`."""

    def release(self) -> None:
        """Free all memory of the target. It is loaded again where it is needed again."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Answers of the target by their use."""

    train: tuple[Answer, ...]
    measured: dict[str, tuple[Answer, ...]]
    """By the name of the prompts. Empty ones are left out."""


class SingleProcess(ABC):
    """One run of a command: the target, its texts, and the directory of the draft."""

    command: ClassVar[str]
    """The name of its module."""
    shape_type: ClassVar[type[FeatureShape] | type[MaskedBlockShape]]
    """What describes the sizes of its drafts."""

    def __init__(
        self, chosen: argparse.Namespace, told: Callable[[str], None] | None = None, peers: Peers = ALONE
    ) -> None:
        """`told` gets each line of the progress; unset: standard output. `peers` train with this process.

        Raises `ModelLoadError`, and `ConfigurationError` for layers that the target does not have.
        """
        self.peers = peers
        self.checkpoints: Checkpoints = NO_CHECKPOINTS
        self.directory_of_training: TrainingDirectory | None = None
        self.writer: TextWriter | None = None
        """What has the target. Only where all texts and their hidden states are stored, none is needed."""
        self.options = chosen
        self._told = told or _print
        self._began = time.monotonic()
        self.device = torch.device(chosen.device)
        is_bfloat16 = multiplies_bfloat16(self.device) if chosen.precision == "auto" else chosen.precision == "bfloat16"
        self.dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        cache = Path(tempfile.gettempdir()) / "pilotfish-models"
        given = Path(chosen.target)
        # What is stored quantized is read as it is: the ends, and the layers that a draft begins as.
        is_stored = given.is_dir() and (_is_computed_stored(given, self.device) or stored_alone(given) is not None)
        self.directory = resolve_model_directory(chosen.target, cache, None, self.tell, stored=is_stored)
        self.config: Any = read_config(self.directory)
        if chosen.start is not None and chosen.start.resolve() == chosen.out.resolve():
            raise ConfigurationError(
                f"--start {chosen.start}: refused as --out, which the training replaces: a repeated command would "
                "begin with another draft instead of going on"
            )
        self.begun = None if chosen.start is None else begun_draft(chosen.start, self.shape_type, self.config)
        """The draft that is trained further; `None`: a new one."""
        notes = "" if chosen.notes is None else chosen.notes.read_text(encoding="utf-8")
        name, command = chosen.name or self.directory.name, command_of(self.command, chosen)
        weights = weights_in_words(self.directory, chosen.quantization or own_quantization(self.directory))
        self.card = TrainingCard(name, command, self.device, notes, weights)
        self.taps(), self.first_layers(), self.shape()  # what is refused is so before the target writes texts

    @cached_property
    def target(self) -> StoredTarget:
        """The target as a training reads it: its ends, the layers that a draft begins as, and stored hidden states."""
        return StoredTarget(load_parts(self.directory, self.device, self.dtype, self.first_layers()), self._stored)

    @cached_property
    def _stored(self) -> TapCache:
        """The hidden states of texts in files."""
        taps = (*self.taps(), int(self.config.num_hidden_layers))
        directory = states_of(self.directory, self.options.states)
        return TapCache(directory, taps, int(self.config.hidden_size), self.options.max_length)

    @abstractmethod
    def default_taps(self) -> Sequence[int]:
        """The hidden states that the draft reads unless others are chosen."""

    @abstractmethod
    def first_layers(self) -> Sequence[int]:
        """The layers of the target that the draft begins as."""

    @abstractmethod
    def shape(self) -> FeatureShape | MaskedBlockShape:
        """The sizes of the draft: those of the one that it begins as, or what the options make of the target's layers.

        Raises `ConfigurationError`.
        """

    @abstractmethod
    def train(self, texts: Texts) -> None:
        """Train, measure and save. Raises `PilotfishError`."""

    def vocabulary(self, _: Texts) -> tuple[int, ...]:
        """The tokens that a draft for these texts can propose, ascending; empty for all of the target's."""
        return ()

    def frequent(self, texts: Texts) -> tuple[int, ...]:
        """The most frequent tokens of the answers, as many as `--vocabulary-size` says, ascending; all ends of text."""
        size, stops = int(self.config.vocab_size), end_of_sequence_ids(self.directory)
        wanted = min(self.options.vocabulary_size, size)
        return frequent_tokens((one.answer for one in texts.train), wanted, stops, size)

    def run(self) -> Texts:
        """Write texts, train, measure and save. Returns the texts. Raises `PilotfishError`."""
        texts = self.texts()
        if not self.had_ended():
            if self.peers.count == 1:
                self.store(texts)
            self.train(texts)
        self.tell(f"{self.options.out} is written")
        return texts

    def remember(self, settings: str = "") -> None:
        """Go on with this training where an earlier run left it, if texts are in a file.

        `settings` name what hidden states depend on beside weights; see `TextWriter`.
        """
        chosen = self.options
        if chosen.answers is None:
            return
        settings = f"{settings} {self.dtype}"  # without --precision, it is the machine's; each has its own optimizers
        kept = self.directory_of_training = TrainingDirectory.of(chosen, self.command, self.directory, settings)
        if chosen.workers == 1:
            self.checkpoints = FileCheckpoints(kept.path / STATE)

    def had_ended(self) -> bool:
        """Whether an earlier run ended this training; then its draft is written again."""
        kept = self.directory_of_training
        if kept is None or not kept.is_finished:
            return False
        self.tell(f"this training has ended: its draft is taken from {kept.path}; without that, it starts anew")
        if not self.peers.rank:
            kept.restore(self.options.out)
        return True

    def store(self, texts: Texts) -> None:
        """Store the hidden states of the texts that `--states` does not have yet. Ends the `TextWriter`."""
        answers = [*self.lengthened(texts.train), *chain(*texts.measured.values())]
        missing = [answer for answer in answers if not self._stored.has(answer)]
        if missing:
            self._stored.check_space(missing, "--states, or --work of pilotfish distill")
            self._stored.fill(self._writer().reading(self._stored.taps), missing, self._now_and_then())
        self.tell(f"hidden states of {len(answers):,} texts are in {self.options.states}, {len(missing):,} of them new")
        self.release()

    def drop_layers(self) -> None:
        """Free the layers that the draft began as: from here on, the training reads embedding and head alone."""
        self.target.get_decoder().layers = torch.nn.ModuleList()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        """Free the memory of the whole target."""
        if self.writer is not None:
            self.writer.release()

    def _writer(self) -> TextWriter:
        if self.writer is None:
            raise ConfigurationError("--states: needed all texts and their hidden states, since nothing has the target")
        return self.writer

    def tell(self, text: str) -> None:
        """Tell a line with the seconds since the start."""
        line = f"[{time.monotonic() - self._began:7.1f} s] {text}"
        self.card.note(line)
        self._told(line)

    def _now_and_then(self) -> Report:
        """Tells how many tokens have hidden states, but not of each batch."""
        told = time.monotonic()

        def report(done: int, wanted: int) -> None:
            nonlocal told
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                self.tell(f"hidden states of {done:,} of {wanted:,} tokens")

        return report

    def training_seconds(self) -> float:
        """The time that training has from now on."""
        chosen = self.options
        if chosen.end_seconds is None:
            return float(chosen.minutes) * 60
        return max(1.0, float(chosen.end_seconds) - (time.monotonic() - self._began))

    def taps(self) -> tuple[int, ...]:
        """The hidden states that the draft reads. Raises `ConfigurationError`."""
        chosen, count = self.options, int(self.config.num_hidden_layers)
        if self.begun is not None:
            return self.begun.taps
        taps = number_list("--taps", int)(chosen.taps) or tuple(sorted(set(self.default_taps())))
        if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= count:
            raise ConfigurationError(f"--taps: {list(taps)} is refused; they must ascend within 0 and {count - 1}")
        return taps

    def lengthened(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers, a share of them with other texts before them."""
        chosen = self.options
        return lengthened(answers, chosen.long_share, chosen.max_length, chosen.seed)

    def check_memory(self, train: Sequence[Answer], texts: Texts, token_bytes: int) -> None:
        """Raise `ConfigurationError` if the device has no room for the texts that this process keeps there.

        These are its part of `train`, and all that are measured on. A row of packed texts may take more.
        """
        own = [*train[self.peers.rank :: self.peers.count], *chain(*texts.measured.values())]
        tokens = sum(min(len(one.prompt) + len(one.answer), self.options.max_length) for one in own)
        device = self.target.get_input_embeddings().get_parameter("weight").device  # which has the target's ends now
        check_texts(tokens, token_bytes, free_bytes(device), str(device))

    def plan_values(self) -> dict[str, Any]:
        """What the options say of a plan of any kind."""
        chosen = self.options
        return {
            "parts": chosen.parts,
            "seconds": self.training_seconds(),
            "steps": chosen.steps,
            "decay": chosen.decay,
            "learning_rate": chosen.learning_rate,
            "is_bfloat16": self.dtype == torch.bfloat16,
            "recomputes": chosen.recompute,
            "seed": chosen.seed,
            "report_steps": max(1, chosen.steps // _REPORTS) if chosen.steps and self.peers.count > 1 else None,
        }

    def fit(
        self,
        training: DeviceTraining[Any, States, Any],
        texts: States,
        measured: Mapping[str, States],
        save: Callable[[], None],
    ) -> None:
        """Train, and save what is measured to draft no worse than every state before.

        The first of the `measured` texts decide: those that were held back, then those of `--evaluate`. Without any,
        the latest state is saved.
        """
        place = Place(
            out=self.options.out,
            card=self.card,
            tell=self.tell,
            peers=self.peers,
            checkpoints=self.checkpoints,
            directory=self.directory_of_training,
        )
        Fitting(training, measured, save, place).run(texts, self.options.report_seconds)

    def save(self, introduction: str, method: str, write: Callable[[Path], None]) -> None:
        """Write the checkpoint and its model card, in the place of an earlier one."""
        self.card.introduction, self.card.method = introduction, method
        if self.peers.rank:
            return
        with replaced_directory(self.options.out, self.card.text(), self.card.pictures()) as scratch:
            write(scratch)

    def texts(self) -> Texts:
        """The answers of the file, and those that the target writes in the time.

        A training that goes on has those that it began with.
        """
        chosen = self.options
        kept, is_fixed = self._kept()
        known = {answer.key for answer in kept}
        temperatures = number_list("--temperatures", float)(chosen.temperatures)
        tasks = schedule([read_prompts(path) for path in chosen.prompts], temperatures, chosen.held_out, chosen.seed)
        evaluation = (
            [] if chosen.evaluate is None else evaluation_tasks(chosen.evaluate, chosen.evaluate_prompts, chosen.seed)
        )
        names = {f"{task.key}:0" for task in evaluation}
        stops = end_of_sequence_ids(self.directory)
        plan = AnswerPlan(chosen.max_tokens, chosen.max_prompt, chosen.rows, stops, chosen.seed)
        # What is measured on may have longer prompts, and is answered whatever the time.
        judging = replace(plan, max_prompt=chosen.max_length - chosen.max_tokens)
        total = sum(len(one.prompt) + len(one.answer) for one in kept)
        groups: list[tuple[AnswerPlan, Iterable[Task], bool]] = []
        if not is_fixed:
            templates = [task for task in evaluation if task.prompt.is_template]  # they wait for long answers
            judged = self._short_enough([task for task in evaluation if task not in templates], judging.max_prompt)
            groups += [(judging, judged, False)] if judged else []
            is_open = chosen.write_seconds and total < chosen.most_tokens
            groups += [(plan, chain(templates, tasks), True)] if is_open else []
        with ExitStack() as stack:
            stored = chosen.answers if groups else None
            file = None if stored is None else stack.enter_context(AnswerFile(stored))
            for found in self._written(groups, known):
                kept += found
                if file is not None:
                    for answer in found:
                        file.append(answer)
                total += sum(len(one.prompt) + len(one.answer) for one in found)
                self.tell(f"{len(kept):,} texts, {total:,} tokens")
                if total >= chosen.most_tokens:
                    break
        held = tuple(one for one in kept if one.held_out and one.key not in names)
        evaluated = tuple(one for one in kept if one.key in names)
        measured = {"held out": held} | ({chosen.evaluate.stem: evaluated} if chosen.evaluate else {})
        texts = Texts(trainable(kept, evaluated), {name: found for name, found in measured.items() if found})
        if self.directory_of_training is not None and not is_fixed:
            self.directory_of_training.begin(kept, self.vocabulary(texts))
        return texts

    def _short_enough(self, tasks: Sequence[Task], most: int) -> list[Task]:
        """The tasks whose prompts have at most so many tokens. Says how many of which category have more."""
        tokenizer = Tokenizer.load(self.directory) if tasks else None
        long = [
            task for task in tasks if task.prompt.turns and tokenizer and len(prompt_tokens(task, tokenizer)) > most
        ]
        if long:
            named = ", ".join(
                f"{count} of {name}" for name, count in Counter(one.prompt.category for one in long).items()
            )
            self.tell(f"--evaluate: not measured on {named}: longer than --max-length less --max-tokens, {most} tokens")
        return [task for task in tasks if task not in long]

    def _kept(self) -> tuple[list[Answer], bool]:
        """The answers of the file, and whether there may be no others: a training began with them."""
        path, begun = self.options.answers, self.directory_of_training
        kept = list(read_answers(path)) if path and path.exists() else []
        is_peer = self.peers.count > 1  # the process of the command wrote the texts
        if begun is None or not (is_peer or begun.is_begun):
            return kept, is_peer
        known = begun.known(kept)
        if known is not None:
            return known, True
        if is_peer:
            raise ConfigurationError(f"--answers: {path} lacks texts with which the training in {begun.path} began")
        self.tell(f"the training in {begun.path} starts anew: {path} lacks texts with which it began")
        begun.clear()
        return kept, False

    def _written(
        self, groups: Sequence[tuple[AnswerPlan, Iterable[Task], bool]], known: Collection[str]
    ) -> Iterator[list[Answer]]:
        """What the target answers to tasks whose answers are not known, batch by batch.

        Each group says whether it ends `--write-seconds` after the target is there, which is loaded where it is needed.
        """
        ends = 0.0
        for plan, wanted, is_bounded in groups:
            unknown = (task for task in wanted if f"{task.key}:0" not in known)
            first = next(unknown, None)
            if first is None:
                continue
            write = self._writer().writing()
            tokenizer = Tokenizer.load(self.directory)
            ends = ends or time.monotonic() + self.options.write_seconds
            plan = replace(plan, ends=ends if is_bounded else None)
            found = BatchedTarget(write, tokenizer, plan)
            yield from found.answers(chain((first,), unknown))


def own_quantization(directory: Path) -> str:
    """The `target.quantization` of a target that no configuration describes."""
    return "stored" if is_dequantized(directory) else "none"


def _is_computed_stored(directory: Path, device: torch.device) -> bool:
    """Whether the serving engine multiplies with a checkpoint's quantized weights on a device as they are stored."""
    return is_dequantized(directory) and (device.type != "cuda" or not QuantizedCheckpoint(directory).gpu_problem())


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
