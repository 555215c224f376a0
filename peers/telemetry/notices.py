"""Events of the log that people want to hear of, as one line each, with the code that names the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peers.telemetry import events as noted
from peers.telemetry.console import Level, Report
from peers.telemetry.event_log import Line
from peers.telemetry.events import Event
from peers.telemetry.reasons import NOTHING, Reason, code_of, reason_of

QUIET_SECONDS = 30.0
"""The same trouble with the same peer is told once in so long: strangers decide how often it comes."""
MOST_REMEMBERED = 256
ALARMING = frozenset(
    {"silent", "connection_lost", "still_silent", "not_reached", "refused_us", "stage_missing", "in_minority",
     "digests_differ", "forked", "not_in_step", "not_finite", "bad_signature", "illegal_path", "malformed",
     "out_of_line", "too_large", "false_sums", "lied", "not_in_order",
     "wrong_hash", "wrong_length", "index_full", "not_written", "not_given_back"}
)  # fmt: skip
"""Codes that are a warning; all others are news."""
WHAT: Mapping[type[Event], str] = {
    noted.Unlinked: "lost {peer}",
    noted.Departed: "{peer} is gone",
    noted.Refused: "refused {peer}",
    noted.RefusedBy: "{peer} refused this peer",
    noted.DialFailed: "{peer} was not reached",
    noted.PostFailed: "could not send to {peer}",
    noted.LookUpFailed: "the directory did not answer",
    noted.AnnounceFailed: "could not announce this peer",
    noted.VisitorNotReached: "visitor {peer} was not reached",
    noted.AnswerFailed: "{peer} was not answered",
    noted.UpkeepFailed: "could not keep the run's orders known",
    noted.Rerouted: "a microbatch went to {to} instead",
    noted.Nack: "{peer} did not take a microbatch",
    noted.MicrobatchFailed: "a microbatch was given up",
    noted.Applied: "a round was applied",
    noted.NotFinite: "no contribution to round {round}",
    noted.GivenBack: "contribution to round {round} taken back",
    noted.Audited: "looked into what {peer} added up for round {round}",
    noted.Resynchronise: "the state is fetched anew",
    noted.DigestDiffers: "weights after round {round} differ",
    noted.NotMoving: "stays on its stage",
    noted.HolderDropped: "{peer} is no source of the state",
    noted.Waiting: "waits for stages {stages}",
    noted.WaitingOver: "waits no more",
    noted.Fault: "cannot go on",
    noted.Stopped: "stopped",
    noted.ArchivingFailed: "stage {stage} was not archived",
}
"""Of every event that has codes."""
TOLD = (
    noted.Unlinked, noted.Refused, noted.RefusedBy, noted.Resynchronise, noted.DigestDiffers, noted.Waiting,
    noted.WaitingOver, noted.NotFinite, noted.GivenBack, noted.Rerouted, noted.Applied, noted.Audited,
)  # fmt: skip
"""What a peer's own report tells of these; `holder_dropped` and the like are said where they happen."""
EVERYDAY = frozenset({"completed", "replayed", "released", "agrees"})
"""Codes that are no news."""
ALONE = "alone"
"""Said once, until another peer of the stage has been there: some runs have one peer per stage on purpose."""


@dataclass(frozen=True, slots=True)
class Told:
    code: str
    text: str
    level: Level
    reason: Reason | None


def short(peer: object) -> str:
    """Enough of a peer id to know it by: its end, for all begin alike."""
    text = str(peer)
    return f"...{text[-6:]}" if len(text) > 12 else text


def told(event: Event) -> Told | None:
    """An event in words; None if it has no code that this version knows."""
    reason, code, fields = reason_of(event), code_of(event), event.fields
    if reason is None:
        return None
    named = {key: value if isinstance(value, (int, float)) else short(value) for key, value in fields.items()}
    if isinstance(event, noted.Waiting):
        named["stages"] = ", ".join(map(str, event.stages[:8]))
    what = WHAT[type(event)].format_map(named)
    if isinstance(event, noted.WaitingOver):
        return Told(code, what, "info", None)
    level: Level = "error" if isinstance(event, noted.Fault) else "warning" if code in ALARMING else "info"
    return Told(code, f"{what}: {reason.meaning}", level, reason)


class Teller:
    """Listens to a peer's event log and says in its report what people want to hear of."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._said: dict[tuple[str, str, str], float] = {}
        self._kept: dict[tuple[str, str, str], int] = {}
        self._alone = False

    def heard(self, line: Line) -> None:
        """`line.monotonic` is the time by which repetitions are held back."""
        event = line.event
        if isinstance(event, noted.Applied):
            was_alone, self._alone = self._alone, event.code == ALONE
            if was_alone and self._alone:
                return
        words = told(event) if isinstance(event, TOLD) and event.code not in EVERYDAY else None
        if words is None:
            return
        which = (event.name, words.code, str(getattr(event, "peer", "")))
        if line.monotonic < self._said.get(which, float("-inf")) + QUIET_SECONDS:
            self._kept[which] = self._kept.get(which, 0) + 1
            return
        if len(self._said) >= MOST_REMEMBERED:
            oldest = next(iter(self._said))
            del self._said[oldest]
            self._kept.pop(oldest, None)
        self._said.pop(which, None)
        self._said[which] = line.monotonic
        more = self._kept.pop(which, 0)
        cure = "" if words.reason is None or words.reason.cure == NOTHING else f" ({words.reason.cure})"
        again = f" ({more} more since it was last said)" if more else ""
        self._report.say(event.name, f"{words.text}{cure}{again}", words.level, code=words.code)
