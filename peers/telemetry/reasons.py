"""Every code of an event, counter or message, with its level, meaning, and what helps.

Codes are stable, because dashboards, alerts and people's notes name them. docs/watching.md lists them all
from here; a test finds every code in the program."""

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
"""Only the owner can ban."""


@dataclass(frozen=True, slots=True)
class Reason:
    meaning: str
    """One sentence for people."""
    cure: str
    """The command or action that helps."""
    level: Literal["none", "info", "warning", "error"] = "info"
    """`none` marks everyday events that are not shown to people."""


@dataclass(frozen=True, slots=True)
class Codes(Mapping[str, Reason]):
    """Codes that answer one question. Events name the table of their `code` (events.py)."""

    title: str
    metric: str
    """The metric that counts them; empty if none does."""
    reasons: Mapping[str, Reason]

    def __getitem__(self, code: str) -> Reason:
        return self.reasons[code]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)


DEPARTURES = Codes("A neighbour is gone", "departures_total", {
    "left": Reason("it said goodbye", NOTHING),
    "moved": Reason("it moved to another stage", NOTHING),
    "paused": Reason("its owner paused it", NOTHING),
    "silent": Reason(
        "it sent nothing for 4 seconds", f"if many fall silent at once: {DOCTOR} here", "warning"
    ),
    "still_silent": Reason(
        "its machine accepts connections, but the peer does not respond", "its owner restarts it", "warning"
    ),
    "not_reached": Reason("it could not be dialled again", f"its owner runs {DOCTOR}", "warning"),
    "connection_lost": Reason(
        "its connection ended without a goodbye", f"if often: {DOCTOR} on both sides", "warning"
    ),
    "refused_us": Reason("it refused this peer", VERSION, "warning"),
    "banned": Reason("the run's owner has banned it", "`swarmnet orders RUN` shows why"),
    "not_invited": Reason("the run's owner has revoked its invite", "`swarmnet orders RUN` shows it"),
    "outlier": Reason("the norms of most of its tensors were far from other peers'", BAN, "warning"),
    "invalid_reduction": Reason("its published sums do not follow from its slices", BAN, "warning"),
    "released": Reason("neither side needs the link: there are nearer neighbours", NOTHING, "none"),
})  # fmt: skip

REFUSALS = Codes("Refused", "refused_total", {
    "malformed": Reason(
        "malformed data, which no honest peer sends", f"one peer: {BAN}; many: {VERSION}", "warning"
    ),
    "too_large": Reason("longer than the message or the run allows", VERSION, "warning"),
    "bad_signature": Reason("the signature does not match the peer, the run or the data", BAN, "warning"),
    "wrong_run": Reason("made for another run", "check `run` in the sender's peer file"),
    "banned": Reason("the run's owner has banned it", "ask the owner; `swarmnet orders RUN` shows why"),
    "not_invited": Reason(
        "the run is by invite only, and the peer showed no valid invite",
        "ask the owner for one (`swarmnet invite RUN.json --peer PEER`)",
    ),
    "wire_version": Reason("another version of the wire format", "update the older side; `swarmnet version`"),
    "backlog": Reason("too much is queued for that peer", f"{DOCTOR}: its link or ours is too slow"),
    "wrong_stage": Reason("meant for another stage", "ends when records are renewed, within 2 minutes"),
    "illegal_path": Reason("a path through the stages that the run forbids", f"{BAN}; {VERSION}", "warning"),
    "not_due": Reason(
        "a receipt that is not owed to this peer: from a stranger, or for rounds long past",
        NOTHING,
    ),
    "outlier": DEPARTURES["outlier"],
    "invalid_reduction": Reason(
        "its published sums do not follow from its slices, and there is proof",
        f"on that peer: faulty memory or device, {DOCTOR}; elsewhere {BAN}",
        "warning",
    ),
    "other": Reason("a code that this version does not know", VERSION),
})  # fmt: skip


def refusal(code: str) -> str:
    """Return the code of another peer's refusal if it is a known one; else `other`."""
    return code if code in REFUSALS else "other"


LINKS = Codes("Not sent or not found", "", {
    "gone": Reason("the other side ended or did not respond in time", NOTHING),
    "unreachable": Reason("none of its addresses responded", f"{DOCTOR} on both sides"),
    "not_stored": Reason("no node of the directory stored it", f"{DOCTOR}: are bootstraps reached?"),
    "backlog": REFUSALS["backlog"],
    "malformed": REFUSALS["malformed"],
    "too_large": REFUSALS["too_large"],
    "bad_signature": REFUSALS["bad_signature"],
    "wrong_run": REFUSALS["wrong_run"],
    "wire": Reason("another transport error; the event has the reason", DOCTOR),
})  # fmt: skip


def join_line(run: str, stage: int) -> str:
    """Return the command that a peer of the stage types to come back. `run` is the run's id; its first digits
    are enough."""
    return f"swarmnet join {run[:RUN_DIGITS]} --stage {stage}"


def way_out(run: str, stage: int) -> str:
    """Return the sentence on how to restore a stage whose weights no present peer has."""
    return f"The peer that was in stage {stage} before can type: {join_line(run, stage)}"


def stuck_lines(stuck: Mapping[int, int], run: str) -> tuple[str, ...]:
    """Return a sentence for each stage whose peers wait for weights. `stuck` maps stages to the number of
    waiting peers; `run` is the run's id."""
    return tuple(
        f"Stage {stage} is stuck: {waiting} {'peer waits' if waiting == 1 else 'peers wait'} for "
        f"its weights. {way_out(run, stage)}"
        for stage, waiting in stuck.items()
    )


def slow_upload(verdict: UploadVerdict, doctor: str, restart: str = "") -> tuple[str, str]:
    """Return what is wrong with a peer's upload, and what helps. `doctor` is the command that measures it.
    `restart` is the command that restarts the peer, where its own limits.upload is too low."""
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
    return what, f"use a faster connection, then measure it with `{doctor}`"


REROUTES = Codes("A microbatch went to another peer", "microbatches_rerouted_total", {
    "busy": Reason("that peer had no free slot", NOTHING),
    "gone": Reason("that peer was lost while it had the microbatch", NOTHING),
    "deadline": Reason("no response came in the usual time", f"{TOP}: does its stage have few peers?"),
    "not_ready": Reason("that peer is not in step yet", NOTHING),
    "committed": Reason("that peer has committed it already and no longer keeps the gradient", NOTHING),
    "cancelled": Reason("it was cancelled at that peer", NOTHING),
    "other_path": Reason("that peer has it by another path", NOTHING),
    "not_finite": Reason(
        "a value was not finite", f"{TOP}: if the loss is not finite, stop the run", "warning"
    ),
    "wrong_stage": REFUSALS["wrong_stage"],
    "illegal_path": REFUSALS["illegal_path"],
    "malformed": REFUSALS["malformed"],
    "outlier": Reason(
        "the norm of its tensor was far from other peers'", f"if one peer often: {BAN}", "warning"
    ),
    "other": REFUSALS["other"],
})  # fmt: skip

DROPS = Codes("A microbatch was dropped", "microbatches_dropped_total", {
    "deadline": Reason("no peer of the next stage computed it in time", f"{TOP}: which stage has few peers?"),
    "cancelled": Reason("its sender is gone or sent it to another peer", NOTHING),
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
        "late": Reason("its round settled without it", f"its contributor runs {DOCTOR}: link and clock"),
        "not_counted": Reason(
            "its contributor is not a known member of the group", "if it continues: ban the sender"
        ),
        "not_taken": Reason("a second one of that peer for the round, or a round too far ahead", BAN),
        "malformed": REFUSALS["malformed"],
        "too_large": REFUSALS["too_large"],
        "bad_signature": REFUSALS["bad_signature"],
        "wrong_run": REFUSALS["wrong_run"],
        "not_finite": Reason(
            "this peer's gradient was not finite, so none was made", f"{TOP}: is the loss finite?", "warning"
        ),
        "contribution_returned": Reason(
            "it came too late for its round; its gradient goes into the next one", DOCTOR
        ),
        "other": REFUSALS["other"],
    },
)

AUDITS = Codes("An audit of a reducer", "audits_total", {
    "agrees": Reason("its sums follow from the slices", NOTHING, "none"),
    "unanswered": Reason("it did not send the slices; this peer uses other reducers for a while", NOTHING),
    "not_in_order": Reason(
        "the slices that it sent are not those that it had signed", f"if it continues: {BAN}", "warning"
    ),
    "lied": Reason("its sums do not follow from the slices: it is excluded", BAN, "warning"),
})  # fmt: skip

RESYNCHRONISATIONS = Codes("The state is fetched again", "", {
    "behind": Reason("the group no longer keeps the rounds that this peer lacks", NOTHING),
    "forked": Reason(
        "this peer's branch lost against the group's", "after a network partition: nothing", "warning"
    ),
    "in_minority": Reason(
        "the group agrees on other weights than this peer's", f"{DOCTOR}: memory", "warning"
    ),
    "digests_differ": Reason("weights differ, without a majority", f"{TOP}: who is there?", "warning"),
    "not_in_step": Reason(
        "this peer did not catch up in 60 seconds", f"{DOCTOR}: is its link or machine too slow?", "warning"
    ),
})  # fmt: skip

MOVES = Codes("A move was cancelled", "", {
    "not_confirmed": Reason("no peer of the stage confirmed that it stays", NOTHING),
    "directory_silent": Reason("the directory does not answer", f"{DOCTOR}: are bootstraps reached?"),
    "not_needed": Reason("other peers move already, or it is no longer needed", NOTHING),
})  # fmt: skip

HOLDERS = Codes("A source of a snapshot was dropped", "", {
    "gone": Reason("it was lost", NOTHING),
    "stalled": Reason("it sent nothing for some seconds", NOTHING),
    "wrong_hash": Reason("it sent a chunk whose hash is wrong", BAN, "warning"),
    "wrong_length": Reason("it sent a chunk of a wrong length", BAN, "warning"),
    "no_chunk": Reason("it does not have the snapshot any more", NOTHING),
})  # fmt: skip

WAITS = Codes("Waiting", "stages_missing", {
    "stage_missing": Reason("no peer serves a stage that cannot be skipped", f"serve it: {JOIN}", "warning"),
})  # fmt: skip

ENDS = Codes("The peer ended", "", {
    "asked": Reason("a person or the system stopped it", NOTHING),
    "out_of_memory": Reason(
        "the machine ran out of memory", "lower `slots` and `in_flight`; `swarmnet doctor`", "error"
    ),
    "not_possible": Reason(
        "a person must correct something first; the reason says what", "see the reason", "error"
    ),
    "fault": Reason(
        "an unexpected failure", "restart it; report the event log's last lines", "error"
    ),
})  # fmt: skip

REQUESTS = Codes("An inference request", "inference_requests_total", {
    "done": Reason("answered", NOTHING),
    "stale": Reason("its client was gone or its deadline had passed", NOTHING),
    "busy": Reason("too many requests are queued there", NOTHING),
    "not_ready": Reason("the peer has no settled snapshot yet", NOTHING),
    "no_round": Reason("the peer no longer has the weights of that round", "ask again"),
    "wrong_stage": REFUSALS["wrong_stage"],
    "malformed": REFUSALS["malformed"],
    "not_finite": REROUTES["not_finite"],
})  # fmt: skip

ARCHIVING = Codes("A stage was not archived", "archive_failures_total", {
    "no_peer": Reason("the directory has no peer of the stage", f"serve it: {JOIN}"),
    "not_reached": Reason(
        "none of its peers could be dialled", f"{DOCTOR} on both sides", "warning"
    ),
    "directory_silent": MOVES["directory_silent"],
    "no_agreement": Reason(
        "its peers did not respond, agree on no snapshot, or sent none completely",
        f"normal in a new run; else {TOP}: is the stage in step?",
    ),
    "not_signed": Reason("no peer had signed these weights when they were fetched", NOTHING),
    "deadline": Reason("its snapshot was not complete after 15 minutes", f"{DOCTOR}: its link"),
    "index_full": Reason(
        "the archive's index is full", "lower `archiving.newest` or raise `archiving.every`", "warning"
    ),
    "not_written": Reason(
        "the archive could not be written", "check free space and permissions there", "warning"
    ),
    "not_given_back": Reason(
        "the archive returned other data than was written", "use another disk or store", "warning"
    ),
})  # fmt: skip

RELAYING = Codes("A relay gave no slot or circuit", "relay_refused_total", {
    "slots_full": Reason("all slots are taken", "another bootstrap"),
    "address_full": Reason("its address range (/24 or /48) has all slots that it may have", NOTHING),
    "circuits_full": Reason("all circuits are open", "another bootstrap"),
    "range_full": Reason("its address range (/24 or /48) has all circuits that it may have", NOTHING),
    "peer_full": Reason("it or its target has all circuits that one peer may have", NOTHING),
    "streams_full": Reason("too many requests at once", "another bootstrap"),
    "no_slot": Reason("its target has no slot here", "ends when records are renewed"),
    "not_reached": Reason("its target did not accept the circuit", NOTHING, "warning"),
    "relayed": Reason("the request came through a circuit", NOTHING),
    "malformed": REFUSALS["malformed"],
})  # fmt: skip

TABLES = (
    DEPARTURES, REFUSALS, LINKS, REROUTES, DROPS, ROUNDS,
    CONTRIBUTIONS, AUDITS, RESYNCHRONISATIONS, MOVES, HOLDERS, WAITS,
    ENDS, REQUESTS, ARCHIVING, RELAYING,
)  # fmt: skip
"""The tables in the order of docs/watching.md."""
