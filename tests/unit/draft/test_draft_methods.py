"""A drafting method is registered with its settings, and read without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.core.config.base import PluginSettings
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from tests.integration.test_speculation import DRAFTING, ON_THE_TARGET
from workers.draft.common.idle_work import IdleWork
from workers.draft.registry import METHODS, check_standalone, create, register
from workers.serve.configuration import load_configuration

UNRESTARTED = {
    "blockwise": "it drafts with the module of `heads`",
    "none": "it drafts nothing",
    "prediction": "it drafts what a request predicts, and stores nothing else",
    "synthetic": "its drafts are accepted whatever the target decides",
}
"""Methods that `tests/integration/test_speculation.py` restarts no drafter and no target of, and why."""
ROOT = Path(__file__).parents[3]
DRAFTS = ROOT / "deploy" / "docs" / "drafts.md"
FOR_VLLM = ROOT / "protos" / "pilotfish_vllm" / "README.md"


class RepeatSettings(PluginSettings):
    """The settings of a drafting method that is registered only in this test."""

    times: int = 1
    """Number of repetitions."""


class RepeatDrafter:
    def __init__(self, times: int) -> None:
        self._times = times

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return tuple(
            Proposal(row.sequence_id, row.base_len, TokenTree.chain(row.new_tokens[-1:] * self._times)) for row in rows
        )

    def release(self, sequence_ids: Sequence[SequenceId]) -> None: ...


@pytest.fixture
def repeat_method(monkeypatch: pytest.MonkeyPatch) -> None:
    METHODS.names()  # registers all packaged methods
    monkeypatch.setattr(METHODS, "_plugins", dict(METHODS._plugins))
    register("repeat", RepeatSettings)(lambda settings, draft, target: RepeatDrafter(settings.times))


@pytest.mark.usefixtures("repeat_method")
def test_a_method_needs_propose_and_release_settings_and_a_registered_factory() -> None:
    configuration = load_configuration({"draft": {"method": "repeat", "repeat": {"times": 3}}})
    method = create(configuration.draft, configuration.target)
    row = DraftRow(SequenceId("a"), 9, (5,), DraftBudget(4, 4))
    assert method.propose([row])[0].tree == TokenTree.chain([5, 5, 5])
    assert not isinstance(method, IdleWork)
    with pytest.raises(ConfigurationError, match=r"^draft\.repeat\.time: unknown key; .* draft\.repeat\.times$"):
        load_configuration({}, {"draft.repeat.time": 3})


def test_the_settings_of_all_plugins_are_read_without_torch() -> None:
    code = "import sys; from workers.serve.configuration import load_configuration; load_configuration({})"
    check = "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


def test_the_page_of_drafts_describes_every_method() -> None:
    page = DRAFTS.read_text("utf-8")
    (refused,) = re.findall(r"^For encoder-decoder targets .*?, (.*?) are refused", page, re.MULTILINE)
    assert [name for name in METHODS.names() if f"\n| `{name}` | " not in page] == []
    assert re.findall(r"`(\w+)`", refused) == [name for name, one in METHODS.items() if not one.for_encoder_decoder]


def test_the_page_for_vllm_names_the_methods_that_need_more_than_tokens() -> None:
    page = FOR_VLLM.read_text("utf-8")
    (drafting,) = re.findall(r"The methods (.*?) draft from them", page)
    (refused,) = re.findall(r"needs hidden states, ranked tokens or decisions \((.*?)\) is refused", page)
    draft = load_configuration({}).draft
    reasons = {}
    for name in METHODS.names():
        try:
            check_standalone(draft.model_copy(update={"method": name}))
        except ConfigurationError as error:
            reasons[name] = str(error)
    assert re.findall(r"`(\w+)`", refused) == [name for name, reason in reasons.items() if "it needs the" in reason]
    assert not reasons.keys() & set(re.findall(r"`(\w+)`", drafting))


def test_every_method_is_restarted_while_it_drafts() -> None:
    restarted = {drafting.get("method", "model") for drafting in (*DRAFTING, *ON_THE_TARGET)}
    assert set(METHODS.names()) - restarted == UNRESTARTED.keys()
