"""Every kind of drafting method drafts for a target whose weights stay as they are stored, without changing a text."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from tests.support.clusters.restartable_drafters import restartable_cluster
from tests.support.deadline import deadline
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import quantized, stored_gguf
from tests.unit.draft.contract.methods import Directories, cases_of, make_directories, values
from tests.unit.draft.contract.test_streams import NEVER_RIGHT, RIGHT, TIMEOUT_SECONDS, USUAL, answer
from workers.model.model_files import resolve_model_directory
from workers.model.stored.source import write_stored_in
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

METHODS = ("none", "ngram", "lookahead", "prediction", "model", "heads", "blockwise", "eagle", "block", "early_exit")
OTHER_WEIGHTS = ("model:int4", "model:pard", "model:text", "eagle:int4", "recycling:table", "suffix+recycling")
PUBLIC = ("block:dflash", "block:dspark", "eagle:eagle3", "eagle:peagle")
"""Public drafts. They are as wide as the target in AWQ, whose width is no multiple of 32, as in GGUF."""
CASES = [
    *((name, form) for name in (*METHODS, *OTHER_WEIGHTS) for form in ("awq", "gguf")),
    *((name, "awq") for name in PUBLIC),
    ("none", "fp8"),
    ("mtp", "fp8"),
    ("mtp", "awq"),
]
"""Methods with the format of the target. No GGUF file has the layer of `mtp`."""
REQUESTS = [*RIGHT, NEVER_RIGHT[0], *USUAL[:2]]
FORMATS = {
    "awq": (quantized.awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "fp8": (quantized.fp8(16, 16), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}),
}
WIDE = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 16}
"""Widths that blocks of 32 inputs divide."""
KINDS = {"embed_tokens": "Q8_0", "lm_head": "Q8_0", "v_proj": "Q5_0", "down_proj": "Q5_1"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Directories]:
    """A plain target with drafts for it, by the format of the stored one."""
    usual = make_directories(tmp_path_factory.mktemp("plain"))
    return dict.fromkeys(FORMATS, usual) | {"gguf": make_directories(tmp_path_factory.mktemp("wide"), **WIDE)}


@pytest.fixture(scope="module")
def stored(
    directories: dict[str, Directories], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """The directories of the target with stored weights, and of its de-quantized ones, by the format."""
    path, cache = tmp_path_factory.mktemp("stored"), tmp_path_factory.mktemp("cache")
    found = {}
    for name, how in FORMATS.items():
        own = quantized.save_with_tokenizer(directories[name].target, path / name, *how)
        found[name] = own, resolve_model_directory(str(own), cache)
    return found | {"gguf": write_gguf(directories["gguf"].target, path)}


def write_gguf(source: Path, path: Path) -> tuple[Path, Path]:
    """Write the model in `source` to a GGUF file. Returns what `stored` has."""
    directory, plain = (shutil.copytree(source, path / name) for name in ("gguf", "plain"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tensors = stored_gguf.write(model, path / "model.gguf", "llama", KINDS, default="Q4_0")
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    write_stored_in(directory, path / "model.gguf")
    return directory, plain


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
    directories: dict[str, Directories], stored: dict[str, tuple[Path, Path]]
) -> dict[str, list[tuple[int, ...]]]:
    """The answers of the de-quantized weights in float32, without drafts, by the format."""
    return {
        form: asyncio.run(answer_all(configure("none", replace(directories[form], target=plain), "none")))[0]
        for form, (_, plain) in stored.items()
    }


@pytest.mark.parametrize("case", CASES, ids="-".join)
async def test_answers_are_those_of_the_dequantized_weights(
    case: tuple[str, str],
    directories: dict[str, Directories],
    stored: dict[str, tuple[Path, Path]],
    expected: dict[str, list[tuple[int, ...]]],
) -> None:
    name, form = case
    own = directories[form]
    values(name, own, placement="target")  # makes the modules, for the plain target
    answers, accepted = await answer_all(configure(name, replace(own, target=stored[form][0]), "stored"))
    assert answers == expected[form]
    if any(one.drafts and one.finds_repetitions for one in cases_of(name)):
        assert all(accepted[: len(RIGHT)])
