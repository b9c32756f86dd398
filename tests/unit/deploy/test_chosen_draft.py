"""One path of a draft chooses the drafting method, and vLLM's option means what it means there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.errors import ConfigurationError, ModelLoadError
from deploy.chosen_draft import from_speculative_config
from deploy.models import resolve_models
from deploy.placement import Resources, plan
from deploy.ray import application
from deploy.settings import load_settings
from tests.support.models import drafting_modules, public_drafts, tiny
from tests.support.models.public_drafts import DRAFTED, LLAMA


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=8))


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA | {"draft_vocab_size": len(DRAFTED)}
    return public_drafts.write(tmp_path_factory.mktemp("eagle3"), config, public_drafts.eagle3())


@pytest.mark.parametrize("config", ["cpu", "gpu"])
def test_the_format_of_a_draft_chooses_the_method(config: str, target: Path, eagle3: Path, tmp_path: Path) -> None:
    settings = load_settings(config, [f"target.path={target}", f"draft.path={eagle3}"], {})

    draft = settings.configuration.draft
    assert draft.name == "eagle"
    assert draft.modules["eagle"].path == str(eagle3)
    resolved = resolve_models(settings.configuration, tmp_path, lambda _: None).configuration
    assert resolved.draft.modules["eagle"].path == str(eagle3)


def test_the_draft_whose_matrix_the_target_applies_is_found_on_each_node(
    target: Path, eagle3: Path, tmp_path: Path
) -> None:
    """The fusion has the name of the draft, which is another directory on each node."""
    name = tmp_path / "name"
    name.symlink_to(eagle3)
    assignments = [f"target.path={target}", f"draft.path={name}", "draft.placement=drafter"]
    configuration = load_settings("cpu", assignments, {}).configuration

    sent = application._on_devices(configuration, plan(configuration, [Resources(2.0, 0, 1 << 34)]))
    assert sent.target.evidence.fusion == sent.draft.modules["eagle"].path == str(name)

    found = resolve_models(sent, tmp_path, lambda _: None).configuration
    assert found.target.evidence.fusion == found.draft.modules["eagle"].path == str(eagle3)


def test_a_draft_of_pilotfish_and_a_whole_model_choose_their_methods(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path, "heads", (2,))

    def method(path: Path, *more: str) -> str:
        return load_settings("cpu", [f"draft.path={path}", *more], {}).configuration.draft.name

    medusa = public_drafts.write(tmp_path / "medusa", {"medusa_num_heads": 3}, public_drafts.medusa())
    eagle = public_drafts.write(tmp_path / "eagle", LLAMA, public_drafts.eagle1(), "pytorch_model.bin")
    assert method(tmp_path) == method(medusa) == "heads"
    assert method(eagle) == "eagle"
    assert method(tmp_path, "draft.method=blockwise") == "blockwise"
    assert method(target) == "model"


def test_a_file_may_name_a_draft_and_the_command_line_another(target: Path, eagle3: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"draft": {"method": "ngram"}, "target": {"path": str(target)}}))
    assert load_settings(str(file), [f"draft.path={eagle3}"], {}).configuration.draft.name == "eagle"

    file.write_text(json.dumps({"draft": {"method": "ngram", "path": str(eagle3)}}))
    with pytest.raises(ConfigurationError, match="holds a draft for eagle, and the method is set to 'ngram'"):
        load_settings(str(file), (), {})


def test_a_draft_that_does_not_fit_the_method_is_refused(eagle3: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"draft.path: .* holds a draft for eagle, and the method is .*heads"):
        load_settings("cpu", [f"draft.path={eagle3}", "draft.method=heads"], {})


def test_a_path_that_is_no_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds neither a draft nor a model: config.json is missing"):
        load_settings("cpu", [f"draft.path={tmp_path}"], {})
    with pytest.raises(ModelLoadError, match="no such directory; give a directory or a hub id"):
        load_settings("cpu", [f"draft.path={tmp_path / 'absent'}"], {})
    (tmp_path / "draft.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"it is a file; .*a .gguf file is a draft model: set draft.method=model"):
        load_settings("cpu", [f"draft.path={tmp_path / 'draft.gguf'}"], {})


class TestOptionOfVllm:
    def test_a_head_and_its_number_of_tokens(self, eagle3: Path) -> None:
        given = {"method": "eagle3", "model": str(eagle3), "num_speculative_tokens": 5}

        below = from_speculative_config(json.dumps(given))
        draft = load_settings("cpu", (), {}, below=below).configuration.draft

        assert (draft.name, draft.max_depth, draft.max_nodes) == ("eagle", 5, 5)
        assert draft.modules["eagle"].path == str(eagle3)
        wider = load_settings("cpu", ["draft.max_nodes=12"], {}, below=below).configuration.draft
        assert (wider.max_depth, wider.max_nodes) == (5, 12)

    @pytest.mark.parametrize("method", ["dflash", "dspark"])
    def test_a_block_drafter(self, method: str, tmp_path: Path) -> None:
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

    def test_lookups(self) -> None:
        given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 3}

        draft = load_settings("cpu", (), {}, below=from_speculative_config(json.dumps(given))).configuration.draft

        assert draft.name == "ngram" and draft.max_depth == 4
        settings = draft.model_dump()["ngram"]
        assert (settings["max"], settings["min"]) == (5, 3)

    @pytest.mark.parametrize(("name", "value"), [("max", 1), ("max", 4), ("min", 3), ("min", 12)])
    def test_one_length_of_prompt_lookup_is_both(self, name: str, value: int) -> None:
        given = from_speculative_config(json.dumps({"method": "ngram", f"prompt_lookup_{name}": value}))

        draft = load_settings("cpu", (), {}, below=given).configuration.draft.model_dump()

        assert (draft["ngram"]["max"], draft["ngram"]["min"]) == (value, value)

    @pytest.mark.parametrize("given", [{"model": "ngram"}, {"model": "[ngram]"}, {"method": "[ngram]"}])
    def test_prompt_lookup_has_several_names(self, given: dict[str, str]) -> None:
        assert from_speculative_config(json.dumps(given)) == ['draft.method="ngram"']

    def test_null_means_unset(self) -> None:
        unset = dict.fromkeys(("model", "draft_tensor_parallel_size", "quantization", "prompt_lookup_max"))

        assert from_speculative_config(json.dumps({"method": "ngram", **unset})) == ['draft.method="ngram"']

    @pytest.mark.parametrize("name", ["mtp", "qwen3_next_mtp"])
    def test_the_targets_own_layer(self, name: str) -> None:
        given = from_speculative_config(f'{{"method": "{name}", "num_speculative_tokens": 2}}')

        draft = load_settings("cpu", (), {}, below=given).configuration.draft

        assert (draft.name, draft.max_depth, draft.max_nodes) == ("mtp", 2, 2)

    def test_a_model_beside_mtp_is_the_draft_and_must_hold_such_a_layer(self, eagle3: Path) -> None:
        given = from_speculative_config(json.dumps({"method": "mtp", "model": str(eagle3)}))

        assert f'draft.path="{eagle3}"' in given
        with pytest.raises(ConfigurationError, match="holds a draft for eagle, and the method is set to 'mtp'"):
            load_settings("cpu", (), {}, below=given)

    def test_vllms_own_name_of_a_lookups_model_means_none(self) -> None:
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
        self, config: dict[str, Any], weights: dict[str, torch.Tensor], eagle3: Path, tmp_path: Path
    ) -> None:
        public_drafts.write(tmp_path, config, weights)
        given = {"model": str(tmp_path), "num_speculative_tokens": 4, "parallel_drafting": True}

        assert from_speculative_config(json.dumps(given))[0] == f'draft.path="{tmp_path}"'
        assert from_speculative_config(json.dumps(given | {"model": str(eagle3), "parallel_drafting": False}))
        with pytest.raises(ConfigurationError, match="parallel_drafting: True is refused; it must be false or unset"):
            from_speculative_config(json.dumps(given | {"model": str(eagle3)}))

    def test_keys_that_change_nothing_here_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        given = {
            "method": "ngram",
            "max_model_len": 2048,
            "enforce_eager": True,
            "disable_padded_drafter_batch": True,
            "attention_backend": "FLASH_ATTN",
            "draft_tensor_parallel_size": 1,
        }

        assert from_speculative_config(json.dumps(given)) == ['draft.method="ngram"']

        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 4
        assert told[0] == "--speculative-config max_model_len: 2048 is ignored; it changes nothing here"

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
    def test_refusals(self, text: str, message: str) -> None:
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
    def test_a_wrong_value_is_refused_by_its_own_name(self, key: str, value: str, bound: str) -> None:
        method = "" if key == "method" else '"method": "ngram", '
        with pytest.raises(ConfigurationError) as caught:
            from_speculative_config(f'{{{method}"{key}": {value}}}')
        shown = re.escape(str(json.loads(value))) if value != "NaN" else "nan"
        assert re.match(f"--speculative-config {key}: '?{shown}'? is refused; it must be {bound}", str(caught.value))

    @pytest.mark.parametrize(("key", "value"), [("model", "5"), ("model", '""'), ("model", "[]"), ("revision", "true")])
    def test_what_is_no_text_is_no_model(self, key: str, value: str) -> None:
        model = "" if key == "model" else ', "model": "a/b"'
        with pytest.raises(
            ConfigurationError, match=f"config {key}: .* is refused; it must be a text that is not empty"
        ):
            from_speculative_config(f'{{"method": "eagle3", "{key}": {value}{model}}}')

    def test_the_shortest_lookup_is_not_above_the_longest(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"prompt_lookup_min: 4 is refused; .* at most prompt_lookup_max, 3"
        ):
            from_speculative_config('{"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4}')

    @pytest.mark.parametrize("key", ["num_speculative_tokens", "method", "model", "unknown"])
    def test_a_key_is_given_once(self, key: str) -> None:
        with pytest.raises(ConfigurationError, match=f"--speculative-config {key}: 4 and '5'; it must be set once"):
            from_speculative_config(f'{{"{key}": 4, "{key}": "5"}}')

    def test_nesting_without_an_end_is_one_line(self) -> None:
        with pytest.raises(ConfigurationError, match="--speculative-config: needed a JSON object"):
            from_speculative_config("[" * 100_000)

    @pytest.mark.parametrize("count", [1, 64])
    def test_the_bounds_of_a_number_of_tokens_are_those_of_the_settings(self, count: int) -> None:
        given = from_speculative_config(f'{{"method": "ngram", "num_speculative_tokens": {count}}}')

        draft = load_settings("cpu", (), {}, below=given).configuration.draft

        assert (draft.max_depth, draft.max_nodes) == (count, count)
