"""Processes log text or JSON, at the level of the settings, to stderr or to the socket of `serve`."""

from __future__ import annotations

import errno
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.ray import log_stream
from deploy.ray.log_stream import LogStream
from workers.serve import logs
from workers.serve.logs import JsonFormatter, SocketHandler, set_logging

NAMES = ("cluster", "workers", "deploy", "pilotfish", "ray", "ray.serve")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The loggers of this process become again what they were."""
    kept = [(log, log.level, log.handlers, log.propagate) for log in map(logging.getLogger, (None, *NAMES))]
    for log, *_ in kept:
        log.handlers = []
    yield
    for log, level, handlers, propagates in kept:
        log.setLevel(level)
        log.handlers, log.propagate = handlers, propagates
    logging.captureWarnings(False)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for sockets of a Ray session that this process is part of."""
    monkeypatch.setattr(logs, "sockets_directory", lambda: tmp_path)
    return tmp_path


def test_json_is_written_to_every_handler_and_has_the_exception() -> None:
    handler = logging.StreamHandler()
    logging.getLogger().handlers = [handler]
    set_logging("debug", "json", "ingress")
    try:
        raise ValueError("wrong")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("name", logging.ERROR, "file", 1, "%s failed", ("it",), info)
    entry = json.loads(handler.format(record))
    assert (entry["message"], entry["level"], entry["logger"], entry["process"]) == (
        "it failed",
        "error",
        "name",
        "ingress",
    )
    assert "ValueError: wrong" in entry["exception"]
    assert entry["time"].endswith("+00:00")


@pytest.mark.parametrize(("level", "own", "others"), [("debug", 10, 30), ("info", 20, 30), ("error", 40, 40)])
def test_the_level_is_that_of_the_settings_and_other_libraries_only_warn(level: str, own: int, others: int) -> None:
    set_logging(level, "text", "ingress")
    found = [logging.getLogger(name).getEffectiveLevel() for name in ("pilotfish.requests", "workers.verify", "httpx")]
    assert found == [own, own, others]


def lines_of(stream: io.StringIO, count: int) -> list[dict[str, Any]]:
    until = time.monotonic() + 10
    while stream.getvalue().count("\n") < count and time.monotonic() < until:
        time.sleep(0.01)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_serve_writes_its_own_lines_and_those_of_the_other_processes(directory: Path) -> None:
    stream = io.StringIO()
    with LogStream("info", stream) as log:
        log.collect(directory)
        logging.getLogger("deploy.serve").info("ready")
        other = SocketHandler(directory / logs.SOCKET)
        other.setFormatter(JsonFormatter("ingress"))
        for text in ("one", "two\nlines"):
            other.handle(logging.LogRecord("cluster.ingress", logging.WARNING, "file", 1, text, None, None))
        logging.getLogger("ray").error("lost")
        found = lines_of(stream, 4)
    assert sorted((line["process"], line["message"]) for line in found) == [
        ("ingress", "one"),
        ("ingress", "two\nlines"),
        ("serve", "lost"),
        ("serve", "ready"),
    ]
    assert (directory / logs.SOCKET).stat().st_mode & 0o077 == 0


def test_what_was_sent_before_the_end_is_written(directory: Path) -> None:
    stream = io.StringIO()
    with LogStream("info", stream) as log:
        log.collect(directory)
        other = SocketHandler(directory / logs.SOCKET)
        other.setFormatter(JsonFormatter("ingress"))
        for number in range(50):
            other.handle(logging.LogRecord("cluster", logging.INFO, "file", 1, str(number), None, None))
    assert [line["message"] for line in lines_of(stream, 50)] == list(map(str, range(50)))


def test_a_process_sends_its_records_and_the_warnings_of_ray_serve(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / logs.SOCKET))
        listener.listen()
        listener.settimeout(10)
        logging.getLogger().handlers = []
        set_logging("info", "json", "coordinator")
        set_logging("info", "json", "coordinator")  # a second time changes nothing
        logging.getLogger("ray.serve").propagate = False
        logging.getLogger("ray.serve").setLevel(logging.INFO)
        logging.getLogger("workers.serve").info("loaded")
        logging.getLogger("ray.serve").info("a request")
        logging.getLogger("ray.serve").warning("a replica has died")
        logging.getLogger("httpx").info("HTTP Request")
        connection, _ = listener.accept()
        connection.setblocking(False)
        found = [json.loads(connection.recv(logs.MOST_BYTES)) for _ in range(2)]
        with pytest.raises(BlockingIOError):
            connection.recv(logs.MOST_BYTES)
    assert [(line["process"], line["message"]) for line in found] == [
        ("coordinator", "loaded"),
        ("coordinator", "a replica has died"),
    ]


def test_lines_that_nobody_reads_are_lost_and_counted_and_nobody_waits(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / logs.SOCKET))
        listener.listen()
        listener.settimeout(10)
        handler = SocketHandler(directory / logs.SOCKET)
        handler.setFormatter(JsonFormatter("target rank 0"))
        record = logging.LogRecord("workers", logging.ERROR, "file", 1, "x" * 100_000, None, None)
        for _ in range(100):
            handler.handle(record)
        connection, _ = listener.accept()
        connection.setblocking(False)
        kept = 0
        try:
            while line := connection.recv(logs.MOST_BYTES):
                assert len(json.loads(line)["message"]) == 10_000
                kept += 1
        except BlockingIOError:
            pass
        assert 0 < kept < 100
        handler.handle(record)
        lost = json.loads(connection.recv(logs.MOST_BYTES))
    assert lost["message"].startswith(f"{100 - kept} lines of this process were lost")


def test_a_record_without_a_text_does_not_stop_the_code_that_logs(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    with LogStream("info", stream) as log:
        log.collect(directory)
        other = SocketHandler(directory / logs.SOCKET)
        other.setFormatter(JsonFormatter("ingress"))
        for text in ("%d", "next %s"):
            other.handle(logging.LogRecord("cluster", logging.WARNING, "file", 1, text, ("x",), None))
    assert [line["message"] for line in lines_of(stream, 1)] == ["next x"]
    assert "TypeError" in capsys.readouterr().err


def test_a_line_above_the_bound_is_counted_as_lost(directory: Path) -> None:
    stream = io.StringIO()
    with LogStream("info", stream) as log:
        log.collect(directory)
        other = SocketHandler(directory / logs.SOCKET)
        other.setFormatter(JsonFormatter("ingress"))
        for size in (logs.MOST_BYTES, 10):
            record = logging.LogRecord("cluster", logging.INFO, "file", 1, "request it", None, None)
            record.fields = {"user": "x" * size}
            other.handle(record)
    lost, kept = lines_of(stream, 2)
    assert lost["message"].startswith("1 lines of this process were lost: too long")
    assert kept["user"] == "x" * 10


@pytest.mark.parametrize("absent", [False, True])
def test_without_a_socket_serve_warns_and_other_processes_write_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], absent: bool
) -> None:
    directory = tmp_path / ("d" * 120)  # above the 108 bytes of a socket's name
    directory.mkdir()
    monkeypatch.setattr(logs, "sockets_directory", lambda: directory)
    if absent:
        monkeypatch.delattr(socket, "SOCK_SEQPACKET")
    stream = io.StringIO()
    with LogStream("info", stream) as log:
        log.collect(directory)
        logging.getLogger("deploy.serve").info("ready")
    warning, line = lines_of(stream, 2)
    assert warning["message"].startswith("lines of other processes go to their stderr, in Ray's logs: no socket")
    assert line["message"] == "ready"
    logging.getLogger().handlers = []
    set_logging("info", "json", "ingress")
    logging.getLogger("cluster").info("here")
    assert json.loads(capsys.readouterr().err)["message"] == "here"


def test_a_process_that_cannot_be_accepted_yet_is_accepted_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([OSError(errno.EMFILE, "Too many open files")] * 2)
    accept = socket.socket.accept

    def accept_later(listener: socket.socket) -> Any:
        for refusal in refusals:
            raise refusal
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    stream = io.StringIO()
    with LogStream("info", stream) as log:
        log.collect(directory)
        other = SocketHandler(directory / logs.SOCKET)
        other.setFormatter(JsonFormatter("ingress"))
        other.handle(logging.LogRecord("cluster", logging.INFO, "file", 1, "here", None, None))
        found = lines_of(stream, 1)
    assert [line["message"] for line in found] == ["here"]


def test_the_end_does_not_wait_for_a_process_that_writes_without_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_stream, "_END_SECONDS", 0.5)
    ended = threading.Event()

    def write_on() -> None:
        other = SocketHandler(directory / logs.SOCKET)
        other.setFormatter(JsonFormatter("ingress"))
        while not ended.wait(0.001):
            other.handle(logging.LogRecord("cluster", logging.INFO, "file", 1, "again", None, None))

    begun = time.monotonic()
    with LogStream("info", io.StringIO()) as log:
        log.collect(directory)
        writer = threading.Thread(target=write_on, daemon=True)
        writer.start()
        time.sleep(0.2)
        limit = threading.Timer(10, ended.set)
        limit.start()
    took = time.monotonic() - begun
    limit.cancel()
    ended.set()
    writer.join()
    assert took < 5


def test_without_a_session_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers = []
    set_logging("info", "json", "ingress")
    logging.getLogger("cluster").info("here")
    assert json.loads(capsys.readouterr().err)["message"] == "here"
