"""The student has layers of the target between the target's embedding and head. Only its own layers are exported."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel, SmolLM3Config

from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.models import distilled_draft, tiny
from workers.distill.output import check_replaceable
from workers.distill.student import Student, StudentPlan, export, make_student
from workers.distill.target_model import load_target
from workers.distill.vocabulary import frequent_tokens, stored_vocabulary
from workers.forward.attention import register
from workers.model.distilled import load_distilled_draft
from workers.model.draft_card import read_card

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=4, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def target(directory: Path) -> PreTrainedModel:
    return load_target(directory, CPU)


def student_of(target: PreTrainedModel, *layers: int, vocabulary: tuple[int, ...] | None = None) -> Student:
    return make_student(target, StudentPlan(layers, vocabulary=vocabulary), seed=0)


def logits_of(student: Student, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return student.logits(student.hidden(tokens))


class TestMaking:
    def test_with_all_layers_the_student_equals_the_target(self, target: PreTrainedModel) -> None:
        tokens = torch.arange(3, 23).reshape(2, 10)

        found = logits_of(student_of(target, 0, 1, 2, 3), tokens)

        with torch.inference_mode():
            torch.testing.assert_close(found, target(input_ids=tokens).logits)

    def test_the_logits_have_the_factor_that_the_served_draft_has(self, tmp_path: Path) -> None:
        target = load_target(tiny.save(tmp_path, tiny.granite(logits_scaling=8.0)), CPU)
        tokens = torch.arange(3, 23).reshape(2, 10)

        found = logits_of(student_of(target, 0, 1), tokens)

        with torch.inference_mode():
            torch.testing.assert_close(found, target(input_ids=tokens).logits)

    def test_a_target_in_the_type_of_its_files_gives_the_same_student(
        self, target: PreTrainedModel, tmp_path: Path
    ) -> None:
        copy.deepcopy(target).bfloat16().save_pretrained(tmp_path)

        half, whole = load_target(tmp_path, CPU, "auto"), load_target(tmp_path, CPU)

        assert (half.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
        found, wanted = student_of(half, 0, 2), student_of(whole, 0, 2)
        for name, value in found.own_parameters().items():
            assert torch.equal(value, wanted.own_parameters()[name])
        assert torch.equal(found.head, wanted.head) and found.head.dtype == torch.float32

    def test_the_student_starts_as_the_named_layers_in_their_order(self, target: PreTrainedModel) -> None:
        source = target.state_dict()

        own = student_of(target, 3, 0).own_parameters()

        name = "mlp.gate_proj.weight"
        torch.testing.assert_close(own[f"model.layers.0.{name}"].detach(), source[f"model.layers.3.{name}"])
        torch.testing.assert_close(own[f"model.layers.1.{name}"].detach(), source[f"model.layers.0.{name}"])

    def test_embedding_and_head_belong_to_the_target_and_are_not_trained(self, target: PreTrainedModel) -> None:
        student = student_of(target, 0)

        assert not any("embed" in name or "head" in name for name in student.own_parameters())
        assert not student.module.get_input_embeddings().weight.requires_grad

    def test_a_reduced_head_has_the_rows_of_its_tokens(self, target: PreTrainedModel) -> None:
        vocabulary, tokens = (2, 5, 40, 95), torch.arange(3, 13)[None]

        whole, reduced = student_of(target, 0, 1), student_of(target, 0, 1, vocabulary=vocabulary)

        torch.testing.assert_close(logits_of(reduced, tokens), logits_of(whole, tokens)[..., list(vocabulary)])
        assert reduced.tokens_of(torch.tensor([3, 0])).tolist() == [95, 2]
        assert reduced.position_in_head[torch.tensor([5, 6])].tolist() == [1, -1]

    def test_another_configuration_starts_with_random_weights_from_the_seed(
        self, target: PreTrainedModel, tmp_path: Path
    ) -> None:
        tiny.llama(num_hidden_layers=1, intermediate_size=32).save_pretrained(tmp_path)
        plan = StudentPlan(config=tmp_path)

        one, same, other = (make_student(target, plan, seed) for seed in (1, 1, 2))

        name = "model.layers.0.mlp.up_proj.weight"
        assert one.own_parameters()[name].shape == (32, 48)
        assert torch.equal(one.own_parameters()[name], same.own_parameters()[name])
        assert not torch.equal(one.own_parameters()[name], other.own_parameters()[name])

    @pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt2", "mistral"])
    def test_students_of_other_families_can_be_made(self, family: str, tmp_path: Path) -> None:
        tiny.save(tmp_path, tiny.FAMILIES[family]())
        target, tokens = load_target(tmp_path, CPU), torch.arange(3, 13)[None]

        found = logits_of(student_of(target, 0, 1).eval(), tokens)

        with torch.inference_mode():
            torch.testing.assert_close(found, target(input_ids=tokens).logits)

    def test_a_layer_without_rotary_positions_stays_one_wherever_it_comes(self, tmp_path: Path) -> None:
        config = SmolLM3Config(
            vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=3, pad_token_id=0,
        )  # fmt: skip
        assert config.no_rope_layers == [1, 1, 1, 0]
        target = load_target(tiny.save(tmp_path, config), CPU)

        found = student_of(target, 3, 0)

        assert found.module.config.no_rope_layers == [0, 1]
        assert [layer.self_attn.use_rope for layer in found.module.model.layers] == [0, 1]

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (StudentPlan(), "layers: needed at least one"),
            (StudentPlan((0, 4)), "layers: 4 is refused; it must be within 0 and 3"),
            (StudentPlan((-1,)), "layers: -1 is refused"),
        ],
    )
    def test_layers_that_do_not_exist_are_refused(
        self, target: PreTrainedModel, plan: StudentPlan, message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make_student(target, plan, 0)

    def test_training_continues_with_the_weights_of_an_existing_draft(
        self, target: PreTrainedModel, directory: Path, tmp_path: Path
    ) -> None:
        draft = distilled_draft.save(directory, tmp_path / "draft", layers=(1, 3), vocabulary=(2, 5, 40))
        stored = load_file(draft / "model.safetensors")
        stored["model.norm.weight"] += 1  # trained weights, which no layer of the target has
        save_file(stored, draft / "model.safetensors")

        found = make_student(target, StudentPlan.of_draft(draft), 0)

        assert found.layers == (1, 3)
        assert found.tokens_of(torch.arange(3)).tolist() == [2, 5, 40]
        own = found.own_parameters()
        assert own.keys() == stored.keys() - {"vocabulary"}
        assert all(torch.equal(value.detach(), stored[name]) for name, value in own.items())

    def test_an_incomplete_draft_is_refused(self, directory: Path, tmp_path: Path) -> None:
        draft = distilled_draft.save(directory, tmp_path / "draft", layers=(1, 3))
        card = read_card(draft)
        tiny.llama(num_hidden_layers=3, tie_word_embeddings=True).save_pretrained(draft)
        card.write(draft)

        with pytest.raises(ModelLoadError, match=r"model.safetensors lacks \['model.layers.2"):
            StudentPlan.of_draft(draft)
        (draft / "model.safetensors").unlink()
        with pytest.raises(ModelLoadError, match="cannot be read"):
            StudentPlan.of_draft(draft)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"vocab_size": 97}, "vocab_size 97 is refused; it must be the target's, 96"),
            ({"hidden_size": 60}, "hidden_size 60 is refused; it must be the target's, 48"),
        ],
    )
    def test_a_configuration_that_does_not_fit_the_target_is_refused(
        self, target: PreTrainedModel, tmp_path: Path, changes: dict[str, int], message: str
    ) -> None:
        tiny.llama(**changes).save_pretrained(tmp_path)

        with pytest.raises(ConfigurationError, match=message):
            make_student(target, StudentPlan(config=tmp_path), 0)

    def test_a_configuration_that_cannot_be_read_is_refused_by_its_directory(
        self, target: PreTrainedModel, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "abc"}))

        with pytest.raises(ModelLoadError, match=f"'{tmp_path}': its configuration cannot be read"):
            make_student(target, StudentPlan(config=tmp_path), 0)

    def test_a_target_that_does_not_exist_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError):
            load_target(tmp_path, CPU)


class TestVocabulary:
    def test_the_vocabulary_has_the_most_frequent_and_the_required_tokens(self) -> None:
        answers = [(9, 9, 9, 4), (4, 7, 7, 7)]

        assert frequent_tokens(answers, 3, always=(2,), vocabulary_size=10) == (2, 7, 9)

    def test_the_lowest_ids_fill_up_the_vocabulary_and_win_ties(self) -> None:
        assert frequent_tokens([(8, 6)], 2, (), 10) == (6, 8)
        assert frequent_tokens([(8, 6)], 4, (), 10) == (0, 1, 6, 8)

    @pytest.mark.parametrize("size", [0, 11])
    def test_a_size_out_of_bounds_is_refused(self, size: int) -> None:
        with pytest.raises(ConfigurationError, match=f"vocabulary_size: {size} is refused; it must be within 1 and 10"):
            frequent_tokens([], size, (), 10)

    def test_a_chosen_vocabulary_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "work" / "vocabulary.json"

        assert stored_vocabulary(path, lambda: (1, 2)) == (1, 2)
        assert stored_vocabulary(path, lambda: (3, 4)) == (1, 2)

    def test_an_interruption_while_it_is_written_leaves_nothing_that_cannot_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(path: Path, text: str, encoding: str) -> int:
            path.write_bytes(text[:3].encode(encoding))
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stored_vocabulary(tmp_path / "vocabulary.json", lambda: (1, 2))

        assert stored_vocabulary(tmp_path / "vocabulary.json", lambda: (1, 2)) == (1, 2)


class TestExport:
    def test_the_export_has_the_students_layers_and_no_weights_of_the_target(
        self, target: PreTrainedModel, tmp_path: Path
    ) -> None:
        student = student_of(target, 0, 3, vocabulary=(2, 5, 40))

        export(student, tmp_path / "draft", "the-target", "# card\n", {"curve.png": b"png"})

        assert sorted(file.name for file in (tmp_path / "draft").iterdir()) == [
            "README.md",
            "config.json",
            "curve.png",
            "model.safetensors",
        ]
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / "draft").iterdir()} == {0o644}
        tensors = load_file(tmp_path / "draft" / "model.safetensors")
        assert {name.split(".")[1] for name in tensors if name != "vocabulary"} == {"layers", "norm"}
        assert {name.split(".")[2] for name in tensors if "layers" in name} == {"0", "1"}
        assert all(value.dtype == torch.bfloat16 for name, value in tensors.items() if name != "vocabulary")
        assert tensors["vocabulary"].dtype == torch.int32
        assert tensors["vocabulary"].tolist() == [2, 5, 40]

    def test_the_draft_card_describes_the_target(self, target: PreTrainedModel, tmp_path: Path) -> None:
        export(student_of(target, 1, 2), tmp_path / "draft", "the-target", "", {})

        assert distilled_draft.stored_card(tmp_path / "draft") == {
            "format_version": 2,
            "target": "the-target",
            "target_vocabulary_size": 96,
            "hidden_size": 48,
            "layers": [1, 2],
            "vocabulary_size": None,
            "kind": "layers",
            "taps": [],
            "shape": None,
        }
        config = json.loads((tmp_path / "draft" / "config.json").read_text())
        assert (config["model_type"], config["num_hidden_layers"], config["dtype"]) == ("llama", 2, "bfloat16")
        assert str(tmp_path) not in (tmp_path / "draft" / "config.json").read_text()
        assert "vocabulary" not in load_file(tmp_path / "draft" / "model.safetensors")

    @pytest.mark.parametrize("vocabulary", [None, tuple(range(3, 90))])
    def test_the_draft_worker_loads_the_export(
        self, directory: Path, target: PreTrainedModel, tmp_path: Path, vocabulary: tuple[int, ...] | None
    ) -> None:
        student = student_of(target, 0, 3, vocabulary=vocabulary)
        text = torch.arange(5, 17)

        export(student, tmp_path / "draft", directory.name, "", {})

        register()
        config = AutoConfig.from_pretrained(tmp_path / "draft")
        loaded = load_distilled_draft(tmp_path / "draft", directory, config, torch.float32, CPU)
        loaded.module.set_attn_implementation("sdpa")
        with torch.no_grad():
            for parameter in student.own_parameters().values():
                parameter.copy_(parameter.bfloat16())  # unchanged
            found = loaded.module(input_ids=text[None]).logits
        torch.testing.assert_close(found, logits_of(student, text[None]))
        known = None if loaded.vocabulary is None else tuple(loaded.vocabulary.tolist())
        assert known == vocabulary

    def test_only_a_draft_is_replaced(self, target: PreTrainedModel, tmp_path: Path) -> None:
        (tmp_path / "letters").mkdir()
        (tmp_path / "letters" / "dear.txt").write_text("Dear")

        with pytest.raises(ConfigurationError, match="needed an empty directory or an earlier draft"):
            export(student_of(target, 0), tmp_path / "letters", "t", "", {})

        assert (tmp_path / "letters" / "dear.txt").read_text() == "Dear"
        with pytest.raises(ConfigurationError, match=r"needed a directory that this user may write, found .*dear"):
            check_replaceable(tmp_path / "letters" / "dear.txt" / "draft")

    @pytest.mark.parametrize("name", ["a" * 300, f"{'a' * 300}/draft"])
    def test_a_path_that_the_system_refuses_is_no_place_for_a_draft(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigurationError, match=r"--out .*: needed a directory that this user may write, found "):
            check_replaceable(tmp_path / name)

    def test_an_older_draft_is_replaced_completely(self, target: PreTrainedModel, tmp_path: Path) -> None:
        export(student_of(target, 1, 2), tmp_path / "draft", "t", "", {"old.png": b"old"})

        export(student_of(target, 0), tmp_path / "draft", "t", "", {})

        assert not (tmp_path / "draft" / "old.png").exists()
        assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]
