"""Checks that need a network: p2pd, bootstraps, clock, the run, bandwidth and reachability.

The doctor joins the swarm like the peer itself, with its identity, ports and p2pd options. If that peer is
running, the doctor uses a temporary identity instead, because two processes with one identity would take each
other's connections. Helpers still check the peer's addresses, since the doctor has its key to sign the
request.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from peers.config import line_file
from peers.config.errors import UserError
from peers.config.peer_file import PeerFile, run_id_of
from peers.config.run_file import RunFileError, SignedManifest
from peers.data.local_text import (
    FIRST_STAGE,
    first_shard_here,
    is_fetched,
    missing_text,
    places_here,
    progress_lines,
)
from peers.network.addresses import Addresses, is_public_address
from peers.network.discovery import mdns
from peers.network.discovery.bootstrap import PeerCache, find_manifest
from peers.network.discovery.record_reader import look, opened
from peers.process.sessions import SLOT_SECONDS, daemon_options, keeps_slots, with_ports
from peers.runtime.control_client import ask
from peers.telemetry.event_log import LOG_FILE, read_lately
from peers.telemetry.log_events import Assembled, Listening, NotRelayed, Relayed, Started
from peers.telemetry.snapshot import from_json
from peers.tools.doctor.gpu_checks import as_asked
from peers.tools.doctor.line import CheckResult, Tell
from peers.tools.doctor.reachability import judge, line_of, no_bootstrap, undialled
from peers.tools.doctor.stage_memory import Memory, judge_read, judge_text
from peers.tools.doctor.stage_memory import judge as judge_stage
from peers.worker.watch.upload_watch import upload_need_of, upload_words, weakest_stage
from protocols.daemon.multiaddr import is_circuit
from protocols.daemon.names import resolve_dialable
from protocols.dht.directory import DhtDirectory, split_multiaddr
from protocols.dht.swarm_time import MAX_OFFSET_SECONDS
from protocols.errors import Backlog, CannotStart, Unreachable, WireError
from protocols.p2pd.speed_test import BYTES, measure
from protocols.p2pd.transport import P2pdTransport
from protocols.reachability.dial_back import ask_dial_back
from protocols.reachability.fresh_dial import DialOutcome, can_dial, dial
from protocols.signed.identity import Identity
from protocols.signed.records import SKEW_SECONDS
from swarmnet.identifiers import PeerId
from swarmnet.resources import link_bandwidth
from swarmnet.resources.upload_need import judge_upload
from swarmnet.run.manifest import Manifest

CONNECT_SECONDS = 8.0
FIND_SECONDS = 20.0
"""Timeout of the search for the manifest."""
STATUS_SECONDS = 5.0
"""Timeout of the status request to the running peer."""
LOOK_UP_SECONDS = 8.0
REMEMBERED = 4
"""Number of remembered peers to contact in addition to the bootstraps."""
HELPERS = 8
"""Maximum number of peers that are asked to dial back; the first success ends it."""
ASK_AGAIN_SECONDS = (0.0, 10.0, 20.0, 35.0)
"""Pauses before each round of requests. A busy helper dials again for others within a minute."""
OF_THE_RUN = frozenset({"run", "stage", "text", "reachability"})
BUSY = "is busy with other requests"
SLOW_UP, SLOW_DOWN = 5e6 / 8, 10e6 / 8
"""Bytes per second: half of the 10 Mbit/s up with which the swarm was measured (docs/benchmarks/wan.md), and
10 Mbit/s down."""
NOT_KNOWN = CheckResult(
    "reachability",
    "warn",
    "unknown: the event log of the running peer no longer shows its listen addresses and relays",
    "restart the peer: it then logs them again, and repeats them in each new log file",
    {"verdict": "unknown"},
)
"""Result if the running peer's addresses are unknown: without them every verdict would be false."""


@dataclass(frozen=True, slots=True)
class Helper:
    """A peer that answered."""

    peer: PeerId
    address: str

    @property
    def public(self) -> bool:
        return is_public_address(self.address)


@dataclass(frozen=True, slots=True)
class ExaminedPeer:
    """The peer that the doctor examines."""

    config: PeerFile
    identity: Identity
    """Identity whose addresses are checked: the peer's own, or a temporary one if it has none yet."""
    key: Path
    """File of that identity."""
    running: bool
    must_be_reached: bool
    """True for a bootstrap, which is useless if others cannot dial it."""
    free: Memory
    place: Path
    """Temporary folder. Its `stranger.key` is an identity that no peer uses."""


class NetworkChecks:
    """All network checks, over one connection to the swarm."""

    def __init__(self, subject: ExaminedPeer, tell: Tell, wanted: frozenset[str]) -> None:
        """Prepare the checks `wanted`. Steps that they depend on run without output."""
        self.subject = subject
        self.show = tell
        self.wanted = wanted
        self.helpers: list[Helper] = []
        self.signed: SignedManifest | None = None

    async def run(self) -> None:
        """Run the wanted checks, and report those that cannot run."""
        try:
            async with self._network() as (transport, directory):
                await self._bootstraps(transport)
                await self._join(directory)
                if (self.helpers or self._run_is_a_file) and self.wanted & OF_THE_RUN:
                    await self._run(transport, directory)
                if "bandwidth" in self.wanted:
                    await self._bandwidth(transport, directory)
                if "reachability" in self.wanted:
                    await self._reachability(transport)
        except CannotStart as error:
            self.show(CheckResult("p2pd", "fail", str(error), "fix listen: or announce: in the peer file"))

    @property
    def _run_is_a_file(self) -> bool:
        """Whether the run is given as a file, which can be checked before any peer of the run is there."""
        run = self.subject.config.run
        return run is not None and run_id_of(run) is None

    @asynccontextmanager
    async def _network(self) -> AsyncIterator[tuple[P2pdTransport, DhtDirectory]]:
        """Start p2pd by the peer file, or with a temporary identity if the peer is running."""
        config = self.subject.config
        key, listen = self.subject.key, config.listen
        if self.subject.running:
            config = config.model_copy(update={"announce": (), "role": "worker", "nat": False})
            key, listen = self.subject.place / "stranger.key", ("/ip4/0.0.0.0/tcp/0",)
        began = time.monotonic()
        transport = await P2pdTransport.start(key, daemon_options(config, listen))
        directory = None
        try:
            took = time.monotonic() - began
            data = {"seconds": round(took, 2), "peer": transport.peer}
            self.show(CheckResult("p2pd", "ok", f"starts in {took:.1f} s as {transport.peer}", data=data))
            if keeps_slots(config) and not self.subject.running and "reachability" in self.wanted:
                transport.relays.use(config.bootstrap, lambda *_: None)
            directory = await DhtDirectory.start(transport.daemon, stores=False)
            yield transport, directory
        finally:
            if directory is not None:
                await directory.close()
            await transport.close()

    async def _bootstraps(self, transport: P2pdTransport) -> None:
        """Report of each bootstrap whether and how fast it answers."""
        config = self.subject.config
        remembered = PeerCache(config.state / "peers.json").read()[:REMEMBERED]
        own = self.subject.identity.peer_id
        addresses = [each for each in dict.fromkeys([*config.bootstrap, *remembered]) if own not in each]
        if not addresses:
            if config.role != "bootstrap":
                self.show(no_bootstrap(config.lan, mdns.installed()))
            return
        answers = await asyncio.gather(*(self._one(transport, each) for each in addresses))
        for line in verdicts(config.bootstrap, addresses, answers):
            self.show(line)

    async def _one(self, transport: P2pdTransport, multiaddr: str) -> CheckResult:
        """Dial one bootstrap, and return whether it answers and after how long."""
        try:
            peer, address = split_multiaddr(multiaddr)
        except ValueError as error:
            return CheckResult("bootstrap", "warn", str(error), "correct bootstrap: in the peer file")
        began = time.monotonic()
        try:
            await transport.daemon.connect(peer, [address], CONNECT_SECONDS)
        except Unreachable as error:
            return await self._silent(peer, address, str(error))
        took = time.monotonic() - began
        self.helpers.append(Helper(peer, address))
        text = f"{address} answers in {1000 * took:.0f} ms"
        data: dict[str, object] = {"address": multiaddr, "seconds": round(took, 4)}
        if "bootstrap" in self.wanted and can_dial() and not is_circuit(address):
            (second,) = await dial(peer, [address])
            data["py_libp2p"] = second.outcome
            text += f"; py-libp2p: {_opinion(second)}"
        return CheckResult("bootstrap", "ok", text, data=data)

    async def _silent(self, peer: PeerId, address: str, why: str) -> CheckResult:
        """Return the result for a bootstrap that p2pd does not reach; py-libp2p may give more detail."""
        data: dict[str, object] = {"address": f"{address}/p2p/{peer}"}
        fix = "ask the run's publisher for another address; check this machine's connection"
        if can_dial():
            (second,) = await dial(peer, [address])
            data["py_libp2p"] = second.outcome
            if second.outcome == "other_peer":
                why = f"{address} answers as {second.detail}, not as {peer}"
                fix = f"bootstrap: [{address}/p2p/{second.detail}] if its owner says that it has a new key"
        return CheckResult("bootstrap", "fail", why, fix, data)

    async def _join(self, directory: DhtDirectory) -> None:
        """Join the directory through the helpers, and report the clock offset that this measures."""
        if not self.helpers:
            return
        known = [f"{helper.address}/p2p/{helper.peer}" for helper in self.helpers]
        try:
            await directory.bootstrap(known, CONNECT_SECONDS)
        except Unreachable as error:
            if directory.measured_offset is None:
                self.show(
                    CheckResult(
                        "bootstrap", "fail", str(error), "ask the run's publisher for another address"
                    )
                )
                return
        offset = directory.measured_offset
        if offset is None:
            return
        text = f"{abs(offset):.2f} s {'behind' if offset > 0 else 'ahead of'} the swarm's"
        data = {"seconds": offset}
        if abs(offset) <= SKEW_SECONDS:
            self.show(CheckResult("clock", "ok", text, data=data))
        elif abs(offset) > MAX_OFFSET_SECONDS:
            text += f"; more than {MAX_OFFSET_SECONDS:.0f} s is not corrected, so the peer would not join"
            self.show(CheckResult("clock", "fail", text, "sudo timedatectl set-ntp true", data))
        else:
            text += "; the peer would use the swarm's time, but logs and orders would mislead"
            self.show(CheckResult("clock", "warn", text, "sudo timedatectl set-ntp true", data))

    async def _run(self, transport: P2pdTransport, directory: DhtDirectory) -> None:
        """Report the manifest and whether its stages fit, and find more helpers."""
        config = self.subject.config
        if config.run is None:
            return
        try:
            async with asyncio.timeout(FIND_SECONDS):
                signed = await find_manifest(
                    config.run, directory, self.subject.place / "run.json", lambda *_: None
                )
        except (RunFileError, WireError, TimeoutError) as error:
            why = str(error) or f"no peer knows it ({FIND_SECONDS:g} s)"
            fix = "compare the run id with the one that its owner published"
            self.show(CheckResult("run", "fail", f"the run {config.run[:16]}... was not found: {why}", fix))
            return
        self.signed = signed
        manifest = signed.manifest
        stages = f"{len(manifest.stages)} stages"
        text = f"{manifest.name} ({signed.run_id[:16]}...), {stages}, owner {manifest.owner}"
        self.show(CheckResult("run", "ok", text, data={"run": signed.run_id, "name": manifest.name}))
        wish = None if config.stage == "auto" else config.stage
        self.show(judge_stage(manifest, wish, self.subject.free, config.max_data_bytes, as_asked(config)[0]))
        if config.role == "worker":
            self.show(await asyncio.to_thread(self._text, manifest, wish))
        if "reachability" in self.wanted:
            await self._more_helpers(transport, directory, signed)

    def _text(self, manifest: Manifest, wish: int | None) -> CheckResult:
        """Read the first shard like a peer. Tokens are stored in the peer's state folder, unless it is in use
        or missing."""
        config, key = self.subject.config, self.subject.identity.public_key
        missing = missing_text(manifest, config)
        if missing or wish not in (None, FIRST_STAGE) or "text" not in self.wanted:
            return judge_text(wish, missing)
        if is_fetched(places_here(manifest, config)):
            size = sum(source.file_bytes for source in manifest.data.sources if source.is_shared)
            limit = f"at most max_text_bytes: {config.max_text_bytes:,}"
            return CheckResult("text", "ok", f"other peers send it: {size:,} bytes, {limit}")
        if self.subject.running or not config.state.is_dir():
            config = config.model_copy(update={"state": self.subject.place})
        progress = progress_lines(lambda _event, line: print(line, file=sys.stderr), time.monotonic)
        try:
            read, shards = first_shard_here(manifest, config, key, progress)
        except UserError as error:
            return CheckResult("text", "fail", str(error), "correct what the message names")
        return judge_read(read, manifest.data.seq_len + 1, shards)

    async def _more_helpers(
        self, transport: P2pdTransport, directory: DhtDirectory, signed: SignedManifest
    ) -> None:
        """Add peers of the run as helpers, by their records in the directory."""
        known = {helper.peer for helper in self.helpers} | {self.subject.identity.peer_id, transport.peer}
        for stage in range(len(signed.manifest.stages)):
            if len(self.helpers) >= HELPERS:
                return
            try:
                records = await directory.look_up(signed.run_id, stage, LOOK_UP_SECONDS)
            except WireError:
                continue
            for found in opened(records.values(), signed.run_id):
                addresses = await resolve_dialable(found.record.addresses, transport.addresses)
                direct = [each for each in addresses if not is_circuit(each)]
                if found.peer not in known and direct:
                    known.add(found.peer)
                    self.helpers.append(Helper(found.peer, direct[0]))

    async def _bandwidth(self, transport: P2pdTransport, directory: DhtDirectory) -> None:
        """Measure bandwidth up and down with the first helper that can."""
        why = "no peer of the swarm answers"
        for helper in self.helpers[:HELPERS]:
            try:
                await transport.daemon.connect(helper.peer, [helper.address], CONNECT_SECONDS)
                up = await measure(transport.daemon, helper.peer, "up")
                down = await measure(transport.daemon, helper.peer, "down")
            except (WireError, Backlog) as error:
                why = str(error)
                continue
            text = (
                f"{8e-6 * up:.1f} Mbit/s up, {8e-6 * down:.1f} Mbit/s down, with {helper.peer} "
                f"({BYTES >> 20} MiB each way; limited by its connection too)"
            )
            data = {
                "up_bytes_per_second": round(up),
                "down_bytes_per_second": round(down),
                "helper": helper.peer,
            }
            slow = up < SLOW_UP or down < SLOW_DOWN
            fix = (
                "stop other transfers, use a cable instead of Wi-Fi; peers with more bandwidth get more work"
            )
            line_file.keep(self.subject.config.state, link_bandwidth.LinkBandwidth(up, down))
            self.show(CheckResult("bandwidth", "warn" if slow else "ok", text, fix if slow else "", data))
            await self._upload(directory, up)
            return
        self.show(CheckResult("bandwidth", "warn", f"not measured: {why}", "try again in a minute"))

    async def _upload(self, directory: DhtDirectory, measured: float) -> None:
        """Warn if the upload bandwidth is too low for the run, by this measurement and the running peer's
        recent contributions."""
        config, signed = self.subject.config, self.signed
        if signed is None or config.role != "worker":
            return
        try:
            found = await look(directory, signed.run_id, len(signed.manifest.stages))
        except WireError:
            return
        own = self.subject.identity.peer_id
        records = [each.record for peer, each in found.items() if peer != own]
        held, decided, late = -1, 0, 0
        if self.subject.running:
            held = await asyncio.to_thread(stage_held, config.state)
            decided, late = await asyncio.to_thread(contributions_of, config.state)
        stage = held if config.stage == "auto" else config.stage
        if not 0 <= stage < len(signed.manifest.stages):
            stage = weakest_stage(signed.manifest, records)
        need = upload_need_of(signed.manifest, records, stage)
        up = min(config.limits.upload or inf, measured)
        verdict = judge_upload(up, need, decided, late)
        if verdict is not None:
            data = {"up_bytes_per_second": round(up), "needed_bytes_per_second": round(need)}
            what, fix = upload_words(config, verdict, runs=self.subject.running)
            self.show(CheckResult("bandwidth", "warn", what, fix, data))

    async def _reachability(self, transport: P2pdTransport) -> None:
        """Report how other peers reach this one. Helpers that are busy are asked again."""
        reasons: dict[PeerId, str] = {}
        await transport.relays.first(SLOT_SECONDS)
        for pause in ASK_AGAIN_SECONDS:
            await asyncio.sleep(pause)
            addresses = addresses_of(self.subject, transport)
            if addresses is None:
                self.show(NOT_KNOWN)
                return
            reasons = {}
            if await self._ask_helpers(transport, addresses, reasons):
                return
            if not any(why.endswith(BUSY) for why in reasons.values()):
                break
        self.show(undialled(tuple(reasons.values()), self.subject.must_be_reached))

    async def _ask_helpers(
        self, transport: P2pdTransport, addresses: Addresses, reasons: dict[PeerId, str]
    ) -> bool:
        """Report what the first helper finds. Return False if none does; `reasons` says why."""
        subject = self.subject
        for helper in sorted(self.helpers, key=lambda each: not each.public)[:HELPERS]:
            try:
                await transport.daemon.connect(helper.peer, [helper.address], CONNECT_SECONDS)
                answer = await ask_dial_back(
                    transport.daemon, helper.peer, subject.identity, addresses.to_ask
                )
            except WireError as error:
                reasons[helper.peer] = str(error)
                continue
            if answer.code != "done":
                why = BUSY if answer.code == "busy" else "has no py-libp2p"
                reasons[helper.peer] = f"{helper.peer} {why}"
                continue
            finding = judge(addresses, answer.observed, answer.dialled, subject.must_be_reached)
            line = line_of(finding, answer.observed, answer.dialled, helper.peer)
            if finding.verdict == "reachable" and not helper.public:
                seen = f"{line.text}; as seen from within this network: {helper.peer} has no public address"
                line = CheckResult(line.check, line.level, seen, line.fix, line.data)
            self.show(line)
            return True
        return False


def verdicts(
    bootstraps: Sequence[str], addresses: Sequence[str], answers: Sequence[CheckResult]
) -> list[CheckResult]:
    """Return the results of bootstraps and remembered peers. One answer is enough: the others are warnings
    then, and a silent remembered peer is not reported."""
    entered = any(line.level == "ok" for line in answers)
    results = [
        line if line.level == "ok" or not entered else replace(line, level="warn")
        for address, line in zip(addresses, answers, strict=True)
        if line.level == "ok" or address in bootstraps
    ]
    return results or list(answers[:1])


def _opinion(second: DialOutcome) -> str:
    if second.outcome == "reached":
        return f"reached too, in {1000 * second.seconds:.0f} ms"
    return f"{second.outcome.replace('_', ' ')} ({second.detail})"


def addresses_of(subject: ExaminedPeer, transport: P2pdTransport) -> Addresses | None:
    """Return the addresses of the examined peer, which may run in another process; None: unknown. Announced
    addresses are known from the peer file, and a peer that announces uses no relays."""
    config = subject.config
    listening = (
        logged_addresses(config.state, subject.identity.peer_id) if subject.running else transport.addresses
    )
    if listening is None:
        if not config.announce:
            return None
        listening = ()
    return Addresses.of(config.announce, with_ports(config.listen, listening), listening)


def stage_held(state: Path) -> int:
    """Return the stage of a running peer from its event log since its last start; -1: unknown."""
    stage = -1
    for line in read_lately(state / LOG_FILE):
        match line.event:
            case Started():
                stage = -1
            case Assembled(stage=assembled):
                stage = assembled
    return stage


def contributions_of(state: Path) -> tuple[int, int]:
    """Return how many contributions of a running peer are decided and how many late; zeros if unknown."""
    try:
        snapshot = from_json(ask(state, {"do": "status"}, STATUS_SECONDS))
    except UserError:  # It has just ended, or runs another version.
        return 0, 0
    return snapshot.contributions_decided, snapshot.contributions_late


def logged_addresses(state: Path, peer: PeerId) -> Sequence[str] | None:
    """Return the listen and relay addresses of a running peer, from its event log since its last start. None
    if the log no longer reaches back to that start: an incomplete list would only be a guess."""
    found: list[str] = []
    circuits: dict[str, list[str]] = {}
    started = False
    for line in read_lately(state / LOG_FILE):
        match line.event:
            case Started():
                started, found, circuits = True, [], {}
            case Relayed(relay=relay, addresses=addresses):
                circuits[relay] = list(addresses)
            case NotRelayed(relay=relay):
                circuits.pop(relay, None)
            case Listening(text):
                address, _, whose = text.removeprefix("listening on ").rpartition("/p2p/")
                if whose == peer:
                    found.append(address)
    if not started:
        return None
    return list(dict.fromkeys([*found, *(each for slot in circuits.values() for each in slot)]))
