"""What a caller says that it has received is checked like any other input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest
from cluster.generation.recent_answers import RecentAnswers
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.fake_engine import VOCABULARY, fake_service
from tests.unit.generation.resume.resumed_calls import read_events

REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "an index beyond n": ([{"index": 1}], {}, "resume[0].index"),
    "an index twice": ([{"index": 0}, {"index": 0}], {"n": 2}, "resume[1].index"),
    "more entries than answers": ([{"index": 0}, {"index": 0}], {}, "resume"),
    "more tokens than counted": ([{"token_count": 1, "token_ids": [5, 6]}], {}, "resume[0].token_ids"),
    "a token outside the vocabulary": ([{"token_count": 1, "token_ids": [VOCABULARY]}], {}, "resume[0].token_ids[0]"),
    "more tokens than max_tokens": ([{"token_count": 9}], {}, "resume[0].token_count"),
    "more accepted tokens than tokens": (
        [{"token_count": 1, "drafted_tokens": 9, "accepted_draft_tokens": 2}],
        {},
        "resume[0].accepted_draft_tokens",
    ),
    "more steps than tokens": ([{"token_count": 1, "target_steps": 2}], {}, "resume[0].target_steps"),
    "tokens of the best of several": ([{"token_count": 1}], {"best_of": 2}, "resume[0].token_count"),
    "tokens after the end of the answer": ([{"token_count": 2, "token_ids": [2, 5]}], {}, "resume"),
    "no seed": ([{"token_count": 1}], {"seedless": True}, "resume"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_it_is_refused_with_the_name_of_the_field(tmp_path: Path, case: str) -> None:
    entries, values, field = REFUSED[case]
    service, engine, _ = fake_service(tmp_path)
    seedless = "seedless" in values
    message = generation_pb2.GenerateRequest(
        text="hi",
        sampling=common_pb2.SamplingParameters(seed=None if seedless else 3),
        stopping=generation_pb2.StoppingCriteria(max_tokens=8),
        resume=[generation_pb2.ResumedAnswer(**entry) for entry in entries],
        **{name: value for name, value in values.items() if name != "seedless"},
    )
    with pytest.raises(InvalidRequest) as refusal:
        await read_events(service, message)
    assert refusal.value.field == field
    assert engine.requests == []


async def test_tokens_after_a_stop_string_are_refused(tmp_path: Path) -> None:
    service, engine, tokenizer = fake_service(tmp_path)
    tokens = tokenizer.encode("hello the world")
    message = generation_pb2.GenerateRequest(
        text="hi",
        sampling=common_pb2.SamplingParameters(seed=3),
        stopping=generation_pb2.StoppingCriteria(stop=["the"]),
        resume=[generation_pb2.ResumedAnswer(token_count=len(tokens), token_ids=tokens)],
    )
    with pytest.raises(InvalidRequest, match="without tokens after a stop string"):
        await read_events(service, message)
    assert engine.requests == []


def test_recent_answers_are_bounded_and_the_oldest_is_dropped() -> None:
    store = RecentAnswers(max_tokens=10, max_requests=3)
    for name in (b"a", b"b", b"c"):
        store.begin(name, [(1, 2), ()])
    store.append(b"a", 1, (3, 4))
    store.begin(b"d", [(7,)])
    assert [list(store.tokens(name, 0)) for name in (b"a", b"b", b"c", b"d")] == [[1, 2], [], [1, 2], [7]]
    assert (list(store.tokens(b"a", 1)), store.token_count) == ([3, 4], 7)
    store.append(b"d", 0, range(9))
    assert store.token_count <= 10
    assert len(store.tokens(b"d", 0)) == 10
    store.append(b"d", 0, range(9))
    assert store.token_count == 0
