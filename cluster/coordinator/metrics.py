"""What the coordinator counts. vLLM's names where it has one, `pilotfish:*` where nobody has."""

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
    """One registry of its own; every series carries the model's name, known once the target has told it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name = ""
        self._plain: list[Counter | Histogram] = []
        self._running = self._gauge("vllm:num_requests_running", "Requests in flight.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the target's KV blocks in use, 0 to 1.")
        self._lossless = self._gauge(
            "pilotfish:lossless", "1 where answers are what the target alone would have written; 0: an experiment."
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens committed to answers.")
        self._success = self._counter("vllm:request_success", "Ended answers, by reason.", "finished_reason")
        self._preemptions = self._counter("vllm:num_preemptions", "Sequences that gave their blocks up.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Trees verified.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Nodes of trees verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Answer tokens that drafters wrote.")
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first commit.", _SECONDS)
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between commits, per token of the later one.", _SECONDS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last commit.", _LONG_SECONDS)
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Tokens of sequences that were looked for in the target's prefix cache."
        )
        self._prefix_hits = self._counter("vllm:prefix_cache_hits", "Those of them that were found there.")
        self._resume_queries = self._counter(
            "pilotfish:resume_queries", "Tokens of sequences that were opened again after preemption or a loss."
        )
        self._resume_hits = self._counter(
            "pilotfish:resume_hits", "Those of them that were stored still and need no replay."
        )
        self._forked = self._counter("pilotfish:forked_tokens", "Tokens shared with a sequence that began alike.")
        self._fallback = self._counter(
            "pilotfish:drafter_fallback", "Rounds that went without wanted drafts, by reason.", "reason"
        )
        self._stale = self._counter("pilotfish:stale_proposals", "Proposals dropped: grown from another length.")
        self._replays = self._counter("pilotfish:target_replays", "Sequences sent to the target anew after a loss.")
        self._errors = self._counter("pilotfish:request_errors", "Requests that ended with an error.", "error")
        self._crashes = self._counter("pilotfish:loop_restarts", "Times the coordinator's loop died of a bug.")
        self._committed = self._histogram(
            "pilotfish:committed_tokens_per_step", "Tokens that one verdict added to a sequence.", _TOKENS
        )
        self._step_tokens = self._histogram(
            "pilotfish:step_tokens", "Tokens in one step: prompt chunks, last tokens and trees.", _TOKENS
        )
        self._propose = self._histogram(
            "pilotfish:propose_latency_seconds", "Waiting for drafts, per round that asked.", _SHORT_SECONDS
        )
        self._step = self._histogram("pilotfish:step_latency_seconds", "Waiting for verdicts, per round.", _SECONDS)
        self._target = self._histogram(
            "pilotfish:target_step_seconds", "The part of the wait that the target itself reports.", _SECONDS
        )
        self._proposals = self._counter("pilotfish:proposals", "Proposals with guesses in them.")
        self._ready = self._counter("pilotfish:proposals_ready", "Those that were complete before they were asked for.")
        self._nodes = self._counter("pilotfish:proposed_nodes", "Guesses proposed.")
        self._ready_nodes = self._counter(
            "pilotfish:proposed_nodes_ready", "Those that were there before they were asked for."
        )
        self._pruned = self._histogram(
            "pilotfish:chosen_nodes", "Guesses that the controller kept of one proposal.", (0, *_TOKENS)
        )
        self._predicted = self._counter(
            "pilotfish:foreseen_round_seconds", "What the controller thought that rounds would take."
        )
        self._measured = self._counter("pilotfish:controlled_round_seconds", "What these rounds took.")
        self._drafter_seconds = self._counter(
            "pilotfish:drafter_call_seconds", "Time in which drafters were computing proposals, waited for or not."
        )
        self._overhead = self._histogram(
            "pilotfish:round_overhead_seconds",
            "A round less its wait for drafts and the target's own step: the coordinator's work and the wire.",
            _SHORT_SECONDS,
        )

    def exposition(self) -> tuple[bytes, str]:
        """Everything in Prometheus' text format, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def begin(
        self,
        model_name: str,
        is_lossless: bool,
        running: Callable[[], float],
        waiting: Callable[[], float],
        kv_usage: Callable[[], float],
    ) -> None:
        """Name the model, let every series stand at zero, and read the gauges whenever the metrics are asked for."""
        self.model_name = model_name
        self._lossless.labels(model_name).set(is_lossless)
        for metric in self._plain:
            metric.labels(model_name)
        for reason in FinishReason:
            self._success.labels(model_name, reason.value)
        self._running.labels(model_name).set_function(running)
        self._waiting.labels(model_name).set_function(waiting)
        self._kv_usage.labels(model_name).set_function(kv_usage)

    def opened(self, tokens: int, stored: int, *, resumed: bool, from_parent: bool) -> None:
        """The target was asked for the KV of `tokens` tokens and had that of `stored`."""
        if resumed:
            self._resume_queries.labels(self.model_name).inc(tokens)
            self._resume_hits.labels(self.model_name).inc(stored)
        elif from_parent:
            self._forked.labels(self.model_name).inc(stored)
        else:
            self._prefix_queries.labels(self.model_name).inc(tokens)
            self._prefix_hits.labels(self.model_name).inc(stored)

    def admitted(self, prompt_tokens: int) -> None:
        """A request was accepted into the queue."""
        self._prompt_tokens.labels(self.model_name).inc(prompt_tokens)

    def decided(self, commit: Commit) -> None:
        """A verdict added `commit` to a sequence."""
        self._committed.labels(self.model_name).observe(len(commit.tokens))
        if commit.drafted:
            self._drafts.labels(self.model_name).inc()
            self._draft_tokens.labels(self.model_name).inc(commit.drafted)
            self._accepted.labels(self.model_name).inc(commit.accepted)

    def emitted(self, count: int, since_arrival: float | None, since_latest: float | None) -> None:
        """`count` tokens of an answer went to its reader. In seconds.

        `since_arrival` is given for the first of the request, `since_latest` for all but the first of the answer.
        """
        self._generation_tokens.labels(self.model_name).inc(count)
        if since_arrival is not None:
            self._first_token.labels(self.model_name).observe(since_arrival)
        if since_latest is not None:
            inter_token = self._inter_token.labels(self.model_name)
            for _ in range(count):
                inter_token.observe(since_latest / count)

    def finished(self, reason: str, since_arrival: float) -> None:
        """An answer ended with a finish reason; one that a client left counts as `abort`."""
        self._success.labels(self.model_name, reason).inc()
        self._e2e.labels(self.model_name).observe(since_arrival)

    def failed(self, error: Exception) -> None:
        """A request ended with an error."""
        self._errors.labels(self.model_name, type(error).__name__).inc()

    def preempted(self, count: int) -> None:
        """Sequences gave their blocks up to older ones."""
        self._preemptions.labels(self.model_name).inc(count)

    def replayed(self, count: int) -> None:
        """Sequences will be sent anew: the target lost them."""
        self._replays.labels(self.model_name).inc(count)

    def drafter_fallback(self, reason: str) -> None:
        """A round goes without drafts that it wanted: `late`, `failed`, `open` (breaker), `busy` (a late
        call) or `untold` (it does not know the sequence yet)."""
        self._fallback.labels(self.model_name, reason).inc()

    def stale_proposal(self) -> None:
        """A proposal was dropped."""
        self._stale.labels(self.model_name).inc()

    def proposed(self, nodes: int, ready: int) -> None:
        """A proposal came in time, with so many nodes; `ready` of them were there before they were asked for."""
        if nodes:
            self._proposals.labels(self.model_name).inc()
            self._ready.labels(self.model_name).inc(ready == nodes)
            self._nodes.labels(self.model_name).inc(nodes)
            self._ready_nodes.labels(self.model_name).inc(ready)

    def pruned(self, nodes: int) -> None:
        """The controller kept so many nodes of a proposal."""
        self._pruned.labels(self.model_name).observe(nodes)

    def predicted_round(self, expected: float, actual: float) -> None:
        """A round with guesses: the seconds it was expected to take, and took."""
        self._predicted.labels(self.model_name).inc(expected)
        self._measured.labels(self.model_name).inc(actual)

    def drafter_worked(self, seconds: float) -> None:
        """A call to a drafter has ended."""
        self._drafter_seconds.labels(self.model_name).inc(seconds)

    def loop_died(self) -> None:
        """The coordinator's loop is restarted."""
        self._crashes.labels(self.model_name).inc()

    def round(self, *, tokens: int, total: float, propose: float | None, step: float, target: float) -> None:
        """One round: tokens in its step, and seconds; `propose` is `None` when no drafts were asked for."""
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
            self._plain.append(counter)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, (_MODEL,), registry=self.registry, buckets=buckets)
        self._plain.append(histogram)
        return histogram
