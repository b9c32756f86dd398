"""`return_drafts`: the verified trees and the text of each token, without a change of the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.request import Commit, FinishReason, GeneratedPart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult
from cluster.generation.events import Delta
from cluster.generation.text.output_processor import OutputProcessor
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.fakes.fake_cluster import read, request, serving
from tests.support.fakes.fake_drafters import PerfectDrafter, RandomDrafter
from tests.support.fakes.fake_target import FakeTarget
from tests.support.fakes.http_app import HttpApi, chunks, error_of
from tests.support.models.tiny_tokenizer import byte_level

TEXT = "hello the 🐟 world"


def choices(events: list[Any]) -> list[Any]:
    return [event["choices"][0] for event in events]


def check(choice: Any) -> None:
    """The tokens of a choice follow the accepted nodes of its trees, then come the target's own."""
    rest = list(choice["token_ids"])
    for draft in choice["drafts"]:
        accepted, committed = draft["accepted"], rest[: draft["committed_tokens"]]
        del rest[: draft["committed_tokens"]]
        assert [draft["token_ids"][node] for node in accepted] == committed[: len(accepted)]
        assert len(draft["token_ids"]) == len(draft["texts"]) == len(draft["parents"]) > len(accepted)
        assert [draft["origins"][node] for node in accepted] == ["earlier", "request", "request"][: len(accepted)]
        parent = -1
        for node in accepted:
            assert draft["parents"][node] == parent
            parent = node
    assert rest == []
    assert len(choice["token_texts"]) == len(choice["token_ids"])


async def test_a_stream_reports_the_tree_of_every_verdict(api: HttpApi) -> None:
    plain = choices(chunks(await api.chat(stream=True)))
    shown = choices(chunks(await api.chat(stream=True, return_drafts=True, return_token_ids=True)))
    assert all("drafts" not in choice and "token_texts" not in choice for choice in plain)
    text = "".join(choice["delta"].get("content", "") for choice in plain)
    assert "".join(choice["delta"].get("content", "") for choice in shown) == text == TEXT
    drafted = [choice for choice in shown if "drafts" in choice]
    assert "".join(text for choice in drafted for text in choice["token_texts"]) == TEXT
    assert all(len(choice["drafts"]) == 1 for choice in drafted)
    assert sum(len(choice["drafts"][0]["accepted"]) for choice in drafted) > 2
    for choice in drafted:
        check(choice)
    assert [one.returns_drafts for one in api.engine.requests] == [False, True]


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_a_whole_response_has_all_trees(api: HttpApi, path: str) -> None:
    options = {"return_drafts": True, "return_token_ids": True, "max_tokens": 40}
    choice = (await getattr(api, path)(**options)).json()["choices"][0]
    assert len(choice["drafts"]) > 3
    assert "".join(choice["token_texts"]) == TEXT
    check(choice)


async def test_chunks_of_several_verdicts_have_several_trees(api: HttpApi) -> None:
    events = await api.chat(stream=True, return_drafts=True, return_token_ids=True, stream_interval=7)
    drafted = [choice for choice in choices(chunks(events)) if "drafts" in choice]
    assert max(len(choice["drafts"]) for choice in drafted) > 1
    for choice in drafted:
        check(choice)


async def test_a_stop_string_cuts_texts_and_tree(api: HttpApi) -> None:
    choice = (await api.chat(return_drafts=True, return_token_ids=True, stop=["the"])).json()["choices"][0]
    assert "".join(choice["token_texts"]) == choice["message"]["content"] == "hello "
    check(choice)


async def test_beam_search_has_no_drafts(api: HttpApi) -> None:
    response = await api.chat(return_drafts=True, use_beam_search=True, best_of=2)
    assert response.status_code == 400
    assert error_of(response)["param"] == "return_drafts"


def test_a_verdict_that_the_caller_has_in_part_is_reported_without_its_tree(tmp_path: Path) -> None:
    """What is left of its tokens does not begin at the root of the tree."""
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    tokens = tuple(tokenizer.encode("hello the world"))
    wanted = replace(request(max_tokens=40), returns_drafts=True)
    output = OutputProcessor(wanted, tokenizer.detokenizer())
    output.resume(GeneratedPart(), None, 1)
    for first, verdict in ((0, tokens[:3]), (3, tokens[3:])):
        commit = Commit(verdict, len(verdict) - 1, drafted=len(verdict) - 1, tree=TokenTree.chain(verdict[:-1]))
        (delta,) = output.process(commit)
        assert isinstance(delta, Delta)
        assert delta.draft is not None
        assert len(delta.draft.tree) == (0 if first == 0 else len(verdict) - 1)
        assert len(delta.draft.texts) == len(delta.tokens) == len(verdict) - (first == 0)
        assert "".join(delta.draft.texts) == delta.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_coordinator_reports_the_trees_that_it_verifies(temperature: float) -> None:
    target = FakeTarget()
    wanted = request(max_tokens=40, temperature=temperature)
    async with serving(target, RandomDrafter(target), draft__timeout_seconds=10.0) as coordinator:
        plain = await read(coordinator, wanted)
        shown = await read(coordinator, replace(wanted, returns_drafts=True))
    assert all(len(commit.tree) == 0 for commit in plain)
    answer = [token for commit in shown for token in commit.tokens]
    assert answer == [token for commit in plain for token in commit.tokens] == target.answer(wanted)
    assert sum(commit.accepted for commit in shown) > 0
    assert shown[-1].finish is FinishReason.LENGTH
    for commit in shown:
        assert len(commit.tree) == commit.drafted
        path = commit.tree.follow(commit.tokens)
        assert len(path) >= commit.accepted
        assert tuple(commit.tree.tokens[node] for node in path[: commit.accepted]) == commit.tokens[: commit.accepted]


async def test_a_tree_is_reported_as_far_as_the_target_has_verified_it() -> None:
    target = FakeTarget()
    original, wanted, cut = target.step, replace(request(max_tokens=40), returns_drafts=True), 0

    async def step(batch: StepBatch) -> StepResult:
        """A target without room for the states of all nodes verifies the first ones alone."""
        nonlocal cut
        cut += sum(len(row.tree) > 2 for row in batch.rows)
        return await original(StepBatch(tuple(replace(row, tree=row.tree.first(2)) for row in batch.rows)))

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target), draft__timeout_seconds=10.0) as coordinator:
        shown = await read(coordinator, wanted)
    assert [token for commit in shown for token in commit.tokens] == target.answer(wanted)
    assert cut > 1
    assert target.accepted > 0
    assert all(len(commit.tree) == len(commit.tree_origins) == commit.drafted for commit in shown)
