"""The validator: every bound is checked, and the error names the field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import BeamParameters, BeamScoring, EarlyStopping, GenerationRequest, SamplingParameters
from cluster.core.verification import TargetInfo
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.prompts import ChatPrompt, TextPrompt, TokenPrompt
from cluster.generation.validate import fit_to_context, validate
from pilotfish.v1 import common_pb2, generation_pb2

INFO = TargetInfo("tiny", 100, 32, KvLayout(16), KvOccupancy(8, 8), (2,), 1, "float32")
LIMITS = LimitsSection(
    max_output_tokens=20,
    max_stop_strings=2,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_messages=2,
    max_n=8,
    max_prediction_tokens=3,
)
Sampling = common_pb2.SamplingParameters
Stopping = generation_pb2.StoppingCriteria
Request = generation_pb2.GenerateRequest
BeamSearch = generation_pb2.BeamSearch


def check(request: Request) -> object:
    return validate(request, INFO, LIMITS, INFO.eos_token_ids)


def sampled(**values: object) -> Request:
    return Request(text="hi", sampling=Sampling(**values))  # type: ignore[arg-type]


def stopped(**values: object) -> Request:
    return Request(text="hi", stopping=Stopping(**values))  # type: ignore[arg-type]


def chat(*messages: generation_pb2.ChatMessage) -> Request:
    return Request(chat=generation_pb2.ChatInput(messages=messages))


def bias(*pairs: tuple[int, float]) -> Request:
    return sampled(logit_bias=[common_pb2.LogitBias(token_id=token, bias=value) for token, value in pairs])


def test_unset_takes_the_defaults_of_the_schema() -> None:
    valid = validate(Request(text="hi"), INFO, LIMITS, INFO.eos_token_ids)
    assert valid.prompt == TextPrompt("hi")
    assert valid.sampling == SamplingParameters(seed=valid.sampling.seed, end_token_ids=(2,))
    assert valid.stopping.stop_token_ids == {2}
    assert valid.max_tokens is None


def test_zero_is_not_the_same_as_unset() -> None:
    valid = validate(sampled(temperature=0.0, seed=0, logprobs=0), INFO, LIMITS, ())
    assert (valid.sampling.temperature, valid.sampling.seed, valid.sampling.logprobs) == (0.0, 0, 0)


def test_an_unset_seed_is_drawn_and_fits_a_json_number() -> None:
    seeds = {validate(Request(text="hi"), INFO, LIMITS, ()).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(seed < 2**53 for seed in seeds)


def test_end_of_sequence_is_a_stop_token_unless_ignored() -> None:
    stops = Stopping(stop_token_ids=[5])
    assert validate(Request(text="a", stopping=stops), INFO, LIMITS, (2,)).stopping.stop_token_ids == {2, 5}
    stops.ignore_eos = True
    assert validate(Request(text="a", stopping=stops), INFO, LIMITS, (2,)).stopping.stop_token_ids == {5}


def test_all_three_kinds_of_prompt_are_accepted() -> None:
    tokens = Request(token_ids=common_pb2.TokenIds(ids=[1, 99]))
    assert validate(tokens, INFO, LIMITS, ()).prompt == TokenPrompt((1, 99))
    message = generation_pb2.ChatMessage(role="user", content="hi", name="ann")
    assert validate(chat(message), INFO, LIMITS, ()).prompt == ChatPrompt((Message("user", "hi", "ann"),))


USER = generation_pb2.ChatMessage(role="user", content="hi")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "prompt"),
        (Request(text=""), "prompt"),
        (Request(token_ids=common_pb2.TokenIds()), "prompt"),
        (Request(token_ids=common_pb2.TokenIds(ids=[1, 100])), "prompt[1]"),
        (Request(token_ids=common_pb2.TokenIds(ids=[1] * 32)), "prompt"),
        (Request(text="hi", request_id=""), "request_id"),
        (Request(text="hi", request_id="a b"), "request_id"),
        (Request(text="hi", request_id="x" * 65), "request_id"),
        (chat(), "messages"),
        (chat(USER, USER, USER), "messages"),
        (chat(USER, generation_pb2.ChatMessage(content="hi")), "messages[1].role"),
        (chat(generation_pb2.ChatMessage(role="<|im_end|>", content="hi")), "messages[0].role"),
        (chat(generation_pb2.ChatMessage(role="user", name="n" * 65)), "messages[0].name"),
        (sampled(temperature=-0.1), "temperature"),
        (sampled(temperature=1.1e6), "temperature"),
        (sampled(temperature=math.nan), "temperature"),
        (sampled(temperature=math.inf), "temperature"),
        (sampled(top_k=2**20 + 1), "top_k"),
        (sampled(top_p=0.0), "top_p"),
        (sampled(top_p=1.1), "top_p"),
        (sampled(min_p=-0.1), "min_p"),
        (sampled(min_p=math.nan), "min_p"),
        (sampled(repetition_penalty=0.0), "repetition_penalty"),
        (sampled(repetition_penalty=1.1e6), "repetition_penalty"),
        (sampled(presence_penalty=-2.1), "presence_penalty"),
        (sampled(frequency_penalty=2.1), "frequency_penalty"),
        (sampled(logprobs=21), "logprobs"),
        (bias((1, 1.0), (2, 1.0), (3, 1.0)), "logit_bias"),
        (bias((100, 1.0)), "logit_bias"),
        (bias((1, 1.0), (1, 2.0)), "logit_bias"),
        (bias((1, 101.0)), "logit_bias[1]"),
        (bias((1, math.nan)), "logit_bias[1]"),
        (stopped(max_tokens=0), "max_tokens"),
        (stopped(max_tokens=21), "max_tokens"),
        (stopped(stop=["a", "b", "c"]), "stop"),
        (stopped(stop=[""]), "stop"),
        (stopped(stop=["x" * 257]), "stop"),
        (stopped(stop_token_ids=[1, 2, 3]), "stop_token_ids"),
        (stopped(stop_token_ids=[100]), "stop_token_ids[0]"),
        (stopped(min_tokens=21), "min_tokens"),
        (Request(text="hi", prediction_token_ids=common_pb2.TokenIds(ids=[1, 2, 3, 4])), "prediction"),
        (Request(text="hi", prediction_token_ids=common_pb2.TokenIds(ids=[1, 100])), "prediction[1]"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(request_: Request, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(request_)
    assert caught.value.field == field


@pytest.mark.parametrize("most", [None, 0, 7, 256])
def test_max_draft_tokens_is_bounded_by_the_largest_tree(most: int | None) -> None:
    assert admitted(Request(text="hi", max_draft_tokens=most)).max_draft_tokens == most
    with pytest.raises(InvalidRequest, match="max_draft_tokens: 257 is refused; it must be between 0 and 256"):
        check(Request(text="hi", max_draft_tokens=257))


def several(sampling: Sampling | None = None, stopping: Stopping | None = None, **values: object) -> Request:
    return Request(text="hi", sampling=sampling, stopping=stopping, **values)  # type: ignore[arg-type]


def beams(width: int = 4, **values: object) -> Request:
    return several(best_of=width, beam_search=BeamSearch(), **values)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (several(n=0), "n"),
        (several(n=9), "n"),
        (several(best_of=0), "best_of"),
        (several(best_of=9), "best_of"),
        (several(n=3, best_of=2), "best_of"),
        (several(cache_salt="x" * 257), "cache_salt"),
        (several(cache_salt="\N{FISH}" * 65), "cache_salt"),
        (several(beam_search=BeamSearch()), "best_of"),
        (beams(1), "best_of"),
        (several(n=2, beam_search=BeamSearch(length_penalty=math.nan)), "length_penalty"),
        (several(n=2, beam_search=BeamSearch(length_penalty=-10.5)), "length_penalty"),
        (several(n=2, beam_search=BeamSearch(early_stopping=9)), "early_stopping"),  # type: ignore[arg-type]
        (beams(sampling=Sampling(temperature=0.7)), "temperature"),
        (beams(sampling=Sampling(top_k=1)), "top_k"),
        (beams(sampling=Sampling(top_p=0.5)), "top_p"),
        (beams(sampling=Sampling(min_p=0.5)), "min_p"),
        (beams(sampling=Sampling(repetition_penalty=1.1)), "repetition_penalty"),
        (beams(sampling=Sampling(presence_penalty=0.1)), "presence_penalty"),
        (beams(sampling=Sampling(frequency_penalty=0.1)), "frequency_penalty"),
        (beams(sampling=Sampling(logit_bias=[common_pb2.LogitBias(token_id=1, bias=1)])), "logit_bias"),
        (beams(sampling=Sampling(logprobs=0)), "logprobs"),
        (beams(stopping=Stopping(stop=["x"])), "stop"),
        (beams(bad_words=["x"]), "bad_words"),
        (beams(return_drafts=True), "return_drafts"),
    ],
)
def test_answer_counts_and_beams_out_of_bounds_are_refused_by_name(request_: Request, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(request_)
    assert caught.value.field == field


def admitted(request: Request, prediction: tuple[int, ...] = (), info: TargetInfo = INFO) -> GenerationRequest:
    valid = validate(request, info, LIMITS, info.eos_token_ids)
    return fit_to_context(valid, (1, 2), prediction, info, LIMITS, info.max_context_len)


def test_sampling_has_the_tokens_that_end_the_answer_and_its_minimal_length() -> None:
    sampling = admitted(stopped(stop_token_ids=[7, 5], min_tokens=4)).sampling
    assert (sampling.end_token_ids, sampling.min_tokens) == ((2, 5, 7), 4)
    assert admitted(stopped(stop_token_ids=[7, 5], ignore_eos=True)).sampling.end_token_ids == (5, 7)


def test_the_minimal_length_is_at_most_the_largest() -> None:
    assert admitted(stopped(max_tokens=6, min_tokens=6)).sampling.min_tokens == 6
    with pytest.raises(InvalidRequest, match="min_tokens: 7 is refused; it must be at most max_tokens, which is 6"):
        admitted(stopped(max_tokens=6, min_tokens=7))


def test_a_prediction_of_too_many_tokens_is_refused() -> None:
    assert admitted(Request(text="hi"), (1, 2, 3)).prediction == (1, 2, 3)
    with pytest.raises(InvalidRequest, match="prediction: '4 tokens' is refused; it must be at most 3 tokens"):
        admitted(Request(text="hi"), (1, 2, 3, 4))


def test_beams_have_no_prediction() -> None:
    assert admitted(beams(4), (1, 2, 3)).prediction == ()


def test_the_default_is_one_answer_without_salt() -> None:
    request = admitted(Request(text="hi"))
    assert (request.n, request.beam, request.cache_salt) == (1, None, "/")


def test_best_of_requests_all_samples_with_log_probabilities() -> None:
    request = admitted(several(n=2, best_of=5, cache_salt="mine"))
    assert (request.n, request.sampling.logprobs, request.cache_salt) == (5, 0, "/mine")
    assert admitted(several(Sampling(logprobs=3), best_of=5)).sampling.logprobs == 3
    request = admitted(several(n=5, best_of=5))
    assert (request.n, request.sampling.logprobs) == (5, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_beam_width_is_best_of_or_else_n(temperature: float) -> None:
    search = BeamSearch(length_penalty=-0.5, early_stopping=generation_pb2.EARLY_STOPPING_NEVER)
    request = admitted(several(Sampling(temperature=temperature, top_p=1.0), n=2, best_of=4, beam_search=search))
    assert (request.n, request.beam) == (2, BeamParameters(4, -0.5, EarlyStopping.NEVER))
    assert admitted(several(n=3, beam_search=BeamSearch())).beam == BeamParameters(3)


def test_what_a_request_does_not_say_is_as_the_model_says() -> None:
    info = replace(INFO, min_tokens=6, beam_scoring=BeamScoring(2.0, EarlyStopping.YES))
    search = BeamSearch(length_penalty=0.5, early_stopping=generation_pb2.EARLY_STOPPING_NO)
    assert admitted(beams(), info=info).beam == BeamParameters(4, 2.0, EarlyStopping.YES)
    assert admitted(several(n=2, beam_search=search), info=info).beam == BeamParameters(2, 0.5)
    assert admitted(stopped(), info=info).sampling.min_tokens == 6
    assert admitted(stopped(min_tokens=3), info=info).sampling.min_tokens == 3
    assert admitted(stopped(min_tokens=0), info=info).sampling.min_tokens == 0
    assert admitted(stopped(max_tokens=4), info=info).sampling.min_tokens == 4


def test_a_beam_has_no_more_candidates_than_the_vocabulary() -> None:
    info = replace(INFO, vocabulary_size=6)
    request = beams(4, stopping=Stopping(stop_token_ids=[3, 4]))
    with pytest.raises(InvalidRequest, match="best_of: 4 is refused; it must be at most 3: of 6 candidates 3 may be"):
        validate(request, info, LIMITS, (2,))
    validate(beams(3, stopping=Stopping(stop_token_ids=[3, 4])), info, LIMITS, (2,))


def test_the_error_for_an_unknown_model_names_the_served_one() -> None:
    with pytest.raises(UnknownModel, match="'gpt-4' is refused; it must be a served model: tiny"):
        check(Request(text="hi", model="gpt-4"))
    check(Request(text="hi", model="tiny"))


def test_unset_max_tokens_is_what_context_and_limits_allow() -> None:
    valid = validate(Request(text="hi"), INFO, LIMITS, ())
    assert fit_to_context(valid, (1,) * 5, (), INFO, LIMITS, 32).stopping.max_tokens == 20
    assert fit_to_context(valid, (1,) * 25, (), INFO, LIMITS, 32).stopping.max_tokens == 7
    assert fit_to_context(valid, (1,) * 31, (), INFO, LIMITS, 32).stopping.max_tokens == 1


def test_a_length_without_room_is_reduced_to_it() -> None:
    valid = validate(stopped(max_tokens=8), INFO, LIMITS, ())
    assert fit_to_context(valid, (1,) * 24, (), INFO, LIMITS, 32).stopping.max_tokens == 8
    assert fit_to_context(valid, (1,) * 25, (), INFO, LIMITS, 32).stopping.max_tokens == 7
    assert fit_to_context(valid, (1,) * 31, (), INFO, LIMITS, 32).stopping.max_tokens == 1
    assert fit_to_context(valid, (1,) * 3, (), INFO, LIMITS, 10).stopping.max_tokens == 7


def test_a_prompt_and_a_length_above_the_context_are_refused_with_the_numbers() -> None:
    valid, limits = validate(stopped(max_tokens=8), INFO, LIMITS, ()), LimitsSection()
    with pytest.raises(ContextLengthExceeded) as long_prompt:
        fit_to_context(valid, (1,) * 32, (), INFO, LIMITS, 32)
    assert str(long_prompt.value) == (
        "prompt is too long: 32 tokens > 31 maximum: this model's maximum context length is 32 tokens, "
        "for the prompt and the answer together"
    )
    assert validate(stopped(max_tokens=32), INFO, limits, ()).max_tokens == 32
    with pytest.raises(
        ContextLengthExceeded, match="33 tokens > 32 maximum: this model's maximum context length is 32"
    ):
        validate(stopped(max_tokens=33), INFO, limits, ())
    with pytest.raises(InvalidRequest, match="at least one token"):
        fit_to_context(valid, (), (), INFO, LIMITS, 32)
