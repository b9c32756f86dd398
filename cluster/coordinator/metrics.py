"""The coordinator's Prometheus metrics: vLLM's names where vLLM has the metric, `pilotfish:*` otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from cluster.core.request import Commit, FinishReason

_MODEL = "model_name"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_LONG_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 4096)


class Metrics:
    """Metrics in a registry of their own. Every series has the model's name as a label."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name = ""
        self._model_only: list[Counter | Histogram] = []
        self._declare_request_metrics()
        self._declare_memory_metrics()
        self._declare_speculation_metrics()
        self._declare_round_metrics()

    def _declare_request_metrics(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Number of sequences that are running.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Number of sequences that wait to run.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Number of prompt tokens of admitted requests.")
        self._generation_tokens = self._counter(
            "vllm:generation_tokens", "Number of tokens of answers that were sent to clients."
        )
        self._success = self._counter(
            "vllm:request_success", "Number of answers that ended, by finish reason.", "finished_reason"
        )
        self._errors = self._counter(
            "pilotfish:request_errors", "Number of requests that ended with an error, by error.", "error"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first tokens, in seconds.",
            _SECONDS,
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two commits of an answer divided by the tokens of the later one, in seconds per token.",
            _SECONDS,
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to the end of an answer, in seconds.",
            _LONG_SECONDS,
        )

    def _declare_memory_metrics(self) -> None:
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the target's KV blocks in use, from 0 to 1.")
        self._preemptions = self._counter("vllm:num_preemptions", "Number of times that a sequence was preempted.")
        self._replays = self._counter(
            "pilotfish:target_replays", "Number of sequences opened again because the target lost them."
        )
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Number of tokens of new sequences looked up in the target's prefix cache."
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Number of tokens of new sequences found in the target's prefix cache."
        )
        self._resume_queries = self._counter(
            "pilotfish:resume_queries", "Number of tokens of sequences opened again after a preemption or a loss."
        )
        self._resume_hits = self._counter(
            "pilotfish:resume_hits", "Number of tokens found stored when a sequence was opened again."
        )
        self._forked = self._counter(
            "pilotfish:forked_tokens", "Number of tokens whose KV a new sequence shared with its parent."
        )

    def _declare_speculation_metrics(self) -> None:
        self._lossless = self._gauge(
            "pilotfish:lossless", "1 if every answer is that of the target alone, 0 for a lossy configuration."
        )
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Number of draft trees verified.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Number of drafted tokens verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Number of drafted tokens accepted.")
        self._fallback = self._counter(
            "pilotfish:drafter_fallback", "Number of rounds in which wanted drafts were missing, by reason.", "reason"
        )
        self._stale = self._counter(
            "pilotfish:stale_proposals", "Number of proposals dropped because they were for another length."
        )
        self._proposals = self._counter("pilotfish:proposals", "Number of proposals with at least one drafted token.")
        self._ready = self._counter(
            "pilotfish:proposals_ready", "Number of proposals that were complete before they were requested."
        )
        self._nodes = self._counter("pilotfish:proposed_nodes", "Number of drafted tokens proposed.")
        self._ready_nodes = self._counter(
            "pilotfish:proposed_nodes_ready", "Number of drafted tokens that existed before they were requested."
        )
        self._pruned = self._histogram(
            "pilotfish:chosen_nodes",
            "Number of drafted tokens that the controller kept of one proposal.",
            (0, *_TOKENS),
        )
        self._predicted = self._counter(
            "pilotfish:foreseen_round_seconds", "Predicted total time of rounds with drafts, in seconds."
        )
        self._measured = self._counter(
            "pilotfish:controlled_round_seconds",
            "Measured total time of the rounds in pilotfish:foreseen_round_seconds, in seconds.",
        )
        self._drafter_seconds = self._counter(
            "pilotfish:drafter_call_seconds", "Total time of calls to drafters, waited for or not, in seconds."
        )

    def _declare_round_metrics(self) -> None:
        self._committed = self._histogram(
            "pilotfish:committed_tokens_per_step", "Number of tokens that one verdict added to a sequence.", _TOKENS
        )
        self._step_tokens = self._histogram(
            "pilotfish:step_tokens", "Number of tokens in one step: prompt chunks, last tokens and trees.", _TOKENS
        )
        self._propose = self._histogram(
            "pilotfish:propose_latency_seconds", "Time that a round waited for proposals, in seconds.", _SHORT_SECONDS
        )
        self._step = self._histogram(
            "pilotfish:step_latency_seconds",
            "Time that a round waited for the target's verdicts, in seconds.",
            _SECONDS,
        )
        self._target = self._histogram(
            "pilotfish:target_step_seconds", "Time that the target itself spent on a step, in seconds.", _SECONDS
        )
        self._overhead = self._histogram(
            "pilotfish:round_overhead_seconds",
            "Time of a round without its wait for proposals and the target's own step, in seconds.",
            _SHORT_SECONDS,
        )
        self._crashes = self._counter(
            "pilotfish:loop_restarts", "Number of times that the coordinator's loop restarted after a bug."
        )

    def exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def begin(
        self,
        model_name: str,
        is_lossless: bool,
        running: Callable[[], float],
        waiting: Callable[[], float],
        kv_usage: Callable[[], float],
    ) -> None:
        """Label all series with the model's name and start them at zero; the gauges are read at each exposition."""
        self.model_name = model_name
        self._lossless.labels(model_name).set(is_lossless)
        for metric in self._model_only:
            metric.labels(model_name)
        for reason in FinishReason:
            self._success.labels(model_name, reason.value)
        self._running.labels(model_name).set_function(running)
        self._waiting.labels(model_name).set_function(waiting)
        self._kv_usage.labels(model_name).set_function(kv_usage)

    def opened(self, tokens: int, stored: int, *, resumed: bool, from_parent: bool) -> None:
        """Count an opened sequence of `tokens` tokens. The target had the KV of `stored` of them."""
        if resumed:
            self._resume_queries.labels(self.model_name).inc(tokens)
            self._resume_hits.labels(self.model_name).inc(stored)
        elif from_parent:
            self._forked.labels(self.model_name).inc(stored)
        else:
            self._prefix_queries.labels(self.model_name).inc(tokens)
            self._prefix_hits.labels(self.model_name).inc(stored)

    def admitted(self, prompt_tokens: int) -> None:
        """Count a request that was accepted into the queue."""
        self._prompt_tokens.labels(self.model_name).inc(prompt_tokens)

    def decided(self, commit: Commit) -> None:
        """Count a verdict that added `commit` to a sequence."""
        self._committed.labels(self.model_name).observe(len(commit.tokens))
        if commit.drafted:
            self._drafts.labels(self.model_name).inc()
            self._draft_tokens.labels(self.model_name).inc(commit.drafted)
            self._accepted.labels(self.model_name).inc(commit.accepted)

    def emitted(self, count: int, since_arrival: float | None, since_latest: float | None) -> None:
        """Record the times of `count` tokens of an answer that were handed to its reader.

        `since_arrival` is set for the first tokens of the request, `since_latest` for all but the first tokens of the
        answer; both in seconds.
        """
        if since_arrival is not None:
            self._first_token.labels(self.model_name).observe(since_arrival)
        if since_latest is not None:
            inter_token = self._inter_token.labels(self.model_name)
            for _ in range(count):
                inter_token.observe(since_latest / count)

    def sent(self, count: int) -> None:
        """Count tokens that a reader has sent to its client. It drops those of a commit after a stop string."""
        self._generation_tokens.labels(self.model_name).inc(count)

    def finished(self, reason: str, since_arrival: float) -> None:
        """Count an answer that ended with a finish reason, `since_arrival` seconds after its request arrived."""
        self._success.labels(self.model_name, reason).inc()
        self._e2e.labels(self.model_name).observe(since_arrival)

    def failed(self, error: Exception) -> None:
        """Count a request that ended with an error."""
        self._errors.labels(self.model_name, type(error).__name__).inc()

    def preempted(self, count: int) -> None:
        """Count `count` preempted sequences."""
        self._preemptions.labels(self.model_name).inc(count)

    def replayed(self, count: int) -> None:
        """Count `count` sequences that the target lost and that will be opened again."""
        self._replays.labels(self.model_name).inc(count)

    def drafter_fallback(self, reason: str) -> None:
        """Count a round in which wanted drafts are missing.

        Reasons: `late`, `failed`, `open` (circuit breaker), `busy` (a call of an earlier round is under way), `prefill`
        (the drafter lacks too much of the sequence).
        """
        self._fallback.labels(self.model_name, reason).inc()

    def stale_proposal(self) -> None:
        """Count a proposal that was dropped because it was for another length."""
        self._stale.labels(self.model_name).inc()

    def proposed(self, nodes: int, ready: int) -> None:
        """Count a proposal of `nodes` nodes that arrived in time; `ready` of them existed before the request."""
        if nodes:
            self._proposals.labels(self.model_name).inc()
            self._ready.labels(self.model_name).inc(ready == nodes)
            self._nodes.labels(self.model_name).inc(nodes)
            self._ready_nodes.labels(self.model_name).inc(ready)

    def pruned(self, nodes: int) -> None:
        """Count the `nodes` nodes of a proposal that the controller kept."""
        self._pruned.labels(self.model_name).observe(nodes)

    def predicted_round(self, expected: float, actual: float) -> None:
        """Count a round with drafts that was predicted to take `expected` seconds and took `actual` seconds."""
        self._predicted.labels(self.model_name).inc(expected)
        self._measured.labels(self.model_name).inc(actual)

    def drafter_worked(self, seconds: float) -> None:
        """Count a call to a drafter that took `seconds` seconds."""
        self._drafter_seconds.labels(self.model_name).inc(seconds)

    def loop_died(self) -> None:
        """Count a restart of the coordinator's loop after a bug."""
        self._crashes.labels(self.model_name).inc()

    def round(self, *, tokens: int, total: float, propose: float | None, step: float, target: float) -> None:
        """Count a round with `tokens` tokens in its step. Times are in seconds. `propose` is `None` without drafts."""
        self._step_tokens.labels(self.model_name).observe(tokens)
        if propose is not None:
            self._propose.labels(self.model_name).observe(propose)
        self._step.labels(self.model_name).observe(step)
        self._target.labels(self.model_name).observe(target)
        self._overhead.labels(self.model_name).observe(max(0.0, total - (propose or 0.0) - target))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, (_MODEL,), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, (_MODEL, *labels), registry=self.registry)
        if not labels:
            self._model_only.append(counter)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, (_MODEL,), registry=self.registry, buckets=buckets)
        self._model_only.append(histogram)
        return histogram
