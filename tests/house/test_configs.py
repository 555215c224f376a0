"""The ready files in configs/ are right, and what starts them elsewhere names what is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from peers.cli import main as cli
from peers.config.peer_file import OTHER_METRICS_PORTS, MetricsFile, PeerFile, load
from peers.config.quantities import byte_count
from peers.tools.owner.run_check import check_file

CONFIGS = Path(__file__).parents[2] / "configs"
DEPLOYMENT = {"compose.yaml", "kubernetes.yaml", "kustomization.yaml"}
"""What is not ours to check as a peer file."""
FILES = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name not in DEPLOYMENT)
MOUNT = "/etc/swarmnet/"
RUN = "5a" * 32
BOOTSTRAP = "/dns4/bootstrap/tcp/31330/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
PORT = re.compile(r"(?:/tcp/|:)(\d+)$")


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_right(name: str) -> None:
    said = check_file(CONFIGS / name, {}, {})
    assert ": ok, " in said
    assert ("run file" in said) == name.endswith("-run.yaml")


@pytest.mark.parametrize("name", FILES)
def test_every_file_begins_with_what_it_is_for(name: str) -> None:
    first, second = (CONFIGS / name).read_text().splitlines()[:2]
    assert first.startswith("# ")
    assert len(first) > 20
    assert second


def test_there_is_a_file_for_every_role() -> None:
    held = {load(CONFIGS / name).role for name in FILES if not name.endswith("-run.yaml")}
    assert held == set(PeerFile.model_fields["role"].annotation.__args__)


def ports_of(config: PeerFile) -> set[int]:
    """Fixed ports that the peer listens on, for peers and for people."""
    addresses = [*config.listen, config.metrics.listen]
    if config.role == "observer":
        addresses.append(config.observer.listen)
    return {int(found[1]) for address in addresses if (found := PORT.search(address))}


def started(command: list[str], environment: dict[str, str]) -> PeerFile:
    """The peer that `swarmnet COMMAND` would start there."""
    name, file = command
    commands = typer.main.get_command(cli.application()).commands
    assert name in commands
    assert file.startswith(MOUNT)
    assert (CONFIGS / file.removeprefix(MOUNT)).is_file()
    return load(CONFIGS / file.removeprefix(MOUNT), environment)


def read(name: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(CONFIGS / name))


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("-run.yaml")])
def test_no_ready_file_takes_a_port_that_a_second_peer_of_the_machine_may_have(name: str) -> None:
    config = load(CONFIGS / name)
    if config.role != "worker":
        assert not ports_of(config) & {MetricsFile().address[1], *OTHER_METRICS_PORTS}


# Compose.


def filled(text: str) -> str:
    """As compose fills in ${NAME:-default}."""
    found = {"RUN": RUN, "BOOTSTRAP": BOOTSTRAP}
    return re.sub(r"\$\{(\w+)(?::-[^}]*)?\}", lambda match: found[match[1]], text)


SERVICES: dict[str, dict[str, Any]] = read("compose.yaml")[0]["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_starts_a_peer_of_its_role_from_a_file_that_it_mounts(name: str) -> None:
    service = SERVICES[name]
    environment = {key: filled(value) for key, value in service.get("environment", {}).items()}
    config = started(service["command"], environment)
    assert config.role == ("worker" if name == "gpu" else name)
    if config.role != "bootstrap":
        assert (config.run, config.bootstrap) == (RUN, (BOOTSTRAP,))
    file = service["command"][1]
    assert f"./{Path(file).name}:{file}:ro" in service["volumes"]
    for port in service.get("ports", ()):
        assert int(port.rpartition(":")[2]) in ports_of(config)
    assert int(service["stop_grace_period"].removesuffix("s")) > config.drain_seconds
    assert (CONFIGS / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_services_that_may_be_copied_share_no_state() -> None:
    volumes = read("compose.yaml")[0]["volumes"]
    kept = [volume for service in SERVICES.values() for volume in service["volumes"] if ":/state" in volume]
    assert sorted(volume.partition(":")[0] for volume in kept) == sorted(volumes)
    assert not [volume for volume in SERVICES["worker"]["volumes"] if ":/state" in volume]


def test_the_image_is_made_of_what_is_there() -> None:
    text = (CONFIGS / "Dockerfile").read_text()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (.*)$", text, re.MULTILINE)]
    assert {path for paths in copied for path in paths} >= {
        "swarmnet",
        "protocols",
        "peers",
        "pyproject.toml",
    }
    assert all((CONFIGS.parent / path).exists() for paths in copied for path in paths)


def test_the_image_takes_its_extras_from_a_build_argument_and_needs_no_compiler_by_default() -> None:
    text = (CONFIGS / "Dockerfile").read_text()
    found = re.search(r"^ARG EXTRAS=([\w,]+)$", text, re.MULTILINE)
    assert found is not None
    extras = set(found[1].split(","))
    known = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"lan"} <= extras <= set(known) - {"libp2p"}, "that one is compiled"


@pytest.mark.parametrize(
    ("extras", "done"),
    [
        ("lan,gpu", ["setup lan,gpu"]),
        ("", ["setup"]),
        ("lan,libp2p", [
            "apt-get update",
            "apt-get install --yes --no-install-recommends build-essential libgmp-dev",
            "setup lan,libp2p",
        ]),
    ],
)  # fmt: skip
def test_the_image_installs_them_and_a_compiler_where_that_is_needed(extras: str, done: list[str]) -> None:
    text = (CONFIGS / "Dockerfile").read_text().replace("\\\n", "")
    commands = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    said = "".join(f'{name}() {{ echo "{name} $*"; }}\n' for name in ("setup", "apt_get", "useradd", "rm"))
    script = said + "\n".join(commands).replace("apt-get", "apt_get").replace("scripts/setup", "setup")
    ran = subprocess.run(
        ["/bin/sh", "-eu", "-c", script], env={"EXTRAS": extras}, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.replace("apt_get", "apt-get").rstrip() for line in ran.stdout.splitlines()]
    assert [line for line in lines if line.startswith(("setup", "apt-get"))] == done


def test_the_image_is_built_on_a_base_that_no_tag_can_be_moved_away_from() -> None:
    bases = re.findall(r"^FROM (\S+)", (CONFIGS / "Dockerfile").read_text(), re.MULTILINE)
    assert bases
    assert all(re.fullmatch(r"python:3\.1[123]-slim@sha256:[0-9a-f]{64}", base) for base in bases)


# Kubernetes.

OBJECTS = read("kubernetes.yaml")
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]["spec"]
    for each in OBJECTS
    if each["kind"] in ("Deployment", "StatefulSet")
}


def variables(container: dict[str, Any]) -> dict[str, str]:
    """The container's environment, with what the cluster fills in."""
    known = {"run": RUN, "bootstrap": f"[{BOOTSTRAP}]"}
    found = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            found[variable["name"]] = known[source["configMapKeyRef"]["key"]]
        else:
            found[variable["name"]] = variable.get("value", "swarmnet-worker-0")
    return found


@pytest.mark.parametrize("name", PODS)
def test_a_pod_starts_a_peer_of_its_role_that_can_be_watched_and_takes_its_leave(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    config = started(container["args"], variables(container))
    assert config.role == name.removeprefix("swarmnet-")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(ports.values()) <= ports_of(config)
    for probe in ("livenessProbe", "readinessProbe"):
        if probe in container:
            assert container[probe]["httpGet"]["port"] in ports
            assert container[probe]["httpGet"]["path"] in ("/healthz", "/readyz")
    reachable = [config.metrics.listen, config.observer.listen]
    probed = ports[container["livenessProbe"]["httpGet"]["port"]]
    assert f"0.0.0.0:{probed}" in reachable, "the cluster probes from outside of the pod"
    assert pod.get("terminationGracePeriodSeconds", 30) > config.drain_seconds
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    there = {volume["name"] for volume in pod["volumes"]}
    assert mounted - there <= ({"state"} if name == "swarmnet-worker" else set())


def test_services_and_pods_fit() -> None:
    contributors = [each["spec"] for each in OBJECTS if each["kind"] in ("Deployment", "StatefulSet")]
    labels = {spec["template"]["metadata"]["labels"]["app"] for spec in contributors}
    for each in OBJECTS:
        if each["kind"] == "Service":
            app = each["spec"]["selector"]["app"]
            assert app in labels
            (container,) = PODS[app]["containers"]
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert all(ports[port["name"]] == port["port"] for port in each["spec"]["ports"])


def test_the_cluster_gets_the_files_that_its_pods_read() -> None:
    (files,) = (made["files"] for made in read("kustomization.yaml")[0]["configMapGenerator"])
    used = {pod["containers"][0]["args"][1].removeprefix(MOUNT) for pod in PODS.values()}
    assert set(files) == used
    assert read("kustomization.yaml")[0]["resources"] == ["kubernetes.yaml"]


def test_kubectl_puts_it_together() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(
        ["kubectl", "kustomize", str(CONFIGS)], capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    (held,) = (each for each in YAML(typ="safe").load_all(made.stdout) if each["kind"] == "ConfigMap")
    assert held["data"]["lab-node.yaml"] == (CONFIGS / "lab-node.yaml").read_text()
    assert held["metadata"]["name"] != "swarmnet-files", (
        "named by its content, so that a change restarts pods"
    )
    assert made.stdout.count(f"name: {held['metadata']['name']}\n") == 1 + len(PODS)


# systemd.

UNIT = CONFIGS / "systemd" / "swarmnet@.service"
USER_UNIT = CONFIGS / "swarmnet.service"
UNITS = {UNIT: "lab-node.yaml", USER_UNIT: "worker.yaml"}
"""Each with a ready peer file that it may start."""


def settings(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_peer_file_and_lets_it_take_its_leave(unit: Path) -> None:
    found, config = settings(unit), load(CONFIGS / UNITS[unit])
    program, command, file = found["ExecStart"].split()
    assert Path(program).name == "swarmnet"
    assert (command, Path(file).suffix) == ("run", ".yaml")
    assert int(found["TimeoutStopSec"]) > config.drain_seconds
    assert found["Restart"] == "on-failure"
    assert int(found["RestartPreventExitStatus"]) == cli.ERROR_EXIT


def test_the_unit_of_a_machine_makes_the_folder_of_its_state() -> None:
    folder = settings(UNIT)["StateDirectory"]
    assert str(load(CONFIGS / "lab-node.yaml").state).startswith(f"/var/lib/{folder}/")


@pytest.mark.parametrize(("unit", "manager"), [(UNIT, "--system"), (USER_UNIT, "--user")])
def test_systemd_understands_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: Path, manager: str
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
    named = str(tmp_path / unit.name.replace("@", "@node-07"))
    done = subprocess.run(
        ["systemd-analyze", manager, "verify", "--man=no", named],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_gaming_computer_leaves_room() -> None:
    limits = load(CONFIGS / "gaming-gpu.yaml").limits
    assert limits.memory == byte_count("8GiB")
    assert limits.upload == 20e6 / 8
    assert limits.only_when_idle
