"""`n`, `best_of` and beam search: how many answers are generated for a prompt, and how many are returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from cluster.core import bounds
from cluster.core.beam import candidates_needed
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamParameters, SamplingParameters, StoppingCriteria
from cluster.core.verification import TargetInfo
from cluster.wire.codec.common import decode_beam_search
from pilotfish.v1 import generation_pb2

_TAKEN_WITH_BEAMS = {"temperature", "seed", "end_token_ids", "min_tokens", "no_repeat_ngram_size"}
"""Parameters that beam search applies, or that change nothing in it."""
_REFUSED_PARAMETERS = tuple(field.name for field in fields(SamplingParameters) if field.name not in _TAKEN_WITH_BEAMS)
_FIELDS_WITH_BEAMS = {
    *("request_id", "model", "text", "token_ids", "chat", "sampling", "stopping", "n", "best_of", "beam_search"),
    *("cache_salt", "max_draft_tokens", "prediction_text", "prediction_token_ids", "resume", "coordinator"),
    *("prompt_options", "skip_special_tokens", "priority", "store", "client", "client_allows_learning", "traceparent"),
    "stream",
}
"""Fields of a request that beam search applies, or that change nothing in it. It refuses all others."""
INCOMPATIBLE_WITH_BEAMS = (
    *_REFUSED_PARAMETERS,
    *(one.name for one in generation_pb2.GenerateRequest.DESCRIPTOR.fields if one.name not in _FIELDS_WITH_BEAMS),
)
"""Parameters that beam search refuses: they change the probabilities, or report what beams do not have."""


@dataclass(frozen=True, slots=True)
class AnswerCount:
    """How many answers one prompt has."""

    returned: int = 1
    """Answers that the client receives."""
    generated: int = 1
    """Answers that are sampled, or beams that are followed; at least `returned`."""
    beam: BeamParameters | None = None

    @property
    def engine_n(self) -> int:
        """`n` of the request to the engine. A beam search selects its best answers itself."""
        return self.generated if self.beam is None else self.returned

    @property
    def selects_best(self) -> bool:
        """Whether the best of several samples are selected once all are complete."""
        return self.engine_n > self.returned

    def engine_sampling(self, sampling: SamplingParameters) -> SamplingParameters:
        """Return the sampling parameters for the engine, with the log-probabilities that the selection needs."""
        return replace(sampling, logprobs=0) if self.selects_best and sampling.logprobs is None else sampling


def answer_count(
    request: generation_pb2.GenerateRequest,
    sampling: SamplingParameters,
    stopping: StoppingCriteria,
    info: TargetInfo,
    limits: LimitsSection,
) -> AnswerCount:
    """Check `n`, `best_of` and the beam search of a request. Raises `InvalidRequest`."""
    returned = bounds.integer("n", request.n, 1, limits.max_n) if request.HasField("n") else 1
    generated = bounds.integer("best_of", request.best_of, 1, limits.max_n) if request.HasField("best_of") else returned
    if generated < returned:
        raise InvalidRequest("best_of", generated, f"at least n, which is {returned}")
    if not request.HasField("beam_search"):
        return AnswerCount(returned, generated)
    _check_width(generated, stopping, info)
    _check_beam_compatible(sampling, stopping)
    for field, value in request.ListFields():
        if field.name not in _FIELDS_WITH_BEAMS:
            shown = list(value) if isinstance(value, Sequence) else value
            raise InvalidRequest(field.name, shown, "left out with beam search")
    scoring = decode_beam_search(request.beam_search, info.beam_scoring)
    beam = BeamParameters(generated, scoring.length_penalty, scoring.early_stopping)
    return AnswerCount(returned, generated, beam)


def _check_width(width: int, stopping: StoppingCriteria, info: TargetInfo) -> None:
    if width < 2:
        raise InvalidRequest("best_of", width, "at least 2 with beam search: it is the number of beams")
    stops = len(stopping.stop_token_ids)
    most = min(bounds.MAX_LOGPROBS, info.vocabulary_size)
    if candidates_needed(width, stopping.stop_token_ids) > most:
        raise InvalidRequest(
            "best_of", width, f"at most {most - stops}: of {most} candidates {stops} may be stop tokens"
        )


def _check_beam_compatible(sampling: SamplingParameters, stopping: StoppingCriteria) -> None:
    """Refuse parameters that change the probabilities, because beam search follows the model's own."""
    default = SamplingParameters(seed=sampling.seed)
    if sampling.temperature not in (0, default.temperature):
        raise _incompatible("temperature", sampling.temperature, "0, 1 or left out")
    for name in _REFUSED_PARAMETERS:
        value = getattr(sampling, name)
        if value != getattr(default, name):
            raise _incompatible(name, value, "left out")
    if stopping.stop_strings:
        raise _incompatible("stop", stopping.stop_strings, "left out (stop_token_ids are allowed)")


def _incompatible(field: str, value: object, bound: str) -> InvalidRequest:
    return InvalidRequest(field, value, f"{bound} with beam search, which follows the model's own probabilities")
