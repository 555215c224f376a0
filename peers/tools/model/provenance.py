"""What the files of a run's peers tell of how its model was made: rounds, tokens, contributors.

Checkpoints name the run, the round and who signed the weights; event logs beside them name what was committed
and whose contributions settled, receipts what others signed for. Nothing here is asked of the network, so it
is what is *known*: a peer whose files are not there is counted only where others saw it.
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

from peers.errors import UserError
from peers.state.checkpoint_file import STATEMENT_BYTES, number, token_count
from peers.state.safetensors_file import open_tensors
from peers.telemetry import event_log
from peers.telemetry import events as noted
from protocols.errors import WireError
from protocols.signed.envelope import EnvelopeKind, open_envelope
from protocols.signed.receipts import open_receipt
from swarmnet.identifiers import PeerId, RunId
from swarmnet.rounds.receipts import BLOCKS_KEPT, SIGNERS_KEPT, ReceiptBook
from swarmnet.run.manifest import Manifest

CHECKPOINTS, LOG, RECEIPTS = "checkpoints", "events.jsonl", "receipts.jsonl"
"""In a peer's state folder."""
CLAIMS, CLAIMS_BYTES = "contributors.json", 64 << 20
"""In an archive (peers/state/archive.py)."""
MAX_RECEIPTS = 2 * BLOCKS_KEPT * SIGNERS_KEPT
"""Lines of one peer that are read: more than it keeps."""


@dataclass(slots=True)
class _Author:
    """Whose log is read, as far as it has said so: a log may have lost its beginning."""

    peer: str | None = None
    stage: int | None = None


@dataclass(slots=True)
class ModelProvenance:
    """Of one run, from the files below one folder."""

    rounds: dict[int, int] = field(default_factory=dict)
    """Stage -> settled rounds in the newest weights."""
    signers: set[str] = field(default_factory=set)
    """Peers that signed the newest weights of their stage."""
    logs: int = 0
    """Peers whose event logs were read."""
    finalized_tokens: int | None = None
    """In the settled rounds of the newest weights of the first stage; None: it has not counted."""
    tokens: int = 0
    """Committed by the first stage, as far as the logs tell: also what a crash has cost, or came later."""
    seconds: float = 0.0
    """From the first to the last event."""
    contributions: Counter[str] = field(default_factory=Counter)
    """Peer -> its contributions in settled rounds, as far as the logs tell."""
    receipts: Counter[str] = field(default_factory=Counter)
    """Peer -> its contributions that others have signed for."""
    claims: Counter[str] = field(default_factory=Counter)
    """Peer -> tokens that it says it has committed, in all stages."""
    troubles: list[str] = field(default_factory=list)
    """Files that could not be read."""


def facts(source: Path | None, manifest: Manifest) -> ModelProvenance:
    """What is known of the run from the folder `source` (None: here), or from one checkpoint file."""
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
    _read_logs(found, [folder / LOG for folder in sorted(folders)])
    for folder in sorted(folders):
        _read_receipts(found, folder / RECEIPTS, run_id, manifest.rounds.snapshot_interval)
        _read_claims(found, folder / CLAIMS)
    return found


def _metadata(file: Path) -> Mapping[str, str]:
    """Of a checkpoint; empty where there is none to be had. `checkpoint.newest` is who complains."""
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
        except (ValueError, WireError):  # Another run's or program's: it vouches for nothing here.
            continue


def _read_logs(found: ModelProvenance, logs: list[Path]) -> None:
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
                author = _Author()  # In what was not read it may have moved to another stage.
    found.seconds = max(0.0, last - first)
    # A microbatch is committed in every stage; a stage of which all logs are here has seen them all.
    origins = {origin for counts in tokens.values() for origin in counts}
    found.tokens = sum(max(counts[origin] for counts in tokens.values()) for origin in origins)
    found.contributions.update(contributors[identity] for identity in settled if identity in contributors)


def _read_receipts(found: ModelProvenance, file: Path, run_id: RunId, block_rounds: int) -> None:
    """What others signed for one peer, each signature verified."""
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
                    continue  # The peer's own counts stand there too, and nobody has signed those.
                books.setdefault(receipt.contributor, ReceiptBook(block_rounds)).take(receipt)
    except OSError as error:
        found.troubles.append(f"{file}: cannot be read: {error.strerror}")
    for contributor, book in books.items():
        found.receipts[contributor] = max(found.receipts[contributor], book.total().contributions)


def _read_claims(found: ModelProvenance, file: Path) -> None:
    """An archivist's list of what peers said of themselves in the directory."""
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
    """Read a part of one log into what is gathered of all of them, except what is of an unknown stage or
    maker. Raises UserError where it is damaged."""
    for line in event_log.read_part(file):
        match line.event:
            case noted.Started(peer):
                author.peer, author.stage = peer, None
            case noted.Assembled(stage):
                author.stage = stage
            case noted.Committed(origin, tokens=count) if author.stage is not None:
                tokens.setdefault(author.stage, Counter())[origin] += count
            case noted.ContributionMade(id=identity) if author.peer is not None:
                contributors[identity] = author.peer
            case noted.ContributionAccepted(id=identity, contributor=contributor):
                contributors[identity] = contributor
            case noted.Settled(ids=ids):
                settled.update(ids)
        yield line
