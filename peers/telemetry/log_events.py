"""Every event of a peer's event log: its name, fields, meaning, and the sentence for people.

The name in the log is the class name in snake case. A field that is UNSET is left out of the line. Durations
are seconds, losses nats per token, ids and digests hexadecimal. `code` is one of the class's `codes`
(reasons.py). docs/events.md is generated from here; the class docstrings are its descriptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType, field

from peers.telemetry import reasons
from peers.telemetry.event import Event, Topic

LogEvent = Callable[[Event], None]
"""Appends an event to the peer's event log."""

# One event is one paragraph.
# fmt: off

# -- the process ------------------------------------------------------------------------------------------
class Started(Event, frozen=True):
    """The process has started."""
    sentence = "started"
    peer: str
    pid: int = 0
    role: str = "worker"

class Stopped(Event, frozen=True):
    """The process ends; the last line of a log."""
    sentence = "stopped"
    codes = reasons.ENDS
    code: str
    reason: str | UnsetType = UNSET

class Fault(Event, frozen=True):
    """An unexpected failure; the process ends."""
    sentence = "the process cannot continue"
    codes = reasons.ENDS
    code: str
    reason: str

class ProcessStalled(Event, frozen=True):
    """The event loop was blocked: the machine slept or the process was stopped."""
    sentence = "the process was blocked for {seconds} s"
    seconds: float

class LogRewritten(Event, frozen=True):
    """The disk accepts lines again; `lost` lines were dropped meanwhile."""
    lost: int

# -- serving a stage --------------------------------------------------------------------------------------
class Assembled(Event, frozen=True):
    """A worker for a stage is built."""
    sentence = "serves stage {stage}"
    stage: int
    parameters: int = 0

class InStep(Event, frozen=True):
    """The peer is in step with its group from `round` on."""
    sentence = "in step at round {round}"
    round: int
    settled: int = -1

class ExpertsReassigned(Event, frozen=True):
    """This peer trains expert `group` after `round`. `holders`: peers per group in the newest two rounds."""
    round: int
    group: int
    holders: Sequence[int]

class RunEnded(Event, frozen=True):
    """The run is over: rounds up to `round` are settled here; `ordered`: the owner's last round."""
    round: int
    ordered: int | None

class PlacementChecked(Event, frozen=True):
    """Capacity of each stage and of this peer, tokens per second, before it considers a move."""
    capacities: Sequence[float]
    rate: float

class StageChangeStarted(Event, frozen=True):
    """The peer has announced a move and waits for confirmation."""
    sentence = "plans to move to stage {stage}"
    stage: int

class StageChangeRefused(Event, frozen=True):
    """The peer stays on its stage."""
    sentence = "stays on its stage"
    codes = reasons.MOVES
    code: str
    reason: str

# -- neighbours -------------------------------------------------------------------------------------------
class Linked(Event, frozen=True):
    """A neighbour has completed the handshake."""
    peer: str
    stage: int

class Unlinked(Event, frozen=True):
    """A linked neighbour is gone; `released`: neither side needed the link."""
    sentence = "{peer} is gone"
    codes = reasons.DEPARTURES
    is_printed = True
    peer: str
    code: str
    reason: str = ""
    released: bool = False

class Departed(Event, frozen=True):
    """An observer no longer sees a peer."""
    sentence = "{peer} is gone"
    codes = reasons.DEPARTURES
    peer: str
    code: str

class Refused(Event, frozen=True):
    """This peer refused a message or connection."""
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
    """A connection to a peer could not be opened."""
    sentence = "{peer} could not be reached"
    codes = reasons.LINKS
    peer: str
    lane: str
    code: str
    reason: str

class PostFailed(Event, frozen=True):
    """A message could not be sent on an open connection."""
    sentence = "could not send to {peer}"
    codes = reasons.LINKS
    peer: str
    lane: str
    code: str
    reason: str

class AnswerFailed(Event, frozen=True):
    """A peer without a link could not be answered."""
    sentence = "could not answer {peer}"
    codes = reasons.LINKS
    peer: str
    code: str
    reason: str

class ClientNotReached(Event, frozen=True):
    """An inference client could not be dialled."""
    sentence = "inference client {peer} could not be reached"
    codes = reasons.LINKS
    peer: str
    code: str
    reason: str

# -- the directory ----------------------------------------------------------------------------------------
class LookUpFailed(Event, frozen=True, kw_only=True):
    """A look-up failed: records of a stage, or `what`."""
    sentence = "the directory did not answer"
    codes = reasons.LINKS
    stage: int | UnsetType = UNSET
    what: str | UnsetType = UNSET
    code: str
    reason: str

class AnnounceFailed(Event, frozen=True):
    """This peer's record could not be stored."""
    sentence = "could not announce this peer"
    codes = reasons.LINKS
    code: str
    reason: str

class UpkeepFailed(Event, frozen=True):
    """The owner's order could not be stored again."""
    sentence = "could not store the owner's order again"
    codes = reasons.LINKS
    code: str
    reason: str

# -- microbatches -----------------------------------------------------------------------------------------
class Committed(Event, frozen=True):
    """A microbatch is committed here. If later stages computed it: seconds until the gradient, their compute
    and queue time, own microbatches in flight."""
    origin: str
    counter: int
    tokens: int
    loss: float | None = None
    answered: float | UnsetType = UNSET
    below: float | UnsetType = UNSET
    queued: float | UnsetType = UNSET
    under_way: int | UnsetType = UNSET

class Rerouted(Event, frozen=True):
    """A microbatch was sent to another peer after `tried`."""
    sentence = "a microbatch was sent to {to} instead"
    codes = reasons.REROUTES
    is_printed = True
    code: str
    counter: int
    to: str
    tried: Sequence[str]

class MicrobatchRefused(Event, frozen=True):
    """A peer rejected a microbatch."""
    sentence = "{peer} rejected a microbatch"
    codes = reasons.REROUTES
    peer: str
    counter: int
    code: str
    reason: str

class MicrobatchFailed(Event, frozen=True):
    """A microbatch was dropped here."""
    sentence = "a microbatch was dropped"
    codes = reasons.DROPS
    code: str
    origin: str
    counter: int
    reason: str
    peer: str | None

class AnswersCompared(Event, frozen=True):
    """`peers` computed one microbatch. `likeness`: cosine of their tensors, and larger norm over smaller."""
    sentence = "compared the answers of two peers"
    codes = reasons.COMPARISONS
    code: str
    what: str
    counter: int
    peers: Sequence[str]
    likeness: Sequence[float]

class Waiting(Event, frozen=True):
    """These stages have no live peer and cannot be skipped."""
    sentence = "waits for stages {stages}"
    codes = reasons.WAITS
    is_printed = True
    code: str
    stages: Sequence[int] = ()

class WaitingOver(Event, frozen=True):
    """All stages have peers again."""
    sentence = "all stages have peers again"
    is_printed = True

# -- rounds -----------------------------------------------------------------------------------------------
class ContributionMade(Event, frozen=True):
    """Own contribution to a round."""
    round: int
    id: str
    tokens: int = 0

class NotFinite(Event, frozen=True):
    """No contribution was made: the gradient is not finite."""
    sentence = "no contribution to round {round}"
    codes = reasons.CONTRIBUTIONS
    is_printed = True
    code: str
    round: int
    tokens: int

class Reduced(Event, frozen=True):
    """This peer reduced these shards and published the result."""
    round: int
    id: str
    shards: Sequence[int]
    contributors: int

class Audited(Event, frozen=True):
    """The slices behind a result were requested, from its reducer or a peer that reports fraud."""
    sentence = "audited the sums of {peer} for round {round}"
    codes = reasons.AUDITS
    is_printed = True
    code: str
    peer: str
    round: int
    id: str
    shard: int
    asked: str

class ContributionAccepted(Event, frozen=True):
    """A contribution was received, verified and counted."""
    round: int
    id: str
    contributor: str

class ContributionReturned(Event, frozen=True):
    """A round settled without the own contribution. Its gradient goes into a later one, unless this peer is
    on probation."""
    sentence = "contribution to round {round} did not count"
    codes = reasons.CONTRIBUTIONS
    is_printed = True
    code: str
    round: int
    id: str

class Applied(Event, frozen=True):
    """A round was added to the live weights, `waited` seconds after it closed."""
    sentence = "a round was applied"
    codes = reasons.ROUNDS
    is_printed = True
    round: int
    code: str
    contributors: int = 0
    waited: float = 0.0

class Settled(Event, frozen=True):
    """A round is final. `digest` of the weights (empty for a large state between signed rounds), contribution
    `ids`, `tokens` of all rounds."""
    round: int
    digest: str
    ids: Sequence[str]
    tokens: int | None = None

class SwarmSeen(Event, frozen=True):
    """What an observer showed of the whole run: a point of its curve."""
    round: int | None
    tokens: int
    loss: float | None
    eval_loss: float | None
    peers: int
    tokens_per_second: float | None

class PromptContinued(Event, frozen=True):
    """The run's model continued an evaluating observer's prompt, with the weights of `round`."""
    prompt: str
    continuation: str
    round: int

class ShardRead(Event, frozen=True):
    """A shard of the run's text was read to its end."""
    shard: str
    epoch: int
    tokens: int

class Undecided(Event, frozen=True):
    """At the end of a log: own contributions neither settled nor returned."""
    ids: Sequence[str]

class Resync(Event, frozen=True):
    """The state is fetched again. Own rounds from `fork_round` on are discarded."""
    sentence = "fetches the state again"
    codes = reasons.RESYNCHRONISATIONS
    is_printed = True
    code: str
    peers: Sequence[str]
    reason: str
    fork_round: int | None

class DigestDiffers(Event, frozen=True):
    """Group members have signed other weights after a round."""
    sentence = "weights after round {round} differ"
    codes = reasons.RESYNCHRONISATIONS
    is_printed = True
    code: str
    round: int
    peers: Sequence[str]

class StatementUnusable(Event, frozen=True):
    """A signed digest on this disk is damaged and ignored."""
    reason: str

class ReceiptArrived(Event, frozen=True):
    """A receipt was received; `accepted`: contributions confirmed so far."""
    signer: str
    accepted: int

class ReceiptsUnusable(Event, frozen=True):
    """Damaged lines of the receipts file."""
    lines: int

class ReceiptNotKept(Event, frozen=True):
    """A receipt could not be written."""
    reason: str

# -- state ------------------------------------------------------------------------------------------------
class Saved(Event, frozen=True):
    """A checkpoint was written."""
    sentence = "checkpoint of round {round} written"
    round: int
    bytes: int

class MomentumRestored(Event, frozen=True):
    """A momentum from the disk is used, `age` rounds old."""
    round: int
    age: int

class MomentumIgnored(Event, frozen=True):
    """A momentum on the disk was not used or written."""
    sentence = "the momentum on the disk: {reason}"
    reason: str

class OffersMissing(Event, frozen=True):
    """These peers did not report their state."""
    peers: Sequence[str]

class Fetching(Event, frozen=True):
    """A snapshot of `size` bytes is being fetched, `kept` of them from an earlier download."""
    sentence = "fetches the state of round {round}"
    round: int
    size: int
    kept: int
    holders: int

class Fetched(Event, frozen=True):
    """The state was fetched; `bytes` were downloaded."""
    round: int
    bytes: int

class TextFetched(Event, frozen=True):
    """A file of the run's text came from other peers, or from an archive (0 peers)."""
    sentence = "fetched {file} from {peers} peers"
    file: str
    bytes: int
    seconds: float
    peers: int

class HolderDropped(Event, frozen=True):
    """A source of the snapshot, or of a file of text, was dropped."""
    sentence = "{peer} was dropped as a source of a download"
    codes = reasons.HOLDERS
    peer: str
    code: str
    reason: str

class NoCarriers(Event, frozen=True):
    """More connections for a large snapshot could not be opened."""
    reason: str

# -- the run's owner --------------------------------------------------------------------------------------
class Order(Event, frozen=True):
    """A newer order of the owner or the moderators was received."""
    sequence: int
    reason: str

class OrderUnusable(Event, frozen=True):
    """The order on this disk is damaged."""
    reason: str

class OrderUnknown(Event, frozen=True):
    """The directory did not return the owner's order."""
    reason: str

# -- archivists and bootstraps ----------------------------------------------------------------------------
class Archived(Event, frozen=True):
    """A stage's settled weights were archived, signed by `signers` peers."""
    stage: int
    round: int
    bytes: int
    signers: int

class ArchivingFailed(Event, frozen=True):
    """A stage could not be archived this time."""
    sentence = "stage {stage} was not archived"
    codes = reasons.ARCHIVING
    stage: int
    code: str
    reason: str

class Pruned(Event, frozen=True):
    """An old checkpoint left the archive."""
    stage: int
    round: int

class ArchiveUnusable(Event, frozen=True):
    """A damaged checkpoint in the archive is not served."""
    stage: int
    round: int
    reason: str

class Circuits(Event, frozen=True):
    """Relay statistics: open circuits, slots, bytes in all."""
    open: int
    slots: int
    bytes: int

# -- counters, now and then -------------------------------------------------------------------------------
class Traffic(Event, frozen=True):
    """Bytes by kind of message, refusals by code, links by state; since the worker was built."""
    sent: dict[str, int]
    received: dict[str, int]
    refused: dict[str, int] = field(default_factory=dict)
    subflows: dict[str, int] = field(default_factory=dict)

class Ledger(Event, frozen=True):
    """Microbatches by outcome; dropped and rerouted ones by code; since the worker was built."""
    committed: int
    tokens: int = 0
    repeated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rerouted: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    late_answers: int = 0

# -- lines for people: shown as it happens, also in the log -------------------------------------------------
class Notice(Event, frozen=True):
    """A line for people, as it was shown."""
    text: str

Notify = Callable[[Topic, str], None]
"""Shows one line to people and appends it to the event log."""

class TextNotice(Notice, frozen=True):
    """A line without fields of its own."""
    topic: Topic

    @property
    def name(self) -> str:
        return self.topic

    @property
    def fields(self) -> dict[str, Any]:
        return {"text": self.text}

class Listening(Notice, frozen=True):
    """An address at which the peer listens; `p2pd`: its process id."""
    p2pd: int | None = None

class Relayed(Notice, frozen=True):
    """A relay forwards connections to this peer, at these addresses."""
    relay: str
    addresses: Sequence[str]

class NotRelayed(Notice, frozen=True):
    """The relay no longer does so."""
    relay: str

class Reachable(Notice, frozen=True):
    """How other peers reach this one."""
    way: str

class Metrics(Notice, frozen=True):
    """Address of /metrics."""
    url: str

class Page(Notice, frozen=True):
    """Address of an observer's page."""
    url: str

class Text(Notice, frozen=True):
    """Text that was read: files, documents, bytes, and documents left out."""
    files: int
    documents: int
    bytes: int
    left_out: int

class EpochRead(Notice, frozen=True):
    """All shards of the run's text on this peer were read."""
    epoch: int
    shards: int

class Pausing(Notice, frozen=True):
    """The peer is about to leave its stage."""
    reason: str

class Paused(Notice, frozen=True):
    """No stage is in memory; `bytes` remain in use."""
    bytes: int

class Resuming(Notice, frozen=True):
    """A reason to pause has ended."""
    reason: str

class Evaluated(Notice, frozen=True):
    """An observer's evaluation on `bytes` bytes with this SHA-256."""
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
"""Lines shown at the start, or in addition to another event."""
EVENT_CLASSES = {
    kind.tag(): kind for kind in Event.__subclasses__() if kind.__module__ == __name__ and kind is not Notice
}
"""Event classes by name."""
NOTICE_CLASSES = {kind.tag(): kind for kind in Notice.__subclasses__() if kind is not TextNotice}
"""Classes of lines for people, by name. `order` is in both: as an event with its number, and as a line of
text."""
