"""The options of `pilotfish bench agreement`. Each is declared once, with its type, default and help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from deploy.dataclass_options import check_at_least, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementOptions:
    """The options of one comparison. Raises `ConfigurationError` for a value out of bounds."""

    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL of prompts (Spec-Bench, GSM8K, chat messages, …) or of lines with `text`, or plain text with "
            "one text per line. For a target with an encoder: JSONL with a source and a text per line, as in Multi30k."
        ),
    ]
    fields: Annotated[
        str,
        typer.Option(metavar="SOURCE,TEXT", help="Fields of each line, for a target with an encoder."),
    ] = "fr,en"
    draft: Annotated[str, "The draft model: a directory, hub id or packaged name. Unset: the target's own."] = ""
    target: Annotated[str, "The target: a directory, hub id or packaged name. Unset: target.path of the settings."] = ""
    texts: Annotated[int, "Texts of the file that are read."] = 16
    text_tokens: Annotated[int, "First tokens of each text that are compared."] = 256
    max_tokens: Annotated[int, "Maximum number of tokens in each of the target's answers."] = 64
    temperature: Annotated[float, "Temperature of the distributions for Σ min(p, q)."] = 1.0
    measure: Annotated[
        bool,
        "Also answer the texts as prompts, with and without the draft model, and compare the predicted with "
        "the measured speed.",
    ] = True
    out: Annotated[Path | None, "Directory for agreement.json and agreement.md."] = None

    def __post_init__(self) -> None:
        check_at_least(self, {"texts": 1, "max_tokens": 1, "text_tokens": 1})
        if not 0 < self.temperature <= 10:
            refuse(self, "temperature", "it must be above 0, at most 10")
