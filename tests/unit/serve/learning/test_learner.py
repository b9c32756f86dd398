"""A drafter learns from what it serves: acceptance rises, texts stay, tenants are apart, failures cost nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.errors import ConfigurationError
from cluster.core.verification import StepBatch, StepResult
from deploy.distillation import learner_task
from tests.support.engines.colocated_decoding import decode_together
from tests.support.models import distilled_draft, public_drafts, tiny
from tests.support.models.drafting_evidence import drafter_of
from tests.unit.serve.learning.served import (
    BUDGET,
    PROMPTS,
    TIMES,
    TOKENS,
    Served,
    accepted,
    answers,
    learner_of,
    passed,
    task_in,
    trees,
    wait_until,
)
from workers.draft.common.learning import salt_key
from workers.draft.common.modules.learned_modules import LearnedModules
from workers.serve.configuration import load_configuration
from workers.serve.learning.learner import Learner, start_learner
from workers.serve.learning.messages import Candidate, Task
from workers.serve.learning.versions import Versions, roll_back, stored_versions


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Served:
    torch.set_num_threads(1)
    return Served(tmp_path, getattr(request, "param", "heads"))


@pytest.mark.slow
def test_repeated_traffic_is_drafted_better_after_a_swap_and_its_texts_stay(served: Served, tmp_path: Path) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    versions = Versions(tmp_path / "versions", served.weights)
    learner = learner_of(served, versions)
    assert learner.learn_once()
    assert learner.candidate is not None
    assert learner.candidate.tokens_per_step > learner.candidate.tokens_per_step_before
    after = served.serve()
    assert versions.served(salt_key("a/")) == 1
    assert answers(after) == answers(before)
    assert accepted(after) > accepted(before)


def test_a_swap_between_two_steps_changes_no_text(served: Served) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    weights = served.learned(salt_key("a/"))
    step, count = served.step(), 0

    def swapping(batch: StepBatch) -> StepResult:
        nonlocal count
        count += 1
        if count in (4, 8):
            served.weights.replace(salt_key("a/"), weights if count == 4 else None)
        return step(batch)

    assert answers(list(decode_together(swapping, PROMPTS, TOKENS, BUDGET).values())) == answers(before)
    assert count > 8


def test_weights_of_the_files_are_served_again_without_a_training_where_they_are_clearly_better(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(TIMES):
        served.serve()
    key = salt_key("a/")
    files = served.weights.of(key)
    served.weights.replace(key, {name: torch.randn_like(value) * 10 for name, value in files.items()})
    monkeypatch.setattr(learner_task, "train_online", lambda *_: pytest.fail("trained"))
    learned = served.learned(key)
    assert all(torch.equal(learned[name], value.bfloat16().float()) for name, value in files.items())


def test_a_client_whose_drafts_stay_keeps_what_its_texts_had_stored(served: Served) -> None:
    key = salt_key("a/")
    for weights in (None, served.weights.of(key), None):
        before = served.weights.version("a/")
        served.weights.replace(key, weights)
        served.weights.replace(key, None)
        assert (served.weights.version("a/") == before) is (weights is None)


def test_the_latest_texts_alone_are_learned_from(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(TIMES):
        served.serve()
    tasks: list[Task] = []
    monkeypatch.setattr(Learner, "_candidate", lambda _, file: tasks.append(task_in(file)))
    learner = learner_of(served, most_texts=5, most_left_out=2, most_held_back=3)
    assert not learner.learn_once()
    (texts,) = served.reservoir.salts()
    assert len(texts.training) > 5 and len(texts.held_back) > 3
    assert [text.tokens for text in tasks[0].training] == [text.tokens for text in texts.training[-5:]]
    assert [text.tokens for text in tasks[0].left_out] == [text.tokens for text in texts.left_out[-2:]]
    assert [text.tokens for text in tasks[0].held_back] == [text.tokens for text in texts.held_back[-3:]]


def test_what_one_client_taught_is_not_drafted_for_another(served: Served) -> None:
    """The taught text is drafted for its own client, and every draft for the other one is as before."""
    before_b = served.serve("b/", allows=False)
    for _ in range(TIMES):
        before_a = served.serve("a/")
    served.weights.replace(salt_key("a/"), served.learned(salt_key("a/")))
    after_a, after_b = served.serve("a/"), served.serve("b/", allows=False)
    assert accepted(after_a) > accepted(before_a)
    assert trees(after_b) != trees(after_a)
    assert trees(after_b) == trees(before_b)


def test_nothing_is_collected_without_consent(served: Served) -> None:
    served.serve(allows=False)
    assert (served.reservoir.seen, served.reservoir.stored_bytes) == (0, 0)


@pytest.mark.parametrize("served", ["heads", pytest.param("model", marks=pytest.mark.slow)], indirect=True)
def test_a_learner_that_fails_changes_nothing(served: Served) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    for program in ("raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", "print('no weights')"):
        learner = learner_of(served, command=(sys.executable, "-c", program))
        assert not learner.learn_once(), program
        after = served.serve()
        assert trees(after) == trees(before), program


def test_a_candidate_is_mapped_from_the_file_that_its_process_wrote(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a large draft is copied in one piece, which would hold the interpreter of requests that run."""
    for _ in range(TIMES):
        served.serve()
    weights = {name: value + 1 for name, value in served.weights.of("").items()}
    with (tmp_path / "candidate").open("wb") as file:
        Candidate(weights, (9, 9, 9), (5, 5, 5), (9, 9, 9)).write(file)
    learner = learner_of(served, command=("cat", str(tmp_path / "candidate")))
    found = []
    monkeypatch.setattr(Learner, "_take", lambda _, __, candidate: found.append(candidate.weights))
    assert not learner.learn_once()
    for name, value in weights.items():
        assert torch.equal(found[0][name], value) and "memfd:candidate" in mapped_file(found[0][name])
    assert learner.candidate is not None and not learner.candidate.weights


def mapped_file(value: torch.Tensor) -> str:
    """The file whose contents the tensor's memory is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.partition(" ")[0].split("-"))
        if begin <= value.data_ptr() < end:
            return line.partition("/")[2]
    return ""


def test_the_learner_stands_still_while_requests_run_and_ends_with_its_owner(served: Served, tmp_path: Path) -> None:
    for _ in range(TIMES):
        served.serve()
    file, is_idle = tmp_path / "work", threading.Event()
    is_idle.set()
    program = f"import time\nwhile True:\n    open({str(file)!r}, 'a').write('x')\n    time.sleep(0.01)"
    learner = learner_of(served, command=(sys.executable, "-c", program), is_idle=is_idle.is_set)
    learner.start()
    wait_until(file.exists)
    is_idle.clear()
    time.sleep(0.5)
    size = file.stat().st_size
    time.sleep(0.5)
    assert file.stat().st_size == size
    is_idle.set()
    wait_until(lambda: file.stat().st_size > size)
    learner.close()
    size = file.stat().st_size
    time.sleep(0.2)
    assert file.stat().st_size == size


def test_a_restart_serves_the_last_version_and_a_rollback_the_one_before(served: Served, tmp_path: Path) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    weights = served.learned(salt_key("a/"))
    versions = Versions(tmp_path / "versions", served.weights)
    learned = (served.weights.of(salt_key("a/")), weights)
    assert [versions.store(salt_key("a/"), one, {}, after=number) for number, one in enumerate(learned)] == [1, 2]
    learner = learner_of(served, Versions(tmp_path / "versions", served.weights))
    learner.start()
    learner.close()
    better = served.serve()
    assert accepted(better) > accepted(before)
    assert roll_back(tmp_path / "versions") == {salt_key("a/"): 1}
    learner = learner_of(served, Versions(tmp_path / "versions", served.weights))
    learner.start()
    learner.close()
    assert trees(served.serve()) == trees(before)
    assert answers(better) == answers(before)


def test_weights_that_do_not_fit_or_are_not_finite_are_refused(served: Served) -> None:
    weights = dict(served.weights.of("a"))
    name = next(iter(weights))
    with pytest.raises(ValueError, match="finite"):
        served.weights.replace("a", weights | {name: weights[name] * float("nan")})
    with pytest.raises(ValueError, match="names and shapes"):
        served.weights.replace("a", {})


@pytest.mark.slow
def test_weights_that_diverge_are_dropped_and_the_served_ones_stay(served: Served, tmp_path: Path) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    program = """
import sys
from functools import partial
from deploy.distillation import learner_process, learner_task
learner_task.OnlinePlan = partial(learner_task.OnlinePlan, learning_rate=float(sys.argv.pop(2)))
learner_process.main()
"""
    for rate in ("1e30", "nan"):
        versions = Versions(tmp_path / "versions", served.weights)
        learner = learner_of(served, versions, (sys.executable, "-c", program, "normal", rate))
        assert not learner.learn_once()
        assert versions.served(salt_key("a/")) == 0
        counts = learner.status()
        assert (counts.taken, counts.dropped + counts.failed) == (0, 1)
        assert trees(served.serve()) == trees(before)


@pytest.mark.parametrize(
    ("before", "after", "is_better"),
    [
        ((8, 8, 8, 8), (6, 5, 6, 6), True),
        ((8, 8, 8, 8), (8, 8, 8, 8), False),
        ((6, 6, 6, 6), (8, 8, 8, 8), False),
        ((8, 8, 8, 8), (1, 8, 8, 8), False),
        ((8,), (1,), False),
        ((8, 9) * 32, (6,) * 48 + (9, 10) * 8, False),
        ((8, 9) * 32, (9,) * 48 + (6, 7) * 8, True),
        ((8, 9) * 32, (6, 7) * 24 + (4, 13) * 8, True),
    ],
    ids=[
        "better",
        "equal",
        "worse",
        "within the noise of a few texts",
        "a single text",
        "worse for the latest texts",
        "better for the latest texts alone",
        "better for all texts, and nothing to tell of the latest",
    ],
)
def test_weights_are_better_if_they_save_steps_beyond_the_noise(
    before: tuple[int, ...], after: tuple[int, ...], is_better: bool
) -> None:
    assert Candidate({}, before, after, (12,) * len(before)).is_better is is_better


def test_measurements_that_cannot_be_are_refused() -> None:
    for before, after, tokens in (((5,), (5,), (4,)), ((0,), (0,), (9,)), ((-1,), (1,), (1,)), ((1, 1), (1,), (1,))):
        with pytest.raises(ValueError, match="candidate: needed weights and measurements"):
            passed(Candidate({}, before, after, tokens))


def test_a_rollback_during_a_training_keeps_its_weights_out(served: Served, tmp_path: Path) -> None:
    """Weights of a training that was under way during a rollback are dropped: they follow from what was removed."""
    for _ in range(TIMES):
        served.serve()
    key, directory = salt_key("a/"), tmp_path / "versions"
    base, better = served.weights.of(key), served.learned(key)
    versions = Versions(directory, served.weights)
    versions.store(key, base, {}, after=0)
    versions.store(key, base, {}, after=1)
    assert roll_back(directory, key) == {key: 1}
    for changed in ((key,), ()):
        with pytest.raises(ValueError, match="version 1 was chosen meanwhile"):
            versions.store(key, better, {}, after=2)
        assert versions.changed() == changed
    assert versions.store(key, better, {}, after=1) == 3
    assert stored_versions(directory / key) == [1, 2, 3]
    assert [entry.name for entry in directory.iterdir() if entry.is_dir()] == [key]


def test_what_a_killed_process_left_is_removed_when_a_learner_starts(served: Served, tmp_path: Path) -> None:
    """The process is killed while it writes a version: there is part of a file. Folders of others stay."""
    directory, begun = tmp_path / "versions", tmp_path / "begun"
    directory.mkdir()
    foreign = [directory / name for name in (".snapshot", ".unfinished-by-somebody", "unfinished-abcdefgh", "0" * 32)]
    for folder in foreign:
        folder.mkdir()
    program = f"""
import time
from pathlib import Path
from workers.serve.learning.versions import Versions
class Slow:
    saved_bytes = 5
    def save(self, directory, weights):
        (directory / "model.safetensors").write_bytes(b"begun")
        Path({str(begun)!r}).touch()
        time.sleep(60)
Versions(Path({str(directory)!r}), Slow()).store("1" * 32, {{}}, {{}}, after=0)
"""
    with subprocess.Popen((sys.executable, "-c", program)) as process:
        wait_until(begun.exists)
        process.kill()
    (left,) = (entry for entry in directory.glob(".*/*"))
    assert left.read_bytes() == b"begun"
    learner = learner_of(served, Versions(directory, served.weights))
    learner.start()
    learner.close()
    assert not left.parent.exists()
    assert all(folder.is_dir() for folder in foreign)


def test_a_rollback_is_followed_during_a_training(served: Served, tmp_path: Path) -> None:
    for _ in range(TIMES):
        served.serve()
    key, file = salt_key("a/"), tmp_path / "work"
    base = served.weights.of(key)
    versions = Versions(tmp_path / "versions", served.weights)
    versions.store(key, {name: value + 1 for name, value in base.items()}, {}, after=0)
    program = f"import time\nopen({str(file)!r}, 'w').close()\ntime.sleep(60)"
    learner = learner_of(served, Versions(tmp_path / "versions", served.weights), (sys.executable, "-c", program))
    learner.start()
    wait_until(file.exists)
    roll_back(tmp_path / "versions")
    wait_until(lambda: all(torch.equal(value, base[name]) for name, value in served.weights.of(key).items()))
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("served", ["heads", "dspark", "eagle3", "model"], indirect=True)
def test_a_stored_version_is_a_draft_that_a_server_can_load(served: Served, tmp_path: Path) -> None:
    for _ in range(TIMES):
        served.serve()
    versions = Versions(tmp_path / "versions", served.weights)
    learner = learner_of(served, versions)
    assert learner.learn_once()
    stored = tmp_path / "versions" / salt_key("a/") / "000001"
    about = json.loads((stored / "learned.json").read_text())
    assert about["tokens_per_step"] > about["tokens_per_step_before"]
    weights = served.weights.of(salt_key("a/"))
    served.restart()
    served.weights.replace(salt_key("a/"), weights)
    learned = served.serve()
    served.values["draft"][served.values["draft"]["method"]]["path"] = str(stored)
    served.restart()
    assert trees(served.serve()) == trees(learned)


def test_a_draft_of_other_sizes_in_the_directory_is_left_out(served: Served, tmp_path: Path) -> None:
    before = served.serve()
    key = salt_key("a/")
    stored = tmp_path / "versions" / key / "000001"
    stored.mkdir(parents=True)
    served.weights.save(stored, served.weights.of(key))
    distilled_draft.change_card(stored, {"target": "another"})
    (stored.parent / "served").write_text("1")
    learner = learner_of(served, Versions(tmp_path / "versions", served.weights))
    learner.start()
    learner.close()
    assert trees(served.serve()) == trees(before)


def test_learned_weights_take_no_more_memory_than_allowed(served: Served, tmp_path: Path) -> None:
    """The client whose version was chosen first drafts with the weights of the files, until it learns again."""
    versions = Versions(tmp_path / "versions", served.weights)
    for name in ("a/", "b/", "c/"):
        versions.store(salt_key(name), {n: v + 1 for n, v in served.weights.of(name).items()}, {}, after=0)
    learner = learner_of(served, Versions(tmp_path / "versions", served.weights))
    learner._most_salts = 2
    learner.start()
    learner.close()
    base = served.weights.of("")
    for name, is_learned in (("a/", False), ("b/", True), ("c/", True)):
        found = served.weights.of(salt_key(name))
        assert all(torch.equal(found[one], base[one]) for one in base) is not is_learned
    assert learner.status().clients == 2


@pytest.mark.parametrize(
    ("method", "config", "tensors"),
    [
        (
            "eagle",
            public_drafts.speculators_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
            | {"transformer_layer_config": public_drafts.LLAMA | {"num_hidden_layers": 2}},
            public_drafts.eagle3("layers.0.", layers=2),
        ),
        ("block", public_drafts.speculators_block("dflash"), public_drafts.block()),
        (
            "block",
            public_drafts.speculators_block("dspark", confidence_head_with_markov=False),
            public_drafts.spark(confidence="hidden"),
        ),
    ],
    ids=["EAGLE-3 of two layers", "DFlash", "DSpark with another confidence head"],
)
def test_drafts_that_cannot_be_trained_are_refused(
    tmp_path: Path, method: str, config: dict[str, Any], tensors: public_drafts.Tensors
) -> None:
    target = tiny.save(tmp_path / "target", tiny.llama(num_hidden_layers=8))
    draft = public_drafts.write(tmp_path / "draft", config, tensors)
    drafter, _ = drafter_of(target, 8, method, {"path": str(draft)}, learn="on")
    configuration = load_configuration({"draft": {"method": method, "learn": "on", method: {"path": str(draft)}}})
    with pytest.raises(ConfigurationError, match=f"on is refused; drafts of this format of {method} cannot be trained"):
        start_learner(configuration, drafter, lambda: True)


def test_a_directory_of_an_unknown_user_is_refused_with_its_setting(served: Served) -> None:
    configuration = load_configuration(served.values, {"draft.learn_directory": "~no.body/drafts"})
    with pytest.raises(
        ConfigurationError, match=r"draft\.learn_directory: needed a known user, found ~no\.body/drafts"
    ):
        start_learner(configuration, served.method, lambda: True)


def test_settings_replace_the_default_memory(served: Served) -> None:
    for chosen, texts in ((None, served.method.default_text_bytes), (3 << 20, 3 << 20)):
        configuration = load_configuration(served.values, {"draft.learn_text_bytes": chosen})
        learner = start_learner(configuration, served.method, lambda: True)
        learner.close()
        assert learner._reservoir.most_bytes == texts
        assert learner._options.weight_bytes == 256 << 20


def test_by_default_the_weights_of_one_client_have_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LearnedModules, "bytes_each", 3 << 30)
    learner = start_learner(served.configuration, served.method, lambda: True)
    learner.close()
    assert (learner._options.weight_bytes, learner._most_salts) == (3 << 30, 1)
