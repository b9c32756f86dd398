"""A drafter of Pilotfish over gRPC, for a caller that computes one step after another.

A drafter that is late, wrong or gone costs drafts, never an error: a step without an answer has no drafts. After a
failed call, the next ones wait for a pause that doubles up to `LONGEST_PAUSE_SECONDS`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import grpc

from pilotfish.v1 import common_pb2, draft_pb2, draft_pb2_grpc, lease_pb2, lease_pb2_grpc
from pilotfish_vllm.settings import RefusedSettings, Settings

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""Longest time that the start waits for a drafter, in seconds. Then drafts begin when there is one."""
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 10.0
MOST_IDS = 4096
"""Most sequences that one call releases."""
_RENEWALS = 4
"""How many times a lease can be renewed before it ends."""
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_REFUSING = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
"""Statuses of a server that does not become a drafter for this client by itself."""


class RemoteDrafter:
    """The drafter at one address. `propose` is called by one thread; another keeps the lease and releases sequences.

    What the drafter holds for this client belongs to a lease, which ends soon after this process does.
    """

    def __init__(self, settings: Settings, on_tick: Callable[[], Sequence[str]], clock: Any = time.monotonic) -> None:
        """`on_tick` is called several times in a lease, by the other thread. It returns sequences to release."""
        self._settings = settings
        self._on_tick = on_tick
        self._clock = clock
        self.client = uuid4().hex
        """The name of this client, which no other client has."""
        options = list(_OPTIONS)
        if settings.tls is None:
            self._channel = grpc.insecure_channel(settings.address, options)
        else:
            options.append(("grpc.ssl_target_name_override", settings.tls.server_name or "pilotfish"))
            self._channel = grpc.secure_channel(settings.address, settings.tls.credentials(), options)
        self._stub = draft_pb2_grpc.DraftServiceStub(self._channel)
        self._exchange: Exchange | None = None
        self._lease = lease_pb2_grpc.LeaseServiceStub(self._channel)
        self._lease_seconds = 10.0
        self._used_at = clock()
        self._is_checked = False
        self._failures = 0
        self._refusal = ""
        self._paused_until = 0.0
        self._ended: dict[str, None] = {}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="pilotfish-lease", daemon=True)

    def start(self) -> None:
        """Ask the drafter what it drafts with, and keep the lease from now on.

        Raises `RefusedSettings` for a drafter that refuses this client, or whose methods need what vLLM does not show.
        Without an answer, drafts begin later.
        """
        try:
            self._check(CONNECT_SECONDS)
        except grpc.RpcError as error:
            logger.warning("no drafts yet: the drafter at %s does not answer: %s", self._settings.address, _said(error))
        self._keeper.start()

    def propose(self, rows: Sequence[draft_pb2.DraftRow]) -> Sequence[common_pb2.Proposal] | None:
        """Return one `Proposal` per row, in order; `None` without an answer, and in a pause after a failed call."""
        if self._clock() < self._paused_until:
            return None
        settings, seconds = self._settings, self._settings.timeout_seconds
        begun = self._clock()
        try:
            if not self._is_checked:
                self._check(seconds)
            request = draft_pb2.DraftServiceProposeRequest(rows=rows, client=self.client)
            if self._exchange is None:
                self._exchange = Exchange(lambda requests: self._stub.Propose(requests, metadata=settings.metadata))
            proposals: Sequence[common_pb2.Proposal] = self._exchange.ask(
                request, max(0.0, seconds - (self._clock() - begun))
            ).proposals
        except (grpc.RpcError, StreamEnded, TimeoutError) as error:
            self._fail(_said(error))
            return None
        except RefusedSettings as error:
            self._fail(str(error), is_refusal=True)
            return None
        if [(one.sequence_id, one.base_len) for one in proposals] != [(one.sequence_id, one.base_len) for one in rows]:
            self._fail("its answer is for other rows")
            return None
        if any(one.fault.code == common_pb2.ROW_FAULT_CODE_OUT_OF_SYNC for one in proposals):
            self._is_checked = False  # another drafter may have this address
        if self._failures:
            logger.warning("the drafter at %s answers again", self._settings.address)
        self._failures, self._used_at = 0, self._clock()
        return proposals

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Free sequences soon. The call does not wait."""
        with self._lock:
            self._ended.update(dict.fromkeys(sequence_ids))

    def close(self) -> None:
        """End the connection. The drafter frees what it holds when the lease ends."""
        self._is_closed.set()
        if self._exchange is not None:
            self._exchange.close()
        self._channel.close()

    def _check(self, seconds: float) -> None:
        request = draft_pb2.DraftServiceDescribeRequest()
        address = self._settings.address
        try:
            found = self._stub.Describe(
                request, timeout=seconds, metadata=self._settings.metadata, wait_for_ready=seconds == CONNECT_SECONDS
            )
        except grpc.RpcError as error:
            if _code(error) in _REFUSING:
                raise RefusedSettings(f"the drafter at {address} refuses this client: {_said(error)}") from None
            raise
        for method in found.methods:
            needs = [("hidden states", method.taps), ("ranked tokens", method.top), ("decisions", method.decisions)]
            needed = [name for name, value in needs if value]
            if needed:
                raise RefusedSettings(
                    f"the drafter at {address} drafts by {method.name}, which needs the target's {', '.join(needed)}; "
                    "vLLM shows a proposer only tokens: choose a drafter that reads tokens alone, as ngram"
                )
        self._lease_seconds = found.lease_seconds
        self._is_checked = True

    def _fail(self, reason: str, *, is_refusal: bool = False) -> None:
        """Pause, and ask again what the drafter is: another one may have its address."""
        if not self._failures or (is_refusal and reason != self._refusal):
            logger.warning("no drafts: the drafter at %s: %s", self._settings.address, reason)
        self._refusal = reason if is_refusal else ""
        self._is_checked = False
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        doubled = FIRST_PAUSE_SECONDS * 2**self._failures
        pause = LONGEST_PAUSE_SECONDS if is_refusal else min(doubled, LONGEST_PAUSE_SECONDS)
        self._failures = min(self._failures + 1, 16)
        self._paused_until = self._clock() + pause

    def _keep(self) -> None:
        while not self._is_closed.wait(self._lease_seconds / _RENEWALS):
            self.release(self._on_tick())
            try:
                self._release_ended()
                if self._clock() - self._used_at >= self._lease_seconds / _RENEWALS:
                    self._renew()
            except (grpc.RpcError, ValueError) as error:  # gRPC raises `ValueError` when the channel was closed
                logger.debug("the lease is not renewed: %s", error)
                if self._clock() - self._used_at > 2 * self._lease_seconds:  # it has ended, so all is free
                    self._ended.clear()

    def _release_ended(self) -> None:
        with self._lock:
            ended = list(self._ended)[:MOST_IDS]
        if not ended:
            return
        request = draft_pb2.DraftServiceReleaseRequest(sequence_ids=ended, client=self.client)
        self._stub.Release(request, timeout=CONNECT_SECONDS, metadata=self._settings.metadata)
        self._used_at = self._clock()
        with self._lock:
            for one in ended:
                self._ended.pop(one, None)

    def _renew(self) -> None:
        request = lease_pb2.RenewRequest(client=self.client)
        self._lease.Renew(request, timeout=CONNECT_SECONDS, metadata=self._settings.metadata)
        self._used_at = self._clock()


def _code(error: BaseException) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def _said(error: BaseException) -> str:
    """The status and the message of a failed call."""
    code = _code(error)
    return str(error) if code is None else f"{code.name}: {error.details()}"  # type: ignore[attr-defined]


class StreamEnded(Exception):
    """The server has ended the stream."""


class Exchange:
    """Alternates requests and answers on one stream. After an error it is of no use; close it.

    A stream that stays open costs half of the time of a call, for which gRPC starts a thread and opens a stream.
    """

    def __init__(self, open_stream: Callable[[Iterator[Any]], Any]) -> None:
        """`open_stream` calls a streaming method with an iterator of requests, and returns gRPC's call."""
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = open_stream(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="pilotfish-drafts", daemon=True).start()

    def ask(self, request: Any, seconds: float) -> Any:
        """Send a request and return its answer.

        Raises gRPC's `RpcError`, `StreamEnded`, and `TimeoutError` without an answer in time.
        """
        self._requests.put(request)
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the stream and its threads."""
        self._requests.put(None)
        self._call.cancel()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
        except Exception as error:  # the caller raises it
            self._answers.put(error)
        else:
            self._answers.put(StreamEnded("the drafter has ended the stream"))
