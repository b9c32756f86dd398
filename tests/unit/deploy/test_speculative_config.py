"""vLLM's option `--speculative-config` means what it means there; a key that means nothing here is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.errors import ConfigurationError
from deploy.settings import load_settings
from deploy.speculative_config import from_speculative_config
from tests.support.models import public_drafts
from tests.support.models.public_drafts import DRAFTED, LLAMA


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA | {"draft_vocab_size": len(DRAFTED)}
    return public_drafts.write(tmp_path_factory.mktemp("eagle3"), config, public_drafts.eagle3())


def test_a_head_and_its_number_of_tokens(eagle3: Path) -> None:
    given = {"method": "eagle3", "model": str(eagle3), "num_speculative_tokens": 5}

    below = from_speculative_config(json.dumps(given))
    draft = load_settings("cpu", (), {}, below=below).configuration.draft

    assert (draft.name, draft.max_depth, draft.max_nodes) == ("eagle", 5, 5)
    assert draft.modules["eagle"].path == str(eagle3)
    wider = load_settings("cpu", ["draft.max_nodes=12"], {}, below=below).configuration.draft
    assert (wider.max_depth, wider.max_nodes) == (5, 12)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_block_drafter(method: str, tmp_path: Path) -> None:
    spark = method == "dspark"
    public_drafts.write(
        tmp_path,
        public_drafts.DSPARK if spark else public_drafts.DFLASH,
        public_drafts.spark() if spark else public_drafts.block(),
    )
    given = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}

    draft = load_settings("cpu", (), {}, below=from_speculative_config(json.dumps(given))).configuration.draft

    assert (draft.name, draft.max_depth, draft.max_nodes) == ("block", 3, 3)
    assert draft.modules["block"].path == str(tmp_path)
    assert load_settings("cpu", [f"draft.path={tmp_path}"], {}).configuration.draft.name == "block"


def test_lookups() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 3}

    draft = load_settings("cpu", (), {}, below=from_speculative_config(json.dumps(given))).configuration.draft

    assert draft.name == "ngram" and draft.max_depth == 4
    settings = draft.model_dump()["ngram"]
    assert (settings["max"], settings["min"]) == (5, 3)


@pytest.mark.parametrize(("name", "value"), [("max", 1), ("max", 4), ("min", 3), ("min", 12)])
def test_one_length_of_prompt_lookup_is_both(name: str, value: int) -> None:
    given = from_speculative_config(json.dumps({"method": "ngram", f"prompt_lookup_{name}": value}))

    draft = load_settings("cpu", (), {}, below=given).configuration.draft.model_dump()

    assert (draft["ngram"]["max"], draft["ngram"]["min"]) == (value, value)


@pytest.mark.parametrize("given", [{"model": "ngram"}, {"model": "[ngram]"}, {"method": "[ngram]"}])
def test_prompt_lookup_has_several_names(given: dict[str, str]) -> None:
    assert from_speculative_config(json.dumps(given)) == ['draft.method="ngram"']


def test_null_means_unset() -> None:
    unset = dict.fromkeys(("model", "draft_tensor_parallel_size", "quantization", "prompt_lookup_max"))

    assert from_speculative_config(json.dumps({"method": "ngram", **unset})) == ['draft.method="ngram"']


@pytest.mark.parametrize("name", ["mtp", "qwen3_next_mtp"])
def test_the_targets_own_layer(name: str) -> None:
    given = from_speculative_config(f'{{"method": "{name}", "num_speculative_tokens": 2}}')

    draft = load_settings("cpu", (), {}, below=given).configuration.draft

    assert (draft.name, draft.max_depth, draft.max_nodes) == ("mtp", 2, 2)


def test_a_model_beside_mtp_is_the_draft_and_must_hold_such_a_layer(eagle3: Path) -> None:
    given = from_speculative_config(json.dumps({"method": "mtp", "model": str(eagle3)}))

    assert f'draft.path="{eagle3}"' in given
    with pytest.raises(ConfigurationError, match="holds a draft for eagle, and the method is set to 'mtp'"):
        load_settings("cpu", (), {}, below=given)


def test_vllms_own_name_of_a_lookups_model_means_none() -> None:
    assert from_speculative_config('{"method": "ngram", "model": "[ngram]"}') == ['draft.method="ngram"']


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (LLAMA | {"pard_token": 95}, {"model.norm.weight": torch.zeros(48)}),
        (
            public_drafts.speculators_config(speculators_model_type="peagle", mask_token_id=95),
            public_drafts.peagle(),
        ),
        (LLAMA | {"ptd_token_id": 95, "num_hidden_layers": 2}, public_drafts.peagle("midlayer.")),
        (public_drafts.DFLASH, public_drafts.block()),
    ],
    ids=["pard", "speculators", "specforge", "dflash"],
)
def test_parallel_drafting_is_for_drafts_of_one_pass(
    config: dict[str, Any], weights: dict[str, torch.Tensor], eagle3: Path, tmp_path: Path
) -> None:
    public_drafts.write(tmp_path, config, weights)
    given = {"model": str(tmp_path), "num_speculative_tokens": 4, "parallel_drafting": True}

    assert from_speculative_config(json.dumps(given))[0] == f'draft.path="{tmp_path}"'
    assert from_speculative_config(json.dumps(given | {"model": str(eagle3), "parallel_drafting": False}))
    with pytest.raises(ConfigurationError, match="parallel_drafting: True is refused; it must be false or unset"):
        from_speculative_config(json.dumps(given | {"model": str(eagle3)}))


IGNORED = "is ignored; it changes nothing here"
MODEL = {"method": "draft_model", "model": "a/b"}
SUFFIX = {"method": "suffix"}
KEYS: list[tuple[str, object, dict[str, str], str]] = [
    ("adaptive_verification", True, MODEL, IGNORED),
    ("attention_backend", "FLASH_ATTN", MODEL, IGNORED),
    ("code_revision", "main", MODEL, IGNORED),
    ("disable_by_batch_size", 32, MODEL, "must be left out; draft.controller=auto drafts fewer tokens"),
    ("disable_eagle_block_drop", True, MODEL, IGNORED),
    ("disable_padded_drafter_batch", True, MODEL, IGNORED),
    ("draft_load_config", {"load_format": "auto"}, MODEL, "must be left out; draft.model.load_format"),
    ("draft_sample_method", "probabilistic", MODEL, IGNORED),
    ("draft_tensor_parallel_size", 1, MODEL, ""),
    ("draft_tensor_parallel_size", 2, MODEL, "must be 1; drafts are made on one device"),
    ("dspark_draft_topk", 64, MODEL, "must be left out; draft.block.candidates"),
    ("enable_adaptive_verification", True, MODEL, IGNORED),
    ("enforce_eager", True, MODEL, IGNORED),
    ("fly_entropy_threshold", 0.3, MODEL, "must be left out; the lossy rule here is target.acceptance=typical"),
    ("fly_entropy_top_k", 3, MODEL, "must be left out; the lossy rule here is target.acceptance=typical"),
    ("fly_window_size", 6, MODEL, "must be left out; the lossy rule here is target.acceptance=typical"),
    ("index_share_for_mtp_iteration", True, MODEL, "must be left out; no setting here means the same"),
    ("kv_cache_dtype", "fp8", MODEL, "must be left out; a draft keeps keys and values in its own type"),
    ("max_model_len", 2048, MODEL, IGNORED),
    ("method", "custom_class", {"model": "a/b"}, "or unset; a class of your own is a drafting method here"),
    ("method", "extract_hidden_states", {"model": "a/b"}, "or unset; it drafts nothing, so leave the option out"),
    (
        "method",
        "mlp_speculator",
        {"model": "a/b"},
        "or unset; its format is not read; `pilotfish distill --kind heads`",
    ),
    ("method", "ngram_gpu", {}, 'draft.method="ngram"'),
    ("method", "glm4_moe_lite_mtp", {}, 'draft.method="mtp"'),
    ("moe_backend", "triton", MODEL, IGNORED),
    ("num_speculative_tokens", 4, MODEL, "draft.max_depth=4"),
    ("num_speculative_tokens_per_batch_size", [[1, 64, 3]], MODEL, "must be left out; draft.controller=auto"),
    ("parallel_drafting", False, MODEL, ""),
    ("prompt_lookup_max", 4, {"method": "ngram"}, "draft.ngram.max=4"),
    ("prompt_lookup_max", 4, MODEL, "must be left out, unless method is ngram"),
    ("prompt_lookup_min", 2, {"method": "ngram"}, "draft.ngram.min=2"),
    ("quantization", "fp8", MODEL, "must be left out; a checkpoint says how it is quantized, and draft.model.quant"),
    ("rejection_sample_method", "standard", MODEL, ""),
    ("rejection_sample_method", "block", MODEL, 'target.acceptance="block"'),
    ("rejection_sample_method", "block", SUFFIX, "must be standard, or block with method draft_model"),
    ("rejection_sample_method", "fly", MODEL, "must be standard, .*; target.acceptance names the rules here"),
    ("rejection_sample_method", "synthetic", MODEL, "must be standard, or block with method draft_model"),
    ("revision", "v2", MODEL, 'draft.revision="v2"'),
    ("speculative_token_tree", "[(0,)]", MODEL, "must be left out; trees have the most probable nodes"),
    ("suffix_decoding_max_cached_requests", 0, SUFFIX, "draft.suffix.store_tokens=0"),
    ("suffix_decoding_max_cached_requests", 10000, SUFFIX, "must be 0 with method suffix, or left out; draft.suffix"),
    ("suffix_decoding_max_spec_factor", 1.0, SUFFIX, "must be left out; trees have the most probable nodes"),
    ("suffix_decoding_max_tree_depth", 24, SUFFIX, "must be left out; draft.suffix.max_match and draft.max_depth"),
    ("suffix_decoding_min_token_prob", 0.1, SUFFIX, "must be left out; trees have the most probable nodes"),
    ("synthetic_acceptance_length", 2.5, MODEL, "must be left out; draft.method=synthetic"),
    ("synthetic_acceptance_rates", [0.5], MODEL, "must be left out; draft.method=synthetic"),
    ("tensor_parallel_size", 2, MODEL, "must be left out; the key is draft_tensor_parallel_size"),
    ("use_heterogeneous_vocab", True, MODEL, IGNORED),
    ("use_local_argmax_reduction", True, MODEL, IGNORED),
]
"""Each key of vLLM with a value and the keys beside it, and what becomes of it: an assignment, a line in the log, the
end of a refusal, or nothing."""


@pytest.mark.parametrize(("key", "value", "beside", "outcome"), KEYS, ids=[f"{key}-{value}" for key, value, *_ in KEYS])
def test_every_key_of_vllm_is_understood_or_refused_by_name(
    key: str, value: object, beside: dict[str, str], outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = json.dumps({**beside, key: value})
    if "must be" in outcome or "or unset" in outcome:
        with pytest.raises(ConfigurationError, match=rf"--speculative-config {key}: .* is refused; it .*{outcome}"):
            from_speculative_config(given)
        return
    found = from_speculative_config(given)
    if "=" in outcome:
        assert outcome in found
    elif "method" in beside:
        assert all(one in from_speculative_config(json.dumps(beside)) for one in found)
    assert [one.getMessage().endswith(IGNORED) for one in caplog.records] == [True] * (outcome == IGNORED)


def test_a_key_without_an_effect_is_logged_with_its_value(caplog: pytest.LogCaptureFixture) -> None:
    assert from_speculative_config('{"method": "ngram", "max_model_len": 2048}') == ['draft.method="ngram"']
    told = [record.getMessage() for record in caplog.records]
    assert told == ["--speculative-config max_model_len: 2048 is ignored; it changes nothing here"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--speculative-config: needed a JSON object"),
        ("[1]", r"--speculative-config: \[1\] is refused; it must be a JSON object"),
        ('{"method": "mlp_speculator", "model": "a/b"}', "method: 'mlp_speculator' is refused; it must be one of"),
        ('{"method": ["eagle3"], "model": "a/b"}', r"method: \['eagle3'\] is refused; it must be one of"),
        ('{"method": "eagle3"}', "config model: it must be set, unless method is mtp or ngram or suffix"),
        (
            '{"method": "ngram", "model": "a/b"}',
            "model: 'a/b' is refused; it must be unset; ngram drafts without a model",
        ),
        ('{"model": "a/b", "rejection_sample_method": "block"}', "rejection_sample_method: 'block' is refused"),
        ('{"method": "mtp", "parallel_drafting": true}', "parallel_drafting: True is refused; it must be false or"),
        (
            '{"method": "ngram", "parallel_drafting": 1}',
            "parallel_drafting: 1 is refused; it must be false or unset",
        ),
        (
            '{"model": "a/b", "draft_tensor_parallel_size": 2}',
            "draft_tensor_parallel_size: 2 is refused; it must be 1",
        ),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        from_speculative_config(text)


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        *(
            ("num_speculative_tokens", value, "a whole number from 1 to 64")
            for value in ("0", "-1", "65", '"4"', "true", "4.0", "NaN", "[4]", "{}")
        ),
        *(("prompt_lookup_max", value, "a whole number from 1 to 16") for value in ("0", "17", "true", '"4"')),
        *(("prompt_lookup_min", value, "a whole number from 1 to 16") for value in ("0", "17", "false", "2.5")),
        *(("draft_tensor_parallel_size", value, "1; drafts are made on one device") for value in ("true", '"1"')),
        ("method", '""', "one of eagle, eagle3"),
        ("other", "1", "left out; no setting here means the same"),
    ],
)
def test_a_wrong_value_is_refused_by_its_own_name(key: str, value: str, bound: str) -> None:
    method = "" if key == "method" else '"method": "ngram", '
    with pytest.raises(ConfigurationError) as caught:
        from_speculative_config(f'{{{method}"{key}": {value}}}')
    shown = re.escape(str(json.loads(value))) if value != "NaN" else "nan"
    assert re.match(f"--speculative-config {key}: '?{shown}'? is refused; it must be {bound}", str(caught.value))


@pytest.mark.parametrize(("key", "value"), [("model", "5"), ("model", '""'), ("model", "[]"), ("revision", "true")])
def test_what_is_no_text_is_no_model(key: str, value: str) -> None:
    model = "" if key == "model" else ', "model": "a/b"'
    with pytest.raises(ConfigurationError, match=f"config {key}: .* is refused; it must be a text that is not empty"):
        from_speculative_config(f'{{"method": "eagle3", "{key}": {value}{model}}}')


def test_the_shortest_lookup_is_not_above_the_longest() -> None:
    with pytest.raises(ConfigurationError, match=r"prompt_lookup_min: 4 is refused; .* at most prompt_lookup_max, 3"):
        from_speculative_config('{"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4}')


@pytest.mark.parametrize("key", ["num_speculative_tokens", "method", "model", "unknown"])
def test_a_key_is_given_once(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--speculative-config {key}: 4 and '5'; it must be set once"):
        from_speculative_config(f'{{"{key}": 4, "{key}": "5"}}')


def test_nesting_without_an_end_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="--speculative-config: needed a JSON object"):
        from_speculative_config("[" * 100_000)


@pytest.mark.parametrize("count", [1, 64])
def test_the_bounds_of_a_number_of_tokens_are_those_of_the_settings(count: int) -> None:
    given = from_speculative_config(f'{{"method": "ngram", "num_speculative_tokens": {count}}}')

    draft = load_settings("cpu", (), {}, below=given).configuration.draft

    assert (draft.max_depth, draft.max_nodes) == (count, count)
