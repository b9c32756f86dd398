"""`python -m tests.interop.draft_formats`: how far from its oracle each format of drafts computes, and what it accepts.

Runs the tests that compare (`COMPARISONS`) and keeps the largest absolute difference that they saw. Then it trains a
tiny draft of each format and measures its tokens per step here and around its oracle. Writes the result file from which
`make pages` makes the reference, but not with `--check`. Exits with 1 if a test fails, if a row has no test, if a draft
brings fewer than `LEAST_PER_STEP` tokens per step on a side, or if this side has less than `LEAST_RATIO` of the other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.bench import report
from tests.interop.draft_rates import Rate, Target, rate_here, rate_of_oracle
from tests.interop.trained_drafts import DRAFTS, LAYERS_OF_TARGETS, Draft, damped_target, mtp, mtp_target
from tests.support.engines.kept_kernels import kept_kernels

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "tests" / "bench" / "results" / "draft-formats.json"
OWN = "ours, in plain torch"
LEAST_PER_STEP, LEAST_RATIO = 1.3, 0.97
SPECULATORS = "speculators 0.9.0"
TRANSFORMERS = f"transformers {importlib.metadata.version('transformers')}"
_EAGLE, _PARALLEL, _BLOCK = (
    f"tests/unit/draft/{file}.py::"
    for file in ("eagle/test_public_heads", "eagle/test_parallel_heads", "block/test_public_blocks")
)
_HEADS, _MTP = "tests/unit/draft/heads/test_own_heads.py::", "tests/unit/draft/mtp/"
_PUBLISHED = "test_hidden_states_and_logits_are_those_of_the_published_pass"
_HIDDEN = "test_hidden_vectors_are_those_of_the_published_pass"


@dataclass(frozen=True)
class Comparison:
    """A format, who computes what it is compared with, and the test that compares."""

    format: str
    oracle: str
    compared: str
    test: str
    """A test's file and name."""
    cases: tuple[str, ...] = ("",)
    """How the names of the test's cases begin that belong to the row."""

    def has(self, node: str) -> bool:
        """Whether a test's id is one of the row's cases."""
        return any(node == self.test or node.startswith(f"{self.test}[{case}") for case in self.cases)


COMPARISONS = (
    Comparison("EAGLE-1, EAGLE-2", OWN, "hidden states, logits", _EAGLE + _PUBLISHED, ("eagle 1",)),
    Comparison(
        "EAGLE-3 (authors, SpecForge)",
        OWN,
        "hidden states, logits",
        _EAGLE + _PUBLISHED,
        ("authors", "own", "layers named", "more layers", "normalised", "legacy", "norm of all"),
    ),
    Comparison("EAGLE-3.1", OWN, "hidden states, logits", _EAGLE + _PUBLISHED, ("3.1",)),
    Comparison("EAGLE-3 (NVIDIA)", OWN, "hidden states, logits", _EAGLE + _PUBLISHED, ("nvidia",)),
    Comparison("EAGLE-3 (speculators)", OWN, "hidden states, logits", _EAGLE + _PUBLISHED, ("speculators",)),
    Comparison("P-EAGLE (SpecForge)", OWN, "greedy tokens", _PARALLEL + "test_outputs_are_those_of_one_causal_pass"),
    Comparison(
        "P-EAGLE (speculators)", SPECULATORS, "logits", _PARALLEL + "test_the_library_speculators_computes_the_same"
    ),
    Comparison(
        "DFlash (authors)",
        "transformers 5.24.0",
        "hidden states",
        _BLOCK + "test_another_library_computes_the_same_for_dflash",
        ("dflash_of_transformers",),
    ),
    Comparison(
        "DFlash (speculators)",
        SPECULATORS,
        "hidden states",
        _BLOCK + "test_another_library_computes_the_same_for_dflash",
        ("dflash]",),
    ),
    Comparison("DFlash2 (authors)", OWN, "hidden states", _BLOCK + _HIDDEN, ("dflash2",)),
    Comparison(
        "DFlash2 (speculators)",
        SPECULATORS,
        "hidden states, probabilities",
        _BLOCK + "test_the_library_speculators_computes_the_same_for_dflash2",
    ),
    Comparison("DSpark (authors)", OWN, "hidden states", _BLOCK + _HIDDEN, ("dspark",)),
    Comparison("DSpark (SpecForge)", OWN, "hidden states", _BLOCK + _HIDDEN, ("specforge",)),
    Comparison(
        "DSpark (speculators)",
        SPECULATORS,
        "hidden states, probabilities, confidences",
        _BLOCK + "test_the_library_speculators_computes_the_same_for_dspark",
    ),
    Comparison("Medusa, the authors' two layouts", OWN, "ranks, probabilities", _HEADS + "test_layouts_of_the_authors"),
    Comparison(
        "Medusa, merged models",
        OWN,
        "ranks; probabilities within 1e-4",
        _HEADS + "test_heads_in_the_checkpoint_of_their_target",
    ),
    Comparison(
        "Medusa, vLLM's layout",
        OWN,
        "ranks; probabilities within 1e-4",
        _HEADS + "test_the_layout_of_vllm_has_absolute_tokens",
    ),
    Comparison(
        "Hydra",
        OWN,
        "ranks, probabilities",
        "tests/unit/draft/heads/test_hydra_heads.py::test_candidates_along_all_paths_are_the_published_ones",
    ),
    Comparison(
        "MTP: DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, MiMo-7B",
        TRANSFORMERS,
        "hidden states, logits, four steps",
        _MTP + "test_mtp.py::test_hidden_states_and_logits_are_those_of_transformers",
    ),
    Comparison(
        "MTP (speculators)",
        SPECULATORS,
        "logits, three steps",
        _MTP + "test_speculators_mtp.py::test_the_library_computes_the_same",
    ),
    Comparison(
        "PARD",
        TRANSFORMERS,
        "greedy tokens",
        "tests/unit/draft/model/test_parallel_model.py::test_a_chain_is_that_of_one_pass_and_mask_tokens_leave_nothing_behind",
    ),
)


COLUMNS = (
    *("format", "oracle", "compared", "cases", "largest difference"),
    *("tokens per step here", "of the oracle", "here ÷ oracle", "tokens"),
)


class Differences:
    """A plugin of pytest: the largest difference that each test compared, and the tests that passed."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}
        self.passed: set[str] = set()
        self._node = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._node = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def compare(self, mine: Tensor, wanted: Tensor, **bounds: Any) -> None:
        """`torch.testing.assert_close`, which is kept in `_close`."""
        difference = float((mine - wanted).abs().max())
        self.largest[self._node] = max(difference, self.largest.get(self._node, 0.0))
        _close(mine, wanted, **bounds)


_close = torch.testing.assert_close


class Rates:
    """Tokens per step of trained drafts. Formats that draft for the same target share it."""

    def __init__(self, directory: Path) -> None:
        """`directory` is empty, and outlives this object."""
        self._directory = directory
        self._target: Target | None = None

    def of(self, name: str) -> tuple[Rate, Rate]:
        """The rates of a format here and of its oracle, over all families of targets that it is made for."""
        home = Path(tempfile.mkdtemp(dir=self._directory))
        if name in DRAFTS:
            self._target = self._target or damped_target(self._directory / "target")
            return self._both(self._target, DRAFTS[name](self._target, home / "draft"))
        here, there = Rate(0, 0), Rate(0, 0)
        for family in LAYERS_OF_TARGETS[name]:
            target = mtp_target(family, home / family)
            draft = mtp(family, target, home / f"{family}-draft", is_converted="speculators" in name)
            rates = self._both(target, draft)
            here, there = here + rates[0], there + rates[1]
        return here, there

    def _both(self, target: Target, draft: Draft) -> tuple[Rate, Rate]:
        return rate_here(target, draft.settings, draft.depth), rate_of_oracle(target, draft.chain, draft.depth)


def compared(rows: Sequence[Comparison]) -> tuple[list[list[str]], bool]:
    """The cells of the rows that tests compare, and whether all tests passed."""
    seen = Differences()
    tests = sorted({one.test for one in rows})
    with mock.patch.object(torch.testing, "assert_close", seen.compare):
        is_right = not pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *tests], plugins=[seen])
    cells = []
    for one in rows:
        cases = [node for node in seen.passed if one.has(node)]
        found = [seen.largest[node] for node in cases if node in seen.largest]
        difference = f"{max(found):.1e}" if found else "ranks and tokens are equal"
        cells.append([one.format, one.oracle, one.compared, str(len(cases)), difference])
        is_right = is_right and bool(cases)
    return cells, is_right


def accepted(here: Rate, there: Rate) -> tuple[list[str], bool]:
    """The cells of tokens per step, and whether they are as they must be."""
    ratio, least = here.per_step / there.per_step, min(here.per_step, there.per_step)
    cells = [f"{here.per_step:.3f}", f"{there.per_step:.3f}", f"{ratio:.3f}", str(here.tokens)]
    return cells, ratio >= LEAST_RATIO and least >= LEAST_PER_STEP


def main() -> int:
    """Run the tests, measure and write the result file. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop.draft_formats", description=__doc__)
    parser.add_argument("--only", default="", help="run formats whose names begin so, and write no file")
    parser.add_argument("--check", action="store_true", help="write no file")
    options = parser.parse_args()
    only = options.only
    chosen = [one for one in COMPARISONS if one.format.startswith(only)]
    if not chosen:
        parser.error(
            f"--only: no format begins with {only!r}; there are {', '.join(one.format for one in COMPARISONS)}"
        )
    rows, is_right = compared(chosen)
    with tempfile.TemporaryDirectory() as directory, kept_kernels():
        rates = Rates(Path(directory))
        for row in rows:
            cells, is_enough = accepted(*rates.of(row[0]))
            row += cells
            is_right = is_right and is_enough
    report.heading("Formats of drafts beside their oracles")
    report.table(COLUMNS, rows)
    if is_right and not only and not options.check:
        report.keep(RESULT, platform.machine(), "python -m tests.interop.draft_formats")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
