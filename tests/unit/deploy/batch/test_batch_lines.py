"""The lines of batch files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.batch.run import PATHS, BatchResult, InvalidLine, parse_line

LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": PATHS[0], "body": {"messages": []}}


@pytest.mark.parametrize("url", PATHS)
def test_a_line_is_a_request(url: str) -> None:
    found = parse_line(json.dumps({**LINE, "url": url}))
    assert (found.custom_id, found.url, found.body) == ("a", url, {"messages": []})


@pytest.mark.parametrize(
    ("text", "words", "custom_id"),
    [
        ("{", "not JSON", None),
        ("[" * 100_000, "not JSON", None),
        ("[]", "[] is refused; it must be an object", None),
        (json.dumps({**LINE, "custom_id": 7}), "custom_id: 7 is refused; it must be a string of 1 to 512", None),
        (json.dumps({**LINE, "custom_id": ""}), "custom_id: '' is refused", None),
        (json.dumps({**LINE, "method": "GET"}), "method: 'GET' is refused; it must be POST", "a"),
        (json.dumps({**LINE, "url": "/v1/embeddings"}), "url: '/v1/embeddings' is refused; it must be one of", "a"),
        (json.dumps({**LINE, "url": ["/v1"]}), "url: ['/v1'] is refused", "a"),
        (json.dumps({**LINE, "body": "x"}), "body: 'x' is refused; it must be an object", "a"),
        (json.dumps({**LINE, "body": {"stream": True}}), "body.stream: True is refused; it must be false", "a"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_field(text: str, words: str, custom_id: str | None) -> None:
    with pytest.raises(InvalidLine) as refused:
        parse_line(text)
    assert words in str(refused.value)
    assert refused.value.custom_id == custom_id


def test_a_result_has_a_response_or_an_error() -> None:
    answered = json.loads(BatchResult("a", 3, 200, "id", {"choices": ["é"]}).text())
    assert answered["response"] == {"status_code": 200, "request_id": "id", "body": {"choices": ["é"]}}
    assert (answered["error"], answered["custom_id"]) == (None, "a")
    failed = json.loads(BatchResult(None, 4, code="invalid_line", message="not JSON").text())
    assert (failed["response"], failed["custom_id"]) == (None, None)
    assert failed["error"] == {"code": "invalid_line", "message": "not JSON", "line": 4}
