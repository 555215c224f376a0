"""The peer file: what a person types to start one peer. Loading it, with file and line in every error."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from peers.config.atomic_files import is_file
from peers.config.compute_file import ComputeFile, DeviceName
from peers.config.limits import LimitsFile
from peers.config.quantities import (
    BootstrapMultiaddr,
    ByteCount,
    HostAndPort,
    HostName,
    Multiaddr,
    Seconds,
    at_least_bytes,
    split_host_and_port,
)
from peers.config.schema import Shown
from peers.config.validation import validate
from peers.config.yaml_lines import Typed, overlay, read
from peers.errors import ConfigError, UserError
from swarmnet.identifiers import RunId
from swarmnet.run.manifest import MethodName

__all__ = ["ConfigError", "DemoOptions", "MetricsFile", "PeerFile", "UserError", "default_state", "load"]

ENVIRONMENT_PREFIX = "SWARMNET__"

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _resolve(path: Path, info: ValidationInfo) -> Path:
    """Relative paths are relative to the file they are typed in; `~` is the home folder."""
    folder = info.context.get("folder") if isinstance(info.context, dict) else None
    try:
        path = path.expanduser()
    except RuntimeError:  # What pydantic does not know as a mistake.
        raise ValueError(f"{str(path)!r}: nobody of that name has a home here; write it in full") from None
    return folder / path if isinstance(folder, Path) else path


def _run(value: str, info: ValidationInfo) -> str:
    if is_run_id(value):
        return value
    path = _resolve(Path(value), info)
    try:
        there = is_file(path)
    except UserError as error:
        raise ValueError(str(error)) from None
    if not there:
        raise ValueError(
            f"{value!r} is neither a run id (64 hexadecimal digits) nor a published run file ({path} is not "
            "there; paths are relative to the peer file)"
        )
    return str(path)


def _stage(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"is {value!r}; expected a stage (0, 1, ...) or auto")


def _invite(text: str) -> bytes:
    from protocols.errors import Malformed  # protocols.signed.invites loads the cryptography library
    from protocols.signed.invites import invite_bytes

    try:
        return invite_bytes(text) if text else b""
    except Malformed as error:
        raise ValueError(f"{error}; `swarmnet invite RUN.json --peer PEER` prints one") from None


def _checked_invite(text: str) -> str:
    _invite(text)
    return text


def _path_or_url(url: str, info: ValidationInfo) -> str:
    return str(_resolve(Path(url), info)) if url and "://" not in url else url


PathOrUrl = Annotated[str, AfterValidator(_path_or_url), Shown("path | URL")]
InviteText = Annotated[str, AfterValidator(_checked_invite), Shown("text")]
FilePath = Annotated[Path, AfterValidator(_resolve), Shown("path")]
RunReference = Annotated[str, AfterValidator(_run), Shown("run id | path of a published run file")]
StageWish = Annotated[int | Literal["auto"], PlainValidator(_stage), Shown("whole number | auto")]


OTHER_METRICS_PORTS = range(9430, 9440)
"""A second peer of a machine takes the first free one of these if its file names no port. The ready files in
configs/ use 9411 to 9420."""


class MetricsFile(BaseModel):
    """Where this peer can be watched."""

    model_config = STRICT

    listen: HostAndPort = "127.0.0.1:9410"
    """Where /metrics, /healthz and /readyz are served; port 0 takes any free one, off serves none.
    Whoever reaches this address can read it. Where it is not set and that port is taken, the first free
    one of 9430 to 9439 is."""
    hosts: tuple[HostName, ...] = ()
    """Names by which it is asked there. Addresses and localhost always count; any other name is refused, or
    a website could read it through the browser of somebody who reaches it."""
    peak_flops: Annotated[float | None, Field(gt=0)] = None
    """Floating-point operations per second that the compute device can do at most, such as 67e12 by its
    maker's word for float32: what utilisation is a share of. Without it no utilisation is shown."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port, or None: off."""
        return None if self.listen == "off" else split_host_and_port(self.listen)

    @property
    def other_ports(self) -> Sequence[int]:
        """Return the ports that are tried where that one is taken: none where the file names it."""
        return () if "listen" in self.model_fields_set else OTHER_METRICS_PORTS


def _a(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


class ObserverFile(BaseModel):
    """What an observer shows, and where."""

    model_config = STRICT

    listen: HostAndPort = "127.0.0.1:9420"
    """Where the page, /swarm.json, /metrics of the swarm, /sd and /healthz are served; port 0 takes any free
    one. Whoever reaches this address can read them."""
    hosts: tuple[HostName, ...] = ()
    """Names by which they are asked there, as `metrics.hosts`: those of a reverse proxy or a service."""
    targets: tuple[HostAndPort, ...] = ()
    """Metrics addresses of the own peers, which /sd tells Prometheus: strangers do not announce theirs."""

    @property
    def address(self) -> tuple[str, int]:
        return split_host_and_port(self.listen)

    @model_validator(mode="after")
    def _nothing_is_off(self) -> ObserverFile:
        for key, addresses in (("listen", (self.listen,)), ("targets", self.targets)):
            if "off" in addresses:
                error = "is off; an observer is its page" if key == "listen" else "off is no address"
                raise PydanticCustomError("refused", "{error}", {"key": key, "error": error})
        return self


class ArchivingFile(BaseModel):
    """How an archivist archives."""

    model_config = STRICT

    seconds: Annotated[Seconds, Field(ge=1)] = 600.0
    """Time between two looks at the run."""
    newest: Annotated[int, Field(ge=1, le=10000)] = 4
    """Of each stage, how many of the newest checkpoints stay."""
    every: Annotated[int, Field(ge=0, le=1000000)] = 0
    """Of the older ones, each so many-th of the run's snapshots stays; 0: none."""


class EvaluatingFile(BaseModel):
    """What an observer scores, and how often."""

    model_config = STRICT

    text: FilePath | None = Field(
        default=None, json_schema_extra={"default": "modules of Python that are never trained on"}
    )
    """A file or folder that is not in the run's text; 64 KiB from all over it are scored."""
    seconds: Annotated[Seconds, Field(ge=0)] = 0.0
    """Time from one score to the next, such as 10min; never less than twice what a score takes. 0: the
    observer does not evaluate."""


class PeerFile(BaseModel):
    """One peer. Paths are relative to the folder of the file."""

    model_config = STRICT

    role: Literal["worker", "bootstrap", "observer", "archivist"] = "worker"
    """worker trains a stage; bootstrap only lets others find the run, and needs no run; observer holds
    nothing and shows the swarm on a page; archivist keeps the run's checkpoints at `archive`."""
    run: RunReference | None = None
    """Which run to train or to watch. All but a bootstrap need it. By id, the manifest is fetched from other
    peers and checked."""
    bootstrap: tuple[BootstrapMultiaddr, ...] = ()
    """Peers to find the others through; any one that answers is enough. Empty: be the first."""
    name: Annotated[str, Field(max_length=64)] = Field(
        default="", json_schema_extra={"default": "the file's name"}
    )
    """Shown to people; means nothing to the protocol."""
    state: FilePath = Field(json_schema_extra={"default": "a folder for NAME where this system keeps state"})
    """Folder of everything this peer keeps: identity, checkpoints, event log. One peer per folder."""
    identity: FilePath = Field(
        default_factory=lambda checked: checked["state"] / "identity.key",
        json_schema_extra={"default": "identity.key in the state folder"},
    )
    """The peer's private key (Ed25519). Made at the first start. Two peers must not share one."""
    stage: StageWish = "auto"
    """The stage to hold; auto: the one that needs a peer most."""
    auto_rebalance: bool | Literal["auto"] = "auto"
    """Leave for another stage when that needs a peer more; auto: if the stage is auto."""
    listen: Annotated[tuple[Multiaddr, ...], Field(min_length=1)] = ("/ip4/0.0.0.0/tcp/0",)
    """Where to accept other peers. Port 0 takes any free one."""
    announce: tuple[Multiaddr, ...] = ()
    """Addresses to tell others, where they differ from `listen` (a forwarded port, a host name)."""
    relay: bool = True
    """Be reached through the bootstraps when no port is open to the outside, and reach others so. A bootstrap
    carries what goes between them; `limits.upload` bounds that."""
    nat: bool = True
    """Ask the router to forward a port (UPnP)."""
    lan: bool | Literal["auto"] = "auto"
    """Find peers of the same run on the local network, and be found by them (multicast DNS); auto: if
    zeroconf is installed (the extra lan)."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Compute threads."""
    compute_duty_cycle: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the time, how much to compute for the run at most, where the machine has other things to do."""
    device: DeviceName = "auto"
    """auto: cuda where torch sees a GPU, else cpu."""
    compute: ComputeFile = ComputeFile()
    """How this peer computes its stage."""
    metrics: MetricsFile = MetricsFile()
    """Where this peer can be watched."""
    observer: ObserverFile = ObserverFile()
    """What an observer shows, and where."""
    limits: LimitsFile = LimitsFile()
    """What of this machine the swarm may have, and when."""
    in_flight: Annotated[int, Field(ge=1, le=1024)] = 32
    """Most microbatches of its own that a peer of the first stage keeps under way. It keeps as many as its
    answers show to pay, and never more than an eighth of the memory holds."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 32
    """Most microbatches a peer takes from others at a time. Never more than an eighth of the memory holds."""
    checkpoint_seconds: Annotated[Seconds, Field(ge=0)] = 300.0
    """Time between two checkpoints in the state folder; 0: only when leaving."""
    drain_seconds: Annotated[Seconds, Field(ge=0)] = 20.0
    """After Ctrl+C or SIGTERM, how long to finish what is under way. A second signal stops at once."""
    log: Literal["auto", "line", "json"] = "auto"
    """line: for people; json: one JSON object per line, for programs, with a status each second; auto: line
    on a terminal, else json with a status each minute and when it changes."""
    invite: InviteText = ""
    """What the run's owner handed out (`swarmnet invite RUN.json --peer PEER`), where the run takes peers by
    invite only."""
    archive: PathOrUrl = ""
    """A folder, or a URL that fsspec opens. An archivist keeps the run there. A worker starts from there when
    nobody of its stage is in the swarm and its own checkpoint is older."""
    allow_reinit: bool = False
    """Begin from the seed where nobody of the stage is there, though the run is known to have come farther:
    what it had learnt is given up. Else a peer without weights waits then, and says so."""
    archiving: ArchivingFile = ArchivingFile()
    """How an archivist archives."""
    evaluating: EvaluatingFile = EvaluatingFile()
    """What an observer scores, and how often."""
    data_paths: dict[str, PathOrUrl] = Field(default_factory=dict)
    """Where this machine keeps a data source of the run, by the source's name: a file, a folder, or a URL
    that fsspec opens (https://, s3://, ...)."""
    tokenizer: FilePath | None = None
    """Where this machine keeps the run's `tokenizer.json`, if its text is not read as bytes."""
    init_checkpoint: PathOrUrl = ""
    """Where the model is that the run starts from, if it starts from one: a folder of this machine with
    config.json and safetensors files, or the URL of such a folder (https://huggingface.co/OWNER/NAME/resolve/
    REVISION), which is fetched once. A worker or an archivist that has it gives others their stage's part;
    who does not name it gets that from them."""
    max_data_bytes: Annotated[
        ByteCount, at_least_bytes(1 << 16, "64MiB"), Field(json_schema_extra={"default": "64MiB"})
    ] = 64 << 20
    """How much text to read where it is drawn (`data.sampling`); of a longer one, a random part. A text that
    is read in epochs is read whole. Its tokens are kept in the state folder, and take as much room as it."""

    @property
    def invite_bytes(self) -> bytes:
        """What greetings carry; empty: none."""
        return _invite(self.invite)

    @property
    def may_move(self) -> bool:
        return self.stage == "auto" if self.auto_rebalance == "auto" else self.auto_rebalance

    @model_validator(mode="after")
    def _only_a_worker_pauses(self) -> PeerFile:
        for key in ("hours", "only_when_idle", "only_when_plugged_in", "memory"):
            if self.role != "worker" and getattr(self.limits, key):
                error = f"is for workers; {_a(self.role)} has no such limit, only limits.upload"
                raise PydanticCustomError("refused", "{error}", {"key": f"limits.{key}", "error": error})
        return self

    @model_validator(mode="after")
    def _only_an_observer_evaluates(self) -> PeerFile:
        chosen, error = self.evaluating, ""
        if chosen.seconds and self.role != "observer":
            error = f"is for observers; {_a(self.role)} does not evaluate"
        elif chosen.text is not None and not chosen.seconds:
            error = "is missing; evaluating.text needs it, such as 10min"
        if error:
            raise PydanticCustomError("refused", "{error}", {"key": "evaluating.seconds", "error": error})
        return self

    @model_validator(mode="after")
    def _needs_run(self) -> PeerFile:
        purposes = {"worker": "to train", "observer": "to show", "archivist": "to archive"}
        if self.role in purposes and self.run is None:
            error = f"is missing; {_a(self.role)} needs the run {purposes[self.role]}"
            raise PydanticCustomError("refused", "{error}", {"key": "run", "error": error})
        if self.role == "archivist" and not self.archive:
            error = "is missing; an archivist needs a folder or URL to archive to"
            raise PydanticCustomError("refused", "{error}", {"key": "archive", "error": error})
        return self


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `swarmnet demo` was asked for."""

    peers: int = 6
    stages: int = 3
    seconds: float = 90.0
    report: Path | None = None
    """Where to write the JSON report."""
    seed: int = 0
    keep: Path | None = None
    """Folder for the peers' state, kept afterwards; None: a temporary one."""
    method: MethodName = "demo-sign"
    """The run's sync.method."""
    sharded: bool = False
    """Its sync.topology is that."""
    experts: bool = False
    """Its layers have experts in two groups, and each peer trains one."""
    undisturbed: bool = False
    """Nobody is killed, and nobody joins."""
    routed: bool = False
    """Each group of experts is a stage of its own, and has peers of its own."""


def is_run_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def run_id_of(text: str) -> RunId | None:
    """The run id in `text`, or None where it is something else (a path)."""
    return RunId(text) if is_run_id(text) else None


def load(
    path: Path, environment: Mapping[str, str] | None = None, overrides: Mapping[str, str] | None = None
) -> PeerFile:
    """The peer file at `path`, over it `SWARMNET__*` of `environment`, over both `overrides`.

    `overrides` maps dotted keys to YAML text (`{"metrics.listen": "off"}`). Raises ConfigError.
    """
    environment = environment or {}
    typed = read(path)
    if typed.data.keys() >= {"run_id", "signature", "manifest"}:
        join = f"swarmnet join {path} --bootstrap MULTIADDR"
        raise ConfigError([f"{path}: is a published run, no peer file: {join}"])
    overlay(typed, _from_environment(environment))
    overlay(typed, {tuple(key.split(".")): (text, "--set") for key, text in (overrides or {}).items()})
    return check_typed(typed, path.absolute().parent, path.stem, environment)


def check_typed(typed: Typed, folder: Path, stem: str, environment: Mapping[str, str]) -> PeerFile:
    """What was typed as a PeerFile. Relative paths start in `folder`; `stem` is the name if none is given."""
    name = typed.data.setdefault("name", stem)
    if "state" not in typed.data:
        typed.data["state"] = str(default_state(environment, sys.platform) / (str(name) or stem))
    return validate(PeerFile, typed, {"folder": folder})


def _from_environment(environment: Mapping[str, str]) -> dict[tuple[str, ...], tuple[str, str]]:
    return {
        tuple(key.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")): (text, f"environment {key}")
        for key, text in environment.items()
        if key.startswith(ENVIRONMENT_PREFIX)
    }


def default_state(environment: Mapping[str, Any], platform: str) -> Path:
    """Where this system keeps programs' state: XDG_STATE_HOME, Application Support, or LOCALAPPDATA."""
    home = Path(environment.get("HOME") or environment.get("USERPROFILE") or Path.home())
    if platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local") / "swarmnet"
    if platform == "darwin":
        return home / "Library" / "Application Support" / "swarmnet"
    return Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "swarmnet"
