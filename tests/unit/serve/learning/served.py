"""A tiny target with a draft that knows nothing, and the traffic that it has seen."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget
from cluster.core.ids import CacheSalt, SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult
from deploy.distillation.learner_task import learn
from tests.support.engines.colocated_decoding import Decoded, decode_together
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import distilled_draft, drafting_modules, public_drafts, tiny
from workers.draft.common.learning import LearnsOnline, Reservoir
from workers.draft.registry import create
from workers.model.draft_shapes import BlockShape, EagleShape, HeadsShape, LayerShape, Shape
from workers.serve.configuration import load_configuration
from workers.serve.learning.learner import Learner, LearnerOptions
from workers.serve.learning.messages import Candidate, Task
from workers.serve.learning.versions import Versions
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

LAYERS = 2
"""Decoder layers of the target."""
TOKENS = 24
BUDGET = DraftBudget(3, 3)
TIMES = 10
"""How often the traffic is repeated before a training."""
PROMPTS = {
    str(number): (tuple(range(7 + number, 13 + number)), SamplingParameters(temperature=temperature, seed=number))
    for number, temperature in enumerate((0.0, 0.0, 0.7, 0.0))
}
LAYER = LayerShape(48, 4, 2, 8, 48, window=16)
MODEL: dict[str, Any] = {"candidates": 1, "width": 1, "lookup": "off", "device": "cpu", "kv": {"pool_bytes": 4 << 20}}
DRAFTS: dict[str, tuple[tuple[int, ...], Shape | None, dict[str, Any]]] = {
    "heads": ((2,), HeadsShape(3, mix_rank=8, selector_rank=0), {"candidates": 1}),
    "eagle": ((1, 2), EagleShape(LAYER), {"candidates": 1, "width": 1}),
    "early": ((1,), EagleShape(LAYER), {"candidates": 1, "width": 1}),
    "block": ((1, 2), BlockShape(LAYER, block=3, selector_rank=0), {"candidates": 1}),
    "dspark": ((0, 1, 2), None, {"candidates": 1}),
    "eagle3": ((0, 1, 2), None, {"candidates": 1, "width": 1}),
    "model": ((), None, MODEL | {"compile_directory": str(KEPT)}),
    "distilled": ((), None, MODEL | {"compile_directory": str(KEPT)}),
}
"""By kind: the taps, the shape of the module, and settings with which drafts are chains."""
COMMAND = (sys.executable, "-m", "deploy.distillation.learner_process", "normal")
"""The learner's process with the usual priority, so that a loaded machine does not delay the test."""
METHODS = {"dspark": "block", "eagle3": "eagle", "distilled": "model", "early": "eagle"}
"""The methods of kinds with other names."""
Message = TypeVar("Message", Task, Candidate)


class Served:
    """A tiny target with a draft that knows nothing, and the traffic that it has seen."""

    def __init__(self, directory: Path, kind: str = "heads", vocabulary: Sequence[int] | None = None) -> None:
        target, draft = directory / "target", directory / kind
        self.taps, shape, settings = DRAFTS[kind]
        taps, method = self.taps, METHODS.get(kind, kind)
        tiny.save(target, tiny.llama())
        if method != "model":
            settings = {"weights": "float32"} | settings
        if kind == "model":
            tiny.save(draft, tiny.llama(), seed=5, sharpness=1.0)
        elif kind == "distilled":
            distilled_draft.save(target, draft, (1,), vocabulary)
        elif kind == "eagle3":  # as its authors store it: of a reduced vocabulary, in a file of `torch.save`
            config = public_drafts.LLAMA | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": len(public_drafts.DRAFTED),
                "eagle_aux_hidden_state_layer_ids": list(taps),
            }
            public_drafts.write(draft, config, public_drafts.eagle3(), "pytorch_model.bin")
        elif shape is None:
            tensors = public_drafts.spark()
            tensors["markov_head.markov_w2.weight"].zero_()  # its corrections would have to be unlearned first
            config = public_drafts.speculators_block("dspark", aux_hidden_state_layer_ids=list(taps))
            public_drafts.write(draft, config, tensors)
        else:
            drafting_modules.save(target, draft, method, taps, vocabulary, shape=shape)
        self.values: dict[str, Any] = {
            "target": {
                "path": str(target),
                "device": "cpu",
                "dtype": "float32",
                "compile": "off",
                "compile_directory": str(KEPT),  # the learner's process finds compiled kernels there
                "kv": {"pool_bytes": 4 << 20},
                "evidence": {"taps": taps if not taps or LAYERS in taps else (*taps, -1)},
            },
            "draft": {
                "method": method,
                "learn": "on",
                "max_nodes": 3,
                "max_depth": 3,
                method: {"path": str(draft)} | settings,
            },
        }
        self.reservoir = Reservoir(1 << 22)
        self.restart()

    def restart(self) -> None:
        """Begin with the weights of the files, and with a method that has drafted nothing before."""
        configuration = self.configuration
        method = create(configuration.draft, configuration.target)
        assert isinstance(method, LearnsOnline) and method.weights is not None
        self.method, self.weights = method, method.weights
        self.engine: TargetEngine = build_engine(configuration.target, method=method)
        method.collect_into(self.reservoir)
        self.served = 0

    @property
    def configuration(self) -> Configuration:
        return load_configuration(self.values)

    def step(self, salt: str = "a/", *, allows: bool = True) -> Callable[[StepBatch], StepResult]:
        """Steps of requests with a salt and their consent. Those named `SALT:NAME` have this salt."""

        def salt_of(name: SequenceId) -> CacheSalt:
            return CacheSalt(name.partition(":")[0] if ":" in name else salt)

        def with_start(batch: StepBatch) -> StepResult:
            rows = tuple(
                row
                if row.start is None
                else replace(row, start=replace(row.start, cache_salt=salt_of(row.sequence_id), allows_learning=allows))
                for row in batch.rows
            )
            return self.engine.step(StepBatch(rows))

        return with_start

    def serve(self, salt: str = "a/", *, allows: bool = True) -> list[Decoded]:
        """Answer all prompts once and release them."""
        self.served += 1
        named = {f"{name}-{self.served}": prompt for name, prompt in PROMPTS.items()}
        found = decode_together(self.step(salt, allows=allows), named, TOKENS, BUDGET)
        self.engine.release([SequenceId(name) for name in found])
        return list(found.values())

    def learned(self, key: str) -> Mapping[str, torch.Tensor]:
        """Weights that are learned in this process from what is stored of a salt, better than the served ones."""
        (texts,) = (one for one in self.reservoir.salts() if one.key == key)
        task = Task(self.values, self.weights.of(key), texts.training, texts.left_out, texts.held_back)
        candidate = learn(passed(task))
        assert passed(candidate).is_better
        return candidate.weights


def passed(message: Message) -> Message:
    """The message as the other process reads it."""
    with tempfile.NamedTemporaryFile() as file:
        message.write(file)
        file.flush()
        return type(message).read(Path(file.name))


def task_in(file: IO[bytes]) -> Task:
    """The task that the learner's process is given in an open file."""
    return Task.read(Path(f"/proc/self/fd/{file.fileno()}"))


def answers(found: Sequence[Decoded]) -> list[list[int]]:
    """The answers, cut to the same length."""
    return [one.answer[:TOKENS] for one in found]


def accepted(found: Sequence[Decoded]) -> int:
    """Drafted tokens that were accepted."""
    return sum(one.accepted for one in found)


def trees(found: Sequence[Decoded]) -> list[list[TokenTree]]:
    """The drafts of each sequence."""
    return [[proposal.tree for proposal in one.proposals] for one in found]


def learner_of(
    served: Served,
    versions: Versions | None = None,
    command: tuple[str, ...] = COMMAND,
    is_idle: Callable[[], bool] = lambda: True,
    **bounds: Any,
) -> Learner:
    """A learner that has not begun."""
    return Learner(
        served.weights,
        served.reservoir,
        served.values,
        versions or Versions(None, served.weights),
        is_idle,
        LearnerOptions(command, fresh_texts=8, least_held_back=2, idle_seconds=0.05, **bounds),
    )


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
