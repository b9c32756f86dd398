"""The metrics of requests and their answers, by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.coordinator.observability.families import LONG_SECONDS, SECONDS, MetricFamilies
from cluster.coordinator.requests.delivery import EmittedTokens
from cluster.core.request import FinishReason, GenerationRequest, Timing, Usage

_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_ANSWERS = (1, 2, 5, 10, 20)


class RequestMetrics(MetricFamilies):
    """What requests wanted, how long their phases took, and what they brought."""

    def _declare_request_metrics(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Number of sequences that are running.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Number of sequences that wait to run.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Number of prompt tokens of admitted requests.")
        self._generation_tokens = self._counter(
            "vllm:generation_tokens", "Number of tokens of answers that were sent to clients."
        )
        self._success = self._labelled_counter(
            "vllm:request_success", "Number of answers that ended, by finish reason.", "finished_reason"
        )
        self._errors = self._labelled_counter(
            "pilotfish:request_errors", "Number of requests that ended with an error, by error.", "error"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first tokens, in seconds.",
            SECONDS,
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two commits of an answer divided by the tokens of the later one, in seconds per token.",
            SECONDS,
        )
        self._second_name("vllm:time_per_output_token_seconds", self._inter_token.family)

    def _declare_request_lengths(self) -> None:
        self._request_prompt = self._histogram(
            "vllm:request_prompt_tokens", "Number of prompt tokens of an answer that ended.", _LENGTHS
        )
        self._request_generation = self._histogram(
            "vllm:request_generation_tokens", "Number of tokens of an answer that ended.", _LENGTHS
        )
        self._longest_answer = self._histogram(
            "vllm:request_max_num_generation_tokens", "Number of tokens of the longest answer of a request.", _LENGTHS
        )
        self._computed_prompt = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Number of prompt tokens of an answer that ended whose KV was not found stored.",
            _LENGTHS,
        )
        self._wanted_answers = self._histogram(
            "vllm:request_params_n", "Number of answers that a request wants.", _ANSWERS
        )
        self._wanted_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Number of tokens that an answer of a request may have.", _LENGTHS
        )

    def _declare_request_times(self) -> None:
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to the end of an answer, in seconds.",
            LONG_SECONDS,
        )
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "Time from a request's arrival until it runs, in seconds.", LONG_SECONDS
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Time from when a request runs to its first tokens, in seconds.",
            LONG_SECONDS,
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds",
            "Time from a request's first tokens to the end of an answer, in seconds.",
            LONG_SECONDS,
        )
        self._inference_time = self._histogram(
            "vllm:request_inference_time_seconds",
            "Time from when a request runs to the end of an answer, in seconds.",
            LONG_SECONDS,
        )
        self._token_time = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time from a request's first tokens to the end of an answer, in seconds per further token.",
            SECONDS,
        )

    def admitted(self, request: GenerationRequest) -> None:
        """Count a request that was accepted into the queue."""
        self._prompt_tokens.current.inc(len(request.input))
        self._wanted_answers.current.observe(request.n)
        self._wanted_tokens.current.observe(request.stopping.max_tokens)

    def emitted(self, emitted: Iterable[EmittedTokens]) -> None:
        """Record the times of tokens that were handed to readers."""
        first_token, inter_token = self._first_token.current, self._inter_token.current
        for count, since_arrival, since_latest in emitted:
            if since_arrival is not None:
                first_token.observe(since_arrival)
            if since_latest is not None:
                for _ in range(count):
                    inter_token.observe(since_latest / count)

    def sent(self, count: int) -> None:
        """Count tokens that a reader has sent to its client. It drops those of a commit after a stop string."""
        self._generation_tokens.current.inc(count)

    def finished(self, reason: FinishReason, usage: Usage, timing: Timing) -> None:
        """Count an answer that ended with a finish reason."""
        self._success.labels(*self._series, reason.value).inc()
        further = usage.completion_tokens - usage.resumed_tokens - 1
        for metric, value in (
            (self._request_prompt, usage.prompt_tokens),
            (self._request_generation, usage.completion_tokens),
            (self._computed_prompt, usage.prompt_tokens - usage.cached_tokens),
            (self._e2e, timing.total),
            (self._queue_time, timing.queue),
            (self._prefill_time, timing.prefill),
            (self._decode_time, timing.decode),
            (self._inference_time, timing.prefill + timing.decode),
        ):
            metric.current.observe(value)
        if further > 0:
            self._token_time.current.observe(timing.decode / further)

    def completed(self, longest_answer: int) -> None:
        """Count a request whose answers have all ended; the longest one has `longest_answer` tokens."""
        self._longest_answer.current.observe(longest_answer)

    def failed(self, error: Exception) -> None:
        """Count a request that ended with an error."""
        self._errors.labels(*self._series, type(error).__name__).inc()
