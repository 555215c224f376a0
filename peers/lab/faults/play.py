"""Run one fault schedule from its seed: the world, its faults, the calm after them, and the record of it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from peers.lab.faults.faults import ScheduledFault
from peers.lab.faults.schedules import schedule
from peers.lab.world.gated_clock import GatedLoop
from peers.lab.world.journal import RecordedEvent
from peers.lab.world.stub_stage import StubReduced
from peers.lab.world.world import Member, World
from peers.lab.world.world_events import FaultSkipped, Healed, Injected, StageLost
from peers.network.channels import DIAL_SECONDS
from peers.telemetry.log_events import Assembled, Settled
from peers.worker.rounds.round_service import RoundService
from protocols.signed.identity import Identity
from protocols.signed.records import RECORD_SECONDS
from swarmnet.identifiers import ContributionId
from swarmnet.membership.membership import LONGEST_REDIAL_SECONDS
from swarmnet.rounds.result_table import draw_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Experts, ModelShape, Rounds, Sync
from swarmnet.run.sync_methods import DEFAULT_LOCAL_METHOD, DEFAULT_METHOD

FAULT_SECONDS = 50.0
"""Time in which faults are injected, unless the options say otherwise."""
HEAL_SECONDS = 20.0 + DIAL_SECONDS + 1.2 * LONGEST_REDIAL_SECONDS
"""Time after the last heal until all peers of a stage are on one branch: 20 s once their links are up again.

A dial in progress at the heal fails only at its deadline, and the next comes after the longest pause."""
CALM_SECONDS = 60.0
"""Time after `HEAL_SECONDS` until all peers have settled `NEW_ROUNDS`; longer if such rounds close by time.

After the loss of a stage it starts when the directory has forgotten the stage; until then peers that enter it
wait for its weights."""
LONGEST_SECONDS = 240.0
"""Time limit after the last heal for `MIN_ROUNDS` settled rounds and for all older contributions.

Slow worlds take this long without being stuck; so do worlds whose longest branch was abandoned."""
MIN_ROUNDS = 50
"""Rounds that each stage must settle."""
NEW_ROUNDS = 14
"""Rounds that each peer must settle after the last heal: enough to decide all earlier contributions
(own_contributions.py)."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one schedule."""

    seed: int
    peers: int | None = None
    """Number of peers; None: 8 to 16, from the seed."""
    stages: int | None = None
    """Number of stages; None: 2 to 4, from the seed."""
    rules: Rounds | None = None
    kinds: tuple[str, ...] = ()
    real: bool = False
    rounds: int = MIN_ROUNDS
    seconds: float = FAULT_SECONDS
    """Time in which faults are injected; the calm comes after it."""
    faults: tuple[ScheduledFault, ...] | None = None
    """Faults of the schedule; None: drawn from the seed."""
    moves: bool = False
    """Whether peers move between stages, by their own decision and by order."""
    sharded: bool = False
    """Whether peers exchange contributions through reducers."""
    sync: Sync | None = None
    """Section `sync` of `real` peers; None: the default, or `local-steps` if other options require it."""
    helpers: int = 0
    """Number of further peers that only reduce, spread over the stages."""
    experts: bool = False
    """Whether `real` peers train an expert shard each, half of the experts."""


@dataclass(frozen=True, slots=True)
class ResourceSample:
    """Sizes of the peers' collections, and the event loop's callbacks, sampled once a second."""

    time: float
    callbacks: int
    """Number of callbacks since the start."""
    largest: dict[str, int]
    """Largest size over all peers, by name of the collection."""


@dataclass(slots=True)
class ScheduleRecord:
    """The record of a schedule: its settings, the event logs, and the state at the end."""

    options: Options
    stages: int
    peers: int
    rules: Rounds
    faults: list[ScheduledFault]
    notes: list[RecordedEvent] = field(default_factory=list)
    samples: list[ResourceSample] = field(default_factory=list)
    escaped: list[tuple[str, str]] = field(default_factory=list)
    healed_at: float = 0.0
    ended_at: float = 0.0
    calm: bool = False
    """Whether every stage settled the required rounds in time."""
    standing: list[str] = field(default_factory=list)
    """Peers and stages that are short of the required rounds, as text."""
    living: dict[str, int] = field(default_factory=dict)
    """Stage at the end of each living process; its key is name.life, with `+n` after its nth move."""
    given_up: set[int] = field(default_factory=set)
    """Stages that were lost permanently and have settled no round since."""
    names: dict[str, str] = field(default_factory=dict)
    """Name of each peer, by peer id."""
    callbacks: int = 0
    reduced: StubReduced | None = None
    """Decoder of the stages' results, if there are reducers."""


SHARDS = 3
"""Shards of a contribution: fewer than peers, so that some peers reduce none and some reduce two."""
EXPERTS = Experts(num_experts=4, top_k=1, groups=2, merge_rounds=5, merge_until=10_000, merge_nearest=2)
"""Experts of the model; they merge often, so that peers which settled different rounds are detected."""


def small_manifest(
    stages: int,
    microbatches: int,
    rules: Rounds | None,
    seed: int,
    sharded: bool = False,
    sync: Sync | None = None,
    experts: Experts | None = None,
) -> Manifest:
    """Return a manifest with the smallest model that the wire format accepts.

    A round has `microbatches` microbatches of 4 tokens.
    """
    owner = Identity.from_seed(b"the owner of the run").peer_id
    model = ModelShape(
        hidden_size=8,
        num_hidden_layers=stages,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    if experts is not None:
        model = replace(model, qk_norm=True, experts=experts)
    sync = sync or Sync(method=DEFAULT_LOCAL_METHOD if sharded or experts else DEFAULT_METHOD)
    if sharded:
        sync = replace(sync, topology="sharded-reduce", shards=SHARDS)
    times = rules or Rounds(
        max_seconds=5.0, contribution_timeout_seconds=1.0, finality_timeout_seconds=3.0, snapshot_interval=4
    )
    fields = {name: getattr(times, name) for name in times.__dataclass_fields__}
    return Manifest(
        name="simulated",
        owner=owner,
        seed=seed,
        stages=(1,) * stages,
        activation_codec="fp32",
        model=model,
        data=Data(seq_len=4, micro_batch_size=1),
        rounds=Rounds(**{**fields, "global_batch_tokens": 4 * microbatches}),
        sync=sync,
    )


def play(options: Options) -> ScheduleRecord:
    """Run one schedule on a fresh clock."""
    with (
        tempfile.TemporaryDirectory(prefix="swarmnet-world-", dir=_memory()) as folder,
        asyncio.Runner(loop_factory=GatedLoop) as runner,
    ):
        return runner.run(_play(options, Path(folder)))


def _memory() -> str | None:
    """Return a file system in memory, or None; on a disk, checkpoints would wait for it."""
    return next((path for path in ("/dev/shm",) if os.access(path, os.W_OK)), None)


async def _play(options: Options, folder: Path) -> ScheduleRecord:
    """Run one fault schedule in the simulator, and return what the invariants are checked on."""
    chance = Random(f"shape {options.seed}")
    stages = options.stages or chance.randrange(2, 5)
    peers = options.peers or chance.randrange(max(8, 2 * stages), 17)
    names = [f"p{number}" for number in range(peers)]
    helpers = [f"h{number}" for number in range(options.helpers)]
    experts = EXPERTS if options.experts else None
    manifest = small_manifest(
        stages, max(2, peers // stages), options.rules, options.seed, options.sharded, options.sync, experts
    )
    faults = list(options.faults or _drawn(options, names + helpers))
    world = World(manifest=manifest, seed=options.seed, disk=folder, real=options.real, moves=options.moves)
    seen = ScheduleRecord(options, stages, peers, manifest.rounds, faults)
    seen.reduced = StubReduced(draw_of(manifest)) if options.sharded and not options.real else None
    world.helpers.update(helpers)
    for number, name in [*enumerate(names), *enumerate(helpers)]:
        world.start(name, number % stages)
    sampling = asyncio.create_task(_sample(world, seen))
    await _inflict(world, faults, options.seconds)
    seen.healed_at = asyncio.get_running_loop().time()
    await _calm(world, seen)
    sampling.cancel()
    seen.ended_at = asyncio.get_running_loop().time()
    seen.living = {member.who: member.worker.stage for member in world.living()}
    seen.given_up = set(world.given_up)
    await world.close()
    seen.notes = world.journal.events
    seen.escaped = [(name, _describe_error(error)) for name, error in world.journal.escaped]
    seen.names = {member.peer: member.name for member in world.all_lives}
    seen.callbacks = world.loop.callbacks  # type: ignore[attr-defined]
    return seen


def _drawn(options: Options, names: Sequence[str]) -> list[ScheduledFault]:
    return schedule(options.seed, names, options.seconds, options.kinds, options.moves)


def _describe_error(error: BaseException) -> str:
    """Return the text of an escaped exception, with its file and line."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" in {Path(frame.filename).name}:{frame.lineno}" for frame in place)
    return f"{type(error).__name__}: {error}{where}"


async def _inflict(world: World, faults: list[ScheduledFault], seconds: float) -> None:
    """Inject and heal the faults at their times, and wait until `seconds` have passed."""
    steps = sorted(
        [(fault.at, 0, number, fault) for number, fault in enumerate(faults)]
        + [(fault.until, 1, number, fault) for number, fault in enumerate(faults) if fault.until > fault.at],
        key=lambda step: step[:3],
    )
    loop, injected = asyncio.get_running_loop(), set()
    for at, healing, number, fault in steps:
        await asyncio.sleep(max(0.0, at - loop.time()))
        if not healing:
            done = await fault.inject(world)
            injected.update([number] if done else [])
            world.note("world", 0, Injected(repr(fault)) if done else FaultSkipped(repr(fault)))
        elif number in injected:
            await fault.heal(world)
            world.note("world", 0, Healed(repr(fault)))
    await asyncio.sleep(max(0.0, seconds - loop.time()))


async def _calm(world: World, seen: ScheduleRecord) -> None:
    """Wait until every living peer has settled enough new rounds, or time is up."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    newest, open_then = _newest(world, seen), _open(world)
    lost = [note.time for note in world.journal.events if isinstance(note.what, StageLost)]
    forgotten = max(lost, default=0.0) + RECORD_SECONDS
    by_time = NEW_ROUNDS * (seen.rules.max_seconds + seen.rules.contribution_timeout_seconds)
    until = max(began + HEAL_SECONDS, forgotten) + max(CALM_SECONDS, by_time)
    while loop.time() <= until and not world.journal.escaped:
        if loop.time() <= began + HEAL_SECONDS:  # Until then a stage may abandon its longest branch.
            standing = _newest(world, seen)
        least = [min(then, now) + NEW_ROUNDS for then, now in zip(newest, standing, strict=True)]
        seen.standing = _short_of(world, least)
        if not seen.standing:
            break
        await asyncio.sleep(0.5)
    else:
        return
    least = [max(seen.options.rounds, then + NEW_ROUNDS) for then in newest]
    while loop.time() <= began + LONGEST_SECONDS and not world.journal.escaped:
        seen.standing = _short_of(world, least, open_then)
        if not seen.standing and world.real and loop.time() <= began + HEAL_SECONDS:
            stages = {(peer.name, peer.life): peer.worker.stage for peer in world.living()}
            seen.standing = forked_rounds(world.journal.events, stages)
        if not seen.standing:
            seen.calm = True
            return
        await asyncio.sleep(0.5)


def forked_rounds(notes: Iterable[RecordedEvent], stages: Mapping[tuple[str, int], int]) -> list[str]:
    """Return, as text, the rounds which living peers of a stage settled with different weights.

    `stages` has the stage of each living process, by name and life. Of each peer the newest round counts, as
    far as the others settled it as well: an older one may lie on a branch that the peer has left.
    """
    settled: dict[tuple[str, int], dict[int, str]] = {process: {} for process in stages}
    for note in notes:
        rounds = settled.get((note.name, note.life))
        if rounds is None:
            continue
        match note.what:
            case Assembled():
                rounds.clear()
            case Settled(round=round, digest=digest):
                rounds.pop(round, None)  # The last key is the newest round, also after a return.
                rounds[round] = digest
    forked: set[tuple[int, int]] = set()
    for process, rounds in settled.items():
        newest = next(reversed(rounds), -1)
        others = [settled[other] for other, stage in stages.items() if stage == stages[process]]
        if any(other.get(newest, rounds.get(newest)) != rounds.get(newest) for other in others):
            forked.add((stages[process], newest))
    return [f"stage {stage} is forked at round {round}" for stage, round in sorted(forked)]


def _newest(world: World, seen: ScheduleRecord) -> list[int]:
    """Return the newest settled round of each stage; -1 if none."""
    return [max(world.settled(stage).values(), default=-1) for stage in range(seen.stages)]


def _open(world: World) -> dict[str, set[ContributionId]]:
    """Return the undecided own contributions of each living peer."""
    return {
        member.who: set(service.rounds.offers.open)
        for member in world.living()
        if (service := _round_service(member)) is not None
    }


def _short_of(
    world: World, least: list[int], undecided: dict[str, set[ContributionId]] | None = None
) -> list[str]:
    """Return, as text, the peers that have not settled the round `least` of their stage.

    With `undecided`, a peer that has not decided one of these contributions is listed as well: a disconnected
    peer keeps them open longer than any round (own_contributions.py).
    """
    short = [f"no peer at stage {stage}" for stage in range(len(least)) if not world.living(stage)]
    for member in world.living():
        stage, standing = member.worker.stage, _standing(member)
        rounds = least[stage] if stage >= 0 else 0
        back = not world.real and world.journal.is_returning(member.name, member.life)
        if standing < rounds or back or (undecided is not None and _undecided(member, undecided)):
            short.append(f"{member.name} (stage {stage}, {member.worker.state}): {standing} of {rounds}")
    return short


def _undecided(member: Member, these: dict[str, set[ContributionId]]) -> bool:
    """Return whether one of these contributions, or another that is old enough, is still undecided."""
    service = _round_service(member)
    assert service is not None
    rounds = service.rounds
    return any(
        name in these.get(member.who, ()) or round + rounds.offers.delay < rounds.settled
        for name, round in rounds.offers.open.items()
    )


def _standing(member: Member) -> int:
    service = _round_service(member)
    return service.rounds.settled if service is not None else -1


def _round_service(member: Member) -> RoundService | None:
    """Return the rounds of a peer that has weights, else None."""
    services = member.worker.services
    return services.round_service if services is not None and services.round_service.has_weights else None


async def _sample(world: World, seen: ScheduleRecord) -> None:
    """Record the sizes of the peers' collections once a second, until cancelled."""
    while True:
        await asyncio.sleep(1.0)
        largest: dict[str, int] = {}
        for member in world.living():
            for name, size in _sizes(member).items():
                largest[name] = max(largest.get(name, 0), size)
        callbacks = world.loop.callbacks  # type: ignore[attr-defined]
        seen.samples.append(ResourceSample(asyncio.get_running_loop().time(), callbacks, largest))


def _sizes(member: Member) -> dict[str, int]:
    """Return the sizes of a peer's collections that could grow without bound."""
    services, update = member.worker.services, _round_service(member)
    if update is None or services is None:
        return {}
    data = services.pipeline_service
    return {
        "rounds": len(update.rounds.rounds),
        "history": len(update.rounds.history),
        "stored": len(update.store.stored),
        "pulls": len(update.rounds.pulls),
        "jobs": len(data.pipeline.jobs),
        "bodies": len(data.bodies),
        "own": len(update.work.own),
    }
