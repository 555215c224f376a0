"""Every event of a peer's event log: its name, its fields, what it says, and what people are told of it.

The name in the log is the class' name in small letters with underscores. A field that is UNSET is left out of
the line. Durations are seconds, losses nats per token, ids and digests hexadecimal; `code` is one of the
class' `codes` (reasons.py). docs/events.md is made from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from peers.telemetry import reasons
from peers.telemetry.event import Event

LogEvent = Callable[[Event], None]
"""Writes to the peer's event log."""

# One event is one paragraph.
# fmt: off

# -- the process ------------------------------------------------------------------------------------------

class Started(Event, frozen=True):
    """The process has begun."""
    sentence = "started"
    peer: str
    pid: int = 0
    role: str = "worker"

class Stopped(Event, frozen=True):
    """The process ends; its last line."""
    sentence = "stopped"
    codes = reasons.ENDS
    code: str
    reason: str | UnsetType = UNSET

class Fault(Event, frozen=True):
    """Something failed that should not, and the process ends."""
    sentence = "cannot go on"
    codes = reasons.ENDS
    code: str
    reason: str

class ProcessStalled(Event, frozen=True):
    """The event loop did not turn for so long: the machine slept, or the process was stopped."""
    sentence = "stood still for {seconds} s"
    seconds: float

class LogRewritten(Event, frozen=True):
    """The disk takes lines again; so many were lost meanwhile."""
    lost: int

# -- holding a stage --------------------------------------------------------------------------------------

class Assembled(Event, frozen=True):
    """A worker for a stage is built: one *life* begins."""
    sentence = "holds stage {stage}"
    stage: int
    parameters: int = 0

class InStep(Event, frozen=True):
    """It takes part in its group's rounds from `round` on."""
    sentence = "in step at round {round}"
    round: int
    settled: int = -1

class ExpertsReassigned(Event, frozen=True):
    """It trains this group of experts, from after its contribution to `round` on; how many peers held each in
    the newest two applied rounds: said when it is new which group, or which have nobody."""
    round: int
    group: int
    holders: Sequence[int]

class RunEnded(Event, frozen=True):
    """The run is over: rounds up to `round` are settled here; the owner ordered `ordered` as the last one."""
    round: int
    ordered: int | None

class PlacementChecked(Event, frozen=True):
    """What each stage can do, tokens per second, and what this peer could; before it thinks of a move."""
    capacities: Sequence[float]
    rate: float

class StageChangeStarted(Event, frozen=True):
    """It has said that it would move to a stage, and waits whether others do."""
    sentence = "would move to stage {stage}"
    stage: int

class StageChangeRefused(Event, frozen=True):
    """It stays."""
    sentence = "stays on its stage"
    codes = reasons.MOVES
    code: str
    reason: str

# -- neighbours -------------------------------------------------------------------------------------------

class Linked(Event, frozen=True):
    """A neighbour is connected and has said hello."""
    peer: str
    stage: int

class Unlinked(Event, frozen=True):
    """A linked neighbour is gone; `released`: neither side needed the link."""
    sentence = "lost {peer}"
    codes = reasons.DEPARTURES
    is_printed = True
    peer: str
    code: str
    reason: str = ""
    released: bool = False

class Departed(Event, frozen=True):
    """A peer of the swarm is gone, as an observer sees it."""
    sentence = "{peer} is gone"
    codes = reasons.DEPARTURES
    peer: str
    code: str

class Refused(Event, frozen=True):
    """This peer refused another one's message or connection."""
    sentence = "refused {peer}"
    codes = reasons.REFUSALS
    is_printed = True
    peer: str
    code: str
    reason: str = ""

class RefusedBy(Event, frozen=True):
    """Another peer refused this one."""
    sentence = "{peer} refused this peer"
    codes = reasons.REFUSALS
    is_printed = True
    peer: str
    code: str
    reason: str = ""

class DialFailed(Event, frozen=True):
    """A peer could not be reached on one of its lanes."""
    sentence = "{peer} was not reached"
    codes = reasons.LINKS
    peer: str
    lane: str
    code: str
    reason: str

class PostFailed(Event, frozen=True):
    """A message could not be sent on an open lane."""
    sentence = "could not send to {peer}"
    codes = reasons.LINKS
    peer: str
    lane: str
    code: str
    reason: str

class AnswerFailed(Event, frozen=True):
    """A stranger who asked something could not be answered."""
    sentence = "{peer} was not answered"
    codes = reasons.LINKS
    peer: str
    code: str
    reason: str

class ClientNotReached(Event, frozen=True):
    """A visitor whose request is done could not be dialled."""
    sentence = "visitor {peer} was not reached"
    codes = reasons.LINKS
    peer: str
    code: str
    reason: str

# -- the directory ----------------------------------------------------------------------------------------

class LookUpFailed(Event, frozen=True, kw_only=True):
    """The directory did not answer: for the records of a stage, or for something else."""
    sentence = "the directory did not answer"
    codes = reasons.LINKS
    stage: int | UnsetType = UNSET
    what: str | UnsetType = UNSET
    code: str
    reason: str

class AnnounceFailed(Event, frozen=True):
    """The own record could not be stored."""
    sentence = "could not announce this peer"
    codes = reasons.LINKS
    code: str
    reason: str

class UpkeepFailed(Event, frozen=True):
    """The owner's orders could not be stored again."""
    sentence = "could not keep the run's orders known"
    codes = reasons.LINKS
    code: str
    reason: str

# -- microbatches -----------------------------------------------------------------------------------------

class Committed(Event, frozen=True):
    """A microbatch counts here. Of one that others went on with: seconds until the answer, what of them was
    compute and waiting below, and how many of this peer's own were under way."""
    origin: str
    counter: int
    tokens: int
    loss: float | None = None
    answered: float | UnsetType = UNSET
    below: float | UnsetType = UNSET
    queued: float | UnsetType = UNSET
    under_way: int | UnsetType = UNSET

class Rerouted(Event, frozen=True):
    """A microbatch goes to another peer than those that were tried."""
    sentence = "a microbatch went to {to} instead"
    codes = reasons.REROUTES
    is_printed = True
    code: str
    counter: int
    to: str
    tried: Sequence[str]

class Nack(Event, frozen=True):
    """A peer did not take a microbatch."""
    sentence = "{peer} did not take a microbatch"
    codes = reasons.REROUTES
    peer: str
    counter: int
    code: str
    reason: str

class MicrobatchFailed(Event, frozen=True):
    """A microbatch was given up here."""
    sentence = "a microbatch was given up"
    codes = reasons.DROPS
    code: str
    origin: str
    counter: int
    reason: str
    peer: str | None

class Waiting(Event, frozen=True):
    """No peer of these stages is there, and they cannot be left out."""
    sentence = "waits for stages {stages}"
    codes = reasons.WAITS
    is_printed = True
    code: str
    stages: Sequence[int] = ()

class WaitingOver(Event, frozen=True):
    """All stages have peers again."""
    sentence = "waits no more"
    is_printed = True

# -- rounds -----------------------------------------------------------------------------------------------

class ContributionMade(Event, frozen=True):
    """The own contribution to a round, over so many tokens."""
    round: int
    id: str
    tokens: int = 0

class NotFinite(Event, frozen=True):
    """None was made: the gradient is not finite."""
    sentence = "no contribution to round {round}"
    codes = reasons.CONTRIBUTIONS
    is_printed = True
    code: str
    round: int
    tokens: int

class Reduced(Event, frozen=True):
    """What others contributed of these shards was added up here, and is a result of the round's set."""
    round: int
    id: str
    shards: Sequence[int]
    contributors: int

class Audited(Event, frozen=True):
    """The slices of one shard behind a result were requested, from its reducer or from a peer that reports a
    lie."""
    sentence = "looked into what {peer} added up for round {round}"
    codes = reasons.AUDITS
    is_printed = True
    code: str
    peer: str
    round: int
    id: str
    shard: int
    asked: str

class ContributionAccepted(Event, frozen=True):
    """Somebody's contribution came, was checked and counts."""
    round: int
    id: str
    contributor: str

class ContributionReturned(Event, frozen=True):
    """The group went on without the own contribution; it is offered again with later rounds, unless this
    peer counts for nothing yet."""
    sentence = "contribution to round {round} taken back"
    codes = reasons.CONTRIBUTIONS
    is_printed = True
    code: str
    round: int
    id: str

class Applied(Event, frozen=True):
    """A round became part of the live weights, with so many contributors after so many seconds' wait."""
    sentence = "a round was applied"
    codes = reasons.ROUNDS
    is_printed = True
    round: int
    code: str
    contributors: int = 0
    waited: float = 0.0

class Settled(Event, frozen=True):
    """The set of a round is final: digest of the weights after it (empty: of a large state, between two
    rounds in which it is signed), its ids, and the tokens of all rounds."""
    round: int
    digest: str
    ids: Sequence[str]
    tokens: int | None = None

class ShardRead(Event, frozen=True):
    """This peer has read a shard of the run's text to its end: the sequences of so many tokens."""
    shard: str
    epoch: int
    tokens: int

class Undecided(Event, frozen=True):
    """At the end: what becomes of these own contributions is open."""
    ids: Sequence[str]

class Resync(Event, frozen=True):
    """The state is fetched anew; its own history from `fork_round` on is given up, none if null."""
    sentence = "the state is fetched anew"
    codes = reasons.RESYNCHRONISATIONS
    is_printed = True
    code: str
    peers: Sequence[str]
    reason: str
    fork_round: int | None

class DigestDiffers(Event, frozen=True):
    """Peers of the group have signed other weights of a round."""
    sentence = "weights after round {round} differ"
    codes = reasons.RESYNCHRONISATIONS
    is_printed = True
    code: str
    round: int
    peers: Sequence[str]

class StatementUnusable(Event, frozen=True):
    """A signed digest on the own disk is damaged and left out."""
    reason: str

class Receipt(Event, frozen=True):
    """A peer signed what it has accepted of this one; so many contributions by all signers' word."""
    signer: str
    accepted: int

class ReceiptsUnusable(Event, frozen=True):
    """So many lines of the own receipts are damaged and left out."""
    lines: int

class ReceiptNotKept(Event, frozen=True):
    """A receipt could not be written."""
    reason: str

# -- state ------------------------------------------------------------------------------------------------

class Saved(Event, frozen=True):
    """A checkpoint is on disk."""
    sentence = "checkpoint of round {round} written"
    round: int
    bytes: int

class OffersMissing(Event, frozen=True):
    """These peers did not say in time what state they have."""
    peers: Sequence[str]

class Fetching(Event, frozen=True):
    """A snapshot of so many bytes is fetched, of which so many were kept from before."""
    sentence = "fetches the state of round {round}"
    round: int
    size: int
    kept: int
    holders: int

class Fetched(Event, frozen=True):
    """The state is here; so many bytes came."""
    round: int
    bytes: int

class HolderDropped(Event, frozen=True):
    """A holder of the snapshot is asked no more."""
    sentence = "{peer} is no source of the state"
    codes = reasons.HOLDERS
    peer: str
    code: str
    reason: str

class NoCarriers(Event, frozen=True):
    """Further connections for a large snapshot could not be opened."""
    reason: str

# -- the run's owner --------------------------------------------------------------------------------------

class Order(Event, frozen=True):
    """A newer order of the owner is held."""
    sequence: int
    reason: str

class OrderUnusable(Event, frozen=True):
    """The order on the own disk is damaged."""
    reason: str

class OrderUnknown(Event, frozen=True):
    """The directory did not say in time what the owner orders."""
    reason: str

# -- archivists and bootstraps ----------------------------------------------------------------------------

class Archived(Event, frozen=True):
    """A stage's settled weights are in the archive, signed by so many."""
    stage: int
    round: int
    bytes: int
    signers: int

class ArchivingFailed(Event, frozen=True):
    """A stage was not archived this time."""
    sentence = "stage {stage} was not archived"
    codes = reasons.ARCHIVING
    stage: int
    code: str
    reason: str

class Pruned(Event, frozen=True):
    """An older checkpoint left the archive, by its policy."""
    stage: int
    round: int

class ArchiveUnusable(Event, frozen=True):
    """A checkpoint in the archive is damaged and not served."""
    stage: int
    round: int
    reason: str

class Circuits(Event, frozen=True):
    """What the relay has carried since the last such line grew: open circuits, slots, bytes in all."""
    open: int
    slots: int
    bytes: int

# -- counters, now and then -------------------------------------------------------------------------------

class Traffic(Event, frozen=True):
    """Bytes by kind of message, refusals by code, links by state; since the worker's life began."""
    sent: dict[str, int]
    received: dict[str, int]
    refused: dict[str, int] = field(default_factory=dict)
    subflows: dict[str, int] = field(default_factory=dict)

class Ledger(Event, frozen=True):
    """What became of microbatches, dropped and re-routed ones by code; since the worker's life began."""
    committed: int
    tokens: int = 0
    repeated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rerouted: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    late_answers: int = 0

# -- what people are told as it happens: a line of text, also in the log -------------------------------------

class Said(Event, frozen=True):
    """A line for people, in the log as it was said."""
    text: str

Topic = Literal[
    "archive", "archived", "behind", "bootstraps_found", "bootstraps_lost",
    "busy", "checkpoint", "checkpoint_failed", "checkpoint_unusable",
    "chunks_not_kept", "clock", "compiled", "compiles", "devices", "devices_lost", "directory_split",
    "directory_whole", "elsewhere", "ended", "experts", "found", "height_not_kept", "holder",
    "identity_shared", "joined", "kept",
    "lan", "line", "look_up_failed", "machine", "missing", "moves", "no_manifest", "no_text",
    "no_weights", "not_evaluated", "not_ready", "notsaved", "order", "order_not_kept", "order_unusable",
    "p2pd_ended", "p2pd_not_started", "pause_cut", "restored", "run", "set_aside", "slow_upload", "stage",
    "state", "swarm", "text", "text_left_out", "tokenizing", "trains", "turned_away", "unreachable",
    "weights",
]  # fmt: skip
"""What a line is about that has nothing but its text."""
Notify = Callable[[Topic, str], None]
"""One line for people, and the event log."""

class Remark(Said, frozen=True):
    """A line that has no fields of its own."""
    topic: Topic

    @property
    def name(self) -> str:
        return self.topic

    @property
    def fields(self) -> dict[str, Any]:
        return {"text": self.text}

class Listening(Said, frozen=True):
    """An address at which the peer listens, at the end of its text; the number of p2pd's process."""
    p2pd: int | None = None

class Relayed(Said, frozen=True):
    """A relay leads to this peer, by these addresses."""
    relay: str
    addresses: Sequence[str]

class NotRelayed(Said, frozen=True):
    """It does not any more."""
    relay: str

class Reachable(Said, frozen=True):
    """How others reach this peer."""
    way: str

class Metrics(Said, frozen=True):
    """Where /metrics is."""
    url: str

class Page(Said, frozen=True):
    """Where an observer's page is."""
    url: str

class Text(Said, frozen=True):
    """What was read of the run's text, in files, documents and bytes, and what was left out."""
    files: int
    documents: int
    bytes: int
    left_out: int

class EpochRead(Said, frozen=True):
    """Every shard of the run's text that this peer has was read."""
    epoch: int
    shards: int

class Pausing(Said, frozen=True):
    """It will let go of its stage."""
    reason: str

class Paused(Said, frozen=True):
    """It holds no stage; so much memory is still in use."""
    bytes: int

class Resuming(Said, frozen=True):
    """A reason to pause is gone."""
    reason: str

class Evaluated(Said, frozen=True):
    """An observer's score, in nats per token and bits per byte, on so many bytes with that SHA-256."""
    loss: float
    bits_per_byte: float
    round: int
    bytes: int
    sha256: str
    window: int
    seconds: float

# fmt: on

NOT_AMONG_NEWS = frozenset(
    {"run", "listening", "metrics", "text", "trains", "weights", "checkpoint", "holder"}
)
"""Names of lines that people are told at the start, or by another event too."""
NOTED = {
    kind.tag(): kind for kind in Event.__subclasses__() if kind.__module__ == __name__ and kind is not Said
}
"""By name."""
SAID = {kind.tag(): kind for kind in Said.__subclasses__() if kind is not Remark}
"""By name, which may be one of the noted, too: `order` is noted with its number, and said in words."""
