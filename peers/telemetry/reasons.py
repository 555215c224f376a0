"""Why things happened: every code of an event, a counter or a message, with its level, words and what helps.

A code is stable: dashboards, alerts and people's notes name it. docs/watching.md lists them all from here; a
test finds every code in the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from swarmnet.identifiers import RUN_DIGITS
from swarmnet.resources.upload_need import UploadVerdict

NOTHING = "nothing to do"
TOP = "`swarmnet top`"
DOCTOR = "`swarmnet doctor`"
JOIN = "`swarmnet join RUN --bootstrap ADDRESS --stage N`"
VERSION = "`swarmnet version` on both sides"
BAN = "tell the run's owner: `swarmnet order ban RUN PEER`"
"""Only the owner can."""


@dataclass(frozen=True, slots=True)
class Reason:
    meaning: str
    """One sentence for people."""
    cure: str
    """The command, or the thing to do, that helps."""
    level: Literal["none", "info", "warning", "error"] = "info"
    """`none`: it happens every day, and people are not told."""


@dataclass(frozen=True, slots=True)
class Codes(Mapping[str, Reason]):
    """Codes that answer one question. Events name the table of their `code` (events.py)."""

    title: str
    metric: str
    """Where they are counted; empty: nowhere."""
    reasons: Mapping[str, Reason]

    def __getitem__(self, code: str) -> Reason:
        return self.reasons[code]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)


DEPARTURES = Codes("A neighbour is gone", "departures_total", {
    "left": Reason("it said goodbye", NOTHING),
    "moved": Reason("it went to hold another stage", NOTHING),
    "paused": Reason("its owner paused it", NOTHING),
    "silent": Reason(
        "nothing was heard of it for 4 seconds", f"if many fall silent at once: {DOCTOR} here", "warning"
    ),
    "still_silent": Reason(
        "its machine takes connections, the peer says nothing", "its owner restarts it", "warning"
    ),
    "not_reached": Reason("it could not be dialled again", f"its owner runs {DOCTOR}", "warning"),
    "connection_lost": Reason(
        "its connection ended without a goodbye", f"if often: {DOCTOR} on both sides", "warning"
    ),
    "refused_us": Reason("it refused this peer", VERSION, "warning"),
    "banned": Reason("the run's owner has banned it", "`swarmnet orders RUN` shows why"),
    "not_invited": Reason("the run's owner has revoked its invite", "`swarmnet orders RUN` shows it"),
    "outlier": Reason("most of its numbers were far larger or smaller than others'", BAN, "warning"),
    "invalid_reduction": Reason("it has published sums that its slices do not give", BAN, "warning"),
    "released": Reason("neither side needs the link: nearer neighbours are there", NOTHING, "none"),
})  # fmt: skip

REFUSALS = Codes("Refused", "refused_total", {
    "malformed": Reason("bytes that no honest peer sends", f"one peer: {BAN}; many: {VERSION}", "warning"),
    "too_large": Reason("a length above what the message or the run allows", VERSION, "warning"),
    "bad_signature": Reason("the signature does not fit the peer, the run or the bytes", BAN, "warning"),
    "wrong_run": Reason("made for another run", "check `run` in the peer file of whoever sent it"),
    "banned": Reason("the run's owner has banned it", "ask the owner; `swarmnet orders RUN` shows why"),
    "not_invited": Reason(
        "the run takes peers by invite only, and it showed none that counts",
        "ask the owner for one (`swarmnet invite RUN.json --peer PEER`)",
    ),
    "wire_version": Reason("another version of the wire format", "update the older side; `swarmnet version`"),
    "backlog": Reason("too much is queued for that peer", f"{DOCTOR}: its line, or ours, is too slow"),
    "wrong_stage": Reason("meant for another stage", "passes when records are fresh, within 2 minutes"),
    "illegal_path": Reason("a way through the stages that the run forbids", f"{BAN}; {VERSION}", "warning"),
    "not_due": Reason(
        "a receipt that nobody owes this peer, or not any more: of a stranger, or of rounds long past",
        NOTHING,
    ),
    "outlier": DEPARTURES["outlier"],
    "invalid_reduction": Reason(
        "it has published sums that its slices do not give, and there is proof",
        f"on the peer itself: its memory or its device computes wrongly, {DOCTOR}; else {BAN}",
        "warning",
    ),
    "other": Reason("a code that this version does not know", VERSION),
})  # fmt: skip


def refusal(code: str) -> str:
    """What another peer calls its refusal, if it is one of these codes; else `other`."""
    return code if code in REFUSALS else "other"


LINKS = Codes("Not sent, not found", "", {
    "gone": Reason("the other side ended or did not answer in time", NOTHING),
    "unreachable": Reason("no address of it answered", f"{DOCTOR} here; its owner the same"),
    "not_stored": Reason("no node of the directory stored it", f"{DOCTOR}: are bootstraps reached?"),
    "backlog": REFUSALS["backlog"],
    "malformed": REFUSALS["malformed"],
    "too_large": REFUSALS["too_large"],
    "bad_signature": REFUSALS["bad_signature"],
    "wrong_run": REFUSALS["wrong_run"],
    "wire": Reason("another failure of the wire; the event says which", DOCTOR),
})  # fmt: skip


def join_line(run: str, stage: int) -> str:
    """Return what a peer that took part before types. `run`: the run's id; its first digits are enough."""
    return f"swarmnet join {run[:RUN_DIGITS]} --stage {stage}"


def way_out(run: str, stage: int) -> str:
    """What brings weights back to a stage that no peer has them of."""
    return f"The peer that was in stage {stage} before can type: {join_line(run, stage)}"


def stuck_lines(stuck: Mapping[int, int], run: str) -> tuple[str, ...]:
    """A sentence about each stage whose peers wait for weights. `stuck`: stage -> how many peers wait;
    `run`: its id."""
    return tuple(
        f"Stage {stage} is stuck: {waiting} {'peer waits' if waiting == 1 else 'peers wait'} for "
        f"its weights. {way_out(run, stage)}"
        for stage, waiting in stuck.items()
    )


def slow_upload(verdict: UploadVerdict, doctor: str, restart: str = "") -> tuple[str, str]:
    """Return what is wrong with a peer's upload, and what helps. `doctor`: the command that measures it;
    `restart`: the commands that start the peer, where its own limits.upload is too low."""
    line = f" ({round(8e-6 * verdict.line, 1):g} Mbit/s)" if verdict.line < inf else ""
    proof = "."
    if verdict.has_proof:
        proof = f": {verdict.late} of {verdict.decided} contributions came too late, so they do not count."
    if not verdict.is_short:
        what = f"Your upload{line} may be too slow for this run{proof} Look for the cause"
        return what, f"`{doctor}`"
    need = ceil(8e-5 * verdict.need) / 10
    what = f"Your upload{line} is too slow for this run{proof} It needs about {need:g} Mbit/s"
    if restart:
        return what, f"{restart} --set limits.upload={need:g}Mbit/s`"
    return what, f"use a faster line, then measure it with `{doctor}`"


REROUTES = Codes("A microbatch went to another peer", "microbatches_rerouted_total", {
    "busy": Reason("that peer had no slot free", NOTHING),
    "gone": Reason("that peer was lost while it had the microbatch", NOTHING),
    "deadline": Reason("no answer came in the time that answers usually take", f"{TOP}: is its stage thin?"),
    "not_ready": Reason("that peer is not in step yet", NOTHING),
    "committed": Reason("that peer has counted it already and no longer keeps the answer", NOTHING),
    "cancelled": Reason("that peer gave it up because it was cancelled there", NOTHING),
    "other_path": Reason("that peer has it by another way", NOTHING),
    "not_finite": Reason(
        "its numbers are not finite", f"{TOP}: if the loss is not finite, stop the run", "warning"
    ),
    "wrong_stage": REFUSALS["wrong_stage"],
    "illegal_path": REFUSALS["illegal_path"],
    "malformed": REFUSALS["malformed"],
    "outlier": Reason(
        "its numbers were far from the size of others'", f"if one peer often: {BAN}", "warning"
    ),
    "other": REFUSALS["other"],
})  # fmt: skip

DROPS = Codes("A microbatch was given up", "microbatches_dropped_total", {
    "deadline": Reason("no peer of the next stage did it in time", f"{TOP}: which stage is thin?"),
    "cancelled": Reason("whoever asked for it has gone, or asked somebody else", NOTHING),
    "not_finite": REROUTES["not_finite"],
    "malformed": REFUSALS["malformed"],
    "outlier": REROUTES["outlier"],
})  # fmt: skip

ROUNDS = Codes("A round was applied", "rounds_total", {
    "completed": Reason("all expected contributions came", NOTHING, "none"),
    "deadline": Reason("some came late; they still count, as corrections", f"{TOP}: who lags or has gone?"),
    "alone": Reason("no other peer of the stage was there", f"ask others to join: {JOIN}"),
    "empty": Reason("no contribution had come yet; late ones correct it", f"{TOP}: which stage is missing?"),
    "replayed": Reason("the group had settled it before; this peer caught up", NOTHING, "none"),
})  # fmt: skip

CONTRIBUTIONS = Codes(
    "A contribution",
    "updates_total",
    {
        "accepted": Reason("checked and counted", NOTHING),
        "repeated": Reason("it was here already", NOTHING),
        "late": Reason("its round was settled without it", f"its maker runs {DOCTOR}: line and clock"),
        "not_counted": Reason("its maker is no known member of the group", "if it goes on: ban who sent it"),
        "not_taken": Reason("a second one of that peer for the round, or a round too far ahead", BAN),
        "malformed": REFUSALS["malformed"],
        "too_large": REFUSALS["too_large"],
        "bad_signature": REFUSALS["bad_signature"],
        "wrong_run": REFUSALS["wrong_run"],
        "not_finite": Reason(
            "the own gradient was not finite, so none was made", f"{TOP}: is the loss finite?", "warning"
        ),
        "contribution_returned": Reason(
            "the own one came too late for its round; its gradient goes into the next", DOCTOR
        ),
        "other": REFUSALS["other"],
    },
)

AUDITS = Codes("A reducer's sums were computed again", "audits_total", {
    "agrees": Reason("its sums follow from the slices", NOTHING, "none"),
    "unanswered": Reason("it did not give what it takes; others reduce for this peer for a while", NOTHING),
    "not_in_order": Reason("what it gave is not what it had signed", f"if it goes on: {BAN}", "warning"),
    "lied": Reason("its sums do not follow from the slices: it will not be let in again", BAN, "warning"),
})  # fmt: skip

RESYNCHRONISATIONS = Codes("The state is fetched anew", "", {
    "behind": Reason("the group has forgotten the rounds that this peer lacks", NOTHING),
    "forked": Reason(
        "the group has another history, and that one stands", "after a partition: nothing", "warning"
    ),
    "in_minority": Reason(
        "the group agrees on other weights: this peer's are wrong", f"{DOCTOR}: memory", "warning"
    ),
    "digests_differ": Reason("weights differ and no side has a majority", f"{TOP}: who is there?", "warning"),
    "not_in_step": Reason(
        "this peer did not catch up in 60 seconds", f"{DOCTOR}: its line or its computer", "warning"
    ),
})  # fmt: skip

MOVES = Codes("A move was called off", "", {
    "not_confirmed": Reason("no peer of the stage has said that it stays", NOTHING),
    "directory_silent": Reason("the directory does not answer", f"{DOCTOR}: are bootstraps reached?"),
    "not_needed": Reason("others move already, or it is no longer needed", NOTHING),
})  # fmt: skip

HOLDERS = Codes("A holder of a snapshot is asked no more", "", {
    "gone": Reason("it was lost", NOTHING),
    "stalled": Reason("it sent nothing for some seconds", NOTHING),
    "wrong_hash": Reason("it sent a chunk whose hash is wrong", BAN, "warning"),
    "wrong_length": Reason("it sent a chunk of a wrong length", BAN, "warning"),
    "no_chunk": Reason("it does not have the snapshot any more", NOTHING),
})  # fmt: skip

WAITS = Codes("Waiting", "stages_missing", {
    "stage_missing": Reason("no peer holds a stage that cannot be left out", f"hold it: {JOIN}", "warning"),
})  # fmt: skip

ENDS = Codes("The peer ended", "", {
    "asked": Reason("a person or the system asked for it", NOTHING),
    "out_of_memory": Reason(
        "the machine had no memory left", "less `slots`, `in_flight`; `swarmnet doctor`", "error"
    ),
    "not_possible": Reason(
        "a person must mend something first; the reason says what", "see the reason", "error"
    ),
    "fault": Reason(
        "something failed that should not", "restart it; report the event log's last lines", "error"
    ),
})  # fmt: skip

REQUESTS = Codes("A visitor's request", "inference_requests_total", {
    "done": Reason("answered", NOTHING),
    "stale": Reason("nobody waited for it any more", NOTHING),
    "busy": Reason("too many requests wait there", NOTHING),
    "not_ready": Reason("no settled snapshot yet", NOTHING),
    "no_round": Reason("it no longer holds the weights of that round", "ask again"),
    "wrong_stage": REFUSALS["wrong_stage"],
    "malformed": REFUSALS["malformed"],
    "not_finite": REROUTES["not_finite"],
})  # fmt: skip

ARCHIVING = Codes("A stage was not archived", "archive_failures_total", {
    "no_peer": Reason("the directory names nobody of the stage", f"hold it: {JOIN}"),
    "not_reached": Reason(
        "none of its peers could be dialled", f"{DOCTOR} here; their owners the same", "warning"
    ),
    "directory_silent": MOVES["directory_silent"],
    "no_agreement": Reason(
        "its peers did not say what they have, agree on no snapshot, or gave none whole",
        f"passes in a new run; else {TOP}: is the stage in step?",
    ),
    "not_signed": Reason("nobody had signed these weights when they were fetched", NOTHING),
    "deadline": Reason("its snapshot was not there after 15 minutes", f"{DOCTOR}: its line"),
    "index_full": Reason(
        "the archive's index is full", "less `archiving.newest`, more `archiving.every`", "warning"
    ),
    "not_written": Reason(
        "the archive could not be written", "look at the room and the rights there", "warning"
    ),
    "not_given_back": Reason(
        "the archive did not give back what was written", "another disk or store", "warning"
    ),
})  # fmt: skip

RELAYING = Codes("A relay gave no slot or circuit", "relay_refused_total", {
    "slots_full": Reason("all slots are taken", "another bootstrap"),
    "address_full": Reason("its address range (/24 or /48) has as many slots as one may have", NOTHING),
    "circuits_full": Reason("all circuits are open", "another bootstrap"),
    "range_full": Reason("its address range (/24 or /48) has as many circuits open as one may have", NOTHING),
    "peer_full": Reason("it, or whom it asked for, has as many open as one peer may have", NOTHING),
    "streams_full": Reason("too many ask at once", "another bootstrap"),
    "no_slot": Reason("whom it asked for has no slot here", "passes when records are fresh"),
    "not_reached": Reason("whom it asked for did not take the circuit", NOTHING, "warning"),
    "relayed": Reason("it asked through a circuit", NOTHING),
    "malformed": REFUSALS["malformed"],
})  # fmt: skip

TABLES = (
    DEPARTURES, REFUSALS, LINKS, REROUTES, DROPS, ROUNDS,
    CONTRIBUTIONS, AUDITS, RESYNCHRONISATIONS, MOVES, HOLDERS, WAITS,
    ENDS, REQUESTS, ARCHIVING, RELAYING,
)  # fmt: skip
"""In the order of docs/watching.md."""
