"""A real Prometheus with the shipped files: the rules are right, every expression finds data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from swarm_scene import RUN

from peers.config.peer_file import load
from peers.config.run_file import publish
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start
from peers.telemetry.metrics import ROLES, PeerMetrics, declared_metrics, of_role
from peers.telemetry.snapshot import SwarmSnapshot
from protocols.signed.identity import load_or_create

SHIPPED = Path(__file__).parents[3] / "configs" / "observability"
DASHBOARDS = sorted((SHIPPED / "grafana").glob("*.json"))
PATIENCE_SECONDS = 160.0
"""For everything to have started and every expression to find data; 25 s on an idle machine."""
NEEDS = ("prometheus", "promtool")
MISSING = next((tool for tool in NEEDS if shutil.which(tool) is None), None)
needs_prometheus = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING} is not installed")
COMPARED = re.compile(r"\s*(==|!=|>=|<=|>|<)\s*(?:bool\s+)?-?[0-9][0-9.e]*")
VARIABLES = {"$__rate_interval": "15s", "$instance": ".*", "$run": ".*", "$stage": ".*", "$__interval": "5s"}
SERIES = re.compile(r"\b((?:swarmnet|process)_\w+)(?:\{([^}]*)\})?")
"""A series of an expression, and what it selects by."""
SELECTS = re.compile(r'(\w+)(?:=~|!=|!~|=)"([^"]*)"')
GROUPS = re.compile(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)")
OF_TARGETS = {"run": (), "instance": (), "job": ()}
"""Labels of every series; no values: any."""


def panels(dashboard):
    return json.loads(dashboard.read_text())["panels"]


def panel_expressions():
    """(dashboard: panel, expression as Prometheus gets it)."""
    found = []
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expression = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                found.append((f"{dashboard.stem}: {panel['title']}", expression))
    return found


def alerts():
    rules = YAML(typ="safe").load((SHIPPED / "alerts.yml").read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


def of_others(expression):
    """Whether it can only find data where there is a GPU: others have no such series."""
    return "swarmnet_gpu_" in expression


def alert_expressions():
    """Without what they compare with: an alert that is silent must not be silent for want of a series."""
    return [(f"alert {rule['alert']}", COMPARED.sub("", rule["expr"])) for rule in alerts()]


@cache
def all_series():
    """Every series that a peer or an observer can have -> its labels, each with its values; none: any."""
    from peers.stageless.observer.swarm_metrics import SHOWN

    found = dict.fromkeys(("process_resident_memory_bytes", "process_cpu_seconds_total"), OF_TARGETS)
    for metric in (*declared_metrics(), *(shown.declared for shown in SHOWN)):
        labels = OF_TARGETS | {label.name: label.values for label in metric.labels}
        if metric.kind == "histogram":
            found |= {f"{metric.name}_bucket": labels | {"le": ()}}
            found |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
        else:
            found[metric.name] = labels
    return found


def wrong_names(expression, shown=""):
    """Series and labels, of an expression and the text beside it, that do not exist; and values of labels."""
    known, wrong, labels = all_series(), [], set(OF_TARGETS)
    for name, selector in SERIES.findall(expression):
        of_series = known.get(name)
        if of_series is None:
            wrong.append(name)
            continue
        labels |= of_series.keys()
        for label, value in SELECTS.findall(selector):
            values = of_series.get(label, ("no such label",))
            if value != f"${label}" and values and not set(value.split("|")) <= set(values):
                wrong.append(f"{name}{{{label}={value}}}")
    named = {label for group in GROUPS.findall(expression) for label in re.findall(r"\w+", group)}
    named |= set(re.findall(r"\$labels\.(\w+)", shown)) | set(re.findall(r"\{\{(\w+)\}\}", shown))
    return wrong + sorted(named - labels)


# -- without a swarm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_complete_json_that_asks_only_for_series_that_exist(dashboard):
    data = json.loads(dashboard.read_text())
    assert data["uid"].startswith("swarmnet-")
    names = {variable["name"] for variable in data["templating"]["list"]}
    assert {"datasource", "run", "instance"} <= names
    assert ("stage" in names) == (dashboard.stem == "overview")
    assert len({panel["id"] for panel in data["panels"]}) == len(data["panels"]) > 10
    for panel in data["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= names
            assert wrong_names(target["expr"], target["legendFormat"]) == [], panel["title"]
            for name, selector in SERIES.findall(target["expr"]):
                assert 'run=~"$run"' in selector, f"{panel['title']}: {name} of every run"


def test_names_that_do_not_exist_are_found():
    good = 'sum by (run, way) (swarmnet_network_reachable{run=~"$run",way="none"})'
    assert wrong_names(good, "{{way}}") == []
    assert wrong_names(good.replace("none", "nobody")) == ["swarmnet_network_reachable{way=nobody}"]
    assert wrong_names(good.replace("run, way", "run, road"), "{{path}}") == ["path", "road"]
    assert wrong_names(good.replace("_reachable", "_reached")) == ["swarmnet_network_reached", "way"]


def test_a_panel_that_may_lack_data_says_why():
    """Series that a peer has only from their first value on; or only above 0."""
    from peers.stageless.observer.swarm_metrics import SwarmMetrics

    nothing_known = SwarmMetrics(lambda: SwarmSnapshot("", 0.0)).text()
    texts = [*(PeerMetrics(role).text() for role in ROLES), nothing_known]
    always = set(re.findall(r"^(\w+)", b"".join(texts).decode(), re.MULTILINE))
    lacking = set()
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            asked = [target["expr"] for target in panel["targets"]]
            seen = [name for text in asked if "> 0" not in text for name, _ in SERIES.findall(text)]
            if not set(seen) & always:
                lacking.add(f"{dashboard.stem}: {panel['title']}")
                assert panel["fieldConfig"]["defaults"].get("noValue"), f"{dashboard.stem}: {panel['title']}"
    assert {"overview: Time left", "peer: GPU power", "peer: Loss"} <= lacking


def test_one_page_of_twelve_panels_is_enough_to_begin_with_and_all_together_are_about_forty():
    counts = {dashboard.stem: len(panels(dashboard)) for dashboard in DASHBOARDS}
    assert counts["overview"] == 12
    assert sum(counts.values()) <= 45


def test_panels_do_not_lie_over_each_other():
    for dashboard in DASHBOARDS:
        taken = set()
        for panel in panels(dashboard):
            place = panel["gridPos"]
            cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
            assert not cells & taken, f"{dashboard.stem}: {panel['title']}"
            taken |= cells


def test_alerts_name_series_that_exist_and_say_what_helps():
    wanted = {
        "PeerStuck", "NoFirstRound", "PeerAlone", "StageThin", "LossNotFinite", "RoundLag", "NoCheckpoint",
        "BootstrapDown", "ClockOffset", "UpdatesRejected", "DiskLow", "DhtSplit", "PeerUnreachable",
        "NoFirstCheckpoint", "ArchiveStandsStill",
    }  # fmt: skip
    assert wanted <= {rule["alert"] for rule in alerts()}
    for rule in alerts():
        assert wrong_names(rule["expr"], " ".join(rule["annotations"].values())) == [], rule["alert"]
        for group in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            assert group.startswith("run"), f"{rule['alert']} does not say of which run"
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "help"}


def test_what_is_compared_is_cut_off_and_nothing_else():
    cut = 'sum(a{reason!="busy",code=~"x|y"}) / clamp_min(b, 0.1) > 0.2 and on (instance) c == 1'
    assert COMPARED.sub("", cut) == (
        'sum(a{reason!="busy",code=~"x|y"}) / clamp_min(b, 0.1) and on (instance) c'
    )
    assert COMPARED.sub("", "time() - a > 2e9") == "time() - a"


def test_the_configuration_scrapes_every_ready_role_at_its_port():
    """A role without a target would have alerts that never fire, and look healthy."""
    jobs = YAML(typ="safe").load((SHIPPED / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in jobs for static in job["static_configs"] for target in static["targets"]}
    files = [path for path in SHIPPED.parent.glob("*.yaml") if re.search(r"^role:", path.read_text(), re.M)]
    ready = {config.role: config for config in map(load, (*files, SHIPPED.parent / "worker.yaml"))}
    assert ready.keys() == {"worker", "reducer", "bootstrap", "observer", "archivist"}
    ports = {f"127.0.0.1:{config.metrics.address[1]}" for config in ready.values()}
    assert len(ports) == len(ready)
    assert targets == ports | {ready["observer"].observer.listen}


@needs_prometheus
def test_promtool_finds_nothing_to_say_of_the_rules_and_the_configuration():
    for what, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            ["promtool", "check", what, SHIPPED / file], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout


@needs_prometheus
@pytest.mark.parametrize("role", ROLES)
def test_promtool_finds_nothing_to_say_of_any_declared_metric(role):
    assert linted(of_role(role).text()) == ""


def linted(text):
    """What promtool says of a scrape; empty: nothing."""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    return (done.stdout + done.stderr).decode() if done.returncode or done.stdout or done.stderr else ""


# -- with one ---------------------------------------------------------------------------------------------


def get(url, seconds=10.0):
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        return answer.read()


class Watched:
    """A bootstrap, a worker for each of two stages, an archivist, an observer that also evaluates, and a
    Prometheus that scrapes all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: list[DemoPeer] = []
        self.prometheus: asyncio.subprocess.Process | None = None
        self.until = time.monotonic() + PATIENCE_SECONDS
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def peer(self, name, **keys):
        keys = {"run": "run.json", **LOOPBACK, **keys}
        if "metrics" not in keys:
            keys["metrics"] = {"listen": "127.0.0.1:0"}
        peer = await start(self.folder, name, keys)
        self.peers.append(peer)
        await peer.until_listening()
        return peer

    async def said(self, peer, pattern):
        """The first group of the first line of a peer that fits."""
        while True:
            for line in peer.said:
                found = re.search(pattern, line)
                if found:
                    return found[1]
            self.check(f"{peer.name} says {pattern}: {list(peer.said)[-3:]}")
            await asyncio.sleep(0.2)

    def check(self, what):
        assert time.monotonic() < self.until, f"not within {PATIENCE_SECONDS:g} s: {what}"

    async def begin(self):
        file = self.folder / "run.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in RUN.items()))
        publish(file, load_or_create(self.folder / "owner.key"), self.folder / "run.json")
        self.training = {
            "in_flight": 2, "slots": 8, "checkpoint_seconds": 2, "compute_duty_cycle": 0.25,
            "metrics": {"listen": "127.0.0.1:0", "peak_flops": 1e12},
        }  # fmt: skip
        boot = await self.peer("bootstrap", role="bootstrap")
        through = {"bootstrap": boot.addresses}
        self.training |= through
        first = await self.peer("peer-0", stage=0, **self.training)
        other = await self.peer("peer-1", stage=1, **self.training)
        keeps = {"archive": str(self.folder / "archive"), "archiving": {"seconds": 1.0}}
        archivist = await self.peer("archivist", role="archivist", **through, **keeps)
        pattern = r"metrics at http://([\d.:]+)/metrics"
        self.metrics = [await self.said(peer, pattern) for peer in (first, boot, archivist, other)]
        (self.folder / "held-out.txt").write_text("What nobody trains on. " * 20)
        self.observing = {
            "role": "observer", **through, "observer": {"listen": "127.0.0.1:0", "targets": self.metrics[3:]},
            "evaluating": {"text": "held-out.txt", "seconds": 5},
        }  # fmt: skip
        observer = await self.peer("observer", **self.observing)
        self.metrics.append(await self.said(observer, pattern))
        self.page = await self.said(observer, r"http://([\d.:]+)(?!.*/metrics)")
        await self.scrape()

    async def scrape(self):
        """The shipped files, with this swarm's addresses and a scrape every second."""
        text = (SHIPPED / "prometheus.yml").read_text()
        worker, boot, archivist, _, observer = self.metrics
        changes = {
            "127.0.0.1:9420": self.page, "127.0.0.1:9410": worker, "127.0.0.1:9412": observer,
            "127.0.0.1:9413": archivist, "127.0.0.1:9411": boot, ": 15s": ": 1s",
            "refresh_interval: 1m": "refresh_interval: 5s",
            "          - 127.0.0.1:9414    # reducer.yaml\n": "",
        }  # fmt: skip
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (self.folder / "prometheus.yml").write_text(text)
        shutil.copy(SHIPPED / "alerts.yml", self.folder)
        nowhere = asyncio.subprocess.DEVNULL
        self.prometheus = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={self.folder / 'prometheus.yml'}", "--log.level=warn",
            f"--storage.tsdb.path={self.folder / 'data'}", f"--web.listen-address={self.url[7:]}",
            stdin=nowhere, stdout=nowhere, stderr=nowhere,
        )  # fmt: skip

    async def ask(self, path, **query):
        """Prometheus' answer; None while it does not serve yet."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            return json.loads(await asyncio.to_thread(get, url))["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        except urllib.error.URLError:
            return None

    async def until_data(self, expressions):
        """Ask until each returns something that is a number."""
        waiting = dict(expressions)
        while waiting:
            self.check(f"no data for {sorted(waiting)}")
            for name, expression in list(waiting.items()):
                data = await self.ask("query", query=expression)
                if data is not None and any(sample["value"][1] != "NaN" for sample in data["result"]):
                    del waiting[name]
            await asyncio.sleep(1.0)

    async def until_scraped(self):
        """The targets, once each was scraped under the labels that it has now: the observer gives them the
        run's name as soon as it knows it, and then they are new ones."""
        while True:
            targets = (await self.ask("targets"))["activeTargets"]
            waiting = [target["scrapeUrl"] for target in targets if target["health"] == "unknown"]
            if not waiting:
                return targets
            self.check(f"not scraped yet: {waiting}")
            await asyncio.sleep(0.2)

    async def end(self):
        if self.prometheus is not None:
            self.prometheus.terminate()
            await asyncio.wait_for(self.prometheus.wait(), 20.0)
        await asyncio.gather(*(peer.stop(60.0) for peer in self.peers))


@pytest.mark.parametrize("found", [[], [{"value": [0, "NaN"]}]])
async def test_an_expression_without_data_fails_by_its_name(tmp_path, found):
    async def answers(_path, query):
        return {"result": [{"value": [0, "1"]}] if query == "good" else found}

    watched = Watched(tmp_path)
    watched.until = time.monotonic() + 0.5
    watched.ask = answers
    with pytest.raises(AssertionError, match=r"no data for \['bad one'\]"):
        await watched.until_data([("good one", "good"), ("bad one", "bad")])


async def top_shows_it(watched):
    """One frame each of a running peer and of the directory, by the real command."""
    address = watched.peers[0].addresses[0]
    for arguments in (
        [watched.peers[2].state],
        ["--run", watched.folder / "run.json", "--bootstrap", address],
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "peers.cli.main", "top", *map(str, arguments),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), 60.0)
        finally:
            if process.returncode is None:
                process.kill()
        text = out.decode()
        assert process.returncode == 0, err.decode()
        assert "stages   0:█ 1  1:█ 1" in text, text
        assert re.search(r"round \d+ \(settled \d+\)", text), text
        assert re.search(r"1 peer-1( \(here\))? +training", text), text
        assert "\x1b" not in text


async def shown(watched, what, good):
    """The page's numbers, once the observer has read the directory and they are `good`."""
    while True:
        with contextlib.suppress(urllib.error.URLError):
            swarm = json.loads(await asyncio.to_thread(get, f"http://{watched.page}/swarm.json"))
            if swarm.get("walked_at") and good(swarm):
                return swarm
        watched.check(what)
        await asyncio.sleep(0.2)


def contributed(swarm):
    """The tokens that each contributor claims."""
    return {peer: tokens for peer, _name, _confirmed, tokens, _seconds in swarm["contributors"]}


async def a_restart_of_the_observer_loses_nothing(watched):
    """A worker restarts before, so that its record counts from 0 again: only the observer knows the rest."""
    worker, observer = watched.peers[2], watched.peers[4]
    await worker.stop(60.0)
    await watched.peer("peer-1", stage=1, **watched.training)
    before = await shown(
        watched, "the worker is back", lambda swarm: len(swarm["contributors"]) == 2 and any(
            row["peer"] == worker.peer_id and row["tokens"] < contributed(swarm)[row["peer"]] / 2
            for row in swarm["rows"]
        ),
    )  # fmt: skip
    await observer.stop(60.0)
    await watched.peer("observer", **watched.observing | {"observer": {"listen": watched.page}})
    after = await shown(watched, "the observer is back", lambda swarm: swarm["finalized_tokens"])
    assert all(contributed(after).get(peer, 0) >= tokens for peer, tokens in contributed(before).items())
    assert after["finalized_tokens"] >= before["finalized_tokens"] > 0
    assert len(after["curve"]["at"]) >= len(before["curve"]["at"]) > 1


@pytest.mark.loopback
@pytest.mark.slow
@needs_prometheus
@pytest.mark.timeout(240)
async def test_every_expression_of_every_panel_and_alert_finds_data_in_a_running_swarm(tmp_path):
    expressions = [*panel_expressions(), *alert_expressions()]
    numbered = [
        (f"{number} {name}", text) for number, (name, text) in enumerate(expressions) if not of_others(text)
    ]
    assert len(numbered) > 75
    elsewhere = {name: text for name, text in expressions if of_others(text)}
    assert elsewhere.keys() == {"peer: GPU load and memory", "peer: GPU power", "alert GpuHot"}
    watched = Watched(tmp_path)
    try:
        await watched.begin()
        await watched.until_data(numbered)
        for name, text in elsewhere.items():  # Nothing, and no 0.
            assert (await watched.ask("query", query=text))["result"] == [], name
        groups = (await watched.ask("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) == len(alerts())
        assert {
            rule["name"]: rule.get("lastError") for rule in rules if rule["health"] not in ("ok", "unknown")
        } == {}
        targets = await watched.until_scraped()
        assert {
            target["scrapeUrl"]: target["lastError"] for target in targets if target["health"] != "up"
        } == {}
        assert len(targets) == 6, "four by their ports, one by the observer's /sd, and the observer's page"
        run_id = json.loads((watched.folder / "run.json").read_text())["run_id"]
        others = f'count by (job, instance) ({{__name__=~"swarmnet_.+|process_.+",run!="{run_id}"}})'
        assert (await watched.ask("query", query=others))["result"] == [], "a series that names no run"
        await top_shows_it(watched)
        for address in (*watched.metrics, watched.page):
            assert linted(await asyncio.to_thread(get, f"http://{address}/metrics")) == "", address
        await a_restart_of_the_observer_loses_nothing(watched)
    finally:
        await watched.end()
