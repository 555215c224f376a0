"""Warn when this peer's upload is too slow for its run, before it trains and while its contributions come
late."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from peers.config.line_file import known_bandwidth
from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest
from peers.runtime.find_running import PEER_FILE
from peers.telemetry.event_fold import PeerTimeline
from peers.telemetry.log_events import Notify
from peers.telemetry.reasons import slow_upload
from peers.telemetry.snapshot import IN_STEP
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.resources.upload_need import UploadVerdict, judge_upload, needed_upload
from swarmnet.run.manifest import Manifest

UPLOAD_SECONDS = 30.0
"""Interval between checks: records are up to two minutes old, and some rounds settle in this time."""


def upload_need_of(manifest: Manifest, records: Iterable[PeerRecord], stage: int) -> float:
    """Return the bytes per second that a newcomer to `stage` must send, by the records of the others.

    Records contain each peer's compute speed. A run is at most as fast as its slowest stage."""
    working = [record for record in records if record.state in IN_STEP]
    pace = min(_paces(manifest, working))
    return needed_upload(manifest, stage, pace, 1 + sum(record.stage == stage for record in working))


def weakest_stage(manifest: Manifest, records: Iterable[PeerRecord]) -> int:
    """Return the slowest stage, where a newcomer is likely to go."""
    paces = _paces(manifest, [record for record in records if record.state in IN_STEP])
    return paces.index(min(paces))


def _paces(manifest: Manifest, working: Sequence[PeerRecord]) -> list[float]:
    """Return the tokens per second of each stage."""
    return [
        sum(record.tokens_per_second for record in working if record.stage == stage)
        for stage in range(len(manifest.stages))
    ]


def upload_words(config: PeerFile, verdict: UploadVerdict, *, runs: bool) -> tuple[str, str]:
    """Return what is wrong with this peer's upload, and what helps. `runs` means that the peer must be
    stopped first."""
    state = shlex.quote(str(config.state))
    doctor, start = f"swarmnet doctor {state}", f"`swarmnet join --state {state}"
    if not (config.state / PEER_FILE).is_file():
        doctor, start = "swarmnet doctor PEER.yaml", "`swarmnet run PEER.yaml"
        if not config.identity.is_file():  # This peer is new here.
            doctor, start = "swarmnet doctor --run RUN --bootstrap ADDRESS", "`swarmnet join RUN"
    if runs:
        start = f"`swarmnet leave {state}`, then {start}"
    return slow_upload(verdict, doctor, start if config.limits.upload == verdict.line else "")


class UploadWatch:
    """The current warning about this peer's upload, if any."""

    def __init__(self, config: Callable[[], PeerFile], story: PeerTimeline, notify: Notify) -> None:
        """`config` returns the peer file with the limits that hold now. `story` is the timeline of this
        peer's events."""
        self._config = config
        self._story = story
        self._notify = notify
        self._need = 0.0
        self._verdict: UploadVerdict | None = None
        self.warnings: tuple[str, ...] = ()

    @property
    def is_doubted(self) -> bool:
        """Whether another check, which costs look-ups, could change the warning."""
        fates = self._story.contributions
        return bool(self.warnings) or judge_upload(inf, 0.0, fates.decided, fates.late) is not None

    def look(self, signed: SignedManifest, records: Mapping[PeerId, SignedRecord] | None, stage: int) -> None:
        """Judge the upload again, and notify when a problem appears or is proved.

        `records` are those of the other peers; None leaves the estimated need unchanged."""
        if records is not None:
            others = [signed.record for signed in records.values()]
            self._need = upload_need_of(signed.manifest, others, stage)
        fates = self._story.contributions
        config = self._config()
        verdict = judge_upload(known_bandwidth(config).up, self._need, fates.decided, fates.late)
        before = self._verdict
        self._verdict = verdict
        self.warnings = ()
        if verdict is None:
            return
        words = ": ".join(upload_words(config, verdict, runs=True))
        self.warnings = (words,)
        if before is None or verdict.has_proof > before.has_proof:
            self._notify("slow_upload", words)
