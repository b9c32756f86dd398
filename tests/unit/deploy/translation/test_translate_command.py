"""`pilotfish translate`: lines in, lines out, in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core.errors import ConfigurationError, InvalidRequest, WorkerUnavailable
from deploy.translation.sources import read_sources
from deploy.translation.translator import RefusedText, TranslateOptions, Translator, in_order
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import HttpApi
from tests.support.terminal import run_command
from tests.support.translation.tiny_marian import ENGLISH, FRENCH
from tests.support.translation.translator import translator


class TestSources:
    def test_every_line_is_a_text(self, tmp_path: Path) -> None:
        file = tmp_path / "in.txt"
        file.write_bytes("un\r\n\ndeux\u2028trois\n".encode())
        assert read_sources(file, None) == ("un", "", "deux\u2028trois")
        file.write_text("")
        assert read_sources(file, None) == ()

    def test_a_field_of_json_lines_is_a_text(self, tmp_path: Path) -> None:
        file = tmp_path / "in.jsonl"
        file.write_text('{"fr": "un", "en": "one"}\n{"fr": "deux"}\n')
        assert read_sources(file, "fr") == ("un", "deux")
        with pytest.raises(InvalidRequest, match=r"line 2: .*fr.* a text under 'en'"):
            read_sources(file, "en")

    @pytest.mark.parametrize(
        "content",
        ["{", "[]", '{"fr": 1}', r'{"fr": "\ud83d"}', pytest.param("[" * 100_000, id="deep")],
    )
    def test_a_line_without_the_field_is_named(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "in").write_text(f'{{"fr": "un"}}\n{content}\n')
        with pytest.raises(InvalidRequest, match=f"{tmp_path / 'in'}, line 2: "):
            read_sources(tmp_path / "in", "fr")

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match=r"FILE: .*missing"):
            read_sources(tmp_path / "missing", None)


class TestOrder:
    async def test_results_have_the_order_of_the_items(self) -> None:
        running = most = 0

        async def work(item: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range((item * 7) % 5):
                await asyncio.sleep(0)
            running -= 1
            return item

        assert [item async for item in in_order(range(50), work, 3)] == list(range(50))
        assert most == 3

    async def test_an_exception_ends_what_still_runs(self) -> None:
        ended: list[int] = []

        async def work(item: int) -> int:
            if item == 2:
                raise ValueError(item)
            try:
                await asyncio.sleep(3600 if item > 2 else 0)
            finally:
                ended.append(item)
            return item

        results: list[int] = []

        async def collect() -> None:
            async for item in in_order(range(6), work, 6):
                results.append(item)  # noqa: PERF401 - what came before the exception is kept

        with pytest.raises(ValueError, match="2"):
            await collect()
        assert (results, sorted(ended)) == ([0, 1], [0, 1, 3, 4, 5])


class TestTranslator:
    @pytest.fixture
    async def served(self, tmp_path: Path) -> AsyncIterator[Any]:
        async with translator(tmp_path) as served:
            yield served

    async def test_a_text_is_translated(self, served: Any) -> None:
        client = Translator(served.http, "http://pilotfish", TranslateOptions(max_tokens=40))
        await client.choose_model(None)
        translation = await client.translate(FRENCH[0])
        assert (client.model, translation.text, translation.is_cut) == ("tiny", ENGLISH[0], False)
        assert translation.tokens == len(served.tokenizer.encode_answer(ENGLISH[0])) + 1
        assert (await client.translate("  ")).text == ""
        assert len(served.engine.requests) == 1

    async def test_a_translation_that_was_cut_says_so(self, served: Any) -> None:
        client = Translator(served.http, "http://pilotfish/v1", TranslateOptions(max_tokens=2))
        await client.choose_model("tiny")
        assert (await client.translate(FRENCH[0])).is_cut

    async def test_beams_are_a_beam_search(self) -> None:
        fields = TranslateOptions(beams=4).fields()
        assert (fields["use_beam_search"], fields["best_of"], fields["temperature"]) == (True, 4, 0)

    async def test_a_refused_text_has_the_message_of_the_server(self, served: Any) -> None:
        client = Translator(served.http, "http://pilotfish", TranslateOptions(max_tokens=40))
        await client.choose_model(None)
        with pytest.raises(RefusedText, match=r"^prompt is too long: .* 48 maximum") as refused:
            await client.translate("un chien " * 60)
        assert str(refused.value.of_line(3)).startswith("line 3: prompt is too long: ")

    async def test_a_model_that_continues_texts_is_refused(self, tmp_path: Path) -> None:
        api = HttpApi(tmp_path)
        async with api.http:
            client = Translator(api.http, "http://pilotfish", TranslateOptions())
            with pytest.raises(ConfigurationError, match="needed an encoder-decoder model, found tiny"):
                await client.choose_model(None)
            with pytest.raises(ConfigurationError, match=r"needed one that .* serves \(tiny\), found other"):
                await client.choose_model("other")

    async def test_a_busy_server_is_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("deploy.translation.translator._RETRY_SECONDS", 0.0)
        answers = iter([httpx.Response(503), httpx.Response(429), httpx.ConnectError("away")])
        whole = {"choices": [{"text": "one", "finish_reason": "stop"}]}

        def respond(request: httpx.Request) -> httpx.Response:
            answer = next(answers, httpx.Response(200, json=whole))
            if isinstance(answer, Exception):
                raise answer
            return answer

        async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
            assert (await Translator(http, "http://server", TranslateOptions()).translate("un")).text == "one"

    async def test_a_server_that_fails_is_named(self) -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(500, text="broken"))
        async with httpx.AsyncClient(transport=transport) as http:
            with pytest.raises(WorkerUnavailable, match="http://server/v1/completions answered 500: broken"):
                await Translator(http, "http://server", TranslateOptions()).translate("un")


async def run(*arguments: str) -> int:
    """Run the command in a thread. Returns its exit code."""
    return await asyncio.to_thread(run_command, "translate", *arguments)


async def test_the_command_translates_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [FRENCH[3], "", *FRENCH]
    expected = [ENGLISH[3], "", *ENGLISH]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"fr": line}) + "\n" for line in lines))
    async with translator(tmp_path / "model", block=2) as served, listening(served.app) as url:
        assert await run(str(tmp_path / "in.txt"), "--url", url, "--max-tokens", "40") == 0
        captured = capsys.readouterr()
        assert captured.out.split("\n") == [*expected, ""]
        assert "6 texts" in captured.err
        out = str(tmp_path / "out.txt")
        options = ("--url", url, "--field", "fr", "--out", out, "--max-tokens", "40")
        assert await run(str(tmp_path / "in.jsonl"), *options) == 0
        assert (tmp_path / "out.txt").read_text().split("\n") == [*expected, ""]
        assert capsys.readouterr().out == ""
        (tmp_path / "long.txt").write_text(f"{FRENCH[0]}\n{'un chien ' * 60}\n")
        assert await run(str(tmp_path / "long.txt"), "--url", url, "--max-tokens", "40") == 2
        captured = capsys.readouterr()
        assert captured.out.split("\n") == [ENGLISH[0], ""]
        assert "line 2: prompt is too long:" in captured.err


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text(f"{FRENCH[0]}\n")
    (tmp_path / "link").symlink_to(tmp_path / "in.txt")
    async with translator(tmp_path / "model") as served, listening(served.app) as url:
        out = str(tmp_path / "absent" / "out.txt")
        assert await run(str(tmp_path / "in.txt"), "--url", url, "--out", out) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pilotfish: ")]
        assert line.startswith(f"pilotfish: --out {out}: needed a file that can be written; ")
        for same in ("in.txt", "link"):
            assert await run(str(tmp_path / "in.txt"), "--url", url, "--out", str(tmp_path / same)) == 2
            assert "--out: needed another file than FILE, found the same" in capsys.readouterr().err
    assert (tmp_path / "in.txt").read_text() == f"{FRENCH[0]}\n"


@pytest.mark.parametrize("wrong", [("--beams", "0"), ("--max-tokens", "0"), ("--in-flight", "0")])
async def test_wrong_options_are_refused(
    tmp_path: Path, wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("un")
    assert await run(str(tmp_path / "in"), *wrong) == 2
    assert "at least 1" in capsys.readouterr().err
