"""The page of every Prometheus metric, from the registries of a coordinator and of an ingress."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from cluster.coordinator.metrics import Metrics
from cluster.ingress.observability.ingress_metrics import IngressMetrics

_HEAD = """# Metrics

Every metric of `GET /metrics`, in Prometheus' text format. This page is generated from the code by `make pages`.
Names that begin with `vllm:` are vLLM's, with its meanings; `pilotfish:` names are this project's own. In a
cluster, each series also has the label `replica`: the coordinator or the ingress that counts.

An answer has the series of all coordinators, and of the one ingress that answers. With several ingresses
(`server.ingress_replicas`), each scrape reaches one of them. Sum `rate(…)` or `increase(…)` over the label, with a
range of many scrapes: a sum of the counters alone has only one ingress.
"""


def page() -> str:
    """Return the page, in Markdown."""
    sections = (("A coordinator", Metrics().registry), ("An ingress", IngressMetrics().registry))
    return "\n".join([_HEAD, *(line for title, registry in sections for line in _section(title, registry))])


def _section(title: str, registry: CollectorRegistry) -> Iterator[str]:
    yield from (f"## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|")
    collectors = registry._names_to_collectors
    for family in sorted(registry.collect(), key=lambda family: family.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in getattr(collectors.get(name), "_labelnames", ()))
        yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |"
    yield ""
