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
    """Codes that answer one question. Events name the table of their `code` (log_events.py)."""

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


DEPARTURES = Codes("A linked peer is gone", "departures_total", {
    "left": Reason("it left", NOTHING),
    "moved": Reason("it went to another stage", NOTHING),
    "paused": Reason("its owner paused it", NOTHING),
    "silent": Reason(
        "it sent nothing for 4 seconds", f"if many fall silent at once: {DOCTOR} here", "warning"
    ),
    "still_silent": Reason(
        "its machine accepts connections, but it sends nothing", "its owner restarts it", "warning"
    ),
    "not_reached": Reason("it could not be dialled again", f"its owner runs {DOCTOR}", "warning"),
    "connection_lost": Reason(
        "its connection broke", f"if often: {DOCTOR} on both sides", "warning"
    ),
    "bad_signature": Reason("the signature does not match the peer, the run or the bytes", BAN, "warning"),
    "refused_us": Reason("it refused this peer", VERSION, "warning"),
    "banned": Reason("the run's owner has banned it", "`swarmnet orders RUN` shows why"),
    "not_invited": Reason("the run's owner has revoked its invite", "`swarmnet orders RUN` shows it"),
    "outlier": Reason("most of its values differed far from those of others", BAN, "warning"),
    "invalid_reduction": Reason("it published a result that is not the sum of its slices", BAN, "warning"),
    "released": Reason("neither side needs the link: nearer peers are linked", NOTHING, "none"),
})  # fmt: skip

REFUSALS = Codes("Refused", "refused_total", {
    "malformed": Reason("bytes that no honest peer sends", f"one peer: {BAN}; many: {VERSION}", "warning"),
    "too_large": Reason("longer than the message or the run allows", VERSION, "warning"),
    "bad_signature": DEPARTURES["bad_signature"],
    "wrong_run": Reason("made for another run", "the sender checks `run` in its peer file"),
    "banned": Reason("the run's owner has banned it", "ask the owner; `swarmnet orders RUN` shows why"),
    "not_invited": Reason(
        "the run is by invite only, and it showed no valid invite",
        "ask the owner for one (`swarmnet invite RUN.json --peer PEER`)",
    ),
    "wire_version": Reason("another version of the wire format", "update the older side; `swarmnet version`"),
    "backlog": Reason("too much is queued for that peer", f"{DOCTOR}: its link or yours is too slow"),
    "no_place": Reason("it wanted a link, and others have all places", NOTHING, "none"),
    "wrong_stage": Reason("meant for another stage", "wait 2 minutes for fresh records"),
    "illegal_path": Reason("a path through the stages that the run forbids", f"{BAN}; {VERSION}", "warning"),
    "not_due": Reason(
        "an unexpected receipt: from an unknown peer, or for old rounds",
        NOTHING,
    ),
    "outlier": DEPARTURES["outlier"],
    "differs": Reason("its answers differ from those of others: it gets no work for a while", BAN, "warning"),
    "invalid_reduction": Reason(
        "it is proven that its published sums do not follow from its slices",
        f"your own peer: memory or device is faulty, {DOCTOR}; another: {BAN}",
        "warning",
    ),
    "other": Reason("a code that this version does not know", VERSION),
})  # fmt: skip


def refusal(code: str) -> str:
    """Return the code of another peer's refusal if it is a known one; else `other`."""
    return code if code in REFUSALS else "other"


LINKS = Codes("Not sent, not found", "", {
    "gone": Reason("the other side ended or did not answer in time", NOTHING),
    "unreachable": Reason("no address of it answered", f"{DOCTOR} here and there"),
    "not_stored": Reason("no directory node stored it", f"{DOCTOR}: are bootstraps reached?"),
    "backlog": REFUSALS["backlog"],
    "malformed": REFUSALS["malformed"],
    "too_large": REFUSALS["too_large"],
    "bad_signature": REFUSALS["bad_signature"],
    "wrong_run": REFUSALS["wrong_run"],
    "wire": Reason("another protocol failure; the event says which", DOCTOR),
})  # fmt: skip


def join_line(run: str, stage: int) -> str:
    """Return the command that a peer of the stage types to come back. `run` is the run's id; its first digits
    are enough."""
    return f"swarmnet join {run[:RUN_DIGITS]} --stage {stage}"


def way_out(run: str, stage: int) -> str:
    """Return a sentence for people: which command restores a stage whose weights no present peer has."""
    return f"The peer that was in stage {stage} before can type: {join_line(run, stage)}"


def stuck_lines(stuck: Mapping[int, int], run: str) -> tuple[str, ...]:
    """Return a sentence for each stage whose peers wait for weights. `stuck` maps stages to the number of
    waiting peers; `run` is the run's id."""
    lines = []
    for stage, waiting in stuck.items():
        peers_wait = "peer waits" if waiting == 1 else "peers wait"
        lines.append(f"Stage {stage} is stuck: {waiting} {peers_wait} for its weights. {way_out(run, stage)}")
    return tuple(lines)


def slow_upload(verdict: UploadVerdict, doctor: str, restart: str = "") -> tuple[str, str]:
    """Return two texts for people: what is wrong with a peer's upload, and what helps. `doctor` is a command
    that measures it. `restart` is the command that restarts the peer, after an opening backtick; it is empty
    unless the peer's own limits.upload is too low."""
    rate = f" ({round(8e-6 * verdict.line, 1):g} Mbit/s)" if verdict.line < inf else ""  # From bytes/s.
    proof = "."
    if verdict.has_proof:
        proof = f": {verdict.late} of {verdict.decided} contributions came too late, so they do not count."
    if not verdict.is_short:  # The link seems fast enough, but contributions were late.
        what = f"Your upload{rate} may be too slow for this run{proof} Look for the cause"
        return what, f"`{doctor}`"
    need = ceil(8e-5 * verdict.need) / 10  # Mbit/s, rounded up to a tenth.
    what = f"Your upload{rate} is too slow for this run{proof} It needs about {need:g} Mbit/s"
    if restart:
        return what, f"{restart} --set limits.upload={need:g}Mbit/s`"
    return what, f"use a faster line, then measure it with `{doctor}`"


REROUTES = Codes("A microbatch went to another peer", "microbatches_rerouted_total", {
    "busy": Reason("that peer had no slot free", NOTHING),
    "gone": Reason("that peer was lost while it had the microbatch", NOTHING),
    "deadline": Reason("no response in the usual time", f"{TOP}: is its stage thin?"),
    "not_ready": Reason("that peer is not up to date yet", NOTHING),
    "committed": Reason("that peer has already counted it and dropped the response", NOTHING),
    "cancelled": Reason("it was cancelled there", NOTHING),
    "other_path": Reason("that peer has it by another path", NOTHING),
    "not_finite": Reason(
        "its values are not finite", f"{TOP}: if the loss is not finite, tell the run's owner", "warning"
    ),
    "wrong_stage": REFUSALS["wrong_stage"],
    "illegal_path": REFUSALS["illegal_path"],
    "malformed": REFUSALS["malformed"],
    "outlier": Reason(
        "its values differed far in size from those of others", f"if one peer often: {BAN}", "warning"
    ),
    "other": REFUSALS["other"],
})  # fmt: skip

COMPARISONS = Codes("The answers of two peers to a microbatch were compared", "comparisons_total", {
    "agreed": Reason("both are alike", NOTHING, "none"),
    "differed": Reason("one peer answered otherwise than others", BAN, "warning"),
    "undecided": Reason("answers differ, and no majority agrees", f"{TOP}: is the stage thin?", "warning"),
    "alone": Reason("the next stage has one peer, so its answers are not compared", NOTHING),
    "unanswered": Reason("no second peer could compute the microbatch again", NOTHING),
})  # fmt: skip

DROPS = Codes("A microbatch was dropped", "microbatches_dropped_total", {
    "deadline": Reason("no peer of the next stage did it in time", f"{TOP}: which stage is thin?"),
    "cancelled": Reason("the requester has gone, or asked another peer", NOTHING),
    "not_finite": REROUTES["not_finite"],
    "malformed": REFUSALS["malformed"],
    "outlier": REROUTES["outlier"],
})  # fmt: skip

ROUNDS = Codes("A round was applied", "rounds_total", {
    "completed": Reason("all expected contributions came", NOTHING, "none"),
    "deadline": Reason("some came late; they still count, as corrections", f"{TOP}: who lags or has gone?"),
    "alone": Reason("no other peer of the stage was there", f"ask others to join: {JOIN}"),
    "empty": Reason("no contribution had come yet; late ones correct it", f"{TOP}: which stage is missing?"),
    "replayed": Reason("the group had closed it before; this peer caught up", NOTHING, "none"),
})  # fmt: skip

CONTRIBUTIONS = Codes(
    "A contribution",
    "updates_total",
    {
        "accepted": Reason("checked and counted", NOTHING),
        "repeated": Reason("it was here already", NOTHING),
        "late": Reason("its round was settled without it", f"its contributor runs {DOCTOR}: link and clock"),
        "not_counted": Reason("its contributor is not a known member of the group", f"if it repeats: {BAN}"),
        "not_taken": Reason("a second one for the round, or a round too far ahead", BAN),
        "malformed": REFUSALS["malformed"],
        "too_large": REFUSALS["too_large"],
        "bad_signature": REFUSALS["bad_signature"],
        "wrong_run": REFUSALS["wrong_run"],
        "not_finite": Reason(
            "the gradient was not finite, so none was sent", f"{TOP}: is the loss finite?", "warning"
        ),
        "contribution_returned": Reason(
            "your own came too late; its gradient goes into the next round", DOCTOR
        ),
        "other": REFUSALS["other"],
    },
)

AUDITS = Codes("A reducer's sums were checked", "audits_total", {
    "agrees": Reason("its sums follow from the slices", NOTHING, "none"),
    "unanswered": Reason("it sent no evidence; other reducers are used for a while", NOTHING),
    "not_in_order": Reason("its evidence is not what it had signed", f"if it repeats: {BAN}", "warning"),
    "lied": Reason("its sums do not follow from the slices; it stays excluded", BAN, "warning"),
})  # fmt: skip

RESYNCHRONISATIONS = Codes("The weights are fetched again", "", {
    "behind": Reason("the group no longer keeps the rounds that this peer lacks", NOTHING),
    "forked": Reason(
        "the group follows another branch, which wins", "normal after a partition", "warning"
    ),
    "returned": Reason("the owner ordered a return to a snapshot", NOTHING, "warning"),
    "in_minority": Reason(
        "the group agrees on other weights; this peer's are wrong", f"{DOCTOR}: memory", "warning"
    ),
    "digests_differ": Reason("weights differ and no side has a majority", f"{TOP}: who is there?", "warning"),
    "not_in_step": Reason(
        "this peer did not catch up in 60 seconds", f"{DOCTOR}: its link or its computer", "warning"
    ),
})  # fmt: skip

MOVES = Codes("A stage change was cancelled", "", {
    "not_confirmed": Reason("no peer of the stage confirmed that it stays", NOTHING),
    "directory_silent": Reason("the directory does not answer", f"{DOCTOR}: are bootstraps reached?"),
    "not_needed": Reason("others move already, or it is no longer needed", NOTHING),
})  # fmt: skip

HOLDERS = Codes("A source of a snapshot is dropped", "", {
    "gone": Reason("its link was lost", NOTHING),
    "stalled": Reason("it sent nothing for some seconds", NOTHING),
    "wrong_hash": Reason("it sent a chunk whose hash is wrong", BAN, "warning"),
    "wrong_length": Reason("it sent a chunk of a wrong length", BAN, "warning"),
    "no_chunk": Reason("it no longer has the snapshot", NOTHING),
})  # fmt: skip

WAITS = Codes("Waiting", "stages_missing", {
    "stage_missing": Reason("no peer holds a stage that cannot be left out", f"take it: {JOIN}", "warning"),
})  # fmt: skip

ENDS = Codes("The peer ended", "", {
    "asked": Reason("a person or the system asked for it", NOTHING),
    "out_of_memory": Reason(
        "the machine had no memory left", "lower `slots` and `in_flight`; `swarmnet doctor`", "error"
    ),
    "not_possible": Reason(
        "it cannot run until a person fixes something", "see the reason", "error"
    ),
    "fault": Reason(
        "an unexpected error", "restart it; report the last lines of its event log", "error"
    ),
})  # fmt: skip

REQUESTS = Codes("A request of an inference client", "inference_requests_total", {
    "done": Reason("answered", NOTHING),
    "stale": Reason("the client no longer waited for it", NOTHING),
    "busy": Reason("too many requests wait there", NOTHING),
    "not_ready": Reason("no settled snapshot yet", NOTHING),
    "no_round": Reason("it no longer has the weights of that round", "ask again"),
    "wrong_stage": REFUSALS["wrong_stage"],
    "malformed": REFUSALS["malformed"],
    "not_finite": REROUTES["not_finite"],
})  # fmt: skip

ARCHIVING = Codes("A stage was not archived", "archive_failures_total", {
    "no_peer": Reason("the directory lists no peer of the stage", f"take it: {JOIN}"),
    "not_reached": Reason(
        "none of its peers could be dialled", f"{DOCTOR} here and there", "warning"
    ),
    "directory_silent": MOVES["directory_silent"],
    "no_agreement": Reason(
        "its peers agree on no snapshot, or sent none completely",
        f"wait in a new run; else {TOP}: is the stage up to date?",
    ),
    "not_signed": Reason("no peer had signed these weights when they were fetched", NOTHING),
    "deadline": Reason("its snapshot was not there after 15 minutes", f"{DOCTOR}: its link"),
    "index_full": Reason(
        "the archive's index is full", "lower `archiving.newest`, raise `archiving.every`", "warning"
    ),
    "not_written": Reason(
        "the archive could not be written", "check free space and permissions there", "warning"
    ),
    "not_given_back": Reason(
        "the archive returned other bytes than were written", "use another disk or store", "warning"
    ),
})  # fmt: skip

RELAYING = Codes("A relay refused a slot or circuit", "relay_refused_total", {
    "slots_full": Reason("all slots are taken", "use another bootstrap"),
    "address_full": Reason("its address range (/24 or /48) has no slot left", NOTHING),
    "circuits_full": Reason("all circuits are open", "use another bootstrap"),
    "range_full": Reason("its address range (/24 or /48) has no circuit left", NOTHING),
    "peer_full": Reason("it or its target has no circuit left", NOTHING),
    "streams_full": Reason("too many requests at once", "use another bootstrap"),
    "no_slot": Reason("its target has no slot here", "wait for fresh records"),
    "not_reached": Reason("its target did not accept the circuit", NOTHING, "warning"),
    "relayed": Reason("it asked through a circuit", NOTHING),
    "malformed": REFUSALS["malformed"],
})  # fmt: skip

TABLES = (
    DEPARTURES, REFUSALS, LINKS, REROUTES, COMPARISONS, DROPS, ROUNDS,
    CONTRIBUTIONS, AUDITS, RESYNCHRONISATIONS, MOVES, HOLDERS, WAITS,
    ENDS, REQUESTS, ARCHIVING, RELAYING,
)  # fmt: skip
"""The tables in the order of docs/watching.md."""
