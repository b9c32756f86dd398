"""The coordinator's Prometheus metrics: vLLM's names where vLLM has the metric, `pilotfish:*` otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import Counter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from cluster.coordinator.observability.families import SECONDS, SHORT_SECONDS
from cluster.coordinator.observability.request_metrics import RequestMetrics
from cluster.core.draft_origin import DraftOrigin
from cluster.core.request import Commit, FinishReason
from cluster.core.verification import LearningStatus
from cluster.speculation.observation import RoundRecord

_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 4096)
CACHE_LABELS = (
    "block_size",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "num_gpu_blocks",
    "sliding_window",
)
"""What `vllm:cache_config_info` says of the KV cache."""


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """What a drafter in a process of its own does for this coordinator."""

    is_available: bool
    """Whether rounds wait for it."""
    sequences: int = 0
    """Number of sequences that it drafts for."""
    drafted_tokens: int = 0
    """Number of drafted tokens that it proposed."""
    call_seconds: float = 0.0
    """Total time of the calls to it, in seconds."""


class Metrics(RequestMetrics):
    """All metrics of a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self._accepted_from: dict[DraftOrigin, Counter] = {}
        """The counters of accepted tokens by origin."""
        self._accepted_at: list[Counter] = []
        """The counters of accepted tokens by position, without those that no token was accepted at yet."""
        self._read_drafters: Callable[[], Mapping[str, DrafterStatus]] | None = None
        self._declare_request_metrics()
        self._declare_request_lengths()
        self._declare_request_times()
        self._declare_memory_metrics()
        self._declare_speculation_metrics()
        self._declare_round_metrics()
        self._declare_learning_metrics()

    def _declare_memory_metrics(self) -> None:
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the target's KV blocks in use, from 0 to 1.")
        self._cache_config = self._gauge(
            "vllm:cache_config_info", "1 if the labels describe the KV cache of the target.", *CACHE_LABELS
        )
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
            "pilotfish:lossless",
            "1 if every answer has the distribution of the target alone, 0 for a lossy configuration.",
        )
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Number of draft trees verified.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Number of drafted tokens verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Number of drafted tokens accepted.")
        self._accepted_per_position = self._labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of drafted tokens accepted, by their position in the draft, from 0.",
            "position",
        )
        self._accepted_by_origin = self._labelled_counter(
            "pilotfish:accepted_tokens_by_origin",
            "Number of drafted tokens accepted, by their origin: request, earlier, trained or forced.",
            "origin",
        )
        self._fallback = self._labelled_counter(
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
        self._drafters = self._gauge("pilotfish:drafters", "Number of drafters: available or failed.", "state")
        self._drafter_available = self._gauge(
            "pilotfish:drafter_available", "1 if rounds wait for the drafter, 0 after it has failed.", "drafter"
        )
        self._drafter_sequences = self._gauge(
            "pilotfish:drafter_sequences", "Number of sequences that the drafter drafts for.", "drafter"
        )
        self._drafter_tokens = self._labelled_counter(
            "pilotfish:drafter_proposed_tokens", "Number of drafted tokens that the drafter proposed.", "drafter"
        )
        self._drafter_busy = self._labelled_counter(
            "pilotfish:drafter_busy_seconds", "Total time of calls to the drafter, in seconds.", "drafter"
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
        self._iteration = self._histogram(
            "vllm:iteration_tokens_total", "Number of prompt tokens computed and tokens committed in one step.", _TOKENS
        )
        self._propose = self._histogram(
            "pilotfish:propose_latency_seconds", "Time that a round waited for proposals, in seconds.", SHORT_SECONDS
        )
        self._step = self._histogram(
            "pilotfish:step_latency_seconds",
            "Time that a round waited for the target's verdicts, in seconds.",
            SECONDS,
        )
        self._target = self._histogram(
            "pilotfish:target_step_seconds", "Time that the target itself spent on a step, in seconds.", SECONDS
        )
        self._overhead = self._histogram(
            "pilotfish:round_overhead_seconds",
            "Time of a round without its wait for proposals and the target's own step, in seconds.",
            SHORT_SECONDS,
        )
        self._crashes = self._counter(
            "pilotfish:loop_restarts", "Number of times that the coordinator's loop restarted after a bug."
        )

    def _declare_learning_metrics(self) -> None:
        self._draft_version = self._gauge(
            "pilotfish:draft_version",
            "Number of the learned version that drafts, the highest of all salts, 0 for none, as of the last step.",
        )
        self._learned_clients = self._gauge(
            "pilotfish:draft_learned_clients",
            "Number of salts (an API key and its cache_salt) that have learned draft weights, as of the last step.",
        )
        self._learned_texts = self._gauge(
            "pilotfish:draft_learned_texts",
            "Number of texts that the processes that draft have collected to learn from, as of the last step.",
        )
        self._learned_bytes = self._gauge(
            "pilotfish:draft_learned_text_bytes",
            "Number of bytes that texts to learn from take in the processes that draft, as of the last step.",
        )
        self._trainings = self._gauge(
            "pilotfish:draft_trainings",
            "Number of trainings since the start of the processes that draft, by result: taken, dropped or failed.",
            "result",
        )
        self._learned_tokens = self._gauge(
            "pilotfish:draft_tokens_per_step",
            "Number of tokens per step of the target on held-back texts, before and after the last training.",
            "weights",
        )

    def exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its content type."""
        if self._read_drafters is not None:
            self._show_drafters(self._read_drafters())
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def begin(
        self,
        model_name: str,
        is_lossless: bool,
        running: Callable[[], float],
        waiting: Callable[[], float],
        kv_usage: Callable[[], float],
        cache_config: Mapping[str, object] | None = None,
    ) -> None:
        """Label all series with the model's name and start them at zero; the gauges are read at each exposition.

        `cache_config` has a value for each of `CACHE_LABELS`.
        """
        self._start(model_name)
        self._accepted_at.clear()
        self._accepted_from = {
            origin: self._accepted_by_origin.labels(*self._series, origin.name.lower()) for origin in DraftOrigin
        }
        self._lossless.labels(*self._series).set(is_lossless)
        for reason in FinishReason:
            self._success.labels(*self._series, reason.value)
        if cache_config is not None:
            values = [str(cache_config[label]) for label in CACHE_LABELS]
            self._cache_config.labels(*self._series, *values).set(1)
        self._running.labels(*self._series).set_function(running)
        self._waiting.labels(*self._series).set_function(waiting)
        self._kv_usage.labels(*self._series).set_function(kv_usage)

    def watch_drafters(self, drafters: Callable[[], Mapping[str, DrafterStatus]]) -> None:
        """Read what each drafter does, by its name, at each exposition."""
        self._read_drafters = drafters

    def _show_drafters(self, drafters: Mapping[str, DrafterStatus]) -> None:
        """Set the series of all drafters. Those that have left have none."""
        available = sum(drafter.is_available for drafter in drafters.values())
        self._drafters.labels(*self._series, "available").set(available)
        self._drafters.labels(*self._series, "failed").set(len(drafters) - available)
        families = (self._drafter_available, self._drafter_sequences, self._drafter_tokens, self._drafter_busy)
        for family in families:
            family.clear()
        for name, drafter in drafters.items():
            labels = (*self._series, name)
            self._drafter_available.labels(*labels).set(drafter.is_available)
            self._drafter_sequences.labels(*labels).set(drafter.sequences)
            self._drafter_tokens.labels(*labels).inc(drafter.drafted_tokens)
            self._drafter_busy.labels(*labels).inc(drafter.call_seconds)

    def opened(self, tokens: int, stored: int, *, resumed: bool, from_parent: bool) -> None:
        """Count an opened sequence of `tokens` tokens. The target had the KV of `stored` of them."""
        if resumed:
            self._resume_queries.current.inc(tokens)
            self._resume_hits.current.inc(stored)
        elif from_parent:
            self._forked.current.inc(stored)
        else:
            self._prefix_queries.current.inc(tokens)
            self._prefix_hits.current.inc(stored)

    def decided(self, commits: Iterable[Commit]) -> None:
        """Count verdicts that each added a commit to a sequence."""
        committed = self._committed.current
        for commit in commits:
            committed.observe(len(commit.tokens))
            if commit.drafted:
                self._verified(commit)

    def _verified(self, commit: Commit) -> None:
        self._drafts.current.inc()
        self._draft_tokens.current.inc(commit.drafted)
        self._accepted.current.inc(commit.accepted)
        for position in range(len(self._accepted_at), commit.accepted):
            self._accepted_at.append(self._accepted_per_position.labels(*self._series, str(position)))
        for counter in self._accepted_at[: commit.accepted]:
            counter.inc()
        for origin in commit.origins:
            self._accepted_from[origin].inc()

    def preempted(self, count: int) -> None:
        """Count `count` preempted sequences."""
        self._preemptions.current.inc(count)

    def replayed(self, count: int) -> None:
        """Count `count` sequences that the target lost and that will be opened again."""
        self._replays.current.inc(count)

    def drafter_fallback(self, reason: str) -> None:
        """Count a round in which wanted drafts are missing.

        Reasons: `late`, `failed`, `open` (circuit breaker), `busy` (a call of an earlier round is under way), `prefill`
        (the drafter lacks too much of the sequence).
        """
        self._fallback.labels(*self._series, reason).inc()

    def stale_proposal(self) -> None:
        """Count a proposal that was dropped because it was for another length."""
        self._stale.current.inc()

    def proposed(self, nodes: int, ready: int) -> None:
        """Count a proposal of `nodes` nodes that arrived in time; `ready` of them existed before the request."""
        if nodes:
            self._proposals.current.inc()
            self._ready.current.inc(ready == nodes)
            self._nodes.current.inc(nodes)
            self._ready_nodes.current.inc(ready)

    def pruned(self, nodes: int) -> None:
        """Count the `nodes` nodes of a proposal that the controller kept."""
        self._pruned.current.observe(nodes)

    def drafter_worked(self, seconds: float) -> None:
        """Count a call to a drafter that took `seconds` seconds."""
        self._drafter_seconds.current.inc(seconds)

    def loop_died(self) -> None:
        """Count a restart of the coordinator's loop after a bug."""
        self._crashes.current.inc()

    def round(self, record: RoundRecord) -> None:
        """Count a round."""
        drafts, target, seconds = record.drafts, record.step.step_seconds, record.seconds
        self._iteration.current.observe(record.useful_tokens)
        self._step_tokens.current.observe(record.tokens)
        if drafts.asked:
            self._propose.current.observe(drafts.waited)
        self._step.current.observe(record.step_seconds)
        self._target.current.observe(target)
        self._overhead.current.observe(max(0.0, seconds - (drafts.waited if drafts.asked else 0.0) - target))
        if drafts.step_seconds is not None and record.is_comparable:
            self._predicted.current.inc(drafts.step_seconds + drafts.waited)
            self._measured.current.inc(seconds)
        if record.step.learning is not None:
            self.learned(record.step.learning)

    def learned(self, status: LearningStatus) -> None:
        """Show what the draft has learned."""
        self._draft_version.labels(*self._series).set(status.version)
        self._learned_clients.labels(*self._series).set(status.clients)
        self._learned_texts.labels(*self._series).set(status.texts)
        self._learned_bytes.labels(*self._series).set(status.text_bytes)
        for result, count in (("taken", status.taken), ("dropped", status.dropped), ("failed", status.failed)):
            self._trainings.labels(*self._series, result).set(count)
        for weights, tokens in (("before", status.tokens_per_step_before), ("after", status.tokens_per_step)):
            self._learned_tokens.labels(*self._series, weights).set(tokens)
