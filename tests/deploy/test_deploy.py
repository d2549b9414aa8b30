"""Alerts, dashboard, compose file, manifest and workflows, checked as far as it goes without containers.

Not run here: the image, compose, Kubernetes and Grafana, of which packages bring the published schemas.
Prometheus is Debian's, real.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import httpx
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from asynchicache.cli.commands import find_commands
from asynchicache.cli.options import ServeOptions
from asynchicache.cli.parser import build_parser
from engines import Server, executable, free_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
TRIED = Path(__file__).with_name("alerts_test.yml")
METRIC = re.compile(r"asynchicache_\w+")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads((DEPLOY / "grafana" / "asynchicache.json").read_text())["panels"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.mark.engine("prometheus")
def test_each_alert_fires_in_trouble_and_none_on_a_healthy_replica():
    promtool = executable("promtool")
    for verb, file in (("check", ALERTS), ("test", TRIED)):
        done = run([promtool, verb, "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried_and_leads_to_its_page_of_the_runbook():
    trials = [one for test in yaml.safe_load(TRIED.read_text())["tests"] for one in test["alert_rule_test"]]
    fires = {one["alertname"] for one in trials if one.get("exp_alerts")}
    quiet = {one["alertname"] for one in trials if not one.get("exp_alerts")}
    runbook = (ROOT / "docs" / "howto" / "runbook.md").read_text()
    titles = re.findall(r"^## (.+)$", runbook, re.M)
    anchors = {title.lower().replace(",", "").replace(" ", "-") for title in titles}
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/howto/runbook.md"
        assert anchor in anchors, anchor
        assert rule["alert"] in fires & quiet


def test_alerts_and_dashboard_ask_for_documented_metrics():
    documented = set(METRIC.findall((ROOT / "docs" / "reference" / "metrics.md").read_text()))
    for query in [*queries(), *(rule["expr"] for rule in rules())]:
        asked = {name.removesuffix("_bucket") for name in METRIC.findall(query)}
        assert asked, query
        assert asked <= documented, asked - documented


WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


@pytest.mark.parametrize(
    ("command", "files"),
    [
        (["check_jsonschema", "--builtin-schema", "vendor.compose-spec"], [DEPLOY / "compose.yaml"]),
        (["check_jsonschema", "--builtin-schema", "vendor.github-workflows"], WORKFLOWS),
        (["check_jsonschema", "--builtin-schema", "custom.github-workflows-require-timeout"], WORKFLOWS),
        (["kubernetes_validate", "--strict"], [DEPLOY / "kubernetes.yaml"]),
    ],
)
def test_files_of_others_are_as_their_published_schemas_say(command: list[str], files: list[Path]):
    done = run([sys.executable, "-m", *command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What of ours is not in theirs, which may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            bad
            for name in ours
            for bad in (lost(ours[name], theirs[name], f"{path}.{name}") if name in theirs else [path + name])
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [bad for one, other in zip(ours, theirs, strict=True) for bad in lost(one, other, f"{path}[]")]
    return [] if ours == theirs else [path]


def test_grafanas_own_classes_know_all_of_the_dashboard():
    """They are made from Grafana's schema, and drop what is not in it."""
    register_default_plugins()
    ours = json.loads((DEPLOY / "grafana" / "asynchicache.json").read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    assert lost(ours, read) == []
    assert lost(ours | {"widgets": []}, read) == ["widgets"]


def test_panels_do_not_overlap_and_each_has_its_source():
    cells = set[tuple[int, int]]()
    for panel in panels():
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine, panel["title"]
        assert max(x for x, _ in mine) < 24
        cells |= mine
        assert panel["type"] == "timeseries"
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["legendFormat"] and target["refId"] for target in panel["targets"])
    assert len({panel["id"] for panel in panels()}) == len(panels())


@pytest.mark.engine("prometheus")
def test_prometheus_answers_each_query_of_the_dashboard(tmp_path: Path):
    """A real server under a real Prometheus, which understands each query and finds each metric."""
    prometheus = executable("prometheus")
    port, mine = free_port(), free_port()
    store = ["--storage-path", tmp_path / "pages", "--threads", "1"]
    command = [sys.executable, "-m", "asynchicache", "serve", "--port", str(port), *store]
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "serve", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    watch = [
        prometheus,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'series'}",
        f"--web.listen-address=127.0.0.1:{mine}",
    ]
    with (
        Server(command, ready="listening on http"),
        Server(watch, ready="ready to receive web requests", port=mine),
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        prompt = {"model": "tiny", "prompt": "A conversation that comes back. " * 20, "max_tokens": 1}
        for _ in range(3):
            assert http.post(f"http://127.0.0.1:{port}/v1/completions", json=prompt).status_code == 200
        exported = set(METRIC.findall(http.get(f"http://127.0.0.1:{port}/metrics").text))
        api = f"http://127.0.0.1:{mine}/api/v1"
        while not _ask(http, f"{api}/query", query="count_over_time(asynchicache_cache[1h]) >= 2"):
            pass  # each question takes a while by itself; rates need two samples
        for query in queries():
            missing = {name for name in METRIC.findall(query) if name not in exported}
            assert not missing, missing
            _ask(http, f"{api}/query", query=query.replace("$instance", ".*"))
        full = next(query for query in queries() if 'state="free"' in query)
        assert _ask(http, f"{api}/query", query=full.replace("$instance", ".*")), "slots are there"
        health = http.get(f"{api}/rules").json()["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in health} <= {"ok", "unknown"}, health


def _ask(http: httpx.Client, url: str, **parameters: str) -> list[Any]:
    answer = http.get(url, params=parameters).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def served() -> list[Any]:
    """By who starts the server: its arguments, and the seconds it may take to end."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["serve"]
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in compose["command"]]
    manifest = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    deployment = next(one for one in manifest if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    return [
        pytest.param(words, float(compose["stop_grace_period"].removesuffix("s")), id="compose"),
        pytest.param(pod["containers"][0]["args"], pod["terminationGracePeriodSeconds"], id="kubernetes"),
    ]


@pytest.mark.parametrize(("arguments", "grace"), served())
def test_serve_takes_the_arguments_and_ends_in_the_time_that_it_is_given(arguments: list[str], grace: float):
    options = build_parser(find_commands()).parse_args(["serve", *arguments])
    assert options.storage == "redis"
    drain = ServeOptions().drain_seconds if options.drain_seconds is None else options.drain_seconds
    assert grace >= 2 * drain, "after the requests end, what only memory has is written"


def test_what_compose_mounts_is_there_and_goes_where_it_is_looked_for():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = [
        re.sub(r"\$\{\w+:-(.*?)\}", r"\1", one)
        for each in services.values()
        for one in each.get("volumes", [])
    ]
    assert len(mounts) >= 4
    assert [mount for mount in mounts if not (DEPLOY / mount.split(":")[0]).exists()] == []
    provided = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/asynchicache.yaml").read_text())
    (folder,) = (one["options"]["path"] for one in provided["providers"])
    assert any(mount.split(":")[1].startswith(folder) for mount in mounts)


def test_the_image_has_what_the_arguments_need():
    image = (DEPLOY / "Containerfile").read_text()
    copied = re.findall(r"^COPY (.+) \S+$", image, re.M)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
    extras = re.search(r"'\.\[(.+)\]'", image)
    assert extras is not None
    known = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    assert set(extras[1].split(",")) <= known
