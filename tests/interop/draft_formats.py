"""`python -m tests.interop.draft_formats`: how far from its oracle each format of drafts computes.

Runs the tests that compare (`COMPARISONS`), keeps the largest absolute difference that they saw, and writes the result
file from which `make pages` makes the reference. Exits with 1 if a test fails, or if a row has no test.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.bench import report

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "tests" / "bench" / "results" / "draft-formats.json"
OWN = "ours, in plain torch"
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


def main() -> int:
    """Run the tests and write the result file. Returns the exit status."""
    seen = Differences()
    tests = sorted({one.test for one in COMPARISONS})
    with mock.patch.object(torch.testing, "assert_close", seen.compare):
        failed = pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *tests], plugins=[seen])
    rows = []
    for one in COMPARISONS:
        cases = [node for node in seen.passed if one.has(node)]
        found = [seen.largest[node] for node in cases if node in seen.largest]
        difference = f"{max(found):.1e}" if found else "ranks and tokens are equal"
        rows.append([one.format, one.oracle, one.compared, str(len(cases)), difference])
        failed = failed or not cases
    report.heading("Formats of drafts beside their oracles")
    report.table(("format", "oracle", "compared", "cases", "largest difference"), rows)
    if not failed:
        report.keep(RESULT, platform.machine(), "python -m tests.interop.draft_formats")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
