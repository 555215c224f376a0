"""Define the peer file, a YAML file that a person writes to start one peer, and load it with file and line in
every error. Each class is a section of the file, and each field a key."""

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
from peers.config.errors import ConfigError, UserError
from peers.config.limits import LimitsFile
from peers.config.quantities import (
    BootstrapMultiaddr,
    ByteCount,
    FilePath,
    HostAndPort,
    HostName,
    Multiaddr,
    Seconds,
    at_least_bytes,
    resolve_path,
    split_host_and_port,
)
from peers.config.schema import TypeLabel
from peers.config.validation import validate
from peers.config.yaml_lines import ParsedYaml, override_values, read
from swarmnet.identifiers import RunId
from swarmnet.run.sync_methods import COMMON_STEP_METHOD, MethodName

__all__ = ["ConfigError", "DemoOptions", "MetricsFile", "PeerFile", "UserError", "default_state", "load"]

ENVIRONMENT_PREFIX = "SWARMNET__"

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _checked_run(value: str, info: ValidationInfo) -> str:
    """Return a run id unchanged, or the full path of a published run file. Raises ValueError if it is
    neither."""
    if is_run_id(value):
        return value
    path = resolve_path(Path(value), info)
    try:
        exists = is_file(path)
    except UserError as error:
        raise ValueError(str(error)) from None
    if not exists:
        raise ValueError(
            f"{value!r} is neither a run id (64 hexadecimal digits) nor a published run file ({path} is "
            "not there; paths are relative to the peer file)"
        )
    return str(path)


def _checked_stage(value: object) -> int | Literal["auto"]:
    """Return a stage number or `auto`. Raises ValueError for anything else."""
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"is {value!r}; expected a stage (0, 1, ...) or auto")


def _decode_invite(text: str) -> bytes:
    """Return the bytes of an invite (the owner's signed permission to join), or none. Raises ValueError."""
    from protocols.errors import Malformed  # Loads the cryptography library.
    from protocols.signed.invites import invite_bytes

    try:
        return invite_bytes(text) if text else b""
    except Malformed as error:
        raise ValueError(f"{error}; `swarmnet invite RUN.json --peer PEER` prints one") from None


def _checked_invite(text: str) -> str:
    """Return the text unchanged. Raises ValueError if it is no invite."""
    _decode_invite(text)
    return text


def _path_or_url(url: str, info: ValidationInfo) -> str:
    """Return a URL unchanged, and the full path for a path relative to the peer file's folder."""
    return str(resolve_path(Path(url), info)) if url and "://" not in url else url


PathOrUrl = Annotated[str, AfterValidator(_path_or_url), TypeLabel("path | URL")]
InviteText = Annotated[str, AfterValidator(_checked_invite), TypeLabel("text")]
RunReference = Annotated[
    str, AfterValidator(_checked_run), TypeLabel("run id | path of a published run file")
]
StageWish = Annotated[int | Literal["auto"], PlainValidator(_checked_stage), TypeLabel("whole number | auto")]


OTHER_METRICS_PORTS = range(9430, 9440)
"""Ports for a second peer of the same machine: it takes the first free one if its file names no port. The
ready-made files in configs/ use 9411 to 9420."""


class MetricsFile(BaseModel):
    """Key `metrics`: where Prometheus metrics of this peer are served."""

    model_config = STRICT

    listen: HostAndPort = "127.0.0.1:9410"
    """Address of /metrics, /healthz and /readyz, readable by anyone who reaches it. Port 0: any free port.
    `off`: none. If the key is not set and 9410 is taken: the first free of 9430 to 9439."""
    hosts: tuple[HostName, ...] = ()
    """Host names accepted in requests, besides IP addresses and localhost. Other names are refused, so that a
    website cannot read metrics through a visitor's browser."""
    peak_flops: Annotated[float | None, Field(gt=0)] = None
    """Peak floating-point operations per second of the compute device, such as 67e12 (from its data sheet).
    Needed to show utilization."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port; None if metrics are off."""
        return None if self.listen == "off" else split_host_and_port(self.listen)

    @property
    def other_ports(self) -> Sequence[int]:
        """Ports to try if that of `listen` is taken; none if the file sets `listen`."""
        return () if "listen" in self.model_fields_set else OTHER_METRICS_PORTS


def _require_loopback(value: str) -> str:
    """Return `off` or an address of this computer unchanged. Raises ValueError for any other address."""
    if value != "off" and split_host_and_port(value)[0] not in ("127.0.0.1", "::1"):
        raise ValueError(f"is {value!r}; the page is for this computer alone: 127.0.0.1:PORT, or off")
    return value


def _with_article(role: str) -> str:
    """Return a role with its article: `a worker`, `an observer`."""
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


class ObserverFile(BaseModel):
    """Key `observer`: where an observer serves its page."""

    model_config = STRICT

    listen: HostAndPort = "127.0.0.1:9420"
    """Address of the page, /swarm.json, the swarm's /metrics, /sd and /healthz, readable by anyone who
    reaches it. Port 0: any free port."""
    hosts: tuple[HostName, ...] = ()
    """Host names accepted in requests, as for `metrics.hosts`, such as that of a reverse proxy."""
    targets: tuple[HostAndPort, ...] = ()
    """Metrics addresses of your own peers, which /sd lists for Prometheus."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the page."""
        return split_host_and_port(self.listen)

    @model_validator(mode="after")
    def _refuse_off(self) -> ObserverFile:
        """Refuse the address `off`, which the type HostAndPort allows. An observer must serve its page."""
        for key, addresses, error in (
            ("listen", (self.listen,), "is off; an observer needs its page: write HOST:PORT"),
            ("targets", self.targets, "off is no address; write HOST:PORT"),
        ):
            if "off" in addresses:
                raise PydanticCustomError("refused", "{error}", {"key": key, "error": error})
        return self


class ArchivingFile(BaseModel):
    """Key `archiving`: how often an archivist saves the run, and which checkpoints it keeps."""

    model_config = STRICT

    seconds: Annotated[Seconds, Field(ge=1)] = 600.0
    """Time between two checks for new checkpoints."""
    newest: Annotated[int, Field(ge=1, le=10000)] = 4
    """Newest checkpoints to keep, per stage."""
    every: Annotated[int, Field(ge=0, le=1000000)] = 0
    """Keep one older checkpoint per this many snapshots of the run. `0`: none."""


class EvaluatingFile(BaseModel):
    """Key `evaluating`: which text an observer scores with the model, and how often."""

    model_config = STRICT

    text: FilePath | None = Field(
        default=None, json_schema_extra={"default": "modules of Python that are never trained on"}
    )
    """File or folder that is not part of the training text. 64 KiB, spread over it, are scored."""
    seconds: Annotated[Seconds, Field(ge=0)] = 0.0
    """Time between two scores, such as 10min; at least twice what a score takes. `0`: never."""
    prompt: Annotated[str, Field(max_length=400)] = ""
    """Text that the model continues after each score; the page shows it. Empty: none."""


class PeerFile(BaseModel):
    """All keys of a peer file. Paths are relative to the folder of the file."""

    model_config = STRICT

    role: Literal["worker", "reducer", "bootstrap", "observer", "archivist"] = "worker"
    """`worker`: trains a stage. `reducer`: sums the contributions of a stage's workers, without training;
    needs no GPU and no text, but a good upload (`sync.topology: sharded-reduce`). `bootstrap`: helps others
    find the run; needs no `run`. `observer`: shows the swarm on a web page. `archivist`: saves checkpoints to
    `archive`."""
    run: RunReference | None = None
    """Run to join; required except for a bootstrap. With an id, the manifest is fetched from other peers and
    verified."""
    bootstrap: tuple[BootstrapMultiaddr, ...] = ()
    """Peers through which to find others; one that responds is enough. Empty: be the first peer."""
    name: Annotated[str, Field(max_length=64)] = Field(
        default="", json_schema_extra={"default": "the file's name"}
    )
    """Name shown to people."""
    state: FilePath = Field(json_schema_extra={"default": "a folder for NAME where this system keeps state"})
    """Folder for the identity, checkpoints and event log of this peer. One peer per folder."""
    identity: FilePath = Field(
        default_factory=lambda checked: checked["state"] / "identity.key",
        json_schema_extra={"default": "identity.key in the state folder"},
    )
    """File with this peer's private key (Ed25519), created at the first start. Never share it between
    peers."""
    stage: StageWish = "auto"
    """Stage to train. `auto`: the one that needs a peer most."""
    auto_rebalance: bool | Literal["auto"] = "auto"
    """Move to another stage when it needs a peer more. `auto`: if `stage` is auto."""
    listen: Annotated[tuple[Multiaddr, ...], Field(min_length=1)] = ("/ip4/0.0.0.0/tcp/0",)
    """Addresses for connections from other peers. Port 0: any free port."""
    announce: tuple[Multiaddr, ...] = ()
    """Public addresses of this peer, if they differ from `listen` (forwarded port, host name)."""
    relay: bool = True
    """Use the bootstraps as relays, to be reachable without an open port and to reach such peers. A bootstrap
    itself relays for others, within `limits.upload`."""
    nat: bool = True
    """Ask the router to forward a port (UPnP)."""
    lan: bool | Literal["auto"] = "auto"
    """Find peers on the local network (multicast DNS). `auto`: if zeroconf is installed (extra `lan`)."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads for computing."""
    compute_duty_cycle: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximum fraction of the time to compute. Lower it to leave the machine to other programs."""
    device: DeviceName = "auto"
    """Device to compute on. `auto`: cuda if torch finds a GPU, else cpu."""
    compute: ComputeFile = ComputeFile()
    """How this peer computes its stage."""
    metrics: MetricsFile = MetricsFile()
    """Address and settings of this peer's Prometheus metrics."""
    page: Annotated[HostAndPort, AfterValidator(_require_loopback)] = "off"
    """Address of the page with which you watch and steer a worker on this computer. Only this computer can
    open it. If the port is taken: any free one. `off`: none."""
    observer: ObserverFile = ObserverFile()
    """Address and settings of an observer's page."""
    limits: LimitsFile = LimitsFile()
    """Which resources of this machine the swarm may use, and when."""
    in_flight: Annotated[int, Field(ge=1, le=1024)] = 32
    """Maximum microbatches that a first-stage peer has in the pipeline. It adapts below that; at most an
    eighth of the memory is used."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 32
    """Maximum microbatches accepted from other peers at a time; at most an eighth of the memory is used."""
    checkpoint_seconds: Annotated[Seconds, Field(ge=0)] = 300.0
    """Time between two checkpoints in the state folder. `0`: only when leaving."""
    drain_seconds: Annotated[Seconds, Field(ge=0)] = 20.0
    """Time to finish current work after Ctrl+C or SIGTERM. A second signal stops at once."""
    leave_after_seconds: Annotated[Seconds, Field(ge=0)] = 0.0
    """Time after which the peer leaves as after SIGTERM, such as 230min. `0`: never."""
    log: Literal["auto", "line", "json"] = "auto"
    """`line`: text for people. `json`: a JSON object per line, with a status per second. `auto`: line on a
    terminal; else json with a status per minute and at changes."""
    invite: InviteText = ""
    """Invite from the run's owner (`swarmnet invite RUN.json --peer PEER`), for runs with `access:
    invite`."""
    archive: PathOrUrl = ""
    """Folder, or URL that fsspec opens, to which an archivist saves the run. A worker starts from it if no
    peer of its stage is online and its own checkpoint is older. An observer without contributors of its own
    takes those in it."""
    allow_reinit: bool = False
    """Start from the initial weights if no peer of the stage is online, even if the run was further; its
    progress is lost. `false`: wait for such a peer."""
    archiving: ArchivingFile = ArchivingFile()
    """How often an archivist saves the run, and which checkpoints it keeps."""
    evaluating: EvaluatingFile = EvaluatingFile()
    """Which text an observer scores with the model, and how often."""
    data_paths: dict[str, PathOrUrl] = Field(default_factory=dict)
    """Location of each data source of the run, by its name: a file, a folder, or a URL that fsspec opens."""
    tokenizer: FilePath | None = None
    """Location of the run's `tokenizer.json`. Not needed for byte-level text."""
    init_checkpoint: PathOrUrl = ""
    """Location of the run's initial model: a folder, or the URL of one
    (https://huggingface.co/OWNER/NAME/resolve/REVISION), fetched once. Workers and archivists without it get
    their stage from other peers."""
    max_data_bytes: Annotated[
        ByteCount, at_least_bytes(1 << 16, "64MiB"), Field(json_schema_extra={"default": "64MiB"})
    ] = 64 << 20
    """Text to load with `data.sampling: random`; of a longer text, a random part. Its tokens need as much
    space in the state folder. Epochs read all text."""

    max_text_bytes: Annotated[ByteCount, Field(json_schema_extra={"default": "4GiB"})] = 4 << 30
    """Disk space for files of the run's text that other peers send, if the run shares its text. This peer
    sends them on to others. Tokens need space in addition. `0`: fetch none, and serve a later stage."""

    @property
    def invite_bytes(self) -> bytes:
        """The invite as sent in handshakes; empty if there is none."""
        return _decode_invite(self.invite)

    @property
    def holds_stage(self) -> bool:
        return self.role in ("worker", "reducer")

    @property
    def may_move(self) -> bool:
        """Whether this peer may move to another stage."""
        if self.role == "reducer":
            return False
        return self.stage == "auto" if self.auto_rebalance == "auto" else self.auto_rebalance

    @model_validator(mode="after")
    def _require_worker_for_limits(self) -> PeerFile:
        """Refuse `limits.memory` and the limits that pause a peer unless the role is worker."""
        for key in ("hours", "only_when_idle", "only_when_plugged_in", "memory", "traffic_per_month"):
            if self.role != "worker" and getattr(self.limits, key):
                error = f"is for workers; {_with_article(self.role)} has no such limit, only limits.upload"
                raise PydanticCustomError("refused", "{error}", {"key": f"limits.{key}", "error": error})
        return self

    @model_validator(mode="after")
    def _require_observer_to_evaluate(self) -> PeerFile:
        """Refuse `evaluating.seconds` unless the role is observer, and other keys without `seconds`."""
        evaluating, error = self.evaluating, ""
        if evaluating.seconds and self.role != "observer":
            error = f"is for observers; {_with_article(self.role)} does not evaluate"
        elif not evaluating.seconds and (evaluating.text is not None or evaluating.prompt):
            key = "text" if evaluating.text is not None else "prompt"
            error = f"is missing; evaluating.{key} needs it, such as 10min"
        if error:
            raise PydanticCustomError("refused", "{error}", {"key": "evaluating.seconds", "error": error})
        return self

    @model_validator(mode="after")
    def _require_run_and_archive(self) -> PeerFile:
        """Refuse every role but bootstrap without `run`, and an archivist without `archive`. The `key` in an
        error says which key of the file it is about."""
        purposes = {
            "worker": "to train",
            "reducer": "to reduce",
            "observer": "to show",
            "archivist": "to archive",
        }
        if self.role in purposes and self.run is None:
            error = f"is missing; {_with_article(self.role)} needs the run {purposes[self.role]}"
            raise PydanticCustomError("refused", "{error}", {"key": "run", "error": error})
        if self.role == "archivist" and not self.archive:
            error = "is missing; an archivist needs a folder or URL to archive to"
            raise PydanticCustomError("refused", "{error}", {"key": "archive", "error": error})
        return self


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `swarmnet demo`."""

    peers: int = 6
    stages: int = 3
    seconds: float = 90.0
    report: Path | None = None
    """Path of the JSON report; None: no report."""
    seed: int = 0
    keep: Path | None = None
    """Folder for the peers' state, which is kept afterwards. None: a temporary one."""
    method: MethodName = COMMON_STEP_METHOD
    """Key `sync.method` of the run."""
    sharded: bool = False
    """Whether `sync.topology` is `sharded-reduce`."""
    experts: bool = False
    """Whether layers have experts in two groups, of which each peer trains one."""
    undisturbed: bool = False
    """Whether no peer is killed and none joins."""


def is_run_id(text: str) -> bool:
    """Return whether the text is a run id: 64 hexadecimal digits."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def run_id_of(text: str) -> RunId | None:
    """Return `text` as a run id; None if it is something else, such as a path."""
    return RunId(text) if is_run_id(text) else None


def load(
    path: Path, environment: Mapping[str, str] | None = None, overrides: Mapping[str, str] | None = None
) -> PeerFile:
    """Return the checked content of the peer file at `path`. `SWARMNET__*` variables of `environment`
    override the file, and `overrides` override both.

    `overrides` maps dotted keys to YAML text (`{"metrics.listen": "off"}`). Raises ConfigError.
    """
    environment = environment or {}
    typed = read(path)  # JSON is valid YAML, so this may also be a published run.
    if typed.data.keys() >= {"run_id", "signature", "manifest"}:
        join = f"swarmnet join {path} --bootstrap MULTIADDR"
        raise ConfigError([f"{path}: is a published run, not a peer file; join it with `{join}`"])
    override_values(typed, _from_environment(environment))
    options = {tuple(key.split(".")): (text, "--set") for key, text in (overrides or {}).items()}
    override_values(typed, options)
    return validate_peer_file(typed, path.absolute().parent, path.stem, environment)


def validate_peer_file(
    typed: ParsedYaml, folder: Path, stem: str, environment: Mapping[str, str]
) -> PeerFile:
    """Return the validated content of a peer file. Relative paths start in `folder`. A missing `name` becomes
    `stem`, the file's name without suffix. A missing `state` becomes the default folder for that name. Raises
    ConfigError."""
    name = typed.data.setdefault("name", stem)
    if "state" not in typed.data:
        typed.data["state"] = str(default_state(environment, sys.platform) / (str(name) or stem))
    return validate(PeerFile, typed, {"folder": folder})


def _from_environment(environment: Mapping[str, str]) -> dict[tuple[str, ...], tuple[str, str]]:
    """Return the `SWARMNET__*` variables as a map from the path of each key to its YAML text and a name for
    errors. `SWARMNET__METRICS__LISTEN` has the path `("metrics", "listen")`."""
    return {
        tuple(key.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")): (text, f"environment {key}")
        for key, text in environment.items()
        if key.startswith(ENVIRONMENT_PREFIX)
    }


def default_state(environment: Mapping[str, Any], platform: str) -> Path:
    """Return the folder for the state of all peers, where the operating system keeps the state of programs:
    in XDG_STATE_HOME (Linux), Application Support (macOS) or LOCALAPPDATA (Windows)."""
    home = Path(environment.get("HOME") or environment.get("USERPROFILE") or Path.home())
    if platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local") / "swarmnet"
    if platform == "darwin":
        return home / "Library" / "Application Support" / "swarmnet"
    return Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "swarmnet"
