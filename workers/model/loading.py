"""Loads a model for serving: weights, paged attention, tensor-parallel shards, kernels or compiled layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh
from transformers.utils import logging as transformers_logging

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError, ModelLoadError, PilotfishError
from workers.forward.adapters.base import accept_attention_name
from workers.forward.attention import ATTENTION_NAME, UnsupportedModel, register
from workers.forward.code_folder import keep_compiled_code
from workers.forward.compilation import compile_layers, should_compile, undo_compile
from workers.forward.encoder_decoder.decoder import free_experts
from workers.forward.expert_trial import replace_experts_on_gpu
from workers.forward.fused_trial import fuse_on_gpu
from workers.forward.gpu_recurrence import triton_recurrences
from workers.forward.layer_lists import decoder_layers
from workers.forward.loaded_model import LoadedModel
from workers.forward.native.build import agree_on_library
from workers.forward.native.recurrence import load_recurrence
from workers.forward.probe import AttentionProbe, measure_layers, run_probe
from workers.forward.recurrence.base import RecurrenceKernels
from workers.forward.recurrence.reference import ReferenceKernels
from workers.forward.recurrent import cache_name, use_recurrences
from workers.forward.replace_linear import replace_linear_layers
from workers.forward.runner import WARM_UP_WIDTHS
from workers.forward.weights.base import NoGpuProduct
from workers.kv.pool import RECURRENT_DRAFT
from workers.kv.start_memory import release_free_memory
from workers.model.complete_weights import load_complete
from workers.model.context import context_len, longest_context, stated_width
from workers.model.devices import choose_device, may_be_native
from workers.model.distilled import load_distilled_draft
from workers.model.draft_card import is_distilled
from workers.model.encoder_decoder.split import (
    decoder_context_len,
    encoder_vocabulary_size,
    split_encoder_decoder,
)
from workers.model.kernel_handover import KernelMismatch, try_native_kernels, with_fast_encoder
from workers.model.latents import attend_over_latents, drop_expansions
from workers.model.model_files import end_of_sequence_ids
from workers.model.sharding import check_divisible, check_inner, complete_plan, divide, has_own_plan, keep_own_part
from workers.model.share import Share
from workers.model.stored.loading import ExpertsRefused, load_stored
from workers.model.stored.quantized_checkpoint import quantization_of
from workers.model.stored.source import stored_file
from workers.model.stored_choice import settled
from workers.model.target_ends import decoder_vocabulary_size, read_config
from workers.model.trial import Trial
from workers.model.verdicts import verdict_file
from workers.ranks import AnotherRankFailed, found_by_all, least_of_all_ranks, try_together
from workers.transfer import launch_on

logger = logging.getLogger(__name__)

# Layers follow the model's own plan. The head's own plan gathers all logits on every rank; with this one each rank
# computes the logits of its own part of the vocabulary.
_SHARDED_HEAD = {"lm_head": "colwise"}
_QUANTIZATION_PACKAGES = {
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel optimum",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
}
"""Arguments of `pip install` for the library of each format of quantized weights that `transformers` reads."""
ReadModule = Callable[[], tuple[PreTrainedModel, torch.Tensor | None]]
"""Returns a module, and the vocabulary of a reduced head, if any."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    section: ModelSection,
    *,
    rank: int = 0,
    tensor_parallel: int = 1,
    max_context_len: int | None = None,
    target_directory: Path | None = None,
    trial: bool = False,
) -> LoadedModel:
    """Load a language model from the local directory `section.path` (see `resolve_model_directory`).

    `target_directory` is where a distilled draft reads its embedding and its head. With `tensor_parallel > 1`,
    `torch.distributed` must be initialized; all ranks call this together, and each holds its own heads and its own
    part of the vocabulary. With `trial`, the model is refused unless it computes step by step what it computes in one
    dense pass. Raises `ModelLoadError`, `ConfigurationError`.
    """
    device = choose_device(section.device, rank)
    launch_on(device)
    if isinstance(section, TargetSection):
        section = settled(section)
    request = _Request(
        section=section,
        config=read_config(Path(section.path)),
        device=device,
        share=Share(rank, tensor_parallel, isinstance(section, TargetSection) and section.enable_expert_parallel),
        max_context_len=max_context_len,
        target_directory=target_directory,
        trial=Trial(verdict_file(section, tensor_parallel, device)) if trial else None,
    )
    if section.quantization in ("int8", "int4") and request.device.type == "cuda":
        raise ConfigurationError(
            f"{request.setting}: {section.quantization} is refused on CUDA, where no weights are quantized; it must be "
            "none, or stored for a checkpoint with quantized weights"
        )
    if tensor_parallel > 1:
        if section.load_format == "dummy":
            raise ConfigurationError(
                f"target.tensor_parallel: {tensor_parallel} is refused; with target.load_format: dummy it must be 1"
            )
        check_divisible(request.config, tensor_parallel)
        complete_plan(request.config, request.share)
    keep_compiled_code(section.compile_directory)
    if device.type == "cpu":
        agree_on_library(section.compile_directory, tensor_parallel)
    register()
    accept_attention_name(request.config)
    may_be_packed = may_be_native(section, request.device, tensor_parallel)
    with _refused_by_name(request.config, request.setting):
        if not request.config.is_encoder_decoder:
            return _load_decoder(request, native=may_be_packed)
        try:
            return _load_encoder_decoder(request, native=may_be_packed)
        except KernelMismatch:
            return _load_encoder_decoder(request, native=False)


def read_decoder(section: ModelSection, target_directory: Path | None) -> tuple[PreTrainedModel, torch.Tensor | None]:
    """The module of a decoder as `transformers` has it, on one device, and the vocabulary of a reduced head, if any.

    Raises as `load_model` does, with whose `section` and `target_directory`.
    """
    device, config = choose_device(section.device, 0), read_config(Path(section.path))
    request = _Request(section, config, device, Share(0, 1), None, target_directory)
    keep_compiled_code(section.compile_directory)
    register()
    accept_attention_name(config)
    with _refused_by_name(config, request.setting):
        return request.read()


def load_prepared(section: ModelSection, config: PreTrainedConfig, prepared: ReadModule) -> LoadedModel:
    """Load a decoder as `load_model` does, with a module that `prepared` makes: one like that of `read_decoder`.

    Other threads may compute meanwhile: no code of `transformers` is called that changes the state of the process.
    """
    device = choose_device(section.device, 0)
    request = _Request(section, config, device, Share(0, 1), None, None, prepared=prepared)
    with _refused_by_name(config, request.setting):
        return _load_decoder(request, native=may_be_native(section, device, 1))


def check_truncatable(directory: Path) -> None:
    """Refuse a draft model with recurrent layers by its configuration, before its weights are read.

    Raises `ConfigurationError` for such a model, `ModelLoadError` for a directory without a configuration.
    """
    config = read_config(directory)
    if config.is_encoder_decoder:
        return
    with _refused_by_name(config, "draft.model.quantization"), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    if any(cache_name(part) is not None for part in module.modules()):
        raise ConfigurationError(RECURRENT_DRAFT)


@contextmanager
def _refused_by_name(config: PreTrainedConfig, setting: str) -> Iterator[None]:
    """Raise `ModelLoadError` with the model's type for whatever an unknown family fails with inside.

    `setting` is the key of `quantization`.
    """
    try:
        yield
    except UnsupportedModel as error:
        raise ModelLoadError(f"model type {config.model_type!r} is refused: {error}") from error
    except NoGpuProduct as error:
        raise ConfigurationError(
            f"{setting}: stored is refused on CUDA: {error}; it must be none, which de-quantizes the weights"
        ) from error
    except ExpertsRefused as error:
        raise ConfigurationError(str(error).replace("target.quantization", setting, 1)) from error
    except (KernelMismatch, PilotfishError, AnotherRankFailed, MemoryError):
        raise
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except Exception as error:  # code of a family that nobody has seen may raise anything
        raise ModelLoadError(
            f"model type {config.model_type!r} is refused: it cannot be loaded with paged attention: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Request:
    """What is loaded, and for whom."""

    section: ModelSection
    config: PreTrainedConfig
    device: torch.device
    share: Share
    max_context_len: int | None
    target_directory: Path | None
    """Where a distilled draft reads its embedding and its head."""
    trial: Trial | None = None
    """What compares its steps with its dense pass; `None`: nothing does."""
    prepared: ReadModule | None = None
    """Makes the module instead of reading the files."""

    @property
    def directory(self) -> Path:
        """The model's files."""
        return Path(self.section.path)

    @property
    def setting(self) -> str:
        """The key of `quantization`."""
        return f"{'target' if isinstance(self.section, TargetSection) else 'draft.model'}.quantization"

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return DTYPES[self.section.dtype]

    def read(self) -> tuple[PreTrainedModel, torch.Tensor | None]:
        """The module, and the vocabulary of a reduced head, if any. Raises `ModelLoadError`, `ConfigurationError`."""
        if self.prepared is not None:
            return self.prepared()
        if self.section.load_format == "dummy":
            return _draw(self)
        return _read(self) if self.section.quantization != "stored" else (_read_stored(self), None)

    def read_decoder(self) -> tuple[PreTrainedModel, torch.Tensor | None]:
        """Read the weights as `read` does, and let layers with latent attention attend over latents."""
        module, vocabulary = self.read()
        attend_over_latents(module, self.section.compile_directory)
        return module, vocabulary


def _load_decoder(request: _Request, *, native: bool) -> LoadedModel:
    """Load a model without an encoder. With `native`, the CPU kernels compute its layers if they can."""
    section, share, text = request.section, request.share, request.config.get_text_config()
    module, vocabulary = request.read_decoder()
    least_of_all_ranks(1, share.ranks)  # all have read their weights: the pass below sums over them
    measured = measure_layers(module, request.device, longest_context(text))
    release_free_memory()
    if measured.states and section.compile == "on":
        raise ConfigurationError(
            f"compile: on is refused for model type {request.config.model_type!r}, whose recurrent layers are not "
            "compiled; it must be auto or off"
        )
    vocabulary_size = int(text.vocab_size)
    depth = len(list(decoder_layers(module)))
    model = LoadedModel(
        module=module,
        name=request.directory.name,
        layers=measured.layers,
        states=measured.states,
        decoder_layers=depth if measured.states or depth < len(measured.layers) else 0,
        hidden_size=stated_width(text),
        vocabulary_size=vocabulary_size,
        vocabulary_offset=share.tokens(vocabulary_size).start,
        max_context_len=context_len(text, request.max_context_len, measured.bounds),
        eos_token_ids=end_of_sequence_ids(request.directory),
        device=request.device,
        dtype=request.dtype,
        code_directory=section.compile_directory,
        tensor_parallel=share.ranks,
        uses_cuda_graphs=request.device.type == "cuda" and section.compile != "off",
        vocabulary=vocabulary,
    )
    if request.trial is not None:
        if any(getattr(part, "sums_ranks", False) for part in module.modules()):  # they sum no ranks by themselves
            replace_linear_layers(module, section.quantization, section.compile_directory)
        request.trial.expect(module, vocabulary_size, request.device, share.ranks)
        request.trial.check(model)
    if native and not model.states:
        try:
            kernels = try_native_kernels(model, section.quantization)
        except KernelMismatch:
            model = replace(model, module=request.read_decoder()[0])
        else:
            if kernels is not None:
                return replace(model, native=kernels)
    return _optimized(model, section)


def _optimized(model: LoadedModel, section: ModelSection) -> LoadedModel:
    """Replace linear layers and experts, and fuse the decoder layers or compile them. `compile: on` always compiles."""
    drop_expansions(model.module)
    replace_linear_layers(model.module, section.quantization, section.compile_directory)
    least_of_all_ranks(1, model.tensor_parallel)
    # Binds attention again, and checks that the replaced layers run.
    measure_layers(model.module, model.device, model.max_context_len)
    replace_experts_on_gpu(model)
    if model.states:
        kernels = _recurrence_kernels(model, section)
        is_whole = kernels is not None and use_recurrences(model.module, kernels, model.tensor_parallel)
        return replace(model, uses_cuda_graphs=model.uses_cuda_graphs and is_whole)  # modules' own code reads the host
    if (section.compile == "on" or not fuse_on_gpu(model)) and should_compile(section):
        _compile_or_warn(model.module, section, model.device, model.tensor_parallel)
    return model


def _recurrence_kernels(model: LoadedModel, section: ModelSection) -> RecurrenceKernels | None:
    """What computes recurrences: of one kind on all ranks, which call this together. `None`: the modules' own code."""
    if model.device.type == "cpu":
        return load_recurrence(section.compile_directory) or ReferenceKernels()  # all ranks load it, or none
    return found_by_all(triton_recurrences(), model.tensor_parallel)


def _load_encoder_decoder(request: _Request, *, native: bool) -> LoadedModel:
    """Load a model with an encoder. It is read whole, and each rank then keeps its share.

    With `native`, the CPU kernels compute its layers if they can. Raises `KernelMismatch` if they compute other logits
    than the module, `ModelLoadError`, `ConfigurationError`.
    """
    section, share, text = request.section, request.share, request.config.get_text_config()
    origin = request.directory  # of the settings
    if is_distilled(origin) and request.target_directory is not None:
        origin = request.target_directory
    module, vocabulary = request.read()
    free_experts(module.get_decoder())
    if request.trial is not None:
        sizes = decoder_vocabulary_size(request.config), encoder_vocabulary_size(module)
        request.trial.expect(module, sizes[0], request.device, share.ranks, source_vocabulary=sizes[1])
    own = share if share.ranks > 1 else None
    split = split_encoder_decoder(module, origin, section.quantization, own, section.compile_directory)
    vocabulary_size = split.vocabulary_size if vocabulary is None else int(text.vocab_size)
    max_context_len = decoder_context_len(text, request.max_context_len)
    model = LoadedModel(
        module=split.decoder,
        name=request.directory.name,
        layers=measure_layers(split.decoder, request.device, max_context_len).layers,
        hidden_size=stated_width(text),
        vocabulary_size=vocabulary_size,
        vocabulary_offset=share.tokens(vocabulary_size).start,
        max_context_len=max_context_len,
        eos_token_ids=end_of_sequence_ids(origin),
        device=request.device,
        dtype=request.dtype,
        code_directory=section.compile_directory,
        tensor_parallel=share.ranks,
        vocabulary=vocabulary,
        source=split.source,
    )
    if request.trial is not None:
        request.trial.check(model)
    model = with_fast_encoder(model, split.encoder, section.quantization, native=native)
    kernels = try_native_kernels(model, section.quantization) if native else None
    return _optimized(model, section) if kernels is None else replace(model, native=kernels)


def _read(request: _Request) -> tuple[PreTrainedModel, torch.Tensor | None]:
    """Load this rank's weights with `transformers`."""
    transformers_logging.disable_progress_bar()  # stderr has the lines of Pilotfish alone
    directory, config = request.directory, request.config
    tensor_parallel = 1 if config.is_encoder_decoder else request.share.ranks
    reads_whole = tensor_parallel == 1 or has_own_plan(config)
    if is_distilled(directory):
        if tensor_parallel > 1:
            raise ConfigurationError(
                f"tensor_parallel: {tensor_parallel} is refused; for a distilled draft it must be 1"
            )
        draft = load_distilled_draft(directory, request.target_directory, config, request.dtype, request.device)
        draft.module.eval().requires_grad_(False)
        return draft.module, draft.vocabulary
    arguments: dict[str, Any] = {
        "dtype": request.dtype,
        "attn_implementation": ATTENTION_NAME,
        "use_safetensors": True,
    }
    if reads_whole:
        arguments["device_map"] = {"": request.device if tensor_parallel == 1 else "cpu"}
    else:
        check_inner(config, request.share)
        least_of_all_ranks(1, tensor_parallel)  # whoever makes a device mesh waits for all ranks
        arguments["distributed_config"] = DistributedConfig(tp_size=tensor_parallel, tp_plan=_SHARDED_HEAD)
        arguments["config"] = config  # its plan may be changed
    try:
        with _ranks_on(request.device):
            module = load_complete(_auto_class(config), directory, **arguments)
    except ImportError as error:
        raise ModelLoadError(_missing_library(directory, config, error)) from error
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"model directory {str(directory)!r} cannot be loaded: {error}") from error
    module.eval().requires_grad_(False)
    if tensor_parallel > 1 and reads_whole:
        divide(module, request.share, request.section.quantization, request.device)
    elif tensor_parallel > 1:
        keep_own_part(module, request.share, request.section.quantization)
    return module, None


def _read_stored(request: _Request) -> PreTrainedModel:
    """Load this rank's share of the weights as they are stored. Raises `ModelLoadError`, `ConfigurationError`."""
    source = None
    if not request.config.is_encoder_decoder:
        is_quantized = quantization_of(request.directory) is not None
        source = request.directory if is_quantized else stored_file(request.directory)
    if source is None:
        raise ConfigurationError(
            f"{request.setting}: stored is refused for {str(request.directory)!r}, which is no decoder with quantized "
            "weights and no converted GGUF file; it must be none or int8"
        )

    def make() -> PreTrainedModel:
        module: PreTrainedModel = _auto_class(request.config).from_config(
            request.config, dtype=request.dtype, attn_implementation=ATTENTION_NAME
        )
        return module

    return load_stored(make, source, request.dtype, request.share, device=request.device)


def _draw(request: _Request) -> tuple[PreTrainedModel, torch.Tensor | None]:
    """A model with random weights, the same at each start."""
    device, config = request.device, request.config
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        module = _auto_class(config).from_config(config, dtype=request.dtype, attn_implementation=ATTENTION_NAME)
    module.eval().requires_grad_(False)
    return module, None


@contextmanager
def _ranks_on(device: torch.device) -> Iterator[None]:
    """Make `transformers` build its device mesh on the configured device.

    By default it uses the accelerator that torch was built for, even if none is present. It has no argument to choose
    another device.
    """

    def on_device(config: DistributedConfig) -> tuple[torch.device, TransformersDeviceMesh]:
        shape = (1, 1, 1, config.tp_size or 1)
        dense = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        # Experts are not sharded (ep_size 1), so all ranks lie on the remaining axis.
        expert = init_device_mesh(
            device.type, (1, 1, shape[3], 1), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
        )
        return device, TransformersDeviceMesh(dense, expert)

    with patch.object(mixin, "initialize_distributed_mesh", on_device):
        yield


def _auto_class(config: PreTrainedConfig) -> Any:
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in kind._model_mapping:
        raise UnsupportedModel(f"transformers has no model of it that reads and writes text alone ({kind.__name__})")
    return kind


def _missing_library(directory: Path, config: PreTrainedConfig, error: ImportError) -> str:
    """The message for a model that `transformers` cannot load without a further package."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return f"model directory {str(directory)!r} needs a Python package that is missing: {error}"
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    method = str(getattr(method, "value", method))
    packages = _QUANTIZATION_PACKAGES.get(method)
    remedy = f"run `pip install {packages}`" if packages else f"install what transformers asks for ({error})"
    return (
        f"model directory {str(directory)!r}: its weights are quantized as {method!r} and the library for them is "
        f"missing; {remedy}, or give the model with plain weights"
    )


def _compile_or_warn(module: PreTrainedModel, section: ModelSection, device: torch.device, ranks: int) -> None:
    """Compile the layers, on all ranks or none. A failure is logged, and with `compile: on` raises `ModelLoadError`."""
    compile_layers(module, section.compile_directory)
    try:
        try_together(lambda: run_probe(module, device, AttentionProbe(1), WARM_UP_WIDTHS[0]), ranks)
    except Exception as error:  # the compiler may raise anything
        if section.compile == "on":
            raise ModelLoadError(f"model type {module.config.model_type!r} cannot be compiled: {error}") from error
        logger.warning("model type %r cannot be compiled and runs uncompiled: %s", module.config.model_type, error)
        undo_compile(module)
