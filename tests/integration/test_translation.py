"""Translations of a real model are those of `transformers`, token for token: greedy, by beams, with and without drafts.

`make translators` prepares the models; without them the tests are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianTokenizer

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from deploy.packaged_drafts import packaged_drafts
from deploy.settings import load_settings
from pilotfish.v1 import generation_pb2
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import drafting_modules
from tests.support.terminal import run_command

pytestmark = pytest.mark.weights

TIMEOUT_SECONDS = 120.0
MAX_TOKENS = 24
MODEL = "opus-mt-fr-en"
DRAFT = packaged_drafts()["opus-mt-fr-en-draft"]
LAYERS, FREQUENT = 6, range(4096)
"""What random heads read, and what they propose: the tokens of a Marian vocabulary are sorted by frequency."""
SENTENCES = (
    "Une femme joue de la guitare.",
    "Deux hommes en tenue de chantier regardent une machine.",
    "Pourquoi le chien ne veut-il pas traverser la rivière ?",
)


def directory() -> Path:
    return load_settings().cache_directory / MODEL


def configure(method: str, heads: Path) -> Configuration:
    drafting: dict[str, Any] = {"method": method, "controller": "off", "max_nodes": 6, "max_depth": 4}
    if method == "model":
        drafting["timeout_seconds"] = 60.0
        drafting["model"] = {"path": str(DRAFT), "device": "cpu", "kv": {"pool_bytes": 50 << 20}}
    elif method != "none":
        drafting[method] = {"path": str(heads)} if method in ("heads", "blockwise") else {}
    settings = {"compile": "auto"}
    memory = {"pool_bytes": 100 << 20}
    return tiny_cluster(directory(), drafting, target=settings, kv=memory, scheduler={"max_sequences": 8})


@pytest.fixture(scope="module")
def library() -> Any:
    if not (directory() / "config.json").is_file():
        pytest.skip(f"{MODEL} is not in the cache: `make translators` fetches 660 MB")
    with warnings.catch_warnings(action="ignore"):
        return MarianTokenizer.from_pretrained(directory())


@pytest.fixture(scope="module")
def expected(library: Any) -> dict[int, list[tuple[int, ...]]]:
    """The tokens of `generate`, by the number of beams."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory(), dtype=torch.float32).eval()
    found: dict[int, list[tuple[int, ...]]] = {1: [], 4: []}
    for sentence in SENTENCES:
        source = library([sentence], return_tensors="pt")
        for beams, answers in found.items():
            written = model.generate(**source, num_beams=beams, do_sample=False, max_new_tokens=MAX_TOKENS)
            answers.append(tuple(written[0, 1:].tolist()))
    return found


@pytest.fixture(scope="module")
def heads(library: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads, most of whose drafts are wrong."""
    written = tmp_path_factory.mktemp("drafts") / "heads"
    drafting_modules.save(directory(), written, "heads", (LAYERS,), FREQUENT)
    return written


@pytest.fixture(params=["none", "ngram", "model", "heads", "blockwise"])
async def client(request: pytest.FixtureRequest, library: Any, heads: Path) -> AsyncIterator[GenerationClient]:
    async with (
        LocalCluster(configure(request.param, heads)) as cluster,
        GenerationClient(fixed_address(cluster.grpc_address)) as client,
    ):
        yield client


async def answer(
    client: GenerationClient, sentence: str, beams: int = 1
) -> tuple[tuple[int, ...], str, generation_pb2.Usage]:
    """The tokens, the text and the usage of a translation."""
    message = generation_pb2.GenerateRequest(
        text=sentence, stopping=generation_pb2.StoppingCriteria(max_tokens=MAX_TOKENS)
    )
    if beams > 1:
        message.best_of = beams
        message.beam_search.SetInParent()
    tokens: list[int] = []
    text, usage = "", generation_pb2.Usage()
    async for response in client.generate(message, TIMEOUT_SECONDS):
        tokens.extend(response.delta.token_ids)
        text += response.delta.text
        usage.MergeFrom(response.finished.usage)
    return tuple(tokens), text, usage


async def test_tokens_and_texts_are_those_of_transformers(
    client: GenerationClient,
    library: Any,
    expected: dict[int, list[tuple[int, ...]]],
    request: pytest.FixtureRequest,
) -> None:
    drafted = accepted = 0
    for beams, answers in expected.items():
        for sentence, wanted in zip(SENTENCES, answers, strict=True):
            tokens, text, usage = await answer(client, sentence, beams)
            assert tokens == wanted, (beams, sentence)
            assert text == library.decode(wanted, skip_special_tokens=True)
            drafted, accepted = drafted + usage.drafted_tokens, accepted + usage.accepted_draft_tokens
    method = request.node.callspec.params["client"]
    if method in ("model", "heads", "blockwise"):
        assert accepted < drafted
    if method == "model":
        assert accepted > 0


def test_the_command_translates_in_one_process(
    library: Any,
    expected: dict[int, list[tuple[int, ...]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES) + "\n")
    arguments = [str(tmp_path / "in.txt"), "--model", MODEL, "--max-tokens", str(MAX_TOKENS)]
    assert run_command("translate", *arguments) == 0
    wanted = [library.decode(tokens, skip_special_tokens=True) for tokens in expected[1]]
    assert capsys.readouterr().out.split("\n") == [*wanted, ""]
