"""Problems are reported before anything starts, with the requirement, the finding and a remedy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.core.config.server import ServerSection
from cluster.core.errors import ConfigurationError
from deploy import preflight
from deploy.machine import free_memory_limit, usable_cores
from deploy.placement import Resources, plan
from deploy.settings import load_settings
from tests.support.certificates import Authority
from tests.support.models import tiny_tokenizer
from workers.forward.graph_memory import ModelSizes
from workers.model.draft_card import DraftCard
from workers.model.draft_shapes import HeadsShape
from workers.model.weight_counts import WeightCounts
from workers.serve.configuration import load_configuration

LAPTOP = Resources(cpus=2, gpus=0, memory_bytes=8 << 30)
TOKENS = {"a": 0, "b": 1, "c": 2}


def model_directory(
    path: Path, *, heads: int = 6, kv_heads: int | None = 3, tokens: dict[str, int] | None = None, rows: int = 8
) -> Path:
    """A model directory with the files that preflight reads: safetensors have `rows` x 4 float32."""
    path.mkdir()
    config: dict[str, object] = {"num_attention_heads": heads, "vocab_size": len(tokens or TOKENS)}
    if kv_heads is not None:
        config["num_key_value_heads"] = kv_heads
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens or TOKENS}, "added_tokens": []}))
    save_file({"weight": torch.zeros(rows, 4)}, path / "model.safetensors")
    return path


def only(problems: Iterator[preflight.Problem]) -> str:
    found = [str(problem) for problem in problems]
    assert len(found) == 1, found
    return found[0]


def test_missing_gpus_are_counted_by_role() -> None:
    configuration = load_configuration({}, {"target.device": "cuda", "target.tensor_parallel": 2})

    line = only(preflight.capacity_problems(plan(configuration, [LAPTOP]), [Resources(4, 1, 8 << 30)]))

    assert line == (
        "GPUs: needed 2 (2 for the target), found 1; lower target.tensor_parallel, or set target.device to cpu"
    )


def test_what_claims_fewer_gpus_depends_on_who_claims_them() -> None:
    draft = {"draft.method": "model", "draft.model.path": "draft", "draft.model.device": "cuda"}
    configuration = load_configuration({}, {"target.device": "cuda", **draft})

    line = only(preflight.capacity_problems(plan(configuration, [LAPTOP]), [Resources(4, 0, 8 << 30)]))

    assert line.endswith("; set draft.method to one that loads no model, or set target.device to cpu")


def test_standby_ranks_are_refused_on_gpus(tmp_path: Path) -> None:
    configuration = load_configuration({}, {"target.device": "cuda", "target.standby": True})
    machine = Resources(4, 1, 8 << 30)
    placement = plan(configuration, [machine])

    line = only(preflight.model_problems(configuration, placement, [machine], model_directory(tmp_path / "m"), None))

    assert line == "target.standby: needed auto or false where ranks use GPUs, found true; set it to auto"


def test_missing_cores_are_reported() -> None:
    configuration = load_configuration({}, {"target.device": "cuda", "target.tensor_parallel": 4})
    small = Resources(cpus=2, gpus=4, memory_bytes=8 << 30)

    assert "CPU cores: needed 4.2, found 2" in only(preflight.capacity_problems(plan(configuration, [small]), [small]))


def test_an_unknown_drafting_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_configuration({}, {"draft.method": "ngrams"})

    assert str(caught.value).startswith("draft.method: 'ngrams' is unknown; it must be one of ")
    assert str(caught.value).endswith("(the nearest is ngram)")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        line = only(preflight.port_problems(ServerSection(http_port=port, grpc_port=0)))

    assert line.startswith(f"server.http_port: needed 127.0.0.1:{port} free, found address already in use;")


@pytest.mark.parametrize("host", ["192.0.2.77", "a..b", "x" * 64, ""])
def test_an_address_that_this_machine_does_not_have_is_named(host: str) -> None:
    for port in (0, 9000):
        line = only(preflight.port_problems(ServerSection(http_port=0, grpc_port=port, grpc_host=host)))
        assert line.startswith(f"server.grpc_host: needed an address of this machine, found {host!r} (")
    twice = ServerSection(http_port=0, grpc_port=0, operations_port=9001, grpc_host=host)
    assert [str(one).partition(":")[0] for one in preflight.port_problems(twice)] == ["server.grpc_host"]


def test_one_port_for_both_apis_is_refused() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    assert "another port than server.http_port" in only(
        preflight.port_problems(ServerSection(http_port=port, grpc_port=port))
    )
    for other in ("http", "grpc"):
        ports = {"http_port": 0, "grpc_port": 0} | {f"{other}_port": port}
        line = only(preflight.port_problems(ServerSection(**ports, operations_port=port)))
        assert line.startswith(f"server.operations_port: needed another port than server.{other}_port, found {port};")
    assert not list(preflight.port_problems(ServerSection(http_port=0, grpc_port=0, operations_port=0)))


def test_a_port_of_the_operations_service_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        line = only(preflight.port_problems(ServerSection(http_port=0, grpc_port=0, operations_port=port)))

    assert line.startswith(f"server.operations_port: needed 127.0.0.1:{port} free, found address already in use;")


def test_a_server_that_demands_certificates_needs_one_for_itself(tmp_path: Path) -> None:
    """A server asks its own API whether it is ready. Without a certificate it would wait for ever."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    files = {"certificate": certificate, "key": key, "client_ca": str(authority.file)}
    ports = ["server.http_port=0", "server.grpc_port=0"]

    def check(**more: str) -> None:
        assignments = [f"server.tls.{name}={file}" for name, file in (files | more).items()]
        preflight.check_files(load_settings(None, [*ports, *assignments], {}))

    with pytest.raises(ConfigurationError, match=r"server\.tls\.client_certificate: needed a certificate for `serve`"):
        check()
    own, own_key = authority.issue("client")
    check(client_certificate=own, client_key=own_key)


@pytest.mark.parametrize("ray_address", [None, "auto"])
def test_a_directory_for_prompts_must_be_this_users_alone_where_the_server_runs(
    tmp_path: Path, ray_address: str | None
) -> None:
    file, shared = tmp_path / "file", tmp_path / "shared"
    file.write_text("")
    shared.mkdir()
    shared.chmod(0o777)
    needed = "draft.prompt_log_directory: needed the directory {} of this user, or room to make it, found "

    def check(directory: Path) -> None:
        ports = ["server.http_port=0", "server.grpc_port=0", f"draft.prompt_log_directory={directory}"]
        variables = {} if ray_address is None else {"PILOTFISH_RAY_ADDRESS": ray_address}
        preflight.check_files(load_settings(None, ports, variables))

    check(tmp_path / "new" / "log")
    for directory, found in ((file / "log", f"the file {file}"), (shared, f"{shared}: others may write to it")):
        if ray_address is not None:  # it is on another machine
            check(directory)
            continue
        with pytest.raises(ConfigurationError) as refused:
            check(directory)
        assert needed.format(directory) + found in str(refused.value)


def test_a_directory_for_prompts_is_refused_for_an_encoder_decoder_model(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    configuration = load_configuration({}, {"draft.prompt_log_directory": str(tmp_path), "target.device": "cpu"})

    line = only(preflight.model_problems(configuration, plan(configuration, [LAPTOP]), [LAPTOP], directory, None))

    assert line == (
        "draft.prompt_log_directory: needed no value for an encoder-decoder model, whose sources are no chats, "
        "found one; leave it out"
    )


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_ranks_that_divide_the_heads_are_no_problem(tmp_path: Path, ranks: int) -> None:
    assert not list(preflight.head_problems(model_directory(tmp_path / "m"), ranks))


@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_ranks_that_do_not_divide_the_heads_are_refused_with_numbers_that_do(tmp_path: Path, ranks: int) -> None:
    line = only(preflight.head_problems(model_directory(tmp_path / "m", heads=6, kv_heads=3), ranks))

    assert line == (
        "target.tensor_parallel: needed a divisor of 3 key-value heads, or a multiple that is at most the number of "
        f"heads, 6, found {ranks}; set it to 1 or 3 or 6"
    )


def test_the_rank_with_most_heads_is_counted_where_ranks_share_a_kv_head(tmp_path: Path) -> None:
    """Two of four ranks have three of 14 query heads, two have four; each has one of two KV heads whole."""
    directory = model_directory(tmp_path / "m", heads=14, kv_heads=2)
    layer = {"q_proj": (112, 112), "k_proj": (16, 112), "v_proj": (16, 112), "o_proj": (112, 112)}
    tensors = {f"model.layers.0.self_attn.{name}.weight": torch.zeros(shape) for name, shape in layer.items()}
    save_file(tensors | {"lm_head.weight": torch.zeros(8, 112)}, directory / "model.safetensors")
    of_heads, of_kv_heads, others = 2 * 112 * 4 * 8, 2 * 8 * 112, 2 * 112
    assert not list(preflight.head_problems(directory, 4))
    assert preflight.weight_bytes(directory, "bfloat16", 4) == 2 * (of_heads + of_kv_heads + others)
    assert preflight.weight_bytes(directory, "bfloat16", 2) == preflight.weight_bytes(directory, "bfloat16") // 2


def test_a_model_without_grouped_heads_divides_by_its_heads(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m", heads=6, kv_heads=None)

    assert not list(preflight.head_problems(directory, 6))
    assert "set it to 1 or 2 or 3 or 6" in only(preflight.head_problems(directory, 4))


def test_a_draft_with_the_same_tokens_is_no_problem(tmp_path: Path) -> None:
    target, draft = model_directory(tmp_path / "t"), model_directory(tmp_path / "d", heads=2, kv_heads=1)

    assert not list(preflight.vocabulary_problems(target, draft, "draft.model.path"))


def test_a_draft_with_another_tokenizer_drafts_by_text(tmp_path: Path) -> None:
    target, draft = model_directory(tmp_path / "t"), model_directory(tmp_path / "d")
    tiny_tokenizer.byte_level(target)
    tiny_tokenizer.sentencepiece(draft)

    assert not list(preflight.vocabulary_problems(target, draft, "draft.model.path"))

    (draft / "config.json").write_text(json.dumps({"vocab_size": 4, "is_encoder_decoder": True}))
    assert "needed 3 tokens, found 4 tokens" in only(preflight.vocabulary_problems(target, draft, "draft.model.path"))


def test_a_draft_with_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    target, draft = model_directory(tmp_path / "t"), model_directory(tmp_path / "d", tokens={"a": 0, "b": 2, "c": 1})
    tiny_tokenizer.byte_level(target)

    line = only(preflight.vocabulary_problems(target, draft, "draft.model.path"))

    assert line.startswith(
        "draft.model.path: needed the target's tokenizer, or one with which it can draft by text, found "
        f"{draft / 'tokenizer.json'}: needed a tokenizer, found none"
    )


def test_without_tokenizers_the_sizes_of_the_vocabularies_decide(tmp_path: Path) -> None:
    target, draft = model_directory(tmp_path / "t"), model_directory(tmp_path / "d", tokens={"a": 0})
    (draft / "tokenizer.json").unlink()

    assert "needed 3 tokens, found 1 tokens" in only(preflight.vocabulary_problems(target, draft, "draft.model.path"))


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_weights_are_measured_in_the_type_in_which_they_are_loaded(tmp_path: Path, dtype: str, width: int) -> None:
    assert preflight.weight_bytes(model_directory(tmp_path / "m", rows=8), dtype) == 8 * 4 * width


@pytest.mark.parametrize(("reduced", "rows"), [(None, 2 * 300), (20, 300 + 20)])
def test_the_size_of_a_distilled_draft_includes_the_weights_of_its_target(
    tmp_path: Path, reduced: int | None, rows: int
) -> None:
    draft = model_directory(tmp_path / "d", rows=8)
    DraftCard("t", 300, 16, (0,), reduced).write(draft)

    assert preflight.weight_bytes(draft, "bfloat16") == (8 * 4 + rows * 16) * 2


def test_a_distilled_draft_is_refused_as_a_target(tmp_path: Path) -> None:
    draft = model_directory(tmp_path / "d")
    DraftCard("t", 3, 4, (0,), None).write(draft)
    configuration = load_configuration({}, {})

    line = only(preflight.model_problems(configuration, plan(configuration, [LAPTOP]), [LAPTOP], draft, None))

    assert line == "target.path: needed a whole model, found a distilled draft; set draft.model.path to it instead"


def test_weights_and_pools_beyond_the_memory_are_refused(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m")
    configuration = load_configuration({}, {"target.kv.pool_bytes": 3 << 30, "target.tensor_parallel": 3})

    line = only(preflight.memory_problems(configuration, plan(configuration, [LAPTOP]), [LAPTOP], directory, None))

    assert line.startswith("memory of this machine: needed 9.0 GiB for weights and KV, found 8.0 GiB free;")


def test_ranks_divide_random_weights_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = WeightCounts(parameters=4 << 30, multiply_adds=0)
    monkeypatch.setattr("workers.model.weight_counts.count_weights", lambda _: counts)
    ranks = {"target.load_format": "dummy", "target.tensor_parallel": 3, "target.kv.pool_bytes": 1 << 30}
    configuration = load_configuration({}, ranks | {"target.dtype": "bfloat16"})
    placement = plan(configuration, [LAPTOP])

    line = only(preflight.memory_problems(configuration, placement, [LAPTOP], model_directory(tmp_path / "m"), None))

    assert line.startswith("memory of this machine: needed 11.0 GiB for weights and KV, found 8.0 GiB free;")


def test_a_draft_on_the_targets_gpu_needs_memory_there_beside_the_target(tmp_path: Path) -> None:
    target, draft = (model_directory(tmp_path / name, rows=rows) for name, rows in (("t", 4096), ("d", 1024)))
    overrides = {"draft.method": "model", "draft.model.path": "d", "draft.model.kv.memory_fraction": 0.5}
    configuration = load_configuration({}, overrides)
    target_bytes, draft_bytes = 4096 * 16, 1024 * 16
    enough = draft_bytes + 2 * target_bytes  # half of what the draft's weights leave is its pool

    def problems(free: int) -> list[str]:
        nodes = [Resources(8, 1, 1 << 40, free)]
        placement = plan(configuration, nodes)
        assert placement.drafts_on_target
        return [str(one) for one in preflight.memory_problems(configuration, placement, nodes, target, draft)]

    assert problems(enough) == []
    (line,) = problems(enough - 2)
    assert line.startswith(
        "target GPU memory: needed 0.0 GiB for the weights of target and draft and for the draft's KV"
    )
    assert "lower draft.model.kv.memory_fraction" in line


SIZES = ModelSizes(hidden_size=24, vocabulary_size=3, attended=((6, 4),), longest=1000, number_bytes=2)
"""The sizes of a small model, whose CUDA graphs and activations a pool has to leave room for."""
GRAPHS, ACTIVATIONS = SIZES.graph_bytes, 512 * SIZES.layer_bytes


@pytest.mark.parametrize(("settings", "taken", "told"), [
    ({"draft.method": "none"}, ACTIVATIONS + GRAPHS, "of activations, 0.0 GiB of CUDA graphs on this machine"),
    ({"draft.method": "none", "target.compile": "off"}, ACTIVATIONS, "of activations on this machine"),
    (
        {"draft.method": "heads", "draft.heads.path": "heads"},
        ACTIVATIONS + GRAPHS + 64 * 4 * 3 * 10,  # 64 rows of four depths, three tokens, ten bytes of a logit
        "of activations, 0.0 GiB of CUDA graphs, 0.0 GiB of those of draft.method=heads on this machine",
    ),
    ({"draft.method": "heads", "draft.heads.path": "heads", "target.compile": "off"}, ACTIVATIONS, "of activations on"),
], ids=["target", "no graphs", "drafts", "drafts without graphs"])  # fmt: skip
def test_a_configured_pool_must_leave_a_gpu_memory_for_graphs_and_activations(
    settings: dict[str, object], taken: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory, heads = model_directory(tmp_path / "m"), tmp_path / "heads"
    values = json.loads((directory / "config.json").read_text()) | {"hidden_size": 24, "max_position_embeddings": 1000}
    (directory / "config.json").write_text(json.dumps(values))
    heads.mkdir()
    DraftCard("t", 3, 24, (), None, "heads", (2,), HeadsShape(depths=4, mix_rank=0, selector_rank=0)).write(heads)
    weights, pool = 8 * 4 * 2, 1 << 30
    base = {"target.device": "cuda", "target.dtype": "bfloat16", "draft.placement": "target"}

    def problems(free: int, pool_bytes: int | None = pool) -> list[str]:
        configuration = load_configuration({}, base | settings | {"target.kv.pool_bytes": pool_bytes})
        nodes = [Resources(8, 1, 1 << 40, free)]
        placement = plan(configuration, nodes)
        return [str(one) for one in preflight.memory_problems(configuration, placement, nodes, directory, None)]

    assert problems(weights + taken + pool) == []
    (line,) = problems(weights + taken + pool - 1)
    assert line.startswith(f"target.kv.pool_bytes: needed at most {pool - 1} beside 0.0 GiB of weights, ")
    assert told in line
    assert line.endswith(f", found {pool}, of 1.0 GiB free; lower it, or unset it: the pool then takes what is left")
    assert problems(weights + taken - 1, pool_bytes=None) == []


def test_a_configured_pool_leaves_no_memory_for_graphs_that_an_encoder_decoder_model_has_not(tmp_path: Path) -> None:
    directory, pool = model_directory(tmp_path / "m"), 1 << 30
    values = json.loads((directory / "config.json").read_text()) | {"hidden_size": 24, "is_encoder_decoder": True}
    (directory / "config.json").write_text(json.dumps(values))
    settings = {"target.device": "cuda", "target.dtype": "bfloat16", "target.kv.pool_bytes": pool}
    configuration = load_configuration({}, settings | {"scheduler.max_step_tokens": 100})
    for missing in (0, 1):
        nodes = [Resources(8, 1, 1 << 40, 8 * 4 * 2 + pool + 100 * 32 * 24 * 2 - missing)]
        placement = plan(configuration, nodes)
        assert len(list(preflight.memory_problems(configuration, placement, nodes, directory, None))) == missing


def test_a_model_that_fits_is_no_problem(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m")
    configuration = load_configuration({}, {"target.kv.pool_bytes": 1 << 30})

    assert not list(preflight.model_problems(configuration, plan(configuration, [LAPTOP]), [LAPTOP], directory, None))


def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m")
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)

    with pytest.raises(ConfigurationError, match="are not safetensors"):
        preflight.weight_bytes(directory, "float32")


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json cannot be read"):
        preflight.read_model_config(tmp_path)


def test_every_problem_is_one_line_of_the_error() -> None:
    problems = [preflight.Problem("x", "1", "0", "do this"), preflight.Problem("y", "2", "0", "do that")]

    with pytest.raises(ConfigurationError) as refused:
        preflight.raise_problems(iter(problems))

    assert str(refused.value).splitlines() == [
        "x: needed 1, found 0; do this",
        "y: needed 2, found 0; do that",
    ]


def test_the_quota_of_a_container_limits_cores_and_memory(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")

    assert usable_cores(tmp_path) == 1
    assert free_memory_limit(tmp_path) == 600


def test_the_quota_of_the_first_version_of_control_groups_limits_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path) == usable_cores(tmp_path / "absent")


def test_a_container_without_limits_has_the_resources_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")

    assert usable_cores(tmp_path) == usable_cores(tmp_path / "absent")
    assert free_memory_limit(tmp_path) >= 1 << 60
