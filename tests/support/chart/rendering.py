"""Renders the Helm chart without a cluster and without the `helm` program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "pilotfish"
CI_VALUES = tuple(sorted(file.name.removesuffix("-values.yaml") for file in (CHART / "ci").glob("*-values.yaml")))
RELEASE, NAMESPACE = "demo", "llm"
ROLES = ("target", "draft", "ingress")


@dataclass(frozen=True)
class Rendered:
    """What an installation would create."""

    objects: tuple[Object, ...]
    notes: str

    def of_kind(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, suffix: str = "") -> Object:
        """The object of that kind whose name ends in `suffix`. There must be exactly one."""
        (found,) = [found for found in self.of_kind(kind) if found["metadata"]["name"].endswith(suffix)]
        return found

    @property
    def cluster(self) -> Object:
        """The specification of the Ray cluster."""
        cluster: Object = self.one("RayService")["spec"]["rayClusterConfig"]
        return cluster

    @property
    def pod_templates(self) -> dict[str, Object]:
        """The pod template of each role."""
        groups = {group["groupName"]: group["template"] for group in self.cluster["workerGroupSpecs"]}
        return {"head": self.cluster["headGroupSpec"]["template"]} | groups

    @property
    def serve_config(self) -> Object:
        """The configuration that KubeRay hands to Ray Serve."""
        config: Object = yaml.safe_load(self.one("RayService")["spec"]["serveConfigV2"])
        return config


def render(values: Object | None = None, chart: Path = CHART) -> Rendered:
    """Render the chart with `values` on top of its own. Raises `helm_python.HelmError`."""
    with helm_python.Chart.load(chart) as loaded:
        manifests = loaded.render(values or {}, name=RELEASE, namespace=NAMESPACE)
    objects = [
        found
        for path, text in sorted(manifests.items())
        if path.endswith(".yaml")
        for found in yaml.load_all(text, UniqueKeys)
        if found is not None
    ]
    notes = "".join(text for path, text in manifests.items() if path.endswith("NOTES.txt"))
    return Rendered(tuple(objects), notes)


@cache
def render_ci(name: str) -> Rendered:
    """Render the chart with the values in `ci/NAME-values.yaml`."""
    return render(ci_values(name))


def ci_values(name: str) -> Object:
    values: Object = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text("utf-8"))
    return values


class UniqueKeys(yaml.CSafeLoader):
    """Refuses a mapping in which a key stands twice, which plain YAML loaders accept."""


def _mapping(loader: UniqueKeys, node: yaml.MappingNode) -> Object:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    if len(keys) != len(set(keys)):
        raise ValueError(f"a key stands twice{node.start_mark}")
    return dict(zip(keys, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))


UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
