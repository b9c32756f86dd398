"""Loads a model with `transformers`, and refuses files whose weights it would invent, leave out or read wrong.

It warns of them and goes on: it draws missing parameters at random, leaves out biases that the configuration does not
state, and reads numbers of a quantization that it does not know without their scales.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel

from cluster.core.errors import ModelLoadError, shorten
from workers.model.stored.quantized_checkpoint import is_dequantized
from workers.model.stored.source import stored_alone
from workers.model.target_ends import named_tensors, outline, read_config
from workers.model.weight_files import weight_files

_SCALE = re.compile(r"(.*\.)?weight_scale\w*|(.*)_scale(_inv)?")
"""Names of the scales of a layer's weight, or of another parameter."""


_PLAIN = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Types of weights that need no scale, as safetensors names them. Those of 8 bits may have one, see `_is_scale`."""
_COMPUTED = "SinusoidalPositionalEmbedding"
"""Ends the names of classes whose weight `transformers` computes where the files lack it, as those of Pegasus do."""


def load_complete(kind: Any, directory: Path, *, dequantizes: bool = False, **options: Any) -> PreTrainedModel:
    """The model that `kind.from_pretrained(directory, **options)` loads. Raises `ModelLoadError`, and what it raises.

    A GGUF model whose directory has no weights is de-quantized from its file, to float32 unless `dtype` is another
    type. With `dequantizes`, a checkpoint of GPTQ and the like is, too, and no library of its format is needed. Under
    tensor parallelism, all ranks raise for the same tensors.
    """
    is_read_here = dequantizes and is_dequantized(directory)
    if is_read_here or ("gguf_file" not in options and stored_alone(directory) is not None):
        module, report = _dequantized(directory, options)
    else:
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
    if "gguf_file" not in options:
        biases = [name for name in report["unexpected_keys"] if _is_bias(name, parameters)]
        has_scales = getattr(module, "hf_quantizer", None) is not None
        _check_numbers(directory, biases, frozenset() if has_scales or is_read_here else parameters)
    loaded: PreTrainedModel = module
    return loaded


def _dequantized(directory: Path, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """A GGUF model from its file, or one that is stored quantized, and what the files lack of it."""
    config = read_config(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    found = outline(config)
    tensors = dict(named_tensors(directory, found.shapes))
    loading: dict[str, Any] = {"config": config, "state_dict": tensors, "output_loading_info": True}
    module, report = cast("Any", found.kind).from_pretrained(None, **{**options, **loading})
    if (directory / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(directory)
    return module, report


def _is_bias(name: str, parameters: Collection[str]) -> bool:
    """Whether a tensor that no parameter takes is the bias of a layer of the model."""
    return name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in parameters


def _check_numbers(directory: Path, biases: Collection[str], parameters: Collection[str]) -> None:
    """Raise `ModelLoadError` for one of `biases` that is not 0, and for one of `parameters` that needs a scale."""
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            dropped = [name for name in names if name in biases and bool(opened.get_tensor(name).float().any())]
            small = [name for name in names if name in parameters and opened.get_slice(name).get_dtype() not in _PLAIN]
        if dropped:
            raise ModelLoadError(
                f"model directory {str(directory)!r}: its files have {shorten(dropped[:3])}, and the model of its "
                "configuration has no such biases; put the configuration of these weights there"
            )
        if small:
            raise ModelLoadError(
                f"model directory {str(directory)!r}: {shorten(small[:3])} have no scales that are read; they must be "
                "float32, bfloat16 or float16"
            )


def _is_scale(name: str, parameters: Collection[str]) -> bool:
    """Whether a tensor that no parameter takes has a weight's scales. Those of a KV cache, as `k_scale`, are others."""
    found = _SCALE.fullmatch(name)
    return found is not None and (found[2] is None or found[2] in parameters)
