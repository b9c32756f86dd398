"""Commands that speak to a server: one meaning of --url and --cacert, and one line for whatever goes wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import ConfigurationError, WorkerUnavailable
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.http import create_app
from deploy.commands.client.connection import ChosenServer
from deploy.commands.generate import Prompt, answer_prompt
from deploy.implied_settings import NOT_LOSSLESS
from deploy.network import https_client
from deploy.network.https_client import open_client, server_root, verification
from deploy.settings import load_settings
from deploy.signals import SIGNALLED
from tests.support.certificates import Authority
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import api_that_writes
from tests.support.terminal import CTRL_C, in_terminal, run_command

NOWHERE = "http://127.0.0.1:1"
BATCH_LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}\n'
COMMANDS = {
    "generate": ["hi"],
    "complete": ["hi"],
    "translate": ["in.jsonl"],
    "run-batch": ["-i", "in.jsonl", "-o", "out.jsonl"],
    "top": ["--once"],
    "bench serve": ["--num-prompts", "1", "--random-input-len", "4", "--max-tokens", "8"],
    "bench race": ["--prompts", "prompts.jsonl", "--max-tokens", "8", "--model", "tiny", "--out", "race"],
    "bench tasks": ["--correction", "pairs.jsonl", "--max-tokens", "8", "--model", "tiny", "--out", "tasks"],
    "chat": [],
}


KEYS = KeyRing(parse_keys("alice alice-key-0123456789", "here"))


@asynccontextmanager
async def serving(
    directory: Path, *, keys: KeyRing | None = None, tls: PublicTlsSection | None = None, is_lossless: bool = True
) -> AsyncIterator[str]:
    """A server that continues every text with `hello the world`. Yields its address."""
    api = api_that_writes(directory / "model", "hello the world")
    api.engine.is_lossless = is_lossless
    async with api.http, listening(create_app(api.client, LimitsSection(), keys=keys), tls) as url:
        yield url


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(BATCH_LINE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"source": "he go", "references": ["he goes"]}\n')


Run = Callable[..., Awaitable[tuple[int, list[str]]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in a thread. Returns its status and the lines of its errors."""
    monkeypatch.delenv("PILOTFISH_API_KEY", raising=False)

    async def run(command: str, *options: str) -> tuple[int, list[str]]:
        status = await asyncio.to_thread(run_command, *command.split(), *COMMANDS[command], *options)
        errors = capsys.readouterr().err
        return status, [line for line in errors.splitlines() if line.startswith("pilotfish: ")]

    return run


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_server_that_is_away_is_one_line(run: Run, command: str) -> None:
    status, lines = await run(command, "--url", NOWHERE)
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"pilotfish: {NOWHERE}")
    assert "the connection is refused, nothing listens there; start `pilotfish serve` or check --url" in lines[0]


@pytest.mark.parametrize("command", ["top", "chat", "run-batch", "translate", "bench serve", "bench race"])
async def test_a_server_that_never_answers_is_one_line(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https_client, "_SHORT", httpx.Timeout(0.3))
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        status, lines = await run(command, "--url", url)
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith(f"pilotfish: {url}") and lines[0].endswith(": it does not answer in time")


@pytest.mark.parametrize("command", ["generate", "complete", "run-batch", "bench serve"])
async def test_a_server_of_this_machine_is_not_asked_through_a_proxy_of_the_environment(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with serving(tmp_path) as url:
        assert await run(command, "--url", url) == (0, [])
        if command in ("generate", "complete"):
            assert await run(command, "--set", f"server.http_port={url.rpartition(':')[2]}") == (0, [])


@pytest.mark.parametrize(
    ("url", "is_own", "asks_proxy"),
    [
        ("http://llm.example.com", False, True),
        ("http://192.0.2.7:8000", False, True),
        ("http://192.0.2.7:8000", True, False),
        ("http://127.0.0.1:8000/v1", False, False),
        ("https://[::1]:8000", False, False),
        ("http://localhost:8000", False, False),
    ],
)
async def test_a_proxy_of_the_environment_is_asked_for_other_machines_alone(
    url: str, is_own: bool, asks_proxy: bool
) -> None:
    async with open_client(url, None, verification(None), 1.0, is_own=is_own) as client:
        assert client.trust_env is asks_proxy


async def test_certificates_that_cannot_be_read_are_named_as_they_were_given(run: Run) -> None:
    status, (line,) = await run("complete", "--url", NOWHERE, "--cacert", "absent.pem")
    assert (status, line.startswith("pilotfish: --cacert: needed a readable PEM file, found absent.pem")) == (2, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("all_proxy", "socks5://127.0.0.1:1"), ("http_proxy", "ftp://127.0.0.1:1"), ("https_proxy", "http://a:port")],
)
async def test_a_proxy_that_cannot_be_used_is_named(
    run: Run, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for exception in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(exception, raising=False)
    monkeypatch.setenv(name, value)
    status, (line,) = await run("complete", "--url", "http://llm.example.com")
    assert status == 2
    assert line.startswith("pilotfish: http_proxy, https_proxy, all_proxy, no_proxy: needed proxies that can be used")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("more", [(), ("--set", "draft.method=eagle")])
async def test_a_client_of_a_server_fetches_no_draft(
    run: Run, command: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[object] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *names, **_: fetched.append(names))
    _, lines = await run(command, "--url", NOWHERE, "--set", "draft.path=owner/name", *more)
    assert (fetched, len(lines)) == ([], 1)
    assert lines[0].startswith(f"pilotfish: {NOWHERE}")


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_command_that_may_load_the_models_fetches_the_draft_without_a_server_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no network\nhere")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    async with serving(tmp_path) as url:
        port = url.rpartition(":")[2] if is_running else "1"
        found = await run("complete", "--set", f"server.http_port={port}", "--set", "draft.path=owner/name")
    missing = "pilotfish: draft 'owner/name': it cannot be downloaded from the model hub: no network here"
    assert found == ((0, []) if is_running else (1, [missing]))


@pytest.mark.parametrize("command", COMMANDS)
async def test_what_is_no_address_is_refused_before_anything_is_sent(run: Run, command: str) -> None:
    status, lines = await run(command, "--url", "localhost:8000")
    assert (status, lines) == (
        2,
        ["pilotfish: --url: needed http://HOST:PORT or https://HOST:PORT, found 'localhost:8000'"],
    )


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_missing_key_names_the_variable(run: Run, command: str, tmp_path: Path) -> None:
    async with serving(tmp_path, keys=KEYS) as url:
        status, lines = await run(command, "--url", url)
    assert status == 1
    assert len(lines) == 1
    assert "answered 401" in lines[0] and "set PILOTFISH_API_KEY" in lines[0]


@pytest.mark.parametrize(
    ("command", "options", "code"),
    [
        ("generate", ("--temperature", "-1"), 400),
        ("complete", ("--max-tokens", "0", "--json"), 400),
        ("complete", ("--model", "other"), 404),
    ],
)
async def test_a_request_that_the_server_refuses_ends_as_one_that_the_command_refuses(
    run: Run, command: str, options: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    async with serving(tmp_path) as url:
        status, lines = await run(command, "--url", url, *options)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(f"pilotfish: {url}/v1/") and f"answered {code}: " in lines[0]


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_server_of_another_kind_is_one_line(run: Run, command: str) -> None:
    async with listening(PlainTextResponse("hello")) as url:
        status, lines = await run(command, "--url", url)
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"pilotfish: {url}/")
    assert lines[0].endswith("is it the address of an OpenAI-compatible server?")


@pytest.mark.parametrize("command", ["bench race", "bench tasks"])
async def test_a_benchmark_asks_for_both_servers_before_it_measures(run: Run, command: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        status, lines = await run(command, "--url", url, "--plain-url", NOWHERE)
        assert (status, len(lines)) == (1, 1) and lines[0].startswith(
            f"pilotfish: {NOWHERE}: the connection is refused"
        )
        status, lines = await run(command, "--url", url, "--plain-url", "localhost")
        assert (status, lines) == (
            2,
            ["pilotfish: --plain-url: needed http://HOST:PORT or https://HOST:PORT, found 'localhost'"],
        )


@pytest.mark.parametrize("command", ["bench serve", "bench race", "bench tasks"])
async def test_the_key_of_the_environment_opens_the_server(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_API_KEY", "alice-key-0123456789")
    async with serving(tmp_path, keys=KEYS) as url:
        assert await run(command, "--url", url) == (0, [])


@pytest.mark.parametrize("command", ["generate", "top"])
async def test_a_key_may_end_a_line(run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_API_KEY", "root-key-0123456789\n")
    keys = KeyRing(parse_keys("root root-key-0123456789 admin", "here"))
    async with serving(tmp_path, keys=keys) as url:
        assert await run(command, "--url", url) == (0, [])


KEYS_OF_NO_HEADER = ("alice-key\n0123456789", "alice key 0123456789", "cl\u00e9-0123456789", "a\udcff")


@pytest.mark.parametrize(
    ("command", "key"),
    [*((command, KEYS_OF_NO_HEADER[0]) for command in COMMANDS), *(("complete", key) for key in KEYS_OF_NO_HEADER[1:])],
)
async def test_what_no_header_holds_is_refused_and_not_shown(
    run: Run, command: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_API_KEY", key)
    assert await run(command, "--url", NOWHERE) == (
        2,
        ["pilotfish: PILOTFISH_API_KEY: needed an API key of printable ASCII characters without spaces"],
    )


async def test_a_host_that_cannot_be_is_no_running_server(run: Run) -> None:
    status, lines = await run("complete", "--set", "server.http_host=a..b", "--set", "target.path=./nowhere")
    assert (status, len(lines)) == (1, 1) and "no such directory" in lines[0]


async def test_generate_asks_servers_of_others() -> None:
    chunk = '{"model": "theirs", "choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]}'
    written: list[str] = []
    events = PlainTextResponse(f"data: {chunk}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
    async with listening(events) as url:
        answer = await answer_prompt(ChosenServer(load_settings(), url), Prompt("hi"), written.append, written.append)
    assert (answer.model, answer.text, answer.finish_reason) == ("theirs", "hello", "stop")
    assert written == ["hello", "\n"]


@pytest.mark.parametrize("command", ["bench serve", "bench race", "bench tasks"])
@pytest.mark.parametrize("out", ["in.jsonl", "in.jsonl/results", "a" * 300, f"{'a' * 300}/results"])
async def test_a_place_where_results_cannot_be_written_is_refused_before_anything_is_measured(
    run: Run, command: str, out: str
) -> None:
    status, (line,) = await run(command, "--url", NOWHERE, "--out", out)
    assert (status, line.startswith(f"pilotfish: --out: {out} is refused; it must be a directory, in one")) == (2, True)


def test_a_simulation_is_not_begun_where_its_results_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("simulate", "capacity", "--out", "in.jsonl/results") == 2
    assert "--out: in.jsonl/results is refused" in capsys.readouterr().err
    assert run_command("bench", "agreement", "in.jsonl", "--out", "in.jsonl") == 2
    assert "--out: in.jsonl is refused" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench race", "bench tasks"])
async def test_a_benchmark_without_a_measurement_fails(run: Run, command: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        status, lines = await run(command, "--url", url, "--model", "another")
    assert status == 1
    assert len(lines) == 1 and lines[0].startswith("pilotfish: nothing was measured; ") and "answered 404" in lines[0]


@pytest.mark.parametrize("command", ["bench race", "bench tasks", "run-batch", "translate"])
def test_ctrl_c_keeps_what_there_is_and_says_so(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(running: Coroutine[object, object, None]) -> None:
        running.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupted)
    assert run_command(*command.split(), *COMMANDS[command], "--url", NOWHERE) == 130
    assert "stopped; " in capsys.readouterr().err
    for name in {"bench race": ("race/race.json",), "bench tasks": ("tasks/tasks.json",)}.get(command, ()):
        assert (tmp_path / name).exists()


async def test_bench_serve_prints_what_was_measured_before_ctrl_c(tmp_path: Path) -> None:
    many = ("--num-prompts", "600", "--request-rate", "40", "--random-input-len", "4", "--max-tokens", "8")
    async with (
        serving(tmp_path) as url,
        in_terminal("bench", "serve", "--url", url, *many) as terminal,
    ):
        await terminal.shows("[1-9]%")
        terminal.type(CTRL_C)
        await terminal.shows(r"\| 40, any \| +[1-9]\d* ")
        await terminal.shows("stopped; the results so far are above")
        assert await terminal.ends() == SIGNALLED


@pytest.mark.parametrize(
    ("lines", "told", "status"),
    [
        ((BATCH_LINE,), "1 of 1 line answered, 0 failed", 0),
        (
            (BATCH_LINE, BATCH_LINE.replace('"a"', '"b"').replace("prompt", "promt")),
            "1 of 2 lines answered, 1 failed",
            1,
        ),
    ],
)
async def test_run_batch_counts_its_lines_and_fails_if_one_failed(
    lines: tuple[str, ...], told: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(lines))
    async with (
        serving(tmp_path) as url,
        in_terminal("run-batch", *COMMANDS["run-batch"], "--url", url) as terminal,
    ):
        await terminal.shows(f"{told}, in the order in which they ended: out.jsonl")
        assert await terminal.ends() == status


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("top", "chat")])
async def test_certificates_are_checked_by_cacert(run: Run, command: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("server")
    async with serving(tmp_path, tls=PublicTlsSection(certificate=certificate, key=key)) as url:
        status, lines = await run(command, "--url", url)
        assert status == 1
        assert len(lines) == 1 and "its certificate is not trusted" in lines[0] and "--cacert" in lines[0]
        status, lines = await run(command, "--url", url, "--cacert", str(authority.file))
        refused = command == "translate"  # the model of this server continues texts
        assert (status, "encoder-decoder" in "".join(lines)) == ((2, True) if refused else (0, False))


async def test_a_server_without_tls_is_named_as_such(tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        server = ChosenServer(load_settings(), url.replace("http:", "https:"))
        with pytest.raises(WorkerUnavailable, match="it does not speak TLS; use http:// instead"):
            await answer_prompt(server, Prompt("hi"), print, print)


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_an_address_may_end_in_the_version_of_the_api(url: str) -> None:
    assert server_root(url) == "http://a:1"


@pytest.mark.parametrize("url", ["", "a", "a:80", "ftp://a", "http://", "http://a:port"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--url: needed"):
        server_root(url)


async def test_generate_says_that_an_answer_is_not_lossless(tmp_path: Path) -> None:
    notices: list[str] = []
    async with serving(tmp_path, is_lossless=False) as url:
        server = ChosenServer(load_settings(), url)
        answer = await answer_prompt(server, Prompt("hi", raw=True), lambda _: None, notices.append)
    assert (answer.text, answer.lossless, answer.completion_tokens) == ("hello the world", False, len(answer.token_ids))
    assert notices[0] == NOT_LOSSLESS
    assert "tokens/step" in notices[1]
