"""The page that lists the verdict on every architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import transformers

from tests.zoo.configs import architectures
from tests.zoo.verdict import Kind, Verdict

PAGE = Path(__file__).resolve().parents[2] / "deploy" / "docs" / "models.md"

_HEAD = """# Models

Which architectures of `transformers` {version} are served, for causal language models and for encoder-decoder ones.
`make zoo` makes a tiny model of each with random weights in float32, serves it, and writes this page.

- MATCH: prompts in one pass and in chunks, single tokens, chains and trees have the logits of the model's own dense
  pass, alone and beside another row.
- REFUSED: the model is refused when it is loaded, with this reason, before anything is served.
- NOT MADE: no tiny model could be made of its configuration's defaults. Such a model is tried when it is loaded, as
  every model is.
- Two ranks: whether two ranks of a MATCH (`target.tensor_parallel: 2`) have the logits of one, in prompts, and in a
  chain beside a tree; else why they are refused; empty where nobody tried.

A checkpoint is tried on its own weights as well. `target.trial: "off"` serves it without that trial; its answers are
then reported as lossy. Code that a checkpoint brings itself is never run.

| | MATCH | REFUSED | NOT MADE |
|---|---|---|---|
"""


def page(verdicts: Iterable[Verdict]) -> str:
    """The whole page."""
    known = {verdict.model_type: verdict for verdict in verdicts}
    lines = [_HEAD.format(version=transformers.__version__).rstrip("\n")]
    groups = {"causal": False, "encoder-decoder": True}
    types = {
        name: sorted(one for one, has_encoder in architectures().items() if has_encoder is wanted and one in known)
        for name, wanted in groups.items()
    }
    for name, members in types.items():
        counts = [sum(known[one].kind is kind for one in members) for kind in (Kind.MATCH, Kind.REFUSED, Kind.NOT_MADE)]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    for name, members in types.items():
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            "| model type | verdict | two ranks | reason |",
            "|---|---|---|---|",
        ]
        lines += [row(known[one]) for one in members]
    return "\n".join(lines) + "\n"


def row(verdict: Verdict) -> str:
    """The line of one architecture."""
    own = f"model type {verdict.model_type!r} is refused: "
    texts = (text.removeprefix(own).replace("|", "\\|") for text in (verdict.two_ranks, verdict.reason))
    return f"| `{verdict.model_type}` | {verdict.kind.value} | {' | '.join(texts)} |"


def written() -> Mapping[str, Verdict]:
    """The verdicts of the page as it is, by model type."""
    found = {}
    for line in PAGE.read_text("utf-8").splitlines() if PAGE.exists() else []:
        parts = [part.strip() for part in line.replace("\\|", "\0").strip("|").split("|")]
        if line.startswith("| `") and len(parts) == 4:
            name, kind, two_ranks, reason = (part.replace("\0", "|") for part in parts)
            found[name.strip("`")] = Verdict(name.strip("`"), Kind(kind), reason, two_ranks)
    return found
