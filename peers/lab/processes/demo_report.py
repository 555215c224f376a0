"""Report of a demo, computed from the peers' event logs alone and not from what the screen showed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from peers.telemetry import event_log, log_events
from peers.telemetry.event_fold import SettledRounds
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Contribution, encode
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.model.flat_layout import trained_layout
from swarmnet.optimizer.method import method_of
from swarmnet.run.manifest import Manifest

EDGE_MICROBATCHES = 20
"""Microbatches over which the first and last loss are averaged; a single loss varies by 0.3 nats."""
CURVE_POINTS = 50
"""Number of points of the curve; each is the mean over equally many microbatches."""


@dataclass(slots=True)
class DemoPeerReport:
    """The contents of one peer's event log. Times are Unix times."""

    peer: str
    stage: int = -1
    started_at: float = 0.0
    alive: bool = True
    commits: list[tuple[float, str, int, int, float | None]] = field(default_factory=list)
    """Committed microbatches: (time, origin, counter, tokens, loss)."""
    settled: SettledRounds = field(default_factory=SettledRounds)
    took: list[tuple[float, str]] = field(default_factory=list)
    """Accepted contributions: (time, contributor)."""
    made: list[float] = field(default_factory=list)
    """The times of its own contributions."""
    took_up: list[tuple[float, int]] = field(default_factory=list)
    """Expert shards that it trains: (time of the assignment, shard)."""
    sent: dict[str, int] = field(default_factory=dict)
    ledger: log_events.Ledger = field(default_factory=lambda: log_events.Ledger(0))


def read_story(state: Path) -> DemoPeerReport:
    story = DemoPeerReport("")
    for line in event_log.read(state / event_log.LOG_FILE):
        story.settled.take(line.event)
        match line.event:
            case log_events.Started(peer):
                story.peer, story.started_at = peer, line.time
            case log_events.Assembled(stage):
                story.stage = stage
            case log_events.Committed(origin, counter, tokens, loss):
                story.commits.append((line.time, origin, counter, tokens, loss))
            case log_events.ContributionMade():
                story.made.append(line.time)
            case log_events.ContributionAccepted(contributor=contributor):
                story.took.append((line.time, contributor))
            case log_events.ExpertsReassigned(group=group):
                story.took_up.append((line.time, group))
            case log_events.Traffic(sent):
                story.sent = sent
            case log_events.Ledger():
                story.ledger = line.event
    return story


def unequal_digests(stories: Sequence[DemoPeerReport]) -> list[str]:
    """Return stage and round of each round that two peers of a stage settled with different digests."""
    found: dict[tuple[int, int], set[str]] = {}
    for story in stories:
        for round, settled in story.settled.items():
            found.setdefault((story.stage, round), set()).update(filter(None, [settled.digest]))
    return [f"stage {s} round {r}" for (s, r), digests in sorted(found.items()) if len(digests) > 1]


def repeats_across_peers(stories: Sequence[DemoPeerReport]) -> tuple[int, int]:
    """Return the number of commits by a second peer of the same stage, and the number of all commits."""
    commits = Counter(
        (story.stage, origin, counter) for story in stories for _, origin, counter, _, _ in story.commits
    )
    return sum(count - 1 for count in commits.values()), commits.total()


def kill_to_commit_seconds(stories: Iterable[DemoPeerReport], stage: int, killed_at: float) -> float | None:
    later = [at for story in stories if story.stage == stage for at, *_ in story.commits if at > killed_at]
    return min(later) - killed_at if later else None


def kill_to_experts_seconds(
    stories: Iterable[DemoPeerReport], killed: DemoPeerReport, at: float
) -> float | None:
    """Return the seconds until another peer of the stage trains the killed peer's expert shard.

    The result is 0 if one did already, and None if none ever did.
    """
    if not killed.took_up:
        return None
    group, found = killed.took_up[-1][1], []
    for story in stories:
        if story.stage == killed.stage and story is not killed:
            before = [taken for since, taken in story.took_up if since <= at][-1:]
            later = [since for since, taken in story.took_up if since > at and taken == group]
            found += [at] if before == [group] else later[:1]
    return min(found) - at if found else None


def join_to_contribution_seconds(
    stories: Iterable[DemoPeerReport], peer: str, started_at: float
) -> float | None:
    accepted = [at for story in stories for at, contributor in story.took if contributor == peer]
    return min(accepted) - started_at if accepted else None


def curve(stories: Iterable[DemoPeerReport]) -> list[tuple[int, float]]:
    """Return the training curve: tokens so far, and the mean loss since the last point in nats per token.

    The loss of a microbatch is computed before the weights are updated by it.
    """
    commits = _with_losses(stories)
    found, trained = [], 0
    size = max(1, -(-len(commits) // CURVE_POINTS))
    for first in range(0, len(commits), size):
        group = commits[first : first + size]
        trained += sum(tokens for tokens, _ in group)
        found.append((trained, fmean(loss for _, loss in group)))
    return found


def _with_losses(stories: Iterable[DemoPeerReport]) -> list[tuple[int, float]]:
    """Return tokens and loss of each microbatch that the first stage committed, in order of time."""
    commits = sorted(
        (at, loss, tokens)
        for story in stories
        if story.stage == 0
        for at, _, _, tokens, loss in story.commits
        if loss is not None
    )
    return [(tokens, loss) for _, loss, tokens in commits]


def contribution_bytes(manifest: Manifest, stage: int) -> int:
    """Return the bytes of one contribution on the wire, computed from the manifest."""
    layout = trained_layout(manifest, stage)
    plain = replace(manifest, sync=replace(manifest.sync, transform="hadamard"))  # It changes no size.
    body = ENVELOPE_BYTES + method_of(plain, layout, "meta").payload_bytes  # Allocates no tensors.
    return wire_bytes(len(encode(Contribution())), body)


def build(
    manifest: Manifest,
    stories: Sequence[DemoPeerReport],
    killed: tuple[DemoPeerReport, float] | None,
    newcomer: DemoPeerReport | None,
    bits_per_byte: float,
    scored_sha256: str,
    train_seconds: float,
) -> dict[str, Any]:
    """Return the report. `killed`: the killed peer and the time."""
    losses = [loss for _, loss in _with_losses(stories)]
    repeats, commits = repeats_across_peers(stories)
    computed = None  # The size of a result depends on its contributors.
    if manifest.sync.topology == "all-gather":
        computed = sum(len(story.took) * contribution_bytes(manifest, story.stage) for story in stories)
    return {
        "loss_start": fmean(losses[:EDGE_MICROBATCHES]) if losses else None,
        "loss_end": fmean(losses[-EDGE_MICROBATCHES:]) if losses else None,
        "curve": curve(stories),
        "bits_per_byte": bits_per_byte,
        "scored_sha256": scored_sha256,
        "tokens": sum(tokens for s in stories if s.stage == 0 for _, _, _, tokens, _ in s.commits),
        "rounds": max((round + 1 for story in stories for round in story.settled), default=0),
        "train_seconds": train_seconds,
        "kill_to_commit_seconds": (
            kill_to_commit_seconds(stories, killed[0].stage, killed[1]) if killed else None
        ),
        "kill_to_experts_seconds": kill_to_experts_seconds(stories, *killed) if killed else None,
        "join_to_contribution_seconds": (
            join_to_contribution_seconds(stories, newcomer.peer, newcomer.started_at) if newcomer else None
        ),
        "stages": len(manifest.stages),
        "unequal_digests": unequal_digests(stories),
        "microbatches": {"committed": commits, "repeated_across_peers": repeats},
        "contribution_bytes": {
            "counted": sum(story.sent.get(Contribution.kind, 0) for story in stories),
            "computed": computed,
        },
        "peers": [
            {
                "peer": story.peer,
                "stage": story.stage,
                "alive": story.alive,
                "digests": {str(round): settled.digest for round, settled in story.settled.items()},
                "bytes_sent": story.sent,
                "ledger": {
                    "committed": story.ledger.committed,
                    "repeated": story.ledger.repeated,
                    "dropped": sum(story.ledger.dropped.values()),
                },
            }
            for story in stories
        ],
    }
