"""One process on one device writes texts and trains an EAGLE-3 head on them; `pilotfish distill --kind eagle3`.

The head is written as a checkpoint of the library `speculators`, which other engines read as well. `python -m
deploy.distillation.eagle3` is the same without the rest of Pilotfish: it needs neither Ray nor a cluster.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from cluster.core.errors import ConfigurationError, PilotfishError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.distillation.conversations import AnswerPlan, BatchedTarget
from workers.distill.answers import Answer, AnswerFile, read_answers
from workers.distill.eagle3.head import Eagle3Head
from workers.distill.eagle3.states import TextStates, lengthened
from workers.distill.eagle3.training import Measured, RollOutPlan, RollOutTraining, State
from workers.distill.output import replaced_directory
from workers.distill.prompts import Task, by_task, read_prompts, schedule
from workers.distill.target_model import load_target
from workers.distill.vocabulary import frequent_tokens
from workers.model.draft_card import DraftDescription
from workers.model.formats.speculators import write_eagle3
from workers.model.model_files import end_of_sequence_ids, resolve_model_directory
from workers.model.public_shapes import DecoderShape, FeatureShape, RopeShape

_STATE_TOKENS = 16384
"""Tokens of one pass of the target that computes hidden states, padding included."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.distillation.eagle3", description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="A model directory or a .gguf file.")
    add("--name", default="", help="The target's name in the checkpoint. Unset: that of the directory.")
    add("--prompts", type=Path, action="append", required=True, help="A JSONL file of prompts. May be repeated.")
    add("--evaluate", type=Path, help="A JSONL file of prompts that are only measured on.")
    add("--evaluate-prompts", type=int, default=8, help="Evaluation prompts of each task.")
    add("--out", type=Path, required=True, help="Directory to write the checkpoint to.")
    add("--answers", type=Path, help="A file of answers. Those in it are used, and new ones are added.")
    add("--write-seconds", type=float, default=120.0, help="Seconds in which the target writes texts.")
    add("--minutes", type=float, default=4.0, help="Minutes of training.")
    add("--steps", type=int, help="Steps of training, instead of --minutes.")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rows", type=int, default=1536, help="Conversations that the target writes at once.")
    add("--max-tokens", type=int, default=384, help="Most tokens of an answer.")
    add("--max-prompt", type=int, default=320, help="Longer prompts, in tokens, are left out.")
    add("--max-length", type=int, default=1536, help="Most tokens of a text that is trained or measured on.")
    add("--long-share", type=float, default=0.25, help="Share of texts that get other texts before them, up to that.")
    add("--most-tokens", type=int, default=6_000_000, help="Most tokens of texts that are kept on the device.")
    add("--temperatures", default="0,0.7,1", help="Temperatures of the first pass over a file, the second, and so on.")
    add("--held-out", type=int, default=48, help="Prompts of each file that are only measured on (a tenth at most).")
    add("--vocabulary-size", type=int, default=8192, help="Tokens that the head can propose.")
    add("--taps", default="", help="Hidden states that it reads. Unset: 2, half of the layers, and all but three.")
    add("--tap-norm", choices=("each", "none"), default="each", help="Whether each hidden state is normalised.")
    add("--depths", type=int, default=5, help="Steps of a roll-out.")
    add("--decay", type=float, default=0.8, help="Weight of a step relative to the one before.")
    add("--learning-rate", type=float, default=1e-3)
    add("--batch-tokens", type=int, default=16384, help="Tokens of a batch, padding included.")
    add("--report-seconds", type=float, default=20.0)
    add("--save-seconds", type=float, default=60.0)
    add("--file-bytes", type=int, default=15_000_000, help="Most bytes of one file of weights.")
    add("--seed", type=int, default=0)
    add("--notes", type=Path, help="A Markdown file to append to the model card.")
    return parser.parse_args(arguments)


def shape_of(config: Any, taps: Sequence[int], *, is_normed: bool) -> FeatureShape:
    """A head with one layer of the target's sizes. `config` is a Llama-like configuration of `transformers`."""
    heads = int(config.num_attention_heads)
    size = int(config.hidden_size)
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    body = DecoderShape(
        hidden_size=size,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_width=int(getattr(config, "head_dim", None) or size // heads),
        intermediate_size=int(config.intermediate_size),
        layers=1,
        norm_epsilon=float(getattr(config, "rms_norm_eps", 1e-5)),
        rope=RopeShape(float(theta), most_positions=int(config.max_position_embeddings)),
    )
    return FeatureShape(
        body,
        entry="wide",
        taps=len(taps),
        target_hidden_size=size,
        tap_norm="each" if is_normed else "none",
        keeps_normed_residual=True,
    )


@dataclass(frozen=True, slots=True)
class Texts:
    """Answers of the target by their use."""

    train: tuple[Answer, ...]
    measured: dict[str, tuple[Answer, ...]]
    """By the name of the prompts."""


class Run:
    """One run of the command."""

    def __init__(self, chosen: argparse.Namespace, told: Callable[[str], None] | None = None) -> None:
        """`told` gets each line of the progress; unset: standard output. Raises `ModelLoadError`."""
        self.options = chosen
        self._told, self._lines = told or _print, list[str]()
        self._began = time.monotonic()
        self.device = torch.device(chosen.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        cache = Path(tempfile.gettempdir()) / "pilotfish-models"
        self.directory = resolve_model_directory(chosen.target, cache, None, self.tell)
        self.config = AutoConfig.from_pretrained(self.directory, trust_remote_code=False)
        self.target = load_target(self.directory, self.device, dtype)
        self.tell(f"target {self.directory.name} in {dtype} on {self._device_name()}")

    def tell(self, text: str) -> None:
        """Tell a line with the seconds since the start."""
        line = f"[{time.monotonic() - self._began:7.1f} s] {text}"
        self._lines.append(line)
        self._told(line)

    def run(self) -> Texts:
        """Write texts, train, measure and save. Returns the texts. Raises `PilotfishError`."""
        chosen = self.options
        texts = self._texts()
        stops = end_of_sequence_ids(self.directory)
        size = int(self.config.vocab_size)
        vocabulary = frequent_tokens(
            (one.answer for one in texts.train), min(chosen.vocabulary_size, size), stops, size
        )
        count = int(self.config.num_hidden_layers)
        taps = tuple(int(one) for one in chosen.taps.split(",") if one) or (2, count // 2, count - 3)
        if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= count:
            raise ConfigurationError(f"--taps: {list(taps)} is refused; they must ascend within 0 and {count - 1}")
        states = self._states(lengthened(texts.train, chosen.long_share, chosen.max_length, chosen.seed), taps)
        measured = {name: self._states(answers, taps) for name, answers in texts.measured.items() if answers}
        head = self._head(taps, vocabulary)
        plan = RollOutPlan(
            chosen.minutes * 60,
            chosen.steps,
            depths=chosen.depths,
            decay=chosen.decay,
            learning_rate=chosen.learning_rate,
            batch_tokens=chosen.batch_tokens,
            is_bfloat16=self.device.type == "cuda",
            seed=chosen.seed,
        )
        rows = torch.tensor(vocabulary, device=self.device)
        training = RollOutTraining(self.target, head, rows, plan)
        card = DraftDescription(
            chosen.name or self.directory.name,
            size,
            int(self.config.hidden_size),
            (),
            len(vocabulary),
            kind="eagle",
            taps=taps,
            shape=head.shape,
        )
        saved = time.monotonic()

        def report(state: State) -> None:
            nonlocal saved
            found = ", ".join(f"{name} {_told(training.measure(each))}" for name, each in measured.items())
            place = f"epoch {state.epoch}, step {state.step}"
            self.tell(f"training {state.seconds:.0f} s: {place}, loss {state.loss:.4f}; {found}")
            if time.monotonic() - saved >= chosen.save_seconds:
                self._save(card, head, rows)
                saved = time.monotonic()

        training.run(states, report, chosen.report_seconds)
        self._save(card, head, rows)
        self.tell(f"{chosen.out} is written")
        return texts

    def _texts(self) -> Texts:
        """The answers of the file, and those that the target writes in the time."""
        chosen = self.options
        kept: list[Answer] = list(read_answers(chosen.answers)) if chosen.answers and chosen.answers.exists() else []
        known = {answer.key for answer in kept}
        temperatures = [float(one) for one in chosen.temperatures.split(",")]
        tasks = schedule([read_prompts(path) for path in chosen.prompts], temperatures, chosen.held_out, chosen.seed)
        evaluation = self._evaluation()
        names = {f"{task.key}:0" for task in evaluation}
        plan = AnswerPlan(
            chosen.max_tokens,
            chosen.max_prompt,
            chosen.rows,
            end_of_sequence_ids(self.directory),
            chosen.seed,
            time.monotonic() + chosen.write_seconds,
        )
        tokenizer = Tokenizer.load(self.directory)
        # What is measured on may be longer; it shares no batch, whose rows all have the length of the longest.
        judging = replace(plan, max_prompt=chosen.max_length - chosen.max_tokens, ends=None)
        groups = [(judging, evaluation)] + ([(plan, tasks)] if chosen.write_seconds else [])
        total = sum(len(one.prompt) + len(one.answer) for one in kept)
        written = chain.from_iterable(
            BatchedTarget(self.target, tokenizer, each, self.tell).answers(
                task for task in wanted if f"{task.key}:0" not in known
            )
            for each, wanted in groups
        )
        for found in written:
            kept += found
            total += sum(len(one.prompt) + len(one.answer) for one in found)
            self.tell(f"{len(kept):,} texts, {total:,} tokens")
            if total >= chosen.most_tokens:
                break
        if chosen.answers is not None:
            with AnswerFile(chosen.answers) as file:
                for answer in kept:
                    if answer.key not in known:
                        file.append(answer)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        held = tuple(one for one in kept if one.held_out and one.key not in names)
        judged = tuple(one for one in kept if one.key in names)
        return Texts(
            tuple(one for one in kept if not one.held_out),
            {"held out": held} | ({chosen.evaluate.stem: judged} if chosen.evaluate else {}),
        )

    def _evaluation(self) -> list[Task]:
        """The first turns of some prompts of each task of the evaluation."""
        chosen = self.options
        if chosen.evaluate is None:
            return []
        return [
            Task(replace(prompt, turns=prompt.turns[:1]), 0, 0.0, chosen.seed, held_out=True)
            for prompts in by_task(read_prompts(chosen.evaluate)).values()
            for prompt in islice(prompts, chosen.evaluate_prompts)
        ]

    def _states(self, answers: Sequence[Answer], taps: Sequence[int]) -> TextStates:
        chosen = self.options
        states = TextStates(
            self.target,
            answers,
            taps,
            max_length=chosen.max_length,
            batch_tokens=min(_STATE_TOKENS, chosen.batch_tokens),
        )
        self.tell(f"hidden states of {len(answers):,} texts, {states.tokens:,} tokens")
        return states

    def _head(self, taps: Sequence[int], vocabulary: Sequence[int]) -> Eagle3Head:
        """A head that begins as the target's last layer, on the target's device."""
        torch.manual_seed(self.options.seed)
        shape = shape_of(self.config, taps, is_normed=self.options.tap_norm == "each")
        head = Eagle3Head(shape, len(vocabulary)).to(self.device)
        decoder = self.target.get_decoder()
        layer = {name: value.detach() for name, value in decoder.layers[-1].named_parameters()}
        rows = self.target.get_output_embeddings().weight.detach()[torch.tensor(vocabulary, device=self.device)]
        head.start(layer, decoder.norm.weight.detach(), rows)
        self.tell(f"head of {sum(one.numel() for one in head.parameters()):,} parameters reads layers {list(taps)}")
        return head

    def _save(self, card: DraftDescription, head: Eagle3Head, vocabulary: torch.Tensor) -> None:
        """Write the checkpoint and its model card, in the place of an earlier one."""
        with replaced_directory(self.options.out, self._card(card, head), {}) as scratch:
            write_eagle3(
                scratch,
                card,
                head.weights(vocabulary),
                architectures=self.config.architectures or (),
                speculative_tokens=self.options.depths,
                file_bytes=self.options.file_bytes,
            )

    def _card(self, card: DraftDescription, head: Eagle3Head) -> str:
        chosen = self.options
        words = [f"--{name.replace('_', '-')} {_word(value)}" for name, value in sorted(vars(chosen).items()) if value]
        notes = "" if chosen.notes is None else f"\n{chosen.notes.read_text(encoding='utf-8').strip()}\n"
        lines = "\n".join(f"    {line}" for line in self._lines)
        return f"""\
# A draft for {card.target}

An EAGLE-3 head (Li et al. 2025) as the library `speculators` stores it: one decoder layer on the target's hidden
states after {", ".join(map(str, card.taps))} layers. It proposes tokens for {card.target} and works with no other
target. Every token that a client reads is the target's own decision. It has
{sum(one.numel() for one in head.parameters()):,} parameters, stored in bfloat16, and can propose
{card.vocabulary_size:,} different tokens. The embedding is the target's.

## How it was made

The target wrote texts (Seq-KD, Kim & Rush 2016), and the head learned the target's probabilities in its own roll-outs
of {chosen.depths} steps, on {self._device_name()}. `slots` are the shares of right tokens after right ones in greedy
chains.

```
python -m deploy.distillation.eagle3 {" ".join(words)}
```

{lines}
{notes}"""

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def _told(found: Measured) -> str:
    slots = " ".join(f"{share:.1%}" for share in found.slots)
    return f"{found.tokens_per_step:.3f} tokens per step (slots {slots})"


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _word(value: object) -> str:
    """A value of an option as the model card shows it: paths lose their directories."""
    if isinstance(value, list):
        return " ".join(map(_word, value))
    return Path(value).name if isinstance(value, (str, Path)) else str(value)


def main() -> int:
    """Run the command. Returns its exit code."""
    try:
        Run(options()).run()
    except PilotfishError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
