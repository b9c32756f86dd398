"""Checks before anything starts. Each problem is one line: what was needed, what was found, and a remedy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.config.sections import Configuration, PoolSection
from cluster.core.config.server import ServerSection
from cluster.core.errors import ConfigurationError
from cluster.wire.address import join_host_port
from deploy.placement import Placement, Resources, RolePlacement
from workers.model.draft_card import is_distilled, read_card

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LONGEST_HEADER = 100 * 1024 * 1024
"""Bytes; the bound that safetensors itself sets on its headers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why the cluster cannot start."""

    subject: str
    needed: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: needed {self.needed}, found {self.found}; {self.remedy}"


def raise_problems(problems: Iterator[Problem]) -> None:
    """Raise `ConfigurationError` with one line per problem, if there are problems."""
    found = [str(problem) for problem in problems]
    if found:
        raise ConfigurationError("\n".join(found))


def machine_problems(configuration: Configuration, placement: Placement, resources: Resources) -> Iterator[Problem]:
    """Problems with the machine, found without reading any model."""
    yield from capacity_problems(placement, resources)
    yield from port_problems(configuration.server)


def capacity_problems(placement: Placement, resources: Resources) -> Iterator[Problem]:
    """Problems with the number of GPUs and cores: the roles claim more than the node has."""
    if placement.gpus > resources.gpus:
        yield Problem(
            "GPUs",
            f"{placement.gpus} ({_claims(placement)})",
            str(resources.gpus),
            "lower target.tensor_parallel, set draft.method to one that loads no model, or set device: cpu",
        )
    cpus = round(placement.cpus, 2)
    if cpus > resources.cpus:
        yield Problem("CPU cores", f"{cpus:g}", f"{resources.cpus:g}", "lower target.tensor_parallel or free cores")


def port_problems(server: ServerSection) -> Iterator[Problem]:
    """Problems with the addresses: ports in use, and hosts that do not belong to this machine."""
    if server.http_port == server.grpc_port != 0:
        yield Problem(
            "server.grpc_port", "another port than server.http_port", str(server.grpc_port), "set one of them otherwise"
        )
    apis = (("http", server.http_host, server.http_port), ("grpc", server.grpc_host, server.grpc_port))
    for api, host, port in apis:
        reason = _why_unbindable(host, port)
        if reason:
            yield Problem(
                f"server.{api}_port",
                f"{join_host_port(host, port)} free",
                reason,
                f"stop what listens there or set server.{api}_port",
            )


def model_problems(
    configuration: Configuration, placement: Placement, resources: Resources, target: Path, draft: Path | None
) -> Iterator[Problem]:
    """Problems between the models, the configuration and the memory.

    `target` and `draft` are resolved directories with `config.json`, safetensors and `tokenizer.json`.
    """
    if is_distilled(target):
        yield Problem("target.path", "a whole model", "a distilled draft", "set draft.model.path to it instead")
        return
    yield from head_problems(target, configuration.target.tensor_parallel)
    if draft is not None:
        yield from vocabulary_problems(target, draft, f"draft.{configuration.draft.weights_method}.path")
    yield from memory_problems(configuration, placement, resources, target, draft)


def head_problems(directory: Path, tensor_parallel: int) -> Iterator[Problem]:
    """Problems with tensor parallelism: the ranks cannot divide the attention heads evenly."""
    config = read_model_config(directory)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or tensor_parallel)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % tensor_parallel or kv_heads % tensor_parallel:
        fitting = [str(ranks) for ranks in range(1, kv_heads + 1) if heads % ranks == 0 and kv_heads % ranks == 0]
        yield Problem(
            "target.tensor_parallel",
            f"a divisor of {heads} heads and {kv_heads} key-value heads",
            str(tensor_parallel),
            f"set it to {' or '.join(fitting)}",
        )


def vocabulary_problems(target: Path, draft: Path, key: str) -> Iterator[Problem]:
    """Problems with a draft whose vocabulary differs from the target's. `key` is the setting that names the draft."""
    target_tokens, draft_tokens = _vocabulary(target), _vocabulary(draft)
    if target_tokens is None or draft_tokens is None:
        # There are no tokenizers to compare, so the vocabulary sizes are compared.
        sizes = [int(read_model_config(directory).get("vocab_size") or 0) for directory in (target, draft)]
        if sizes[0] == sizes[1]:
            return
        needed, found = (f"{size} tokens" for size in sizes)
    elif target_tokens == draft_tokens:
        return
    else:
        different = sum(1 for token, index in target_tokens.items() if draft_tokens.get(token) != index)
        needed = f"the target's vocabulary of {len(target_tokens)} tokens"
        found = f"{len(draft_tokens)} tokens, {different} of the target's missing or numbered otherwise"
    yield Problem(key, needed, found, "choose a draft with the target's tokenizer")


def memory_problems(
    configuration: Configuration, placement: Placement, resources: Resources, target: Path, draft: Path | None
) -> Iterator[Problem]:
    """Problems with memory: weights and KV pools exceed the free memory."""
    ranks = configuration.target.tensor_parallel
    weights = weight_bytes(target, configuration.target.dtype)
    roles: list[tuple[str, str, RolePlacement, int, PoolSection]] = [
        ("target", "target", placement.target, -(-weights // ranks), configuration.target.kv)
    ]
    section = configuration.draft.weights
    if draft is not None and section is not None:
        weights = weight_bytes(draft, section.dtype)
        roles.append(("draft", f"draft.{configuration.draft.weights_method}", placement.draft, weights, section.kv))
    main_memory = 0
    for name, key, role, per_rank, kv in roles:
        if role.device == "cpu":
            main_memory += (per_rank + (kv.pool_bytes or 0)) * len(role.bundles)
        elif resources.gpu_memory_bytes:
            yield from _gpu_memory_problems(name, key, per_rank, kv, resources.gpu_memory_bytes)
    if main_memory > resources.memory_bytes:
        yield Problem(
            "memory",
            f"{_gib(main_memory)} for weights and KV",
            f"{_gib(resources.memory_bytes)} free",
            "lower target.kv.pool_bytes, set target.dtype=bfloat16, or choose a smaller model",
        )


def weight_bytes(directory: Path, dtype: str) -> int:
    """Bytes that the safetensors of a directory take when loaded as `dtype`. Reads their headers only.

    A distilled draft also loads the embedding of its target, and one row of the target's head for each token that it
    can propose.
    """
    total = 0
    if is_distilled(directory):
        card = read_card(directory)
        rows = card.target_vocabulary_size + (card.vocabulary_size or card.target_vocabulary_size)
        total += rows * card.hidden_size * _DTYPE_BYTES[dtype]
    for file in sorted(directory.glob("*.safetensors")):
        for entry in _safetensors_header(file).values():
            first, last = entry["data_offsets"]
            total += (last - first) // _STORED_BYTES.get(entry["dtype"], 1) * _DTYPE_BYTES[dtype]
    return total


def read_model_config(directory: Path) -> dict[str, Any]:
    """Read `config.json`, or the text part of it for a multimodal model. Raises `ConfigurationError`."""
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model directory {str(directory)!r}: config.json cannot be read; {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"model directory {str(directory)!r}: config.json holds no object")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _gpu_memory_problems(name: str, key: str, weights: int, kv: PoolSection, free: int) -> Iterator[Problem]:
    if weights + (kv.pool_bytes or 0) > free:
        yield Problem(
            f"{name} GPU memory",
            f"{_gib(weights + (kv.pool_bytes or 0))} per GPU for weights and KV",
            f"{_gib(free)} free",
            f"lower {key}.kv.pool_bytes, raise target.tensor_parallel, or choose a smaller model",
        )


def _safetensors_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"weights {str(file)!r} are not safetensors; {error}") from None
    header.pop("__metadata__", None)
    return dict(header)


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Token ids by token, special tokens included; `None` if there is no plain vocabulary."""
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_text("utf-8"))
        tokens = tokenizer["model"]["vocab"]
        pairs = (
            tokens.items() if isinstance(tokens, dict) else ((entry[0], index) for index, entry in enumerate(tokens))
        )
        added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
        return dict(pairs) | added
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _why_unbindable(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # With this option a port in TIME_WAIT counts as free, and a port in use does not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def _claims(placement: Placement) -> str:
    claims = ((role.role, _gpus(role)) for role in placement.roles)
    return ", ".join(f"{count} for the {name}" for name, count in claims if count)


def _gpus(role: RolePlacement) -> int:
    return sum(bundle.gpus for bundle in role.bundles)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
