"""How many answers a request is given, out of how many that are made, and by samples or by beams."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.core.beam import candidates_needed
from cluster.core.bounds import MAX_LOGPROBS
from cluster.core.config import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamParameters, EarlyStopping, SamplingParameters, StoppingCriteria
from cluster.core.verification import TargetInfo
from cluster.ingress.checks import integer, number
from pilotfish.v1 import generation_pb2

MAX_LENGTH_PENALTY = 10.0
_EARLY_STOPPING = {
    generation_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.NO,
    generation_pb2.EARLY_STOPPING_NO: EarlyStopping.NO,
    generation_pb2.EARLY_STOPPING_YES: EarlyStopping.YES,
    generation_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_DISTURBING = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
)
"""What must have its default: it changes the probabilities, or asks for them in a form that beams do not have."""


@dataclass(frozen=True, slots=True)
class Plurality:
    """Answers to one prompt."""

    given: int = 1
    """What the client reads."""
    made: int = 1
    """What is sampled, or followed as beams; at least `given`."""
    beam: BeamParameters | None = None

    @property
    def asked(self) -> int:
        """What the engine is asked for: a search chooses its answers itself."""
        return self.made if self.beam is None else self.given

    @property
    def chosen(self) -> bool:
        """Whether samples compete."""
        return self.asked > self.given

    def measured(self, sampling: SamplingParameters) -> SamplingParameters:
        """Sampling with the log-probabilities that a choice is made by."""
        return replace(sampling, logprobs=0) if self.chosen and sampling.logprobs is None else sampling


def plurality(
    request: generation_pb2.GenerateRequest,
    sampling: SamplingParameters,
    stopping: StoppingCriteria,
    info: TargetInfo,
    limits: LimitsSection,
) -> Plurality:
    """Raises `InvalidRequest`."""
    given = integer("n", request.n, 1, limits.max_n) if request.HasField("n") else 1
    made = integer("best_of", request.best_of, 1, limits.max_n) if request.HasField("best_of") else given
    if made < given:
        raise InvalidRequest("best_of", made, f"at least n, which is {given}")
    if not request.HasField("beam_search"):
        return Plurality(given, made)
    _check_width(made, stopping, info)
    _check_undisturbed(sampling, stopping)
    return Plurality(given, made, _beam(request.beam_search, made))


def _beam(message: generation_pb2.BeamSearch, width: int) -> BeamParameters:
    penalty = message.length_penalty if message.HasField("length_penalty") else BeamParameters(width).length_penalty
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidRequest("early_stopping", message.early_stopping, "true, false or never")
    return BeamParameters(
        width,
        number("length_penalty", penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        _EARLY_STOPPING[message.early_stopping],
    )


def _check_width(width: int, stopping: StoppingCriteria, info: TargetInfo) -> None:
    if width < 2:
        raise InvalidRequest("best_of", width, "at least 2 with beam search: it is the number of beams")
    stops = len(stopping.stop_token_ids)
    most = min(MAX_LOGPROBS, info.vocabulary_size)
    if candidates_needed(width, stopping.stop_token_ids) > most:
        raise InvalidRequest(
            "best_of", width, f"at most {most - stops}: of {most} candidates {stops} may be stop tokens"
        )


def _check_undisturbed(sampling: SamplingParameters, stopping: StoppingCriteria) -> None:
    """Beam search follows the model's own probabilities: what would change them cannot be meant."""
    default = SamplingParameters(seed=sampling.seed)
    if sampling.temperature not in (0, default.temperature):
        raise _disturbs("temperature", sampling.temperature, "0, 1 or left out")
    for name in _DISTURBING:
        value = getattr(sampling, name)
        if value != getattr(default, name):
            raise _disturbs(name, value, "left out")
    if stopping.stop_strings:
        raise _disturbs("stop", stopping.stop_strings, "left out (but stop_token_ids may be given)")


def _disturbs(field: str, value: object, bound: str) -> InvalidRequest:
    return InvalidRequest(field, value, f"{bound} with beam search, which follows the model's own probabilities")
