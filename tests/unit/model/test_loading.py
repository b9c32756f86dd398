"""Loading a model leaves the terminal to the command that loads it, and takes the GPU that is the rank's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import get_ident

import pytest
import torch
from transformers.utils import logging as transformers_logging

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from tests.support.models import tiny
from workers.forward.loaded_model import PassOutput
from workers.forward.runner import ModelRunner
from workers.kv.pool import KvPool
from workers.model import loading
from workers.model.loading import load_model


def test_the_progress_of_transformers_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    transformers_logging.enable_progress_bar()
    capsys.readouterr()

    load_model(ModelSection.model_validate({"path": str(directory), "device": "cpu"}))

    assert capsys.readouterr().err == ""


def test_a_rank_that_sees_all_gpus_launches_on_its_own_in_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread loads, and another one computes; a thread launches on the first GPU until it is told otherwise."""
    section = ModelSection.model_validate({"path": str(tiny.save(tmp_path, tiny.llama())), "device": "cpu"})
    model, own, chosen = load_model(section), torch.device("cuda", 3), list[tuple[int, torch.device]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((get_ident(), device)))
    with monkeypatch.context() as patch:
        patch.setattr(loading, "choose_device", lambda *_: own)
        with pytest.raises(Exception, match=r"(?i)cuda"):
            load_model(section)
    runner = ModelRunner(model, KvPool(model.kv_spec, KvSection(block_size=4), 20))
    runner._model = replace(model, device=own)
    monkeypatch.setattr(runner, "_run", lambda *_: PassOutput(torch.zeros(1, 1)))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(runner.forward, ()).result()
    (loader, first), (computer, second) = chosen
    assert (first, second) == (own, own)
    assert loader != computer
