"""How well speculation worked for one response, in the form of vLLM's `metrics.speculative_decoding`."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.ingress.openai.formats import Choice
from cluster.ingress.openai.parsing.parts import Json
from pilotfish.v1 import generation_pb2


def note_acceptance(choice: Choice, delta: generation_pb2.GenerationDelta) -> None:
    """Record what one step verified for an answer."""
    if delta.drafted_tokens:
        choice.acceptances.append((delta.drafted_tokens, delta.accepted_draft_tokens))


def draft_metrics(choices: Iterable[Choice]) -> Json:
    """Return the field `metrics` of a response; nothing if no drafts were verified.

    Entry `j` of the histogram is the number of steps that accepted `j` drafted tokens. `num_spec_tokens` is the
    largest number that one step verified.
    """
    steps = [step for choice in choices for step in choice.acceptances]
    if not steps:
        return {}
    most = max(drafted for drafted, _ in steps)
    histogram = [0] * (most + 1)
    for _, count in steps:
        histogram[count] += 1
    drafted, accepted = (sum(values) for values in zip(*steps, strict=True))
    return {
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / len(steps),
                "draft_acceptance_rate": accepted / drafted,
                "acceptance_histogram": histogram,
                "num_spec_steps": len(steps),
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": most,
            }
        }
    }
