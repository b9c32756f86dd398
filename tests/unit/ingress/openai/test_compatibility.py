"""Unknown fields, and the page that lists every parameter of OpenAI's API and of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from cluster.core.config.sections import LimitsSection
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters
from tests.pages.parameters import OWN, page
from tests.support.fakes.http_app import HI, HttpApi, error_of

# Parameters of vLLM that OpenAI's API lacks.
VLLM_BOTH = [
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "ec_transfer_params",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logprob_token_ids",
    "min_p",
    "min_tokens",
    "priority",
    "prompt_logprobs",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_mm_kwargs",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "routed_experts_prompt_start",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "stream",
    "stream_interval",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "vllm_xargs",
    "watermarking",
    "echo",
]
VLLM_CHAT = [
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "include_reasoning",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
]
VLLM_COMPLETIONS = [
    "prompt_embeds",
]
VLLM_FORMERLY = ["best_of", "guided_choice", "guided_grammar", "guided_json", "guided_regex"]


async def test_unknown_fields_are_ignored_and_named_in_a_header(api: HttpApi) -> None:
    body = {"hue": 1, "tempo": {"a": 1}, "stream_options": {"shade": 2}, "stream": True}
    response = await api.chat(**body, messages=[{**HI[0], "mood": "good"}])
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "hue, tempo, stream_options.shade, messages.mood"
    whole = await api.complete(hue=1)
    assert (whole.status_code, whole.headers["x-ignored-fields"]) == (200, "hue")
    assert "x-ignored-fields" not in (await api.complete()).headers


async def test_hostile_names_of_unknown_fields_are_bounded_and_harmless(api: HttpApi) -> None:
    names = {"a\r\nset-cookie: x": 1, "ü" * 100: 1, **{f"field{number}": 1 for number in range(40)}}
    header = (await api.complete(**names)).headers["x-ignored-fields"]
    assert header.startswith(f"a??set-cookie??x, {'?' * 64}, field0")
    assert header.count(",") == 15


async def test_unknown_fields_are_refused_if_configured(tmp_path: Path) -> None:
    api = HttpApi(tmp_path, limits=LimitsSection(unknown_fields="refuse"))
    for body, field in (({"temprature": 1}, "temprature"), ({"speculation": {"hue": 1}}, "speculation.hue")):
        response = await api.complete(**body)
        assert (response.status_code, error_of(response)["param"]) == (400, field)


@pytest.mark.parametrize(
    ("model", "openai_params", "vllm_names"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase, VLLM_CHAT),
        (CompletionRequest, completion_params.CompletionCreateParamsBase, VLLM_COMPLETIONS),
    ],
)
def test_every_parameter_of_openai_and_vllm_is_known(
    model: type[Parameters], openai_params: type, vllm_names: list[str]
) -> None:
    known = {*model.model_fields, *model.unsupported}
    assert {*openai_params.__annotations__, *vllm_names, *VLLM_BOTH} - known == set()
    assert not {*model.model_fields} & {*model.unsupported}


def test_the_page_marks_parameters_that_neither_openai_nor_vllm_has() -> None:
    openai = (chat_params.CompletionCreateParamsBase, completion_params.CompletionCreateParamsBase)
    theirs = {
        *VLLM_BOTH,
        *VLLM_CHAT,
        *VLLM_COMPLETIONS,
        *VLLM_FORMERLY,
        *(name for one in openai for name in one.__annotations__),
    }
    assert {*ChatRequest.model_fields, *CompletionRequest.model_fields} - theirs == OWN


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_every_served_parameter_is_described_and_every_other_one_has_a_reason(model: type[Parameters]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []
    assert [name for name, one in model.unsupported.items() if not one.reason] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 3),
        ("top_p", 0.5),
        ("min_p", 0.5),
        ("temperature", 0.5),
        ("repetition_penalty", 1.5),
        ("presence_penalty", 1.5),
        ("frequency_penalty", 1.5),
        ("logit_bias", {"5": 1}),
        ("logprobs", 1),
        ("allowed_token_ids", [5]),
        ("bad_words", ["a"]),
        ("prompt_logprobs", 1),
        ("stop", ["a"]),
        ("stream", True),
        ("return_drafts", True),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_regex", "a"),
        ("thinking_token_budget", 3),
    ],
)
async def test_the_page_says_what_beams_refuse(api: HttpApi, name: str, value: object) -> None:
    refused = error_of(await api.complete(use_beam_search=True, best_of=2, **{name: value}))
    assert "beam" in refused["message"] or refused["param"] in ("grammar.regex", name)
    rows = [row for row in page().splitlines() if row.startswith(f"| `{name}`")]
    assert rows and all("ith `use_beam_search`" in row for row in rows)
