"""What the files of a run's peers tell of how its model was made: rounds, tokens, contributors.

Checkpoints name the run, the round and who signed the weights; event logs beside them name what was committed
and whose contributions settled. Nothing here is asked of the network, so it is what is *known*: a peer whose
log is not there is counted only where others saw it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from peers import event_log
from peers.errors import UserError
from protocols.envelope import Kind, open_envelope
from protocols.errors import WireError
from swarmnet.identifiers import RunId

LOG = "events.jsonl"
STATEMENT_BYTES = 64
"""A chain's value and a digest of settled weights are 40 (signed_digests.py)."""


@dataclass(slots=True)
class Facts:
    """Of one run, from the files below one folder."""

    rounds: dict[int, int] = field(default_factory=dict)
    """Stage -> settled rounds in the newest weights."""
    signers: set[str] = field(default_factory=set)
    """Peers that signed the newest weights of their stage."""
    logs: int = 0
    """Event logs that were read."""
    tokens: int = 0
    """Committed by the first stage, as far as the logs tell."""
    seconds: float = 0.0
    """From the first to the last event."""
    contributions: Counter[str] = field(default_factory=Counter)
    """Peer -> its contributions in settled rounds, as far as the logs tell."""
    troubles: list[str] = field(default_factory=list)
    """Files that could not be read."""


def facts(source: Path | None, run_id: RunId) -> Facts:
    """What is known of the run from the folder `source` (None: here), or from one checkpoint file."""
    place = source or Path()
    files = [place] if place.is_file() else sorted(place.rglob("stage-*-round-*.safetensors"))
    found, folders, newest = Facts(), set[Path](), dict[int, Mapping[str, str]]()
    for file in files:
        metadata = _metadata(file)
        if metadata.get("run") != run_id:
            continue
        folders.add(file.parent)
        stage = int(metadata["stage"])
        if stage not in newest or int(newest[stage]["round"]) < int(metadata["round"]):
            newest[stage] = metadata
    for stage, metadata in sorted(newest.items()):
        found.rounds[stage] = int(metadata["round"]) + 1
        found.signers.update(_signers(metadata, run_id))
    _read_logs(found, [folder / LOG for folder in sorted(folders)])
    return found


def _metadata(file: Path) -> Mapping[str, str]:
    """Of a checkpoint; empty where there is none to be had. `checkpoint.newest` is who complains."""
    try:
        with safe_open(file, framework="pt") as opened:
            found: Mapping[str, str] = opened.metadata() or {}
    except (OSError, SafetensorError):
        return {}
    return found if found.get("stage", "").isdecimal() and found.get("round", "").isdecimal() else {}


def _signers(metadata: Mapping[str, str], run_id: RunId) -> Iterator[str]:
    for text in metadata.get("signed", "").split():
        try:
            data = bytes.fromhex(text)
            yield open_envelope(data, run_id, Kind.SETTLED, STATEMENT_BYTES).sender
        except (ValueError, WireError):  # Another run's or program's: it vouches for nothing here.
            continue


def _read_logs(found: Facts, logs: list[Path]) -> None:
    makers: dict[str, str] = {}
    settled: set[str] = set()
    tokens: dict[int, Counter[str]] = {}
    first, last = float("inf"), 0.0
    for log in logs:
        for file in (log.with_name(log.name + ".old"), log):
            if not file.is_file():
                continue
            found.logs += 1
            try:
                for event in _about(file, makers, settled, tokens):
                    first, last = min(first, event.time), max(last, event.time)
            except (UserError, OSError) as error:
                found.troubles.append(str(error))
    found.seconds = max(0.0, last - first)
    # A microbatch is committed in every stage; a stage of which all logs are here has seen them all.
    origins = {origin for counts in tokens.values() for origin in counts}
    found.tokens = sum(max(counts[origin] for counts in tokens.values()) for origin in origins)
    found.contributions.update(makers[identity] for identity in settled if identity in makers)


def _about(
    file: Path, makers: dict[str, str], settled: set[str], tokens: dict[int, Counter[str]]
) -> Iterator[event_log.Event]:
    """Read one log into what is gathered of all of them. Raises UserError where it is damaged."""
    me, stage = "", -1
    for event in event_log.read(file):
        fields = event.fields
        match event.name, fields:
            case "started", {"peer": str(peer)}:
                me = peer
            case "assembled", {"stage": int(held)}:
                stage = held
            case "committed", {"origin": str(origin), "tokens": int(count)}:
                tokens.setdefault(stage, Counter())[origin] += count
            case "made", {"id": str(identity)}:
                makers[identity] = me
            case "took", {"id": str(identity), "maker": str(maker)}:
                makers[identity] = maker
            case "settled", {"ids": list(ids)}:
                settled.update(identity for identity in ids if isinstance(identity, str))
            case _:
                pass
        yield event
