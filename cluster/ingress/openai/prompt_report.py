"""What a response tells of the prompt: its tokens, its text (`echo`), their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.ingress.openai.formats import Choice, EndpointFormat, finite, token_text
from cluster.ingress.openai.responses import ResponseOptions
from pilotfish.v1 import generation_pb2


def note_prompt(
    choice: Choice, started: generation_pb2.GenerationStarted, endpoint: EndpointFormat, options: ResponseOptions
) -> None:
    """Record the prompt of a choice. An answer that an earlier response completed gets the prompt's length."""
    choice.prompt_tokens = started.prompt_tokens
    if choice.finished is not None:
        choice.finished.usage.prompt_tokens = started.prompt_tokens
    if choice.is_started:
        return  # an earlier response had it
    endpoint.begin(choice, started)
    if options.token_ids:
        choice.prompt_token_ids = list(started.prompt_token_ids)
    if options.prompt_logprobs:
        choice.prompt_logprobs = _prompt_logprobs(started)
    if not options.echo:
        return
    choice.echo = b"".join(started.prompt_token_bytes).decode("utf-8", "replace")
    if options.logprobs:
        choice.echo_logprobs = endpoint.prompt_logprobs(choice, started)


def _prompt_logprobs(started: generation_pb2.GenerationStarted) -> list[Mapping[str, Any] | None]:
    """Return vLLM's form: nothing for the first token, then each token's own log-probability and the best ones."""
    found: list[Mapping[str, Any] | None] = [None]
    for entry, own in zip(started.prompt_logprobs, started.prompt_token_bytes[1:], strict=True):
        values = {
            str(top.token_id): {
                "logprob": finite(top.logprob),
                "rank": rank,
                "decoded_token": token_text(top.token_bytes),
            }
            for rank, top in enumerate(entry.top, 1)
        }
        values.setdefault(
            str(entry.token_id),
            {"logprob": finite(entry.logprob), "rank": entry.rank or None, "decoded_token": token_text(own)},
        )
        found.append(values)
    return found
