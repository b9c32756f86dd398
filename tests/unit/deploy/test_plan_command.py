"""`pilotfish plan` for a whole cluster, as a table and as JSON."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.terminal import run_command

CLUSTER = ("--node", "2*cpus=32,gpus=4,memory_gib=256,gpu_memory_gib=80", "--node", "cpus=16")
SETTINGS = ("target.device=auto", "target.replicas=2", "target.tensor_parallel=4", "draft.replicas=2")


def run(*arguments: str) -> int:
    return run_command("plan", *(part for setting in SETTINGS for part in ("--set", setting)), *arguments)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run("--json", *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_lists_nodes_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *CLUSTER)
    assert [(node["node"], node["gpus"]) for node in found["nodes"]] == [("node 1", 4), ("node 2", 4), ("node 3", 0)]
    ranks = [process for process in found["processes"] if process["role"] == "target"]
    assert [(rank["replica"], rank["rank"]) for rank in ranks] == list(product(range(2), range(4)))
    assert {rank["replica"]: rank["node"] for rank in ranks} == {0: "node 1", 1: "node 2"}
    assert all(rank["gpus"] == 1 and rank["device"] == "cuda" for rank in ranks)
    coordinators = [process["node"] for process in found["processes"] if process["role"] == "coordinator"]
    assert coordinators == ["node 1", "node 2"]
    assert {process["node"] for process in found["processes"] if process["role"] == "draft"} == {"node 3"}
    assert found["problems"] == []


def test_json_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--node", "3*cpus=32,gpus=3") == 1
    found = json.loads(capsys.readouterr().out)
    (problem,) = found["problems"]
    assert problem["subject"] == "GPUs on one node"
    assert {process["node"] for process in found["processes"] if process["role"] == "target"} == {None}


def test_ranks_span_nodes_where_a_setting_lets_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan takes as few nodes as possible and counts the GPUs of all."""
    found = planned(capsys, "--node", "3*cpus=32,gpus=3", "--set", "target.span_nodes=true")
    ranks = [process for process in found["processes"] if process["role"] == "target"]
    assert [rank["node"] for rank in ranks] == ["node 1"] * 3 + ["node 2"] + ["node 3"] * 3 + ["node 2"]
    coordinators = [process["node"] for process in found["processes"] if process["role"] == "coordinator"]
    assert coordinators == ["node 1", "node 3"]
    assert planned(capsys, *CLUSTER, "--set", "target.span_nodes=true") == planned(capsys, *CLUSTER)


def test_too_few_gpus_for_ranks_on_several_nodes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("--node", "cpus=32,gpus=8", "--node", "cpus=0.1,gpus=3", "--set", "target.tensor_parallel=9")
    assert run("--json", *nodes, "--set", "target.span_nodes=true", "--set", "target.replicas=1") == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["subject"] == "GPUs and CPU cores on several nodes"


def test_the_table_names_the_node_of_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*CLUSTER) == 0
    shown = capsys.readouterr().out
    assert "Placement on 80 cores and 8 GPUs of 3 nodes" in shown
    assert "node 3" in shown


@pytest.mark.parametrize(
    "node",
    [
        *("gpus=8", "cpus=many", "x*cpus=4", "cpus=4,disks=2", "4"),
        *("0*cpus=4", "-1*cpus=4", "cpus=nan", "cpus=4,gpus=inf", "cpus=-1", "cpus=inf"),
        *("cpus=4,cpus=5", "cpus=4,gpus=1.5", "99999999*cpus=4", "4097*cpus=4"),
    ],
)
def test_a_node_that_is_not_understood_is_refused_with_the_form(node: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--node", node) == 2
    assert f"--node {node}: needed [COUNT*]cpus=" in capsys.readouterr().err


def test_it_says_why_a_draft_model_shares_the_targets_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--set", "draft.method=model", "--set", "draft.model.path=small", "--set", "draft.replicas=1")
    one = ("--set", "target.replicas=1", "--set", "target.tensor_parallel=1", *model)
    one += ("--set", "target.quantization=none")
    for gpus, notes in ((1, 1), (2, 0)):
        found = planned(capsys, *one, "--node", f"cpus=32,gpus={gpus}")
        graphs, prompts, *others = found["notes"]
        assert graphs.startswith("CUDA graphs of the target, captured before the first request: 37 by rows and tokens")
        assert prompts.startswith("prompts beside decoding: at most 128 tokens of a step ")
        assert len(others) == notes
        assert [process["role"] for process in found["processes"]].count("draft") == 1 - notes
    assert run(*one, "--node", "cpus=32,gpus=1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the draft small drafts on a GPU of the target (rank 0): no GPU is left for it" in printed


@pytest.mark.parametrize(("method", "compiled", "told"), [
    ("eagle", "on", ["target", "draft.method=eagle"]), ("block", "on", ["target", "draft.method=block"]),
    ("mtp", "on", ["target", "draft.method=mtp"]), ("heads", "on", ["target", "draft.method=heads"]),
    ("ngram", "on", ["target"]), ("eagle", "off", []),
])  # fmt: skip
def test_it_tells_the_graphs_of_the_drafting_method(
    method: str, compiled: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [f"draft.method={method}", f"target.compile={compiled}", "target.replicas=1", "target.tensor_parallel=1"]
    chosen += ["draft.replicas=1"]
    chosen += [f"draft.{method}.path=module"] if method in ("eagle", "block", "heads") else []
    found = planned(capsys, "--node", "cpus=32,gpus=1", *(part for one in chosen for part in ("--set", one)))
    graphs = [note for note in found["notes"] if note.startswith("CUDA graphs of ")]
    assert [note.removeprefix("CUDA graphs of ").removeprefix("the ").split(",")[0] for note in graphs] == told
    if method == "eagle" and graphs:
        assert "captured when it is loaded, before the target's KV pool is sized: 37 by rows and tokens" in graphs[1]


def test_it_tells_how_many_prompt_tokens_a_gpu_takes_beside_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("plan", "--config", "gpu", "--node", "cpus=16,gpus=1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "prompts beside decoding: at most 1024 tokens of a step (scheduler.max_prompt_tokens is unset)" in printed
    assert run_command("plan", "--config", "cpu", "--node", "cpus=16") == 0
    assert "prompts beside decoding" not in capsys.readouterr().out


def test_it_tells_how_ranks_share_kv_heads_and_refuses_ranks_that_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 28, "num_key_value_heads": 4}))
    target = ("--set", f"target.path={tmp_path}", "--set", "target.replicas=1", "--set", "draft.method=none")
    nodes = ("--node", "cpus=32,gpus=9", "--set", "draft.replicas=1")
    told = "8 ranks hold 4 KV heads, each on 2 of them: a rank has 3 or 4 of 28 query heads; memory is counted for 4"
    assert told in planned(capsys, *target, *nodes, "--set", "target.tensor_parallel=8")["notes"]
    assert not any("KV heads" in note for note in planned(capsys, *target, *nodes)["notes"])
    assert run("--json", *target, *nodes, "--set", "target.tensor_parallel=3") == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["remedy"] == "set it to 1 or 2 or 4 or 8 or 12 or 16 or 20 or 24 or 28"
