"""When peers that do other work than they say are found, and that honest ones are never accused: a group
whose peers compute with the product's own `MicrobatchWork` and `UpdateWork`, real models of one stage, no
network.

In the middle of each round the one before it is applied, as where an exchange runs behind the computing. Then
every honest peer draws from what settled, and replays (swarmnet/audits/).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from peers.compute.stage_part import CPU, real_part
from peers.compute.work_settings import work_settings
from peers.config.run_file import load_manifest
from peers.errors import UserError
from peers.lab.bench.learning.ground import Texts, read_texts
from peers.lab.bench.work.lies import FIRST_LIE, LIES, Lie, Situation
from peers.worker.pipeline.microbatch_compute import Bodies, Computed, MicrobatchWork
from peers.worker.rounds.counters import RoundCounts
from peers.worker.rounds.update_compute import Add, Made, Operation, Settled, UpdateWork
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import Identity
from swarmnet.audits.commitment import NOTHING_BEFORE, Commitment
from swarmnet.audits.draw import is_drawn
from swarmnet.audits.likeness import cosine
from swarmnet.audits.replay import Replay
from swarmnet.audits.verdict import Evidence, Finding, judge
from swarmnet.audits.work_log import SetNames, WorkLog
from swarmnet.identifiers import ContributionId, MicrobatchId, PeerId
from swarmnet.model.carried_text import CarriedText
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.sampling import window_starts, windows
from swarmnet.model.stage_compute import StageCompute
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.own_steps.local_steps import LocalSteps
from swarmnet.rounds.events import ApplyRound, GiveBack, MakeContribution, SettleRound
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE


class SettledWork:
    """What everybody knows: weights and sets by round, and the text (swarmnet.audits.replay.Known)."""

    def __init__(self, manifest: Manifest, corpus: Tensor) -> None:
        self._manifest, self._corpus, self._run_id = manifest, corpus, manifest.run_id()
        self._weights: dict[int, Tensor] = {}
        self._sets = SetNames()
        self._device = CPU

    def on(self, device: torch.device) -> SettledWork:
        """The same, for who computes there."""
        there = copy(self)
        there._device = device
        return there

    def settled(
        self, round: int, units: Tensor, contributions: Mapping[PeerId, bytes], chain: bytes = b""
    ) -> None:
        self._weights[round] = units
        self._sets.settled(round, chain)
        for peer, payload in contributions.items():
            self._sets.add(round, peer, payload)

    def weights(self, applied: int) -> Tensor | None:
        units = self._weights.get(applied)
        return None if units is None else units.to(self._device)

    def sets(self, settled: int, applied: int) -> bytes | None:
        return self._sets.between(settled, applied) if applied in self._weights else None

    def factor(self, round: int) -> int:
        return WHOLE

    def text(self, peer: PeerId, counter: int) -> tuple[Tensor, Tensor]:
        data, key = self._manifest.data, MicrobatchId(peer, counter)
        starts = window_starts(
            self._run_id, self._manifest.seed, key, len(self._corpus), data.microbatch_sequences,
            data.sequence_tokens,
        )  # fmt: skip
        return windows(self._corpus, starts, data.sequence_tokens)


class Peer:
    """One that computes, with the product's compute path."""

    def __init__(
        self, manifest: Manifest, known: SettledWork, seed: bytes, computing: Computing, lie: Lie | None,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        self.identity, self.known, self.lie = Identity.from_seed(seed), known, lie
        self.me, self.secret = self.identity.peer_id, hashlib.sha256(b"secret" + seed).digest()
        part = real_part(manifest, 0, device, computing)
        replica = part.replica(part.first_units(), -1)
        assert isinstance(part.method, LocalSteps)
        self.replica, self.method = replica, part.method
        self.microbatches = MicrobatchWork(manifest, 0, part.compute)
        settings = work_settings(part.computing, part.device, part.kind)
        self.log = WorkLog(settings, self.me, manifest.sync.afresh_rounds)
        self.work = UpdateWork(
            manifest.run_id(), 0, self.identity, part.compute, part.method, replica, self.microbatches, False,
            lambda _settled: None, RoundCounts(), (), self.log,
        )  # fmt: skip
        self.microbatches.after_gradient = self.work.step_if_due
        self.work.publish()
        self._counter = 0
        self.told: dict[int, bytes] = {}
        """Payloads, by round."""
        self.commitments: dict[int, Commitment] = {}
        self._carried: dict[int, bytes] = {}
        """Into windows, by where they begin."""

    def compute(self, is_done: bool = True) -> None:
        """The next microbatch; one that is not done stands in the log all the same."""
        counter, self._counter = self._counter, self._counter + 1
        if not is_done:
            self.log.computed(counter, WHOLE)
            return
        inputs_BT, labels_BT = self.known.text(self.me, counter)
        kept = Bodies(inputs=inputs_BT, text=CarriedText(b"", labels_BT, inputs_BT))
        done = self.microbatches.forward(MicrobatchId(self.me, counter), kept)
        assert isinstance(done, Computed), done

    def contribute(self, round: int, others: Mapping[PeerId, bytes]) -> float:
        """To a round; the cosine of what is told with what would be honest. `others`: what honest peers have
        told by then."""
        carried = self.log.carried
        (made,) = self.work.run([MakeContribution(round, 0)])
        assert isinstance(made, Made)
        assert made.commitment is not None
        payload, commitment, likeness = made.data[ENVELOPE_BYTES:], made.commitment, 1.0
        if self.lie is not None and round >= FIRST_LIE:
            told = self.lie.told(Situation(round, payload, self.told, others, self.method))
            commitment = replace(commitment, payload=hashlib.sha256(told).digest())
            moves = zip(self.method.moves_of(told), self.method.moves_of(payload), strict=True)
            payload, likeness = told, cosine(moves)
            self.log.before = commitment.name
            if self.lie.carries is not None and self.log.ends_window(round):
                self._carry(self.lie.carries(self.method, self.method.carried()))
        self.told[round], self.commitments[round] = payload, commitment
        self._carried[commitment.begun] = carried
        return likeness

    def _carry(self, false: bytes) -> None:
        self.method.begin_afresh(false)
        self.log.begins_afresh(false)
        self.work.publish()

    def lose(self, round: int) -> None:
        """Its contribution to that round is not in the set."""
        self.work.run([GiveBack(round, ContributionId(b""))])

    def carried_into(self, begun: int) -> bytes:
        return self._carried[begun]

    def evidence(self, round: int) -> Evidence | None:
        """Of the window that was over when this peer contributed to that round, the first of the next one."""
        newest = self.commitments[round]
        if newest.begun != round or round - 1 not in self.commitments:
            return None
        begun = self.commitments[round - 1].begun
        window = tuple(self.commitments[each] for each in range(begun, round))
        after = newest if newest.before == window[-1].name else None
        told = {each.payload: self.told[each.round] for each in window}
        return Evidence(self.me, window, self.carried_into(begun), after, told, self.carried_into(round))

    def end(self, round: int, contributions: Mapping[PeerId, bytes]) -> Settled:
        order: list[Operation] = [Add(round, peer, payload) for peer, payload in contributions.items()]
        order += [ApplyRound(round, tuple(contributions), 0.0), SettleRound(round, (), b"")]
        (settled,) = self.work.run(order)
        assert isinstance(settled, Settled)
        return settled


class Auditor:
    """Replays, with what one peer computes with."""

    def __init__(
        self, manifest: Manifest, known: SettledWork, computing: Computing = PLAIN,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        self._manifest, self._known = manifest, known.on(device)
        self._part = real_part(manifest, 0, device, computing)
        self._settings = work_settings(self._part.computing, device, self._part.kind)
        self.rounds = 0
        """Computed again."""

    def judge(self, evidence: Evidence) -> Finding:
        own, compute = method_of(self._manifest, self._part.layout, self._part.device).own, self._part.compute
        assert isinstance(own, LocalSteps)
        assert isinstance(compute, StageCompute)
        replay = Replay(evidence.peer, own, compute, self._part.layout, self._known)
        self.rounds += len(evidence.window)
        return judge(evidence, self._manifest.sync.afresh_rounds, self._settings, replay)


@dataclass(slots=True)
class Played:
    """What came of one group."""

    lie: str
    liars: int
    caught: dict[PeerId, int] = field(default_factory=dict)
    """Of liars: in how many rounds from their first lie on."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """Of audits of honest peers."""
    of_liars: Counter[str] = field(default_factory=Counter)
    """Of audits of windows with a lie in them."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of verdicts that somebody lied."""
    rounds: int = 0
    worked: int = 0
    """Rounds of peers, all together."""
    replayed: int = 0
    cosines: list[float] = field(default_factory=list)
    """Of false contributions with what the liar would have contributed had it told the truth."""


class AuditedPeers:
    """A group of which some lie in one way."""

    def __init__(
        self, manifest: Manifest, corpus: Tensor, peers: int, liars: int, lie: str, share: float, seed: int,
        computing: Computing = PLAIN, device: torch.device = CPU,
    ) -> None:  # fmt: skip
        self._manifest, self._share = manifest, share
        self.known = SettledWork(manifest, corpus)
        names = [f"{seed}/{number}".encode() for number in range(peers)]
        how = LIES[lie] if liars else None
        self.peers = [
            Peer(manifest, self.known, name, computing, how if number < liars else None, device)
            for number, name in enumerate(names)
        ][::-1]
        """Liars last: they have seen what others contribute."""
        self.auditor = Auditor(manifest, self.known, computing, device)
        self._told: dict[PeerId, bytes] = {}
        """Of the round before, by whom it counts."""
        self.played = Played(lie, liars)
        self._settle(-1, {})

    def play(self, rounds: int) -> Played:
        """So many rounds, or until all liars are found."""
        for round in range(rounds):
            self._round(round)
            if self.played.liars and len(self.played.caught) == self.played.liars:
                break
        self.played.replayed = self.auditor.rounds
        return self.played

    def counting(self, round: int, told: Mapping[PeerId, bytes]) -> Mapping[PeerId, bytes]:
        """Of what was told, what came in time for the set."""
        return told

    def _round(self, round: int) -> None:
        here = [peer for peer in self.peers if peer.me not in self.played.caught]
        steps = self._manifest.rounds.target_tokens // self._manifest.microbatch_tokens // len(self.peers)
        for step in range(steps):
            if step == steps // 2 and round:
                self._end(round - 1, here)
            for peer in here:
                idle = peer.lie is not None and round >= FIRST_LIE and peer.lie.skips(step, steps)
                peer.compute(not idle)
        told: dict[PeerId, bytes] = {}
        for peer in here:
            likeness = peer.contribute(round, told)
            if peer.lie is not None and round >= FIRST_LIE:
                self.played.cosines.append(likeness)
            told[peer.me] = peer.told[round]
        self._told = told
        self.played.rounds += 1
        self.played.worked += len(here)

    def _end(self, round: int, here: Sequence[Peer]) -> None:
        """Of the round before: it is applied, settled and looked into."""
        told = {peer: payload for peer, payload in self._told.items() if peer not in self.played.caught}
        counts = self.counting(round, told)
        digests = {peer.end(round, counts).digest for peer in here}
        assert len(digests) == 1, "settled weights are the same everywhere"
        self._settle(round, counts)
        for auditor in here:
            if auditor.lie is None:
                self._look(auditor, round, here)

    def _settle(self, round: int, contributions: Mapping[PeerId, bytes]) -> None:
        self.known.settled(round, self.peers[0].replica.settled_units(), contributions)

    def _look(self, auditor: Peer, round: int, here: Sequence[Peer]) -> None:
        """Into windows after which a next one has begun in that round."""
        for peer in here:
            evidence = peer.evidence(round)
            if peer is auditor or evidence is None:
                continue
            if is_drawn(auditor.secret, evidence.window[-1], self._share, len(here)):
                self._judge(peer, evidence, round)

    def _judge(self, peer: Peer, evidence: Evidence, round: int) -> None:
        finding = self.auditor.judge(evidence)
        is_false = peer.lie is not None and round > FIRST_LIE
        (self.played.of_liars if is_false else self.played.verdicts)[finding.verdict] += 1
        if finding.verdict == "lied":
            self.played.reasons[finding.reason] += 1
        if finding.verdict == "lied" and peer.lie is not None:
            self.played.caught.setdefault(peer.me, round - FIRST_LIE + 1)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the bench."""

    run_file: Path
    lies: Sequence[str]
    """Empty: nobody lies."""
    peers: int
    liars: int
    rounds: int
    seeds: int
    threads: int = 1
    computing: Computing = PLAIN
    device: torch.device = CPU


def bench(question: Question) -> Iterator[Played]:
    """A group for each lie and seed. Every window is looked into once on the mean, and a group goes on until
    its liars are found. Raises UserError, TextError."""
    manifest, texts = read_ground(question)
    for lie in question.lies or [""]:
        liars = question.liars if question.lies else 0
        for seed in range(question.seeds):
            group = AuditedPeers(
                manifest, texts.corpus, question.peers, liars, lie, 1.0, seed, question.computing,
                question.device,
            )  # fmt: skip
            yield group.play(question.rounds)


def read_ground(question: Question) -> tuple[Manifest, Texts]:
    """The run and what it reads. Raises UserError, TextError."""
    manifest = load_manifest(question.run_file, PeerId(""), {})
    own, sync = manifest.sync.own_steps, manifest.sync
    if own is None or not sync.afresh_rounds or len(manifest.stages) > 1:
        raise UserError(
            f"{question.run_file}: only peers that hold the whole model, step by themselves and begin afresh "
            "can be audited: set stages to one, sync.method to local-steps, and sync.afresh_rounds"
        )
    if question.lies and own.sent != "bit":
        raise UserError(f"{question.run_file}: liars here tell signs; set sync.sent to bit")
    if unknown := [lie for lie in question.lies if lie not in LIES]:
        raise UserError(f"nobody lies like {unknown[0]}; there are {', '.join(LIES)}")
    torch.set_num_threads(question.threads)
    return manifest, read_texts(question.run_file, manifest, None, None)


def rounds_until_found(peers: int, every: int, share: float, seeds: range) -> list[int]:
    """How many rounds a peer lies until an honest one has looked into a window of its lies, when a quarter of
    the group lies and finds nobody: by the draw alone, as an audit of a lie does not fail."""
    found, auditors = [], peers - peers // 4
    for seed in seeds:
        for window in count(1):
            name = hashlib.sha256(f"{seed}/{window}".encode()).digest()
            last = Commitment(window, window, name[:8], NOTHING_BEFORE, bytes(32), name, ())
            secrets = (f"{seed}/{number}".encode() for number in range(auditors))
            if any(is_drawn(secret, last, share, peers) for secret in secrets):
                found.append(window * every)
                break
    return sorted(found)


def render(plays: Sequence[Played]) -> str:
    """A table of them."""
    head = "| lie | liars | found | cosine | false windows: lied / not | honest: agrees / not | replayed |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for each in plays:
        likeness = f"{sum(each.cosines) / len(each.cosines):.3f}" if each.cosines else ""
        lines.append(
            f"| {each.lie if each.liars else 'nobody'} | {each.liars} | {len(each.caught)} | {likeness} "
            f"| {_split(each.of_liars, 'lied')} | {_split(each.verdicts, 'agrees')} "
            f"| {each.replayed} of {each.worked} |"
        )
    return "\n".join(lines)


def _split(verdicts: Counter[str], right: str) -> str:
    return f"{verdicts[right]} / {verdicts.total() - verdicts[right]}"
