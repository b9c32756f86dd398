"""Every object of the chart is what Kubernetes and KubeRay accept, for all example values."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import helm_python
import jsonschema
import pytest

from tests.support.chart.rendering import CHART, CI_VALUES, ROLES, Rendered, ci_values, render, render_ci
from tests.support.chart.schemas import FIELDS, check, rayservice_validator

EVERYTHING = "two-by-eight"
"""The example values that render every optional object, except what excludes it."""


def test_there_are_example_values_for_a_cpu_a_gpu_and_two_nodes() -> None:
    assert CI_VALUES == ("cpu-smoke", "one-gpu", EVERYTHING)


@pytest.mark.parametrize("name", [None, *CI_VALUES])
def test_helm_lint_finds_nothing_to_warn_about(name: str | None) -> None:
    report = helm_python.lint(CHART, ci_values(name) if name else {}, strict=True, namespace="llm")

    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def test_every_object_matches_its_schema(rendered: Rendered) -> None:
    check_all(rendered)


def check_all(rendered: Rendered) -> None:
    for found in rendered.objects:
        check(found)


def test_the_example_values_render_every_kind() -> None:
    shared = render({"models": {"cache": {"volume": "shared"}}})
    kinds = {one["kind"] for found in (shared, *map(render_ci, CI_VALUES)) for one in found.objects}

    own = {kind.rsplit("/", 1)[1] for kind in FIELDS}
    expected = "ConfigMap Ingress NetworkPolicy PersistentVolumeClaim Pod PodDisruptionBudget RayService Secret"
    assert kinds == own | set(expected.split()) | {"Service", "ServiceAccount"}


def test_the_rayservice_matches_the_definition_of_kuberay(rendered: Rendered) -> None:
    rayservice_validator().validate(rendered.one("RayService"))


@pytest.mark.parametrize("field", ["rayVerison", "workerGroupSpec"])
def test_a_planted_typo_in_the_rayservice_fails(field: str) -> None:
    found = copy.deepcopy(render_ci(EVERYTHING).one("RayService"))
    found["spec"]["rayClusterConfig"][field] = "2.60.0"

    with pytest.raises(jsonschema.ValidationError, match=field):
        check(found)


TYPOS = {
    "a field of a pod": ("_pod.tpl", "terminationGracePeriodSeconds:", "terminationGraceSeconds:"),
    "a field of a container": ("_pod.tpl", "volumeMounts:", "volumeMount:"),
    "a field of a probe": ("_pod.tpl", "failureThreshold:", "failuresThreshold:"),
    "a field of a Service": ("services.yaml", "clusterIP:", "clusterIp:"),
    "a field of a NetworkPolicy": ("networkpolicy.yaml", "policyTypes:", "policyType:"),
    "a field of a Gateway": ("gateway.yaml", "certificateRefs:", "certificateRef:"),
    "a field of a ServiceMonitor": ("metrics.yaml", "endpoints:", "endpoint:"),
}


@pytest.mark.parametrize("name", TYPOS)
def test_a_planted_typo_in_a_template_fails(name: str, tmp_path: Path) -> None:
    file, right, wrong = TYPOS[name]
    chart = copied(tmp_path, file, right, wrong)

    with pytest.raises(jsonschema.ValidationError, match=wrong.strip(":")):
        check_all(render(ci_values(EVERYTHING), chart))


def test_a_template_that_names_a_missing_template_fails(tmp_path: Path) -> None:
    chart = copied(tmp_path, "pvc.yaml", "pilotfish.metadata", "pilotfish.metadta")

    with pytest.raises(helm_python.HelmError, match="metadta"):
        render({"models": {"cache": {"volume": "shared"}}}, chart)


def copied(directory: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of the chart with `wrong` in place of `right` in one template."""
    chart = Path(shutil.copytree(CHART, directory / "pilotfish"))
    template = chart / "templates" / file
    text = template.read_text("utf-8")
    assert right in text
    template.write_text(text.replace(right, wrong), "utf-8")
    return chart


def test_no_two_objects_share_kind_and_name(rendered: Rendered) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in rendered.objects]
    assert len(names) == len(set(names))


def test_long_release_names_leave_room_for_what_kuberay_appends() -> None:
    found = render({"fullnameOverride": "x" * 60})
    assert max(len(one["metadata"]["name"]) for one in found.of_kind("RayService")) <= 40
    assert max(len(one["metadata"]["name"]) for one in found.objects) <= 63


def test_a_group_without_pods_is_left_out() -> None:
    assert {group["groupName"] for group in render().cluster["workerGroupSpecs"]} == {"target", "ingress"}
    found = render({"workers": {role: {"replicas": 1} for role in ROLES}})
    assert {group["groupName"] for group in found.cluster["workerGroupSpecs"]} == set(ROLES)
