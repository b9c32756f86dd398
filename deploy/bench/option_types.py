"""Options that several benchmarks share, as types with the flag's form and help text."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.dataclass_options import number_list

Batches = Annotated[
    tuple[int, ...],
    typer.Option(
        parser=number_list("--batches", int),
        metavar="NUMBERS",
        help="Numbers of requests in flight, with commas between them.",
    ),
]
Temperatures = Annotated[
    tuple[float, ...],
    typer.Option(
        parser=number_list("--temperatures", float),
        metavar="NUMBERS",
        help="Temperatures, with commas between them; 0 is greedy.",
    ),
]
Configurations = Annotated[
    tuple[str, ...],
    typer.Option(
        metavar="NAME=KEY=VALUE,KEY=VALUE",
        help="A further competitor: its name, its settings, and what its requests change (`request.beams=4`). Or "
        "a YAML file with a list of `name` and `set`, or the name of a combination that comes with Pilotfish: "
        "int8, prefix-cache, window, beams, long-context. May be repeated.",
    ),
]
Peers = Annotated[bool, typer.Option(help="Run the decoding methods of transformers on the same prompts.")]
Repeats = Annotated[int, typer.Option(help="Repetitions of each measurement.")]
Together = Annotated[
    int,
    typer.Option(
        help="Competitors that are held in memory at a time. They answer one after another, between two passes of "
        "plain decoding that they share.",
    ),
]
