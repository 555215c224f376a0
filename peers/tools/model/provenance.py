"""Collect from peers' files how a model was made: rounds, tokens, contributors.

Checkpoints name the run, the round and the signers of the weights. Event logs show committed tokens and
settled contributions; receipts show what other peers signed. The network is not used, so the result is what
these files prove. A peer without files here counts only if other peers recorded it.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from safetensors import SafetensorError

from peers.config.errors import UserError
from peers.state.checkpoint_file import STATEMENT_BYTES, number, token_count
from peers.state.safetensors_file import open_tensors
from peers.telemetry import event_log, log_events
from protocols.errors import WireError
from protocols.signed.envelope import EnvelopeKind, open_envelope
from protocols.signed.signed_receipts import open_receipt
from swarmnet.identifiers import PeerId, RunId
from swarmnet.rounds.receipt_rules import BLOCKS_KEPT, SIGNERS_KEPT, ReceiptBook
from swarmnet.run.manifest import Manifest

CHECKPOINTS, RECEIPTS = "checkpoints", "receipts.jsonl"
"""Names in a peer's state folder."""
CLAIMS, CLAIMS_BYTES = "contributors.json", 64 << 20
"""Name and maximum size of a file in an archive (peers/state/archive.py)."""
MAX_RECEIPTS = 2 * BLOCKS_KEPT * SIGNERS_KEPT
"""Maximum lines that are read of one peer: more than it keeps."""


@dataclass(slots=True)
class _Author:
    """Peer and stage of the log that is read, once known: the start of a log may be missing."""

    peer: str | None = None
    stage: int | None = None


@dataclass(slots=True)
class ModelProvenance:
    """Provenance of one run, from the files below one folder."""

    rounds: dict[int, int] = field(default_factory=dict)
    """Settled rounds in the newest weights, by stage."""
    signers: set[str] = field(default_factory=set)
    """Peers that signed the newest weights of their stage."""
    logs: int = 0
    """Number of peers whose event logs were read."""
    finalized_tokens: int | None = None
    """Tokens in the settled rounds of the first stage's newest weights; None: not counted."""
    tokens: int = 0
    """Tokens that the first stage committed, by the logs. This includes tokens that a crash lost or that came
    after the newest weights."""
    seconds: float = 0.0
    """Seconds from the first to the last event."""
    contributions: Counter[str] = field(default_factory=Counter)
    """Contributions in settled rounds by peer, as far as the logs show."""
    receipts: Counter[str] = field(default_factory=Counter)
    """Contributions by peer that other peers signed receipts for."""
    claims: Counter[str] = field(default_factory=Counter)
    """Tokens that each peer claims to have committed, in all stages."""
    troubles: list[str] = field(default_factory=list)
    """Files that could not be read."""


def facts(source: Path | None, manifest: Manifest) -> ModelProvenance:
    """Return the provenance of a run from the folder `source` (None: the current folder), or from one
    checkpoint file."""
    place, run_id = source or Path(), manifest.run_id()
    files = [place] if place.is_file() else sorted(place.rglob("stage-*-round-*.safetensors"))
    found, folders, newest = ModelProvenance(), set[Path](), dict[int, Mapping[str, str]]()
    for file in files:
        metadata = _metadata(file)
        if metadata.get("run") != run_id:
            continue
        folder = file.absolute().parent
        folders.add(folder.parent if folder.name == CHECKPOINTS else folder)
        stage = number(metadata["stage"])
        if stage not in newest or number(newest[stage]["round"]) < number(metadata["round"]):
            newest[stage] = metadata
    for stage, metadata in sorted(newest.items()):
        found.rounds[stage] = number(metadata["round"]) + 1
        found.signers.update(_signers(metadata, run_id))
    found.finalized_tokens = token_count(newest.get(0, {}).get("tokens", ""))
    _read_logs(found, [folder / event_log.LOG_FILE for folder in sorted(folders)])
    for folder in sorted(folders):
        _read_receipts(found, folder / RECEIPTS, run_id, manifest.rounds.snapshot_interval)
        _read_claims(found, folder / CLAIMS)
    return found


def _metadata(file: Path) -> Mapping[str, str]:
    """Return the metadata of a checkpoint; empty if unreadable. `checkpoint.newest` reports such files."""
    try:
        with open_tensors(file) as opened:
            found: Mapping[str, str] = opened.metadata() or {}
        number(found.get("stage", ""))
        number(found.get("round", ""))
        token_count(found.get("tokens", ""))
    except (OSError, SafetensorError, ValueError):
        return {}
    return found


def _signers(metadata: Mapping[str, str], run_id: RunId) -> Iterator[str]:
    for text in metadata.get("signed", "").split():
        try:
            data = bytes.fromhex(text)
            yield open_envelope(data, run_id, EnvelopeKind.SETTLED, STATEMENT_BYTES).sender
        except (ValueError, WireError):  # A signature of another run or program proves nothing here.
            continue


def _read_logs(found: ModelProvenance, logs: list[Path]) -> None:
    """Add what the event logs contain to `found`: the time of training, the tokens, and the contributions by
    contributor."""
    contributors: dict[str, str] = {}
    settled: set[str] = set()
    tokens: dict[int, Counter[str]] = {}
    first, last = float("inf"), 0.0
    for log in logs:
        files, author = event_log.parts(log), _Author()
        found.logs += bool(files)
        for file in files:
            try:
                for line in _about(file, author, contributors, settled, tokens):
                    first, last = min(first, line.time), max(last, line.time)
            except (UserError, OSError) as error:
                found.troubles.append(str(error))
                author = _Author()  # The peer may have changed its stage in the unread part.
    found.seconds = max(0.0, last - first)
    # Every stage commits each microbatch; a stage with all its logs here has all of them.
    origins = {origin for counts in tokens.values() for origin in counts}
    found.tokens = sum(max(counts[origin] for counts in tokens.values()) for origin in origins)
    found.contributions.update(contributors[identity] for identity in settled if identity in contributors)


def _read_receipts(found: ModelProvenance, file: Path, run_id: RunId, block_rounds: int) -> None:
    """Add the receipts of one peer, each with its signature verified."""
    if not file.is_file():
        return
    books: dict[PeerId, ReceiptBook] = {}
    try:
        with file.open("rb") as lines:
            for line in islice(lines, MAX_RECEIPTS):
                try:
                    data = base64.b64decode(json.loads(line).get("receipt", ""))
                    receipt, _ = open_receipt(data, run_id, block_rounds)
                except (ValueError, AttributeError, TypeError, RecursionError, WireError):
                    continue  # The file also has the peer's own counts, which no other peer signed.
                books.setdefault(receipt.contributor, ReceiptBook(block_rounds)).take(receipt)
    except OSError as error:
        found.troubles.append(f"{file}: cannot be read: {error.strerror}")
    for contributor, book in books.items():
        found.receipts[contributor] = max(found.receipts[contributor], book.total().contributions)


def _read_claims(found: ModelProvenance, file: Path) -> None:
    """Add an archivist's list of the claims that peers made in the directory."""
    if not file.is_file():
        return
    try:
        if file.stat().st_size > CLAIMS_BYTES:
            raise ValueError(f"it has more than {CLAIMS_BYTES} bytes")
        for one in json.loads(file.read_bytes()):
            match one:
                case {"peer": str(peer), "tokens": dict(tokens)}:
                    found.claims[peer] += sum(count for count in tokens.values() if isinstance(count, int))
                case _:
                    raise ValueError("it holds something else than contributors")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        found.troubles.append(f"{file}: is no list of contributors: {error}")


def _about(
    file: Path,
    author: _Author,
    contributors: dict[str, str],
    settled: set[str],
    tokens: dict[int, Counter[str]],
) -> Iterator[event_log.LogLine]:
    """Add one part of a log to the collected facts, except events of an unknown stage or contributor. Raises
    UserError for a damaged log."""
    for line in event_log.read_part(file):
        match line.event:
            case log_events.Started(peer):
                author.peer, author.stage = peer, None
            case log_events.Assembled(stage):
                author.stage = stage
            case log_events.Committed(origin, tokens=count) if author.stage is not None:
                tokens.setdefault(author.stage, Counter())[origin] += count
            case log_events.ContributionMade(id=identity) if author.peer is not None:
                contributors[identity] = author.peer
            case log_events.ContributionAccepted(id=identity, contributor=contributor):
                contributors[identity] = contributor
            case log_events.Settled(ids=ids):
                settled.update(ids)
        yield line
