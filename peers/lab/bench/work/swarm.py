"""What becomes of peers that lie about their work in a swarm of real workers, and of the model: commitments,
audits, proofs and convictions go over the wire, on a clock that jumps.

Compute is real (and its results the same to the bit each time), lines and clocks are those of lab/world. A
microbatch takes a peer 0.15 to 0.45 virtual seconds, computing one of another's again as long.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from peers.compute.stage_part import StagePart, real_part
from peers.config.run_file import load_manifest
from peers.data.tokens import digest_of_tokens
from peers.errors import UserError
from peers.lab.bench.learning.ground import Ground, Texts, read_texts
from peers.lab.bench.work.lies import FIRST_LIE, LIES, OLD_BY, Lie, Situation
from peers.lab.world.gated_clock import GatedLoop
from peers.lab.world.world import Member, World
from peers.telemetry import events as noted
from peers.worker.rounds.replays import NOBODY
from peers.worker.rounds.vouching import Window
from peers.worker.rounds.work_audit_path import WorkAuditPath
from protocols.signed.identity import Identity
from swarmnet.audits.commitment import Word
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import Layout
from swarmnet.model.sampling import window_starts, windows
from swarmnet.model.stage_compute import Finished, StageCompute
from swarmnet.optimizer.own_steps.local_steps import LocalSteps
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.manifest import Data, Manifest

GOOD, BAD = ("agrees", "alike"), ("lied", "unlike")
COLLUDING = "colluding"
"""They contribute noise, look into nobody, and say of one another that their work agrees."""
OTHER = Computing("bf16")
LONGEST_ROUND = 60.0
"""Virtual seconds: a group that takes longer on the mean stands still."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """`Text` in memory."""

    tokens: Tensor
    run_id: RunId
    data: Data
    seed: int

    def microbatch(self, key: MicrobatchId) -> tuple[Tensor, Tensor]:
        data = self.data
        starts = window_starts(
            self.run_id, self.seed, key, len(self.tokens), data.microbatch_sequences, data.sequence_tokens
        )
        return windows(self.tokens, starts, data.sequence_tokens)

    def digest(self) -> bytes:
        return digest_of_tokens(self.tokens)


class LyingSteps(LocalSteps):
    def __init__(self, manifest: Manifest, layout: Layout, liar: Liar) -> None:
        super().__init__(manifest, layout, torch.device("cpu"))
        self._liar = liar

    def tell(self, round: int, peer: PeerId) -> bytes:
        honest = super().tell(round, peer)
        return self._liar.told(round, honest, self) if round >= FIRST_LIE else honest

    def carried(self) -> bytes:
        honest, carries = super().carried(), self._liar.lie.carries
        return honest if carries is None or self._liar.first < 0 else carries(self, honest)


class LazyCompute(StageCompute):
    """Leaves microbatches out, and says that they are done."""

    lie: Lie
    met = 0

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> Finished:
        self.met += 1
        if self.lie.skips(self.met % OLD_BY, OLD_BY):
            return Finished(0.0, labels_BT.numel(), None)
        return super().finish(key, inputs, labels_BT, tokens_BT)


class Liar:
    """One false peer."""

    def __init__(self, world: World, name: str, lie: Lie, computing: Computing) -> None:
        self.world, self.name, self.lie, self.computing = world, name, lie, computing
        self.before: dict[int, bytes] = {}
        self.first = -1
        """The round of its first lie."""
        self._has_own = False

    def part(self, manifest: Manifest, stage: int) -> StagePart:
        """The first is what it computes with itself; with others it looks into what others did."""
        part = real_part(manifest, stage, computing=self.computing)
        if self._has_own:
            return part
        self._has_own = True
        compute = part.compute
        if self.lie.work < 1.0:
            compute = LazyCompute(
                manifest.model, manifest.span(stage), part.layout, part.computing, part.device
            )
            compute.lie = self.lie
        return replace(part, method=LyingSteps(manifest, part.layout, self), compute=compute)

    def lied_in(self, last: int) -> bool:
        """In the window with that last round: who computes less than it says does so from the beginning."""
        return self.lie.work < 1.0 or 0 <= self.first <= last

    def told(self, round: int, honest: bytes, method: LocalSteps) -> bytes:
        self.first = round if self.first < 0 else self.first
        self.before[round] = honest
        old = max((at for at in self.before if at <= round - OLD_BY), default=round)
        before = {**self.before, round - OLD_BY: self.before[old]}
        others = self._others() or {PeerId(""): honest}
        return self.lie.told(Situation(round, honest, before, others, method))

    def _others(self) -> Mapping[PeerId, bytes]:
        """The newest that this peer holds."""
        member = self.world.members[self.name]
        update = member.worker.update
        stored = list(update.stored.values())[-64:] if update is not None else []
        return {
            each.reference.peer: each.payload
            for each in sorted(stored, key=lambda each: -each.reference.round)
            if each.reference.peer != member.peer
        }


@dataclass(slots=True)
class Played:
    lie: str
    liars: int
    rounds: int = 0
    out: dict[str, int] = field(default_factory=dict)
    """Of liars: rounds from the first lie until nothing of it counts."""
    honest_out: int = 0
    loss: float = 0.0
    """Held out, nats per token, of the settled weights in the end."""
    per_second: float = 0.0
    """Microbatches of all, in a virtual second."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """Of honest peers on windows in which nobody lied: as their event logs and metrics have them."""
    of_false: Counter[str] = field(default_factory=Counter)
    """... and on those with a lie in them."""
    head_bytes: float = 0.0
    contribution_bytes: float = 0.0
    processor_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    run_file: Path
    lies: Sequence[str]
    """The first play is of honest peers alone."""
    peers: int
    liars: int
    rounds: int
    seed: int = 1
    mixed: bool = False
    """Every other peer computes in bfloat16, so that liars are of both kinds, in turns."""


def bench(question: Question) -> Iterator[Played]:
    """A swarm of honest peers, then one for each lie. Raises UserError, TextError."""
    owner = Identity.from_seed(b"the owner of the run").peer_id
    manifest = load_manifest(question.run_file, owner, {})
    own, sync = manifest.sync.own_steps, manifest.sync
    if own is None or own.sent != "bit" or sync.own_steps is None or not sync.afresh_rounds:
        raise UserError(
            f"{question.run_file}: liars here are peers that step by themselves, tell signs and begin "
            "afresh: set sync.method to local-steps, and sync.afresh_rounds"
        )
    known = (*LIES, COLLUDING)
    if unknown := [lie for lie in question.lies if lie not in known]:
        raise UserError(f"nobody lies like {unknown[0]}; there are {', '.join(known)}")
    texts = read_texts(question.run_file, manifest, None, None)
    torch.set_num_threads(1)
    for lie in ("", *question.lies):
        with (
            tempfile.TemporaryDirectory(prefix="swarmnet-liars-") as folder,
            asyncio.Runner(loop_factory=GatedLoop) as runner,
        ):
            yield runner.run(_play(question, manifest, texts, lie, Path(folder)))


async def _play(question: Question, manifest: Manifest, texts: Texts, lie: str, folder: Path) -> Played:
    began = time.process_time()
    world = World(manifest, question.seed, folder, real=True)
    world.text = Corpus(texts.corpus, world.signed.run_id, manifest.data, manifest.seed)
    names = [f"p{number}" for number in range(question.peers)]
    computing = {name: OTHER if question.mixed and number % 2 else PLAIN for number, name in enumerate(names)}
    told = LIES["noise" if lie == COLLUDING else lie] if lie else None
    liars = {
        name: Liar(world, name, told, computing[name]) for name in names[: question.liars] if told is not None
    }
    for name in names:
        honest_part = partial(real_part, computing=computing[name])
        world.parts[name] = liars[name].part if name in liars else honest_part
    members = [world.start(name, 0) for name in names]
    honest = [member for member in members if member.name not in liars]
    colluding = [member for member in members if member.name in liars and lie == COLLUDING]
    await until_settled(world, honest, question.rounds, partial(_collude, colluding))
    played = Played(lie, len(liars), question.rounds)
    _look(world, played, honest, liars)
    played.loss = _loss(manifest, texts, honest[0])
    played.processor_seconds = time.process_time() - began
    await world.close()
    return played


async def until_settled(
    world: World, members: Sequence[Member], round: int, each_second: Callable[[], None] = lambda: None
) -> None:
    """Peers of stage 0. AssertionError if one of the world's peers fails, or they stand still."""
    while min(world.settled(0).get(member.name, -1) for member in members) < round:
        await asyncio.sleep(1.0)
        assert not world.escaped, world.escaped
        assert world.loop.time() < LONGEST_ROUND * round, f"stands still: {world.settled(0)}"
        each_second()


def _path(member: Member) -> WorkAuditPath | None:
    return member.worker.update.works if member.worker.update is not None else None


def _collude(liars: Sequence[Member]) -> None:
    for member in liars:
        works = _path(member)
        if works is None:
            continue
        works.means = replace(works.means, auditor=NOBODY)
        for friend in liars:
            last = works.last.get(friend.peer)
            if friend is not member and last is not None and works.vouching is not None:
                works.vouching.found(Window(friend.peer, last.name, last.round), 1, Word.AGREES)


def _look(world: World, played: Played, honest: Sequence[Member], liars: Mapping[str, Liar]) -> None:
    names = {member.name for member in honest}
    false = {world.members[name].peer: liar for name, liar in liars.items()}
    digests: dict[int, set[str]] = {}
    lost: dict[str, int] = {}
    for note in world.notes:
        if note.name not in names:
            continue
        match note.what:
            case noted.Settled(round, digest):
                digests.setdefault(round, set()).add(digest)
            case noted.Audited(code, peer, round):
                liar = false.get(PeerId(peer))
                verdicts = played.of_false if liar is not None and liar.lied_in(round) else played.verdicts
                verdicts[code] += 1
            case noted.Stands("none", tag, round):
                lost.setdefault(tag, round)
    assert all(len(found) == 1 for found in digests.values()), "settled weights are the same everywhere"
    convicted = honest[0].worker.makers.convicted
    for member in world.members.values():
        firsts = (convicted.get(member.peer), lost.get(tag_of(member.peer).hex()))
        known = [first for first in firsts if first is not None]
        if known and member.name in liars:
            played.out[member.name] = min(known) - liars[member.name].first
        played.honest_out += bool(known) and member.name in names
    committed = sum(note.event == "committed" for note in world.notes)
    played.per_second = committed / world.loop.time()
    update = honest[0].worker.update
    assert update is not None
    played.head_bytes = mean(each.head_bytes for each in update.stored.values())
    played.contribution_bytes = mean(each.reference.size for each in update.stored.values())


def _loss(manifest: Manifest, texts: Texts, member: Member) -> float:
    update = member.worker.update
    assert update is not None
    ground = Ground(manifest, texts, 0)
    return ground.held_out_loss(to_floats(update.work.replica.settled_units()[: ground.size]))


def rows(plays: Iterable[Played]) -> Iterator[str]:
    """Lines of a table of them, each when it is there; the first play is the honest one."""
    yield (
        "| lie | liars out | after rounds, mean / most | honest out | held out | against honest "
        "| false windows: lied or unlike / agrees or alike / others "
        "| honest: agrees or alike / lied or unlike / others | microbatches a second "
        "| head, B | contribution, B | processor, s |"
    )
    yield "|" + "---|" * 12
    honest = 0.0
    for each in plays:
        honest = honest or each.loss
        when = f"{mean(each.out.values()):.0f} / {max(each.out.values())}" if each.out else ""
        yield (
            f"| {each.lie or 'nobody'} | {len(each.out)} of {each.liars} | {when} | {each.honest_out} "
            f"| {each.loss:.4f} | {each.loss / honest - 1:+.1%} "
            f"| {_of(each.of_false, BAD, GOOD)} | {_of(each.verdicts, GOOD, BAD)} "
            f"| {each.per_second:.2f} "
            f"| {each.head_bytes:.0f} | {each.contribution_bytes:.0f} | {each.processor_seconds:.0f} |"
        )


def _of(verdicts: Counter[str], *sides: tuple[str, ...]) -> str:
    found = [sum(verdicts[code] for code in side) for side in sides]
    return " / ".join(map(str, [*found, verdicts.total() - sum(found)]))
