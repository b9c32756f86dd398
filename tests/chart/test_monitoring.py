"""Rules and dashboards ask for metrics and labels that a coordinator really exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.coordinator.metrics import Metrics
from cluster.core.request import Commit
from cluster.core.verification import LearningStatus
from tests.support.chart.rendering import CHART, render_ci

RULES = yaml.safe_load((CHART / "files" / "rules.yaml").read_text("utf-8"))
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
REASONS = ("late", "failed", "open", "busy", "prefill")


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The label names of every exposed series, by the series' name."""
    metrics = Metrics()
    metrics.begin("tiny", True, lambda: 0.0, lambda: 0.0, lambda: 0.0)
    metrics.decided([Commit(tokens=(1,), drafted=1, accepted=1)])
    metrics.failed(ValueError())
    for reason in REASONS:
        metrics.drafter_fallback(reason)
    metrics.learned(LearningStatus())
    text = metrics.exposition()[0].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples} | {name: {"model_name"} for name in RECORDED}


def expressions() -> Iterator[tuple[str, str]]:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule.get("record") or rule["alert"], rule["expr"]
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text("utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m")


def selectors(node: object) -> Iterator[promql_parser.VectorSelector]:
    """All selectors of series in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for part in ("vector_selector", "expr", "lhs", "rhs", "args"):
        child = getattr(node, part, None)
        for one in child if isinstance(child, list) else [child]:
            if one is not None:
                yield from selectors(one)


def problems(expression: str, exposed: dict[str, set[str]]) -> list[str]:
    """What an expression asks for and no coordinator exposes."""
    found = list(selectors(promql_parser.parse(expression)))
    assert found, expression
    wrong = [f"no series {one.name}" for one in found if one.name not in exposed]
    for one in found:
        labels = {matcher.name for matcher in one.matchers.matchers}
        wrong += [f"{one.name} has no label {label}" for label in labels - exposed.get(one.name, labels)]
    known = {label for one in found for label in exposed.get(one.name, set())}
    grouped = {name.strip() for names in re.findall(r"by \(([^)]*)\)", expression) for name in names.split(",")}
    return wrong + [f"no label {name} to group by" for name in grouped - known]


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_an_expression_asks_for_exposed_series_and_labels(
    name: str, expression: str, exposed: dict[str, set[str]]
) -> None:
    assert problems(expression, exposed) == [], name


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(vllm:generation_token_total[5m])", "no series vllm:generation_token_total"),
        ('rate(vllm:request_success_total{reason="stop"}[5m])', "vllm:request_success_total has no label reason"),
        ("sum by (model) (vllm:num_requests_running)", "no label model to group by"),
        ("1 + (2 * vllm:num_request_waiting)", "no series vllm:num_request_waiting"),
    ],
)
def test_a_planted_typo_in_an_expression_is_found(expression: str, problem: str, exposed: dict[str, set[str]]) -> None:
    assert problems(expression, exposed) == [problem]


def test_an_expression_that_is_not_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid promql"):
        promql_parser.parse("sum by (model_name) rate(x[5m])")


def test_alerts_name_reasons_that_exist() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    (alert,) = [rule for rule in rules if rule.get("alert") == "PilotfishDraftsMissing"]
    (named,) = re.findall(r'reason=~"([^"]*)"', alert["expr"])
    assert set(named.split("|")) <= set(REASONS)


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["labels"]["severity"] in {"info", "warning", "critical"}
                assert set(rule["annotations"]) == {"summary", "description"}


def test_there_are_two_dashboards_whose_panels_do_not_overlap() -> None:
    assert [file.stem for file in DASHBOARDS] == ["requests", "speculation"]
    for file in DASHBOARDS:
        panels = json.loads(file.read_text("utf-8"))["panels"]
        cells = [
            (column, row)
            for place in (panel["gridPos"] for panel in panels)
            for column in range(place["x"], place["x"] + place["w"])
            for row in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells)) and max(column for column, _ in cells) < 24
        assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_dashboard_of_speculation_answers_what_drafts_bring_and_why_they_are_missing() -> None:
    titles = {panel["title"] for panel in json.loads(DASHBOARDS[1].read_text("utf-8"))["panels"]}
    wanted = {"Acceptance", "Tokens per step", "Drafts refused or missing", "Measured over predicted round time"}
    assert wanted <= titles


def test_the_chart_installs_the_same_rules_and_dashboards() -> None:
    rendered = render_ci("two-by-eight")
    assert rendered.one("PrometheusRule")["spec"] == RULES
    for file in DASHBOARDS:
        data = rendered.one("ConfigMap", f"dashboard-{file.stem}")["data"]
        assert json.loads(data[f"pilotfish-{file.name}"]) == json.loads(file.read_text("utf-8"))


def test_pilotfish_metrics_are_read_at_one_place_and_rays_at_every_pod() -> None:
    rendered = render_ci("two-by-eight")
    service, monitor = rendered.one("Service", "-metrics"), rendered.one("ServiceMonitor")["spec"]
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "head"
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["endpoints"][0]["path"] == "/metrics"
    (endpoint,) = rendered.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    for template in rendered.pod_templates.values():
        assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
