"""Steps that capacity simulations predict of real configurations, against steps that are counted with all layers."""

from __future__ import annotations

import copy

import pytest

from deploy.simulation.device.models import MODELS, RankModel
from deploy.simulation.device.predicted_steps import PredictedSteps
from deploy.simulation.device.prediction import predict
from deploy.simulation.device.step import Rows, count_step

pytestmark = pytest.mark.slow

STEPS: dict[str, tuple[Rows, ...]] = {
    "decode 8 × 2k": (Rows(8, 2048),),
    "decode 20 × 100": (Rows(20, 100),),
    "verify 12 × 5 at 3k": (Rows(12, 3000, nodes=4),),
    "verify 64 × 8 at 2k": (Rows(64, 2048, nodes=7),),
    "prompt of 300 beside 7 × 1k": (Rows(7, 1024), Rows(1, 5000, fresh=300)),
    "prompt of 1k beside 32 × 2k": (Rows(32, 2048), Rows(1, 1024, fresh=1024)),
    "prompt of 2k": (Rows(1, 0, fresh=2048),),
}
BOUND, RECURRENT_BOUND = 0.12, 0.15
"""How far a predicted step may be from a counted one, as a share of it. The states that recurrent layers move, which
follow from the rows, are interpolated by tokens too."""


@pytest.mark.parametrize(("name", "ranks", "layers"), [
    ("Llama-3.1-8B", 1, 32), ("Llama-3.2-1B", 1, 16), ("Llama-3.3-70B", 8, 8), ("Qwen3-30B-A3B", 1, 6),
    ("gpt-oss-20b", 1, 8), ("DeepSeek-V3", 8, 8), ("Qwen3-Next-80B-A3B", 1, 12),
])  # fmt: skip
def test_predicted_steps_are_those_that_are_counted(
    name: str, ranks: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    monkeypatch.setitem(MODELS, name, config)
    model = RankModel(name, ranks)
    found = PredictedSteps(model)
    errors = {}
    for step, rows in STEPS.items():
        shapes = [(kind.stored, kind.fresh + kind.nodes) for kind in rows for _ in range(kind.count)]
        errors[step] = found.seconds(shapes) / predict(count_step(model, rows)).seconds - 1
    assert max(map(abs, errors.values())) < (RECURRENT_BOUND if "Next" in name else BOUND), errors
