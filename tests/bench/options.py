"""The command-line options of the benchmarks, and the prompts and settings that follow from them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from deploy.models import Models, resolve_models
from deploy.settings import Settings, load_settings
from tests.bench.processes.llama_server import ENVIRONMENTS
from tests.support.models.prompts import CHAT, PLAIN
from workers.distill.prompts import read_prompts

TOKENS, ANSWER_TOKENS, QUICK_TOKENS = 48, 64, 8
SPEC_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "spec_bench.jsonl"
"""The six tasks of Spec-Bench (Xia et al. 2024). Their prompts are never trained on."""
FREE_PORTS = ("server.http_port=0", "server.grpc_port=0")
PLAIN_WEIGHTS = "target.quantization=none"
"""Sections choose the storage of weights by their variants; what they compare them with is de-quantized."""


@dataclass(frozen=True)
class Options:
    """The options of one run. Settings come from a preset or file, the environment and `--set`."""

    config: str | None
    assignments: tuple[str, ...]
    prompts_file: Path | None
    repeats: int
    tokens: int
    answer_tokens: int
    """Largest number of tokens in an answer to a prompt of Spec-Bench."""
    batches: tuple[int, ...]
    """Numbers of requests in flight, for some sections. Empty: the section's own choice."""
    lengths: tuple[int, ...]
    """Tokens of the prompts whose way `round` follows. Empty: it measures decoding."""
    contexts: tuple[int, ...]
    """Numbers of stored tokens of each sequence, for `device`. Empty: the section's own choice."""
    ranks: int
    """Number of tensor-parallel ranks, for `ranks`."""
    draft: str | None
    """Directory or packaged name of a draft model. `None` takes the shipped one."""
    against: Path | None
    """Another checkout of the project, for `serving-pairs` and `structure`; `None` without one."""
    plot: Path | None
    results: Path | None
    """Where the printed tables are kept. `None` keeps none."""
    dtypes: tuple[str, ...]
    variants: tuple[str, ...]
    environments: Path
    """Where `llama` builds its peer."""
    quick: bool

    def settings(self, *assignments: str) -> Settings:
        """The chosen settings with `assignments` over them, free ports, and models as local directories."""
        found = load_settings(self.config, assignments, below=[*FREE_PORTS, PLAIN_WEIGHTS, *self.assignments])
        return Settings(self.models(found).configuration, found.cache_directory, found.ray_address)

    def configuration(self, *assignments: str) -> Configuration:
        """The configuration of `settings`."""
        return self.settings(*assignments).configuration

    def based_on(self, *assignments: str) -> Configuration:
        """The configuration with `assignments` under the chosen settings, which take precedence."""
        found = load_settings(self.config, self.assignments, below=[*FREE_PORTS, PLAIN_WEIGHTS, *assignments])
        return self.models(found).configuration

    @staticmethod
    def models(settings: Settings) -> Models:
        """Resolve the models to local directories. Raises `ModelLoadError` with a remedy."""
        return resolve_models(settings.configuration, settings.cache_directory, lambda _: None)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return Tokenizer.load(Path(self.configuration().target.path))

    def prompts(self, most: int) -> list[tuple[int, ...]]:
        """At most `most` chat prompts: spread over the prompts file if there is one, otherwise from the tests."""
        texts = own_prompts(most) if self.prompts_file is None else file_prompts(self.prompts_file, most)
        return [self.tokenizer.encode_chat([Message("user", text, None)]) for text in texts]

    def long_prompt(self, length: int, which: int) -> tuple[int, ...]:
        """A prompt of `length` tokens. Prompts of different `which` share no prefix."""
        text = f"Document {which}. {' '.join((*CHAT, *PLAIN))} "
        once = self.tokenizer.encode(text)
        return (once * (length // len(once) + 1))[:length]


def own_prompts(most: int) -> list[str]:
    """`most` distinct texts: the tests' chat and plain prompts, then the same texts with a number in front."""
    texts = (*CHAT, *PLAIN)
    return [text if index < len(texts) else f"{index}. {text}" for index, text in _cycled(texts, most)]


def file_prompts(file: Path, most: int) -> list[str]:
    """First turns of a prompts file, spread over it. Raises `ConfigurationError` with the name of the file."""
    lines = [prompt.turns[0] for prompt in read_prompts(file) if prompt.turns]
    if not lines:
        raise ConfigurationError(f"--prompts {file}: needed at least one question, found system messages alone")
    return lines[:: max(1, len(lines) // most)][:most]


def _cycled(texts: Sequence[str], most: int) -> list[tuple[int, str]]:
    return [(index, texts[index % len(texts)]) for index in range(most)]


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is refused; needed whole numbers of at least 1, with commas")
    return tuple(dict.fromkeys(map(int, parts)))


def parse(sections: Mapping[str, str], arguments: Sequence[str] | None = None) -> tuple[list[str], Options]:
    """Parse the command line: the chosen sections (all if none is named) and the options."""
    listed = "\n".join(f"  {name:<15}{text}" for name, text in sections.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=f"Measure. Prints tables; asserts nothing about time.\n\nsections (default: all):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="what to measure")
    parser.add_argument("--config", help="preset or file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, for all sections")
    parser.add_argument("--prompts", type=Path, help="JSONL with prompts, such as Spec-Bench's")
    parser.add_argument("--repeats", "--pairs", type=int, default=3, help="number of repetitions of each measurement")
    parser.add_argument("--tokens", type=int, help="tokens per answer (default: 48, for Spec-Bench's prompts 64)")
    parser.add_argument(
        "--batches",
        type=_counts,
        default=(),
        help="requests at once for `round`, `streams` and `serving-pairs`, sequences for `device` and `ranks`: 1,4,8",
    )
    parser.add_argument(
        "--lengths", type=_counts, default=(), help="tokens of prompts to follow to their first token, for `round`"
    )
    parser.add_argument("--contexts", type=_counts, default=(), help="stored tokens for `device`: 128,4096")
    parser.add_argument("--ranks", type=int, default=3, help="tensor-parallel ranks for `ranks`")
    parser.add_argument("--draft", help="a draft model: directory or packaged name (default: the shipped one)")
    parser.add_argument(
        "--against", type=Path, help="a checkout of another commit, for `serving-pairs` and `structure`"
    )
    parser.add_argument("--plot", type=Path, help="where `prefix` draws its curve (PNG; needs matplotlib)")
    parser.add_argument("--results", type=Path, help="a result file for the printed tables (JSON)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="types that `start` and `memory` hold")
    parser.add_argument(
        "--variants",
        default="",
        help="variants for `step`, `widths`, `quality`, `llama`, `start`, `memory` (loading), `round` (host) "
        "and `loop` (ahead), drafting methods for `serving-pairs` and `remote`, or roles for `recovery`",
    )
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where `llama` builds its peer")
    parser.add_argument("--quick", action="store_true", help="the smallest run that shows every table")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.sections if name not in sections]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(sections)}")
    options = Options(
        config=asked.config,
        assignments=tuple(asked.set),
        prompts_file=asked.prompts,
        repeats=1 if asked.quick else max(1, asked.repeats),
        tokens=min(asked.tokens or QUICK_TOKENS, QUICK_TOKENS) if asked.quick else asked.tokens or TOKENS,
        answer_tokens=min(asked.tokens or QUICK_TOKENS, QUICK_TOKENS) if asked.quick else asked.tokens or ANSWER_TOKENS,
        batches=asked.batches,
        lengths=asked.lengths,
        contexts=asked.contexts,
        ranks=max(2, asked.ranks),
        draft=asked.draft,
        against=asked.against,
        plot=asked.plot,
        results=asked.results,
        dtypes=tuple(name for name in asked.dtypes.split(",") if name),
        variants=tuple(name for name in asked.variants.split(",") if name),
        environments=asked.environments.resolve(),
        quick=asked.quick,
    )
    return asked.sections or list(sections), options
