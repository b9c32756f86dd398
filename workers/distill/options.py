"""The options of a distillation: the recipe of its training, and what one run adds to it.

Each is declared once, with its type, default and help text. A recipe is read from a file or from the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict

from cluster.core.bounds import MAX_TEMPERATURE
from cluster.core.errors import ConfigurationError, shorten
from workers.model.draft_card import LAYERS
from workers.model.draft_shapes import SHAPES

EAGLE3, DSPARK = "eagle3", "dspark"
SINGLE_PROCESS = (EAGLE3, DSPARK)
"""The kinds of drafts that are trained in one process, and stored as these public formats name them.

Their modules are of the kinds `eagle` and `block`.
"""
PLANNED = (*SINGLE_PROCESS, LAYERS, *(kind for kind in SHAPES if kind != "table"))
"""The kinds whose memory is known before they are trained: all that a device trains."""
KINDS = (LAYERS, *SHAPES, *SINGLE_PROCESS)

PATHS = ("heads", "block", "eagle")
"""The kinds that are trained on paths of drafted tokens."""
LOSSES = ("forward_kl", "reverse_kl", "overlap")
"""The names of the divergences."""

_READ_BY: Mapping[str, tuple[str, ...]] = {
    "field": (LAYERS, *SHAPES),
    "student_config": (LAYERS,),
    "layers": (LAYERS, "block", "eagle", "exit", DSPARK),
    "taps": (*PATHS, *SINGLE_PROCESS),
    "depths": ("heads", "block", "table", *SINGLE_PROCESS),
    "mix_rank": ("heads",),
    "selector_rank": ("heads", "block"),
    "optimizer": PATHS,
    "int8": PATHS,
    "search": ("exit",),
    "loss": tuple(kind for kind in KINDS if kind not in ("table", DSPARK)),
    "overlap_weight": tuple(kind for kind in KINDS if kind != "table"),
    "on_policy": (LAYERS,),
    "rejection_weight": (LAYERS, *PATHS),
    "pack": (EAGLE3,),
}
"""Options that not every kind reads, and the kinds that do. Elsewhere, another value than the default is refused."""
_POSITIVE = (
    *("answer_tokens", "answer_minutes", "max_tokens", "learning_rate", "batch_tokens", "max_length"),
    *("evaluate_prompts", "minutes", "steps", "depths", "rejection_weight", "vocabulary_size"),
)
_POSITIVE_OF_A_RUN = ("device_gb", "workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained, on which texts and how: all that decides the draft but for the target and the machine.

    Raises `ConfigurationError` for a value out of bounds, and for an option that the kind does not read.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    prompts: Annotated[
        tuple[Path, ...],
        "A JSONL file of prompts, in the format of Spec-Bench, GSM8K, Self-Instruct, chat messages, ShareGPT, plain "
        "text, or system messages alone; a .txt file with a prompt in each line; or a directory that save_to_disk of "
        "Hugging Face's datasets wrote. May be repeated.",
    ] = ()
    field: Annotated[
        str | None,
        "For an encoder-decoder target: the field of the JSONL prompts that holds the source. Unset: every "
        "line of a prompt file is a source.",
    ] = None
    kind: Annotated[
        str,
        "What is trained: layers (a small model), heads (Medusa), block (a whole block in one pass), eagle "
        "(EAGLE-3-like), eagle3 or dspark (a public checkpoint, trained in one process on one device), exit (early "
        "exit), table (successors of tokens).",
    ] = LAYERS
    evaluate: Annotated[
        Path | None,
        "A JSONL file of prompts that are never trained on. Agreement is reported per category.",
    ] = None
    evaluate_prompts: Annotated[int, "Evaluation prompts in each category."] = 8
    held_out: Annotated[int, "Prompts of each file that are not trained on (a tenth of the file at most)."] = 48
    temperatures: Annotated[
        tuple[float, ...],
        "Temperatures of the first pass over a file, the second, and so on, with commas between them.",
    ] = (0.0, 0.7, 1.0)
    answer_tokens: Annotated[int, "Tokens of answers to train on."] = 1_000_000
    answer_minutes: Annotated[float, "Maximum number of minutes that this run spends on answers."] = 30.0
    max_tokens: Annotated[int, "Maximum number of tokens in one answer."] = 384
    layers: Annotated[
        tuple[int, ...],
        "Layers of the target that the draft starts as, with commas between them: 0,1,29. For exit: the "
        "layers that draft.",
    ] = ()
    student_config: Annotated[
        Path | None,
        "A transformers configuration with the target's vocabulary and width, for a new student.",
    ] = None
    start: Annotated[
        Path | None,
        "Directory of a draft to train further, instead of --layers. A block or eagle may also start as "
        "a draft of kind layers; a dspark or eagle3 as a public draft of its kind, with its sizes and vocabulary.",
    ] = None
    vocabulary_size: Annotated[
        int | None,
        "Tokens that the draft can propose: the most frequent ones in the answers. Unset: all of them, or "
        "those of --start; for kinds other than layers and dspark, 8192.",
    ] = None
    taps: Annotated[
        tuple[int, ...],
        "Hidden states of the target that heads, block or eagle read: numbers of layers after which they are "
        "taken, with commas between them. Unset: after the last layer for heads; after a third, two thirds and all "
        "layers for block and eagle.",
    ] = ()
    depths: Annotated[
        int | None,
        "Number of heads (unset: 4), tokens of a block (5; of dspark 6), steps of the roll-outs of eagle3 (5), "
        "successors in a table (8).",
    ] = None
    mix_rank: Annotated[
        int,
        "Width of the layer that adds the last token to the hidden state that heads read; 0: none. With "
        "--selector-rank 0, the heads are plain Medusa and are stored in its format.",
    ] = 1024
    selector_rank: Annotated[
        int, "Width of the selector of heads and block, which reads the token before; 0: none."
    ] = 256
    optimizer: Annotated[str, "Optimizer of heads, block and eagle: muon or adamw."] = "muon"
    int8: Annotated[bool, "Store the matrices of heads, block or eagle as int8."] = False
    search: Annotated[bool, "For exit: find the layers that draft on held-out answers, instead of --layers."] = False
    loss: Annotated[
        str,
        "Divergence to minimise: forward_kl, reverse_kl, or overlap, the share of tokens that the target rejects at "
        "best: one minus the sum of min(p, q). For dspark: forward_kl, the cross entropy.",
    ] = LOSSES[0]
    overlap_weight: Annotated[
        float | None,
        "Weight of overlap, added to the divergence of --loss. Unset: 0, and 1 for dspark.",
    ] = None
    on_policy: Annotated[float, "Share of batches whose answers the student writes."] = 0.0
    rejection_weight: Annotated[
        float,
        "For layers, heads, block and eagle: weight of the token at which the target would reject the draft's own "
        "greedy token, relative to the others. In a chain that is drafted at once, it is the first such token.",
    ] = 1.0
    minutes: Annotated[
        float | None,
        "Minutes that the whole command takes at most: answers, hidden states, training, measuring.",
    ] = None
    steps: Annotated[int | None, "Steps to train, instead of --minutes."] = None
    learning_rate: Annotated[float, "Highest learning rate of the schedule."] = 1e-3
    batch_tokens: Annotated[int, "Tokens in a batch, prompts and padding included."] = 4096
    pack: Annotated[
        bool,
        "For eagle3: let texts of any length share rows as long as the longest text, instead of padding similar ones.",
    ] = False
    max_length: Annotated[int, "Maximum number of tokens in a prompt and its answer together."] = 512
    precision: Annotated[
        str,
        "Precision of matrix products: bfloat16 or float32. For dspark and eagle3, the device decides: bfloat16 on a "
        "GPU and on a CPU that has instructions for it, else float32.",
    ] = "bfloat16"
    seed: Annotated[int, "Seed of all random draws."] = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"--kind: {self.kind!r} is refused; it must be one of {', '.join(KINDS)}")
        check_positive(self, _POSITIVE)
        self._check_ranges()
        self._check_words()
        self._check_kind()
        if self.minutes is not None and self.steps is not None:
            raise ConfigurationError("--minutes and --steps: needed one of them")
        if self.search and self.layers:
            raise ConfigurationError("--search and --layers: needed one of them; a search finds the layers")
        if self.start is not None and (self.layers or self.student_config is not None):
            raise ConfigurationError("--start: a draft has its layers; needed without --layers and --student-config")

    def _check_ranges(self) -> None:
        for name in ("held_out", "mix_rank", "selector_rank", "overlap_weight"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{_option(name)}: {value} is refused; it must be 0 or above")
        for temperature in self.temperatures:
            if not 0 <= temperature <= MAX_TEMPERATURE:
                bound = f"each must be within 0 and {MAX_TEMPERATURE:g}"
                raise ConfigurationError(f"--temperatures: {temperature} is refused; {bound}")
        if not 0 <= self.on_policy <= 1:
            raise ConfigurationError(f"--on-policy: {self.on_policy} is refused; it must be within 0 and 1")

    def _check_words(self) -> None:
        if self.optimizer not in ("muon", "adamw"):
            raise ConfigurationError(f"--optimizer: {self.optimizer!r} is refused; it must be muon or adamw")
        if self.precision not in ("float32", "bfloat16"):
            raise ConfigurationError(f"--precision: {self.precision!r} is refused; it must be float32 or bfloat16")
        if self.loss not in LOSSES:
            raise ConfigurationError(f"--loss: {shorten(self.loss)} is unknown; it must be one of {', '.join(LOSSES)}")

    def _check_kind(self) -> None:
        """Raise `ConfigurationError` for an option that the kind does not read: the training would be another one."""
        defaults = {field.name: field.default for field in fields(self)}
        # An early exit reads the output of its first layers, whether that is said or not.
        implied = {"taps": (len(self.layers),)} if self.kind == "exit" and self.layers else {}
        for name, kinds in _READ_BY.items():
            if self.kind not in kinds and getattr(self, name) not in (defaults[name], implied.get(name)):
                only = f"it is for {', '.join(kinds)}"
                raise ConfigurationError(f"{_option(name)}: refused for kind {self.kind}; {only}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions(Recipe):
    """The options of one distillation run, from prompt files to the directory of the draft.

    Raises `ConfigurationError` for a value out of bounds, for options that exclude each other, and for missing files.
    """

    recipe: Annotated[
        str | None,
        "A packaged recipe or a YAML file: values of options that the command line does not give. --recipes lists the "
        "packaged ones.",
    ] = None
    out: Annotated[Path, "Directory to write the draft to."] = Path()
    plan: Annotated[
        bool,
        "For all kinds but table: print the memory and the predicted speed of the training instead, per number of "
        "devices. The target's config.json suffices; nothing is started.",
    ] = False
    device_gb: Annotated[float, "For --plan: memory of a device in GB."] = 80.0
    json: Annotated[bool, "For --plan: print JSON."] = False
    url: Annotated[
        str | None,
        "The HTTP API of a running server that has the same target and answers the prompts, such as http://host:8000. "
        "Unset: this command serves the target itself.",
    ] = None
    cacert: Annotated[
        str | None,
        "PEM file of certificates by which an https server is checked. Unset: server.tls.ca, or the system's.",
    ] = None
    work: Annotated[
        Path | None,
        "Directory for answers and checkpoints, from which a later run continues. Unset: OUT.work",
    ] = None
    device: Annotated[str, "Device to train on: auto, cpu or cuda."] = "auto"
    workers: Annotated[
        int,
        "For dspark and eagle3: processes that train together, each with a GPU or a core, by Ray Train. They need "
        "--steps.",
    ] = 1
    recompute: Annotated[
        bool,
        "For dspark and eagle3: compute activations again for the backward pass. This saves memory and takes time.",
    ] = False
    notes: Annotated[Path | None, "A Markdown file to append to the model card."] = None

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        check_positive(self, _POSITIVE_OF_A_RUN)
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigurationError(f"--device: {self.device!r} is refused; it must be auto, cpu or cuda")
        if self.kind not in SINGLE_PROCESS:
            self._check_without_peers()
        if self.plan:
            self._check_plan()
        else:
            self._check_run()

    def _check_without_peers(self) -> None:
        kinds = " or ".join(SINGLE_PROCESS)
        if self.workers > 1:
            raise ConfigurationError(f"--workers: {self.workers} is refused for kind {self.kind}; several need {kinds}")
        if self.recompute:
            raise ConfigurationError(f"--recompute: refused for kind {self.kind}; it is for kinds {kinds}")

    def _check_plan(self) -> None:
        if self.kind not in PLANNED:
            kinds = ", ".join(PLANNED)
            raise ConfigurationError(f"--plan: refused for kind {self.kind}; it is for the kinds {kinds}")
        counted: list[tuple[str, object]] = [("precision", "bfloat16"), ("optimizer", "muon"), ("on_policy", 0.0)]
        if self.kind == EAGLE3:
            counted += [("loss", LOSSES[0]), ("overlap_weight", None)]
        for name, known in counted:
            if (value := getattr(self, name)) != known:
                raise ConfigurationError(f"{_option(name)}: {value} is refused with --plan, which counts {known}")

    def _check_run(self) -> None:
        if self.json:
            raise ConfigurationError("--json: refused without --plan")
        if self.workers > 1 and self.steps is None:
            raise ConfigurationError(f"--workers: {self.workers} is refused; several need --steps")
        if self.minutes is None and self.steps is None:
            raise ConfigurationError("--minutes and --steps: needed one of them")
        self._check_files()

    def _check_files(self) -> None:
        if not self.prompts:
            raise ConfigurationError("--prompts: needed at least one file, found none")
        if self.cacert is not None and self.url is None:
            raise ConfigurationError("--cacert: needed with --url, found alone")
        if self.out == Path():
            raise ConfigurationError("--out: needed a directory, found none")
        if self.work_directory.resolve().is_relative_to(self.out.resolve()):
            raise ConfigurationError(
                f"--work: {self.work_directory} is refused; it must not be inside --out, {self.out}"
            )
        refuse_equal_names(self.prompts, self.evaluate)
        single = ("evaluate", "student_config", "start", "notes")
        named = [("prompts", file) for file in self.prompts] + [(name, getattr(self, name)) for name in single]
        for name, file in named:
            if file is not None and not file.exists():
                raise ConfigurationError(f"{_option(name)} {file}: no such file")

    @property
    def work_directory(self) -> Path:
        """Where answers and checkpoints are stored."""
        return self.work or self.out.with_name(f"{self.out.name}.work")

    def command_line(self, config: str | None, assignments: tuple[str, ...]) -> str:
        """The command line with these options, for the model card: paths lose their directories."""
        words = ["pilotfish distill"]
        if config is not None:
            words.append(f"--config {Path(config).name}")
        words += [f"--set {_without_directories(assignment)}" for assignment in assignments]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name in ("work", "url", "cacert"):
                continue
            for part in value if field.name == "prompts" else (value,):
                written = Path(part).name if field.name == "recipe" else _written(part)
                words.append(_option(field.name) if part is True else f"{_option(field.name)} {written}")
        return " \\\n    ".join(words)


def check_positive(options: Recipe, names: Sequence[str]) -> None:
    """Raise `ConfigurationError` for an option among `names` that is set and not above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigurationError(f"{_option(name)}: {value} is refused; it must be above 0")


def refuse_equal_names(prompts: Sequence[Path], evaluate: Path | None) -> None:
    """Raise `ConfigurationError` for files of prompts with the same name: answers and states have it in their keys."""
    files = [*prompts, *([] if evaluate is None else [evaluate])]
    names = [file.name for file in files]
    if equal := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(
            f"--prompts and --evaluate: files of the same name, {equal}, are refused; answers are stored under their "
            "names"
        )


def _without_directories(assignment: str) -> str:
    key, _, value = assignment.partition("=")
    return f"{key}={Path(value).name}"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _written(value: object) -> str:
    if isinstance(value, Path):
        return value.name
    parts = value if isinstance(value, tuple) else (value,)
    return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
