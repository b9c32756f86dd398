"""Whole batch files over a real HTTP API, through busy and lost servers, and by the command in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core.errors import ConfigurationError
from deploy.batch import run as batch_run
from deploy.batch.run import BatchRun
from deploy.network.https_client import open_client, verification
from tests.support.fakes.both_apis import HI, BothApis, apis
from tests.support.models import tiny, tiny_tokenizer
from tests.support.terminal import run_command

__all__ = ["apis"]


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"messages": HI, "max_tokens": 8}}


def write(directory: Path, *rows: dict[str, Any] | str) -> Path:
    file = directory / "in.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def read(file: Path) -> dict[str | None, Any]:
    """The lines of an output file by `custom_id`."""
    return {row["custom_id"]: row for row in map(json.loads, file.read_text().splitlines())}


async def run(client: httpx.AsyncClient, source: Path, concurrency: int = 2, seconds: float = 30.0) -> dict[Any, Any]:
    out = source.parent / "out.jsonl"
    shares: list[float] = []
    async with client:
        counts = await BatchRun(client, concurrency, seconds, lambda share, _: shares.append(share)).run(source, out)
    found = read(out)
    assert shares[-1] == 1.0
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    answered = sum((row["response"] or {}).get("status_code") == 200 for row in rows)
    assert (counts.answered, counts.failed) == (answered, len(rows) - answered)
    return found


async def test_every_line_has_its_answer_or_its_error(apis: BothApis, tmp_path: Path) -> None:
    source = write(
        tmp_path,
        line("chat"),
        line("text", "/v1/completions", prompt="hi", max_tokens=8),
        line("response", "/v1/responses", input="hi", max_output_tokens=8),
        "",
        line("refused", messages=HI, temperature=-1),
        line("chat"),
        "{",
    )
    out = await run(open_client(f"{apis.http.base_url}/v1", None, verification(None), 30.0), source)
    alone = (await apis.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 8})).json()
    assert out["text"]["response"]["body"]["choices"][0]["text"] == alone["choices"][0]["message"]["content"]
    assert out["response"]["response"]["body"]["object"] == "response"
    assert out["refused"]["response"]["status_code"] == 400
    assert out["refused"]["response"]["body"]["error"]["param"] == "temperature"
    assert out["text"]["response"]["request_id"]
    assert out["chat"]["error"] or out["chat"]["response"]["status_code"] == 200
    assert out[None]["error"]["line"] == 7
    texts = (tmp_path / "out.jsonl").read_text()
    assert texts.count("custom_id: 'chat' is refused; it must be unique") == 1
    assert len(texts.splitlines()) == 6


async def test_half_of_a_surrogate_pair_and_nan_are_errors_of_their_lines(apis: BothApis, tmp_path: Path) -> None:
    source = write(
        tmp_path,
        line("text", messages=[{"role": "user", "content": "\ud83d"}]),
        line("number", messages=HI, temperature=float("nan")),
        line("\ud83d", messages=HI, max_tokens=8),
        line("fine", messages=HI, max_tokens=8),
    )
    out = await run(open_client(str(apis.http.base_url), None, verification(None), 30.0), source)
    statuses = {name: row["response"]["status_code"] for name, row in out.items()}
    assert statuses == {"text": 400, "number": 400, "\ud83d": 200, "fine": 200}
    assert "half of a surrogate pair" in out["text"]["response"]["body"]["error"]["message"]
    assert out["number"]["response"]["body"]["error"]["param"] == "temperature"


def served_by(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handler))


async def test_a_busy_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(batch_run.asyncio, "sleep", sleep)
    answers = iter(
        [
            httpx.Response(429, headers={"retry-after": "7"}),
            httpx.Response(502),
            httpx.Response(503),
            httpx.Response(200, json={"a": 1}),
        ]
    )
    found = await run(served_by(lambda _: next(answers)), write(tmp_path, line("one")))
    assert found["one"]["response"]["body"] == {"a": 1}
    assert pauses == [7.0, 14.0, 28.0]


async def test_a_proxy_that_cannot_reach_the_server_is_an_error_of_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "_FIRST_PAUSE_SECONDS", 0.0)
    found = await run(served_by(lambda _: httpx.Response(502, text="no such host")), write(tmp_path, line("one")))
    assert found["one"]["response"]["status_code"] == 502
    assert found["one"]["response"]["body"] == "no such host"


async def test_a_lost_server_is_an_error_of_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_FIRST_PAUSE_SECONDS", 0.0)
    asked = 0

    def refuse(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        raise httpx.ConnectError("refused", request=request)

    found = await run(served_by(refuse), write(tmp_path, line("one")))
    assert asked == 3
    assert found["one"]["error"]["code"] == "connection_error" and found["one"]["response"] is None


async def test_a_line_has_a_timeout(tmp_path: Path) -> None:
    async def wait(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    client = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(wait))
    found = await run(client, write(tmp_path, line("one")), seconds=0.01)
    assert found["one"]["error"] == {"code": "timeout", "message": "no answer within 0.01 s", "line": 1}


async def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needed at least one line, found none"):
        await run(served_by(lambda _: httpx.Response(200)), write(tmp_path, ""))


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["-i", "absent.jsonl", "-o", "out.jsonl"], "--input-file absent.jsonl: needed a readable JSONL file"),
            (["-i", "in.jsonl", "-o", "in.jsonl"], "--output-file: needed another file"),
            (["-i", "in.jsonl", "-o", "out.jsonl", "--concurrency", "0"], "--concurrency: 0 is refused"),
            (["-i", "in.jsonl", "-o", "out.jsonl", "--timeout", "0"], "--timeout: 0.0 is refused"),
        ],
    )
    def test_a_mistake_is_reported_before_models_are_loaded(
        self, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command("run-batch", *arguments) == 2
        assert words in capsys.readouterr().err

    def test_a_file_is_answered_in_one_process(self, tmp_path: Path) -> None:
        target = tmp_path / "target"
        tiny_tokenizer.byte_level(tiny.save(target, tiny.llama(vocab_size=320, head_dim=8)))
        body = {"prompt": "abab", "max_tokens": 6, "temperature": 0}
        source = write(tmp_path, *(line(str(index), "/v1/completions", **body) for index in range(3)))
        settings = (f"target.path={target}", "target.device=cpu", "target.compile=off")
        options = [part for setting in (*settings, "target.kv.pool_bytes=4194304") for part in ("--set", setting)]
        assert run_command("run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), *options) == 0
        found = read(tmp_path / "out.jsonl")
        assert len({row["response"]["body"]["choices"][0]["text"] for row in found.values()}) == 1
        assert [found[str(index)]["response"]["body"]["usage"]["completion_tokens"] for index in range(3)] == [6] * 3
