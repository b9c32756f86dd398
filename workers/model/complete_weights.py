"""Loads a model with `transformers`, and refuses files that lack weights or whose quantized numbers stay as they are.

`transformers` warns of both and goes on: it draws missing parameters at random, and reads numbers of a quantization
that it does not know without their scales.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cluster.core.errors import ModelLoadError, shorten

_SCALE = re.compile(r"(.*\.)?weight_scale\w*|(.*)_scale(_inv)?")
"""Names of the scales of a layer's weight, or of another parameter."""


_COMPUTED = "SinusoidalPositionalEmbedding"
"""Ends the names of classes whose weight `transformers` computes where the files lack it, as those of Pegasus do."""


def load_complete(kind: Any, directory: Path, **options: Any) -> PreTrainedModel:
    """The model that `kind.from_pretrained(directory, **options)` loads. Raises `ModelLoadError`, and what it raises.

    Under tensor parallelism, all ranks raise for the same tensors.
    """
    module, report = kind.from_pretrained(directory, output_loading_info=True, **options)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    computed = {f"{name}.weight" for name, part in module.named_modules() if type(part).__name__.endswith(_COMPUTED)}
    missing = sorted(parameters.intersection(report["missing_keys"]) - computed)
    if missing:
        raise ModelLoadError(
            f"model directory {str(directory)!r}: its files lack {len(missing)} of {len(parameters)} parameters, as "
            f"{shorten(missing[:3])}; put the missing files there, or the configuration of these weights"
        )
    scales = sorted(name for name in report["unexpected_keys"] if _is_scale(name, parameters))
    if scales and getattr(module, "hf_quantizer", None) is None:
        settings = getattr(module.config, "quantization_config", None)
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise ModelLoadError(
            f"model directory {str(directory)!r}: its weights are quantized in a way that is not read (quant_method "
            f"{method!r} in its configuration, scales {shorten(scales[:3])}); give the model in another format"
        )
    loaded: PreTrainedModel = module
    return loaded


def _is_scale(name: str, parameters: Collection[str]) -> bool:
    """Whether a tensor that no parameter takes has a weight's scales. Those of a KV cache, as `k_scale`, are others."""
    found = _SCALE.fullmatch(name)
    return found is not None and (found[2] is None or found[2] in parameters)
