"""Every kind of drafting method drafts for a target whose weights stay as they are stored, without changing a text."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from tests.support.clusters.restartable_drafters import restartable_cluster
from tests.support.deadline import deadline
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import quantized
from tests.unit.draft.contract.methods import Directories, cases_of, make_directories, values
from tests.unit.draft.contract.test_streams import NEVER_RIGHT, RIGHT, TIMEOUT_SECONDS, USUAL, answer
from workers.model.model_files import resolve_model_directory
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

METHODS = ("none", "ngram", "model", "heads", "eagle", "block", "early_exit", "suffix+recycling")
REQUESTS = [*RIGHT, NEVER_RIGHT[0], *USUAL[:2]]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A plain target with drafts for it."""
    return make_directories(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def stored(directories: Directories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny target whose weights are stored in 4 bits."""
    path = tmp_path_factory.mktemp("stored") / "target"
    quantized.save(directories.target, path, quantized.awq(16), AWQ)
    for file in directories.target.iterdir():
        if not (path / file.name).exists():
            shutil.copy(file, path)
    return path


def configure(name: str, directories: Directories, quantization: str) -> Configuration:
    chosen = values(name, directories, placement="target")
    chosen["target"] |= {"quantization": quantization, "compile_directory": str(KEPT)}
    return load_configuration(chosen)


async def answer_all(configuration: Configuration) -> tuple[list[tuple[int, ...]], list[int]]:
    """The tokens of all answers, and how many of each answer's drafted tokens were accepted."""
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        answers = await asyncio.gather(*(answer(cluster.client, message) for message in REQUESTS))
    return [one.tokens for one in answers], [one.accepted for one in answers]


@pytest.fixture(scope="module")
def expected(directories: Directories, stored: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The answers of the de-quantized weights in float32, without drafts."""
    plain = resolve_model_directory(str(stored), tmp_path_factory.mktemp("cache"))
    return asyncio.run(answer_all(configure("none", replace(directories, target=plain), "none")))[0]


@pytest.mark.parametrize("name", METHODS)
async def test_answers_are_those_of_the_dequantized_weights(
    name: str, directories: Directories, stored: Path, expected: list[tuple[int, ...]]
) -> None:
    values(name, directories, placement="target")  # makes the modules, for the plain target
    answers, accepted = await answer_all(configure(name, replace(directories, target=stored), "stored"))
    assert answers == expected
    if any(case.drafts and case.finds_repetitions for case in cases_of(name)):
        assert all(accepted[: len(RIGHT)])
