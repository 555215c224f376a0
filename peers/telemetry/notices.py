"""Events of the log that people want to hear of, as one line each, with the code that names the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peers.telemetry.console import Level, Report
from peers.telemetry.event_log import Event
from peers.telemetry.reasons import NOTHING, Reason, reason_of

QUIET_SECONDS = 30.0
"""The same trouble with the same peer is told once in so long: strangers decide how often it comes."""
MOST_REMEMBERED = 256
ALARMING = frozenset(
    {"silent", "connection_lost", "still_silent", "not_reached", "refused_us", "stage_missing", "in_minority",
     "digests_differ", "forked", "not_in_step", "not_finite", "bad_signature", "illegal_path", "malformed",
     "out_of_line", "too_large", "wrong_hash", "wrong_length", "index_full", "not_written", "not_given_back"}
)  # fmt: skip
"""Codes that are a warning; all others are news."""
WHAT = {
    "unlinked": "lost {peer}",
    "departed": "{peer} is gone",
    "refused": "refused {peer}",
    "refused_by": "{peer} refused this peer",
    "dial_failed": "{peer} was not reached",
    "post_failed": "could not send to {peer}",
    "look_up_failed": "the directory did not answer",
    "announce_failed": "could not announce this peer",
    "visitor_not_reached": "visitor {peer} was not reached",
    "answer_failed": "{peer} was not answered",
    "upkeep_failed": "could not keep the run's orders known",
    "rerouted": "a microbatch went to {to} instead",
    "nack": "{peer} did not take a microbatch",
    "microbatch_failed": "a microbatch was given up",
    "applied": "a round was applied",
    "not_finite": "no contribution to round {round}",
    "given_back": "contribution to round {round} taken back",
    "resynchronise": "the state is fetched anew",
    "digest_differs": "weights after round {round} differ",
    "not_moving": "stays on its stage",
    "holder_dropped": "{peer} is no source of the state",
    "waiting": "waits for stages {stages}",
    "waiting_over": "waits no more",
    "fault": "cannot go on",
    "stopped": "stopped",
    "archiving_failed": "stage {stage} was not archived",
}
"""Of every event that has codes."""
TOLD = frozenset({"unlinked", "refused", "refused_by", "resynchronise", "digest_differs", "waiting",
                  "waiting_over", "not_finite", "given_back", "rerouted", "applied"})  # fmt: skip
"""What a peer's own report tells of these; `holder_dropped` and the like are said where they happen."""
EVERYDAY = frozenset({"completed", "replayed", "released"})
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


def told(event: str, fields: Mapping[str, Any]) -> Told | None:
    """An event in words; None if it has no code that this version knows."""
    reason, code = reason_of(event, fields), fields.get("code")
    if reason is None or not isinstance(code, str):
        return None
    named = {key: value if isinstance(value, (int, float)) else short(value) for key, value in fields.items()}
    if isinstance(stages := fields.get("stages"), list):
        named["stages"] = ", ".join(map(str, stages[:8]))
    try:
        what = WHAT[event].format_map(named)
    except (KeyError, IndexError):  # An older or newer version's event: the code says enough.
        what = event.replace("_", " ")
    if event == "waiting_over":
        return Told(code, what, "info", None)
    level: Level = "error" if event == "fault" else "warning" if code in ALARMING else "info"
    return Told(code, f"{what}: {reason.meaning}", level, reason)


class Teller:
    """Listens to a peer's event log and says in its report what people want to hear of."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._said: dict[tuple[str, str, str], float] = {}
        self._kept: dict[tuple[str, str, str], int] = {}
        self._alone = False

    def heard(self, event: Event) -> None:
        """`event.monotonic` is the time by which repetitions are held back."""
        if event.name == "applied":
            was_alone, self._alone = self._alone, event.fields.get("code") == ALONE
            if was_alone and self._alone:
                return
        if event.name not in TOLD or event.fields.get("code") in EVERYDAY:
            return
        words = told(event.name, event.fields)
        if words is None:
            return
        which = (event.name, words.code, str(event.fields.get("peer", "")))
        if event.monotonic < self._said.get(which, float("-inf")) + QUIET_SECONDS:
            self._kept[which] = self._kept.get(which, 0) + 1
            return
        if len(self._said) >= MOST_REMEMBERED:
            oldest = next(iter(self._said))
            del self._said[oldest]
            self._kept.pop(oldest, None)
        self._said.pop(which, None)
        self._said[which] = event.monotonic
        more = self._kept.pop(which, 0)
        cure = "" if words.reason is None or words.reason.cure == NOTHING else f" ({words.reason.cure})"
        again = f" ({more} more since it was last said)" if more else ""
        self._report.say(event.name, f"{words.text}{cure}{again}", words.level, code=words.code)
