"""A draft model whose token ids are not the target's drafts by text: its drafts are right, and they change no token."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from tests.support.deadline import deadline
from tests.support.models import renumbered, tiny, tiny_tokenizer
from tests.unit.draft.contract.methods import Directories, make_directories, values
from tests.unit.draft.contract.test_streams import TIMEOUT_SECONDS, Answer, answer, parameters, request
from workers.draft.registry import create
from workers.serve.configuration import load_configuration

REQUESTS = [
    request(0, (), parameters(temperature=0.0)),
    request(1, (), parameters(temperature=0.3, seed=3)),
    request(2, (), parameters(temperature=0.0, repetition_penalty=1.5)),
    request(3, (), parameters(temperature=1.0, top_p=0.9)),
]


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A target that writes printable characters, and a copy of it with other numbers for its tokens."""
    found = make_directories(tmp_path_factory.mktemp("writers"))
    renumbered.write_text_alone(found.target)
    return replace(found, draft=renumbered.renumber(found.target, found.others / "renumbered"))


async def answers(configuration: dict[str, Any]) -> list[Answer]:
    async with (
        deadline(TIMEOUT_SECONDS),
        LocalCluster(load_configuration(configuration)) as cluster,
        GenerationClient(fixed_address(cluster.grpc_address)) as client,
    ):
        return list(await asyncio.gather(*(answer(client, message) for message in REQUESTS)))


@pytest.mark.parametrize("place", ["target", "drafter"])
async def test_drafts_by_text_are_accepted_and_change_no_token(place: str, writers: Directories) -> None:
    plain = await answers(values("none", writers))

    found = await answers(values("model", writers, placement=place))

    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(one.drafted > 0 for one in found)
    greedy, sampled = found[:2]
    for one, per_step in ((greedy, 4), (sampled, 1.5)):
        assert len(one.tokens) - one.accepted <= 2 + len(one.tokens) / per_step


async def test_a_parallel_model_drafts_by_text(writers: Directories) -> None:
    directory = writers.others / "parallel"
    shutil.copytree(writers.draft, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"pard_token": config["vocab_size"] - 1}))
    plain = await answers(values("none", writers))

    found = await answers(values("model", replace(writers, draft=directory)))

    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert sum(one.accepted for one in found) > 0


async def test_the_rule_of_rejection_takes_drafts_by_text(writers: Directories) -> None:
    configuration = values("model", writers)
    configuration["target"]["acceptance"] = "rejection"
    assert all(one.accepted > 0 for one in (await answers(configuration))[:2])


def _created(directories: Directories, **model: Any) -> object:
    configuration = values("model", directories)
    configuration["draft"]["model"] |= model
    loaded = load_configuration(configuration)
    return create(loaded.draft, loaded.target)


def test_what_cannot_draft_by_text_is_refused(writers: Directories, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"distributions: on is refused with .*tokenizer is not the target's"):
        _created(writers, distributions="on")
    untold = tiny.save(tmp_path / "untold", tiny.llama(vocab_size=100))
    with pytest.raises(ConfigurationError, match=r"100 tokens and the target .* cannot draft by text: .* No such file"):
        _created(replace(writers, draft=untold))
    reading = tiny.save(tiny_tokenizer.sentencepiece(tmp_path / "reading"), tiny.t5(vocab_size=100))
    with pytest.raises(ConfigurationError, match="cannot draft by text: one of them has an encoder"):
        _created(replace(writers, draft=reading))
    learning = load_configuration(values("model", writers, learn="on", placement="target"))
    with pytest.raises(ConfigurationError, match=r"learn: on is refused with .*tokenizer is not the target's"):
        create(learning.draft, learning.target)
