"""Every kind of drafting method drafts for a target whose weights stay as they are stored, without changing a text."""

from __future__ import annotations

import asyncio
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

METHODS = ("none", "ngram", "lookahead", "prediction", "model", "heads", "blockwise", "eagle", "block", "early_exit")
METHODS_ON_AWQ = (*METHODS, "model:int4", "eagle:int4", "suffix+recycling")
CASES = [*((name, "awq") for name in METHODS_ON_AWQ), ("none", "fp8"), ("mtp", "fp8")]
"""Methods with the format of the target. The layer of `mtp` is read in FP8, and not in 4 bits."""
REQUESTS = [*RIGHT, NEVER_RIGHT[0], *USUAL[:2]]
FORMATS = {
    "awq": (quantized.awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "fp8": (quantized.fp8(16, 16), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A plain target with drafts for it."""
    return make_directories(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def stored(directories: Directories, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of the target with stored weights, by their format."""
    path = tmp_path_factory.mktemp("stored")
    return {name: quantized.save_with_tokenizer(directories.target, path / name, *how) for name, how in FORMATS.items()}


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
def expected(
    directories: Directories, stored: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, ...]]]:
    """The answers of the de-quantized weights in float32, without drafts, by the format."""
    cache = tmp_path_factory.mktemp("cache")
    plain = {name: resolve_model_directory(str(path), cache) for name, path in stored.items()}
    return {
        name: asyncio.run(answer_all(configure("none", replace(directories, target=path), "none")))[0]
        for name, path in plain.items()
    }


@pytest.mark.parametrize("case", CASES, ids="-".join)
async def test_answers_are_those_of_the_dequantized_weights(
    case: tuple[str, str], directories: Directories, stored: dict[str, Path], expected: dict[str, list[tuple[int, ...]]]
) -> None:
    name, form = case
    values(name, directories, placement="target")  # makes the modules, for the plain target
    answers, accepted = await answer_all(configure(name, replace(directories, target=stored[form]), "stored"))
    assert answers == expected[form]
    if any(one.drafts and one.finds_repetitions for one in cases_of(name)):
        assert all(accepted[: len(RIGHT)])
