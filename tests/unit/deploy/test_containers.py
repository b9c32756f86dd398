"""The images and the compose file: checked by hadolint and by a parser of the Compose specification."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from deploy.network.health_check import is_alive

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE, COMPOSE = ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "compose.yaml"
SERVICES = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
CONFIGURATIONS = sorted((ROOT / "deploy" / "containers").glob("*.yaml"))


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).parent / "hadolint"
    return subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True, check=False)


def stages() -> dict[str, str]:
    """The instructions of each stage of the Dockerfile, by the stage's name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parse(text: str) -> Any:
    """The compose file under its specification, with YAML's merge keys resolved. Raises `ValueError`."""
    return PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text)))


def test_hadolint_has_nothing_to_say() -> None:
    outcome = lint(DOCKERFILE)
    assert (outcome.returncode, outcome.stdout) == (0, "")


def test_a_planted_typo_in_the_dockerfile_is_found(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(DOCKERFILE.read_text("utf-8").replace("HEALTHCHECK", "HEALTCHECK"), "utf-8")
    assert lint(file).returncode != 0


def test_the_image_asks_for_its_health_with_a_module_that_exists() -> None:
    assert "HEALTHCHECK" in stages()["runtime"] and f'"-m", "{is_alive.__module__}"' in stages()["runtime"]


def test_the_images_have_the_training_that_a_learning_draft_needs() -> None:
    (listing,) = re.findall(r'^RUN python -c "(.*?)" > requirements\.txt', stages()["build"], re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-c", listing.replace("\\\n", "")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    training = tomllib.loads((ROOT / "deploy" / "distillation" / "pyproject.toml").read_text("utf-8"))["project"]
    assert {one for one in training["dependencies"] if not one.startswith("pilotfish")} <= set(found)
    assert not [one for one in found if one.startswith("pilotfish")]
    for stage in ("build-cpu", "build-cuda"):
        (installed,) = re.findall(r"pip install --no-deps (.*) \.$", stages()[stage], re.MULTILINE)
        assert "./deploy/distillation" in installed.split(), stage


def test_the_compose_file_follows_the_specification() -> None:
    assert sorted(parse(COMPOSE.read_text("utf-8")).service_names()) == sorted(SERVICES)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cap_drop:", "cap_dorp:"),
        ("stop_grace_period: 60s", "stop_grace_period: sixty"),
        ("127.0.0.1:3000:3000", "127.0.0.1:3000:http"),
    ],
)
def test_a_planted_typo_in_the_compose_file_fails(right: str, wrong: str) -> None:
    text = COMPOSE.read_text("utf-8")
    assert right in text
    with pytest.raises(ValueError, match=r"services\.|error"):
        parse(text.replace(right, wrong))


def test_every_mounted_file_and_named_volume_exists() -> None:
    volumes = yaml.safe_load(COMPOSE.read_text("utf-8"))["volumes"]
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in volumes or (COMPOSE.parent / source).exists(), mount
        build = service.get("build")
        if build:
            context = COMPOSE.parent / build["context"]
            assert (context / build["dockerfile"]).resolve() == DOCKERFILE and build["target"] in stages()


def test_ports_are_open_on_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_pilotfish_may_write_where_it_must_and_nowhere_else() -> None:
    for name in ("pilotfish", "pilotfish-gpu"):
        service = SERVICES[name]
        assert service["read_only"] and service["user"] == "1000:1000" and service["cap_drop"] == ["ALL"]
        places = {mount.split(":")[1] for mount in service["volumes"]} | set(service["tmpfs"])
        assert places == {"/models", "/home/pilotfish/.cache", "/tmp"}  # noqa: S108


def test_prometheus_asks_the_service_and_reads_the_rules_of_the_chart() -> None:
    configuration = yaml.safe_load((ROOT / "deploy/containers/prometheus.yaml").read_text("utf-8"))
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["pilotfish:8000"]
    mounted = {mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]}
    assert set(configuration["rule_files"]) <= mounted
    assert [file.stem for file in CONFIGURATIONS] == ["dashboards", "grafana", "prometheus"]
