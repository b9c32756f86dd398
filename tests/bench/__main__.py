"""`make bench`: runs all sections, or the named ones.

    python -m tests.bench [SECTION …] [--repeats 3] [--tokens 48] [--set key=value …]

`llama` takes the variants [--variants stored,stored-drafts,plain,plain-drafts].
`serving-pairs` takes the numbers of requests in flight: [--batches 1,4,8]. `ranks` takes their number: [--ranks 2].

Every ratio compares two things that were measured in turn in the same run. Its spread is over the repetitions.
"""

from __future__ import annotations

import importlib
import logging
import shlex
import signal
import sys
import warnings
from pathlib import Path

from deploy.signals import SIGNALLED
from tests.bench.machine import describe
from tests.bench.options import parse
from tests.bench.report import keep, write

SECTIONS = {
    "step": "the time of a target step against the time to read its weights once",
    "round": "where the time of a round goes inside `pilotfish serve`, against the step alone",
    "loop": "a round without its step, of 1 to 256 rows, while none and 10,000 requests wait",
    "widths": "a step of 1 to 1,500 tokens: kernels against modules, reading the weights, the peak of products",
    "mixture": "verifying 1 to 16 tokens with 8 of 64 experts, and what the controller drafts",
    "quality": "perplexity of each storage, and its agreement with the de-quantized weights in float32",
    "device": "random weights in the shapes of large models: plain, compiled, recorded; --contexts 128,4096",
    "prefix": "cost of a token with and without stored keys and values; a prompt asked twice",
    "routing": "two replicas and requests with shared beginnings: routed against round robin",
    "latency": "between tokens while long prompts arrive, with max_prompt_tokens and without",
    "start": "`pilotfish serve` from its command to ready, cold and warm, by stage; CPU time by process",
    "memory": "peak of the target's process; start to ready, cold and warm",
    "ranks": "tensor parallelism on CPU: --ranks 3 against one rank with the same cores",
    "streams": "many HTTP streams at once against the engine alone; CPU time of each process per 1,000 tokens",
    "serving-pairs": "two clusters with default settings, plain and with a draft model, in turn (--pairs 10)",
    "llama": "the packaged file in llama.cpp, which is built the first time, and here, in turn",
    "recovery": "the pause of a stream when a process of the cluster is killed, by role, under Ray Serve",
    "remote": "drafting on rank 0 against a drafter elsewhere, by the target's cost and the network's delay",
    "remote-simulated": "the same in the capacity simulation, with the constants of a GPU",
    "grammar": "steps that forced tokens and drafts save in answers that match JSON schemas",
    "structure": "modules, packages, lines, parameters and pages, beside another checkout with --against",
    "calibration": "what the capacity simulation predicts beside the real cluster, at several loads",
}
"""In the order in which they run. Each is a module of this package with `run(options)`."""


def main() -> None:
    """Run the chosen sections. SIGTERM ends the processes that a section has started, too."""
    names, options = parse(SECTIONS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGNALLED))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    write(describe())
    for name in names:
        importlib.import_module(module_of(name)).run(options)
        if options.results is not None:
            keep(options.results, describe(), f"make bench ARGS={shlex.join(sys.argv[1:])!r}")


def module_of(section: str) -> str:
    """The name of a section's module, which is in `sections` or in a package there."""
    folder = Path(__file__).parent / "sections"
    (file,) = folder.rglob(f"{section.replace('-', '_')}.py")
    return ".".join(("tests.bench.sections", *file.relative_to(folder).with_suffix("").parts))


if __name__ == "__main__":
    main()
