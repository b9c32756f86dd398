"""Checks before anything starts. Each problem is one line: what was needed, what was found, and a remedy."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.core.config.base import with_home
from cluster.core.config.draft_section import DraftModelSection, DraftSection
from cluster.core.config.model_section import DTYPE_BYTES, USUAL_FRACTION
from cluster.core.config.sections import Configuration
from cluster.core.config.server import ServerSection
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.generation import prompt_log
from cluster.ingress.access.key_ring import KeyRing
from cluster.wire.address import join_host_port
from cluster.wire.peer_access import PeerAccess
from cluster.wire.tls import client_context, server_files
from deploy.fitting import Fit, fit
from deploy.placement import Group, Placement, Resources, RolePlacement
from deploy.settings import Settings
from workers.draft.registry import graph_bytes
from workers.model.draft_card import is_distilled, read_card
from workers.model.formats.checkpoint import safetensors_header
from workers.model.head_counts import most_held, ranks_that_divide, stated_counts
from workers.model.text_tokenizer import TextTokenizer, same_tokens
from workers.model.weight_files import is_encoder_decoder, weight_files

if TYPE_CHECKING:
    from workers.forward.graph_memory import ModelSizes

_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MOST_NODES = 8
"""Nodes that a problem names."""

_FEWER_RANKS = "lower target.tensor_parallel"
_SPAN_NODES = ", or set target.span_nodes for ranks on several nodes"


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


def check_files(settings: Settings) -> None:
    """Check key files, certificates, the cache directory and the ports, before Ray starts or a model is loaded.

    Raises `ConfigurationError` with one line per problem.
    """
    server, internal = settings.configuration.server, settings.configuration.cluster.tls
    problems = [] if settings.ray_address else [str(problem) for problem in port_problems(server)]
    checks: list[Callable[[], object]] = [lambda: KeyRing(settings.api_keys, server.api_key_file)]
    if server.tls is not None:
        tls = server.tls
        checks.append(lambda: (server_files(tls), client_context(tls)))
        if tls.client_ca is not None and tls.client_pair is None:
            needed = "a certificate for `serve` itself, which asks the API, with server.tls.client_ca"
            remedy = "set server.tls.client_certificate and server.tls.client_key"
            problems.append(str(Problem("server.tls.client_certificate", needed, "none", remedy)))
    if internal is not None:
        checks.append(lambda: PeerAccess(tls=internal).server_credentials())
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            problems.append(str(error))
    problems += [str(problem) for problem in cache_problems(settings.cache_directory)]
    if not settings.ray_address:
        problems += [str(problem) for problem in prompt_log_problems(settings.configuration.draft)]
    if problems:
        raise ConfigurationError("\n".join(dict.fromkeys(problems)))


def cache_problems(directory: Path) -> Iterator[Problem]:
    """Problems with the directory for converted weights: it is a file, or this process may not write it."""
    found = _why_unwritable(directory)
    if found is not None:
        remedy = "set PILOTFISH_CACHE_DIR to another directory"
        yield Problem("PILOTFISH_CACHE_DIR", f"the directory {directory}, or room to make it", found, remedy)


def prompt_log_problems(draft: DraftSection) -> Iterator[Problem]:
    """Problems with `draft.prompt_log_directory`: it cannot be made, or it is not this user's alone.

    Raises `ConfigurationError` for the home of an unknown user.
    """
    if draft.prompt_log_directory is None:
        return
    directory = with_home(prompt_log.SETTING, draft.prompt_log_directory)
    found = _why_unwritable(directory)
    if found is None and directory.exists() and (fault := prompt_log.directory_fault(directory)) is not None:
        found = f"{directory}: {fault}"
    if found is not None:
        needed = f"the directory {directory} of this user, or room to make it"
        yield Problem(prompt_log.SETTING, needed, found, "set it to another directory")


def _why_unwritable(directory: Path) -> str | None:
    """What stands in the way of a directory that is to be made and written; `None` if nothing does."""
    existing = next((one for one in (directory, *directory.parents) if one.exists()), directory)
    if not existing.is_dir():
        return f"the file {existing}"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing}, which this user may not write"


def capacity_problems(placement: Placement, nodes: Sequence[Resources]) -> Iterator[Problem]:
    """Problems with GPUs and cores: there are too few, or none of the nodes has enough for a replica."""
    gpus, cpus = sum(node.gpus for node in nodes), round(sum(node.cpus for node in nodes), 2)
    if placement.gpus > gpus:
        yield Problem("GPUs", f"{placement.gpus} ({_claims(placement)})", str(gpus), _fewer_gpus(placement))
    if round(placement.cpus, 2) > cpus:
        needed = f"{round(placement.cpus, 2):g}"
        remedy = f"{_FEWER_RANKS} or free cores" if len(placement.target.bundles) > 1 else "free cores"
        yield Problem("CPU cores", needed, f"{cpus:g}", remedy)
    if placement.gpus > gpus or round(placement.cpus, 2) > cpus:
        return
    found = fit(placement, nodes)
    for group in found.unplaced[:1]:  # the others lack the same
        if not any(node.has(group.node_resource) for node in nodes):
            resource = f"the Ray resource {group.node_resource!r}"
            yield Problem("nodes", f"one with {resource} for the {group.role}", "none", "start a node with it")
            continue
        if group.spans_nodes:
            yield _lacks_in_parts(group, found)
            continue
        lacks_gpus = not any(node.gpus >= group.gpus for node in found.left)
        left = [(node.node, node.gpus if lacks_gpus else round(node.cpus, 2)) for node in found.left]
        yield Problem(
            "GPUs on one node" if lacks_gpus else "CPU cores on one node",
            f"{group.gpus if lacks_gpus else round(group.cpus, 2):g} for a replica of the {group.role}",
            f"{', '.join(f'{count:g} on {node}' for node, count in left[:_MOST_NODES])} without the other replicas",
            f"{_FEWER_RANKS} or the number of replicas, or add a node" + _SPAN_NODES * (len(group.bundles) > 2),
        )


def _lacks_in_parts(group: Group, found: Fit) -> Problem:
    """The problem of a replica that may span nodes, and finds no room on all of them together."""
    left = ", ".join(f"{node.gpus} and {round(node.cpus, 2):g} on {node.node}" for node in found.left[:_MOST_NODES])
    return Problem(
        "GPUs and CPU cores on several nodes",
        f"{group.gpus} and {round(group.cpus, 2):g} for a replica of the {group.role}, in bundles",
        f"{left} without the other replicas",
        f"{_FEWER_RANKS} or the number of replicas, or add a node",
    )


def _fewer_gpus(placement: Placement) -> str:
    """What claims fewer GPUs than the placement does."""
    remedies = [_FEWER_RANKS] if len(placement.target.bundles) > 1 else []
    if any(role.role == "draft" and bundle.gpus for role in placement.roles for bundle in role.bundles):
        remedies.append("set draft.method to one that loads no model")
    return ", or ".join([*remedies, "set target.device to cpu"])


def port_problems(server: ServerSection) -> Iterator[Problem]:
    """Problems with the addresses: ports in use or named twice, and hosts that do not belong to this machine.

    Servers of one kind share their port, so two services on one port would each get a part of the other's connections.
    """
    apis: tuple[tuple[str, str, int | None], ...] = (
        ("http", server.http_host, server.http_port),
        ("grpc", server.grpc_host, server.grpc_port),
        ("operations", server.grpc_host, server.operations_port),
    )
    taken: dict[int, str] = {}
    wrong: set[str] = set()
    for api, host, port in apis:
        if port is None:
            continue
        if reason := _why_unbindable(host, 0):
            found = f"{host!r} ({reason})"
            setting = f"server.{'grpc' if api == 'operations' else api}_host"
            if setting not in wrong:
                yield Problem(setting, "an address of this machine", found, "set it to one, such as 127.0.0.1")
            wrong.add(setting)
            continue
        other = taken.setdefault(port, api) if port else api
        if other != api:
            needed = f"another port than server.{other}_port"
            yield Problem(f"server.{api}_port", needed, str(port), "set one of them otherwise")
            continue
        reason = _why_unbindable(host, port)
        if reason:
            yield Problem(
                f"server.{api}_port",
                f"{join_host_port(host, port)} free",
                reason,
                f"stop what listens there or set server.{api}_port",
            )


def model_problems(
    configuration: Configuration, placement: Placement, nodes: Sequence[Resources], target: Path, draft: Path | None
) -> Iterator[Problem]:
    """Problems between the models, the configuration and the memory.

    `target` and `draft` are resolved directories with `config.json`, safetensors and `tokenizer.json`.
    """
    if is_distilled(target):
        yield Problem("target.path", "a whole model", "a distilled draft", "set draft.model.path to it instead")
        return
    if configuration.target.standby is True and placement.target.device == "cuda":
        yield Problem("target.standby", "auto or false where ranks use GPUs", "true", "set it to auto")
    if configuration.draft.prompt_log_directory is not None and is_encoder_decoder(target):
        needed = "no value for an encoder-decoder model, whose sources are no chats"
        yield Problem(prompt_log.SETTING, needed, "one", "leave it out")
    undivided = list(head_problems(target, configuration.target.tensor_parallel))
    yield from undivided
    if draft is not None:
        yield from vocabulary_problems(target, draft, f"draft.{configuration.draft.weights_method}.path")
    if not undivided:  # else no rank has a part whose bytes could be counted
        yield from memory_problems(configuration, placement, nodes, target, draft)


def head_problems(directory: Path, tensor_parallel: int) -> Iterator[Problem]:
    """Problems with tensor parallelism: the ranks cannot divide the attention heads."""
    heads, kv_heads = stated_counts(read_model_config(directory), tensor_parallel)
    fitting = ranks_that_divide(heads, kv_heads)
    if tensor_parallel not in fitting:
        yield Problem(
            "target.tensor_parallel",
            f"a divisor of {kv_heads} key-value heads, or a multiple that is at most the number of heads, {heads}",
            str(tensor_parallel),
            f"set it to {' or '.join(map(str, fitting))}",
        )


def vocabulary_problems(target: Path, draft: Path, key: str) -> Iterator[Problem]:
    """Problems with a draft whose vocabulary differs from the target's, and that cannot draft by text either.

    `key` is the setting that names the draft.
    """
    sizes = [int(read_model_config(directory).get("vocab_size") or 0) for directory in (target, draft)]
    is_same = same_tokens(target, sizes[0], draft, sizes[1])
    if is_same:
        return
    needed, found = (f"{size} tokens" for size in sizes)
    if is_same is not None and not is_encoder_decoder(target) and not is_encoder_decoder(draft):
        try:
            for directory in (target, draft):
                TextTokenizer.load(directory)
        except ConfigurationError as error:
            needed, found = "the target's tokenizer, or one with which it can draft by text", str(error)
        else:
            return
    yield Problem(key, needed, found, "choose a draft with the target's tokenizer")


def memory_problems(
    configuration: Configuration, placement: Placement, nodes: Sequence[Resources], target: Path, draft: Path | None
) -> Iterator[Problem]:
    """Problems with memory: on some node, weights and KV pools exceed the free memory."""
    ranks, weights = configuration.target.tensor_parallel, configuration.draft.weights
    needs = [_needs("target", configuration.target, placement.target, target, ranks)]
    if draft is not None and weights is not None:
        key = f"draft.{configuration.draft.weights_method}"
        needs.append(_needs(key, weights, placement.draft, draft))
        if placement.drafts_on_target and placement.draft.device == "cuda":
            yield from _shared_gpu_problems(placement, nodes, (needs[0], needs.pop()), weights)
    found = fit(placement, nodes)
    for need in needs:
        gpus = [seat.node for seat in found.seats if seat.group.role == need.role and seat.node.gpu_memory_bytes]
        smallest = min(gpus, key=lambda node: node.gpu_memory_bytes, default=None)
        if need.device == "cuda" and smallest is not None and need.process_bytes > smallest.gpu_memory_bytes:
            yield Problem(
                f"{need.role} GPU memory",
                f"{_gib(need.process_bytes)} per GPU for weights and KV",
                f"{_gib(smallest.gpu_memory_bytes)} free on {smallest.node}",
                f"lower {need.key}.kv.pool_bytes, raise target.tensor_parallel, or choose a smaller model",
            )
        elif need is needs[0] and need.device == "cuda" and smallest is not None:
            yield from _pool_problems(configuration, placement, need, smallest, target)
    for node in nodes:
        needed = sum(need.process_bytes * _processes(found, need.role, node) for need in needs if need.device == "cpu")
        if needed > node.memory_bytes:
            yield Problem(
                f"memory of {node.node}",
                f"{_gib(needed)} for weights and KV",
                f"{_gib(node.memory_bytes)} free",
                "lower target.kv.pool_bytes, set target.dtype=bfloat16, or choose a smaller model",
            )


def _shared_gpu_problems(
    placement: Placement, nodes: Sequence[Resources], needs: tuple[_Needs, _Needs], weights: DraftModelSection
) -> Iterator[Problem]:
    """The problem of a target and a draft that share a GPU: both weights and the draft's KV pool exceed its memory.

    The draft is loaded first, and its pool takes a part of what is then free.
    """
    target, draft = needs
    free = [seat.node for seat in fit(placement, nodes).seats if seat.group.role == "target"]
    for node in [node for node in free if node.gpu_memory_bytes][:1]:
        left = node.gpu_memory_bytes - draft.process_bytes
        pool = 0 if weights.kv.pool_bytes else int(max(0, left) * (weights.kv.memory_fraction or USUAL_FRACTION))
        needed = draft.process_bytes + pool + target.process_bytes
        if needed > node.gpu_memory_bytes >= target.process_bytes:
            yield Problem(
                "target GPU memory",
                f"{_gib(needed)} for the weights of target and draft and for the draft's KV",
                f"{_gib(node.gpu_memory_bytes)} free on {node.node}",
                f"lower {draft.key}.kv.memory_fraction, set {draft.key}.device=cpu, or choose a smaller draft",
            )


def _pool_problems(
    configuration: Configuration, placement: Placement, need: _Needs, node: Resources, directory: Path
) -> Iterator[Problem]:
    """The problem of a configured pool of the target that leaves its GPU no memory for CUDA graphs and activations.

    A pool without `pool_bytes` takes a part of what they leave.
    """
    pool, draft = configuration.target.kv.pool_bytes, configuration.draft
    if pool is None:
        return
    values, ranks = read_model_config(directory), configuration.target.tensor_parallel
    vocabulary = int(values.get("vocab_size") or 0)
    sizes = _sizes(values, configuration, ranks)
    tokens = configuration.target.kv.step_tokens or configuration.scheduler.max_step_tokens
    taken = {"activations": tokens * sizes.layer_bytes}
    if configuration.target.compile != "off":
        if not is_encoder_decoder(directory):  # whose steps are launched kernel by kernel
            taken["CUDA graphs"] = sizes.graph_bytes
        if placement.drafts_on_target and draft.is_enabled:
            taken[f"those of draft.method={draft.name}"] = graph_bytes(draft, vocabulary)
    most = node.gpu_memory_bytes - (need.process_bytes - pool) - sum(taken.values())
    if pool > most:
        parts = ", ".join(f"{_gib(count)} of {name}" for name, count in taken.items() if count)
        yield Problem(
            "target.kv.pool_bytes",
            f"at most {max(0, most)} beside {_gib(need.process_bytes - pool)} of weights, {parts} on {node.node}",
            f"{pool}, of {_gib(node.gpu_memory_bytes)} free",
            "lower it, or unset it: the pool then takes what is left",
        )


def _sizes(values: Mapping[str, Any], configuration: Configuration, ranks: int) -> ModelSizes:
    """The sizes of one rank's part of the target, by its `config.json`; those that it does not state are 0."""
    from workers.forward.graph_memory import ModelSizes  # imports torch, as `stored_bytes` does

    def stated(*names: str) -> int:
        return next((int(values[name]) for name in names if values.get(name)), 0)

    hidden, heads = stated("hidden_size", "n_embd", "d_model"), stated("num_attention_heads", "n_head")
    width = stated("kv_lora_rank", "head_dim") or hidden // max(1, heads)
    longest = stated("max_position_embeddings", "n_positions")
    return ModelSizes(
        hidden_size=hidden,
        vocabulary_size=-(-stated("vocab_size") // ranks),
        attended=((-(-heads // ranks), width),),
        longest=min(configuration.target.max_context_len or longest, longest),
        number_bytes=DTYPE_BYTES[configuration.target.dtype],
    )


def _processes(found: Fit, role: str, node: Resources) -> int:
    """Number of processes with a model that a role has on a node. A target's first bundle is its coordinator."""
    seats = [seat for seat in found.seats if seat.group.role == role and seat.node.node == node.node]
    return sum(len([bundle for bundle in seat.bundles if bundle or role != "target"]) for seat in seats)


@dataclass(frozen=True, slots=True)
class _Needs:
    """The memory that a role with a model needs."""

    role: str
    key: str
    """The section of its settings."""
    device: str
    process_bytes: int
    """Bytes of each of its processes."""


def _needs(
    key: str, section: TargetSection | DraftModelSection, role: RolePlacement, directory: Path, ranks: int = 1
) -> _Needs:
    weights = None
    if section.load_format == "dummy":  # the import takes seconds
        from workers.model.weight_counts import count_weights

        weights = ceil(Fraction(count_weights(directory).parameters * DTYPE_BYTES[section.dtype], ranks))
    elif section.quantization == "stored":
        is_whole = isinstance(section, TargetSection) and section.enable_expert_parallel
        weights = _stored_bytes(directory, section.dtype, ranks, on_gpu=role.device != "cpu", expert_parallel=is_whole)
    if weights is None:
        weights = weight_bytes(directory, section.dtype, ranks)
    return _Needs(role.role, key, role.device, weights + (section.kv.pool_bytes or 0))


def _stored_bytes(directory: Path, dtype: str, ranks: int, *, on_gpu: bool, expert_parallel: bool) -> int | None:
    """Bytes of the stored weights of the rank that has most."""
    if ranks == 1:  # the imports take seconds, which other checks do without
        from workers.model.stored.quantized_checkpoint import stored_bytes

        return stored_bytes(directory, dtype, on_gpu=on_gpu)
    from workers.model.rank_bytes import rank_bytes

    return rank_bytes(directory, dtype, ranks, on_gpu=on_gpu, expert_parallel=expert_parallel)


def weight_bytes(directory: Path, dtype: str, ranks: int = 1) -> int:
    """Bytes that the safetensors of a directory take when loaded as `dtype`, of several ranks on the one that has most.

    Reads their headers only. A distilled draft also loads the embedding of its target, and one row of the target's
    head for each token that it can propose.
    """
    total, even = Fraction(0), Fraction(1, ranks)
    parts = most_held(*stated_counts(read_model_config(directory), ranks), ranks) if ranks > 1 else {}
    if is_distilled(directory):
        card = read_card(directory)
        rows = card.target_vocabulary_size + (card.vocabulary_size or card.target_vocabulary_size)
        total += rows * card.hidden_size * DTYPE_BYTES[dtype]
    for file in weight_files(directory):
        try:
            header = safetensors_header(file)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"weights {str(file)!r} are not safetensors; {error}") from None
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            own = (last - first) // _STORED_BYTES.get(entry["dtype"], 1) * DTYPE_BYTES[dtype]
            total += own * parts.get(name.rpartition(".")[0].rpartition(".")[2], even)
    return ceil(total)


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


def _why_unbindable(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # With this option a port in TIME_WAIT counts as free, and a port in use does not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except UnicodeError:  # an empty part between two dots, or one that is too long
        return "a name that no host can have"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def _claims(placement: Placement) -> str:
    gpus = {group.role: 0 for group in placement.groups}
    for group in placement.groups:
        gpus[group.role] += group.gpus
    return ", ".join(f"{count} for the {role}" for role, count in gpus.items() if count)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
