"""How alike the work of peers is, honest and false, to what auditors with other settings make of it: the
group of audits.py, of which each window is computed again once, with other numbers or on another device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor

from peers.compute.stage_part import CPU
from peers.errors import UserError
from peers.lab.bench.learning.ground import Ground
from peers.lab.bench.work.audits import AuditedPeers, Auditor, Peer, Question, read_ground
from peers.lab.bench.work.lies import FIRST_LIE
from swarmnet.audits.standing import ENOUGH, SEVERAL
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import Computing
from swarmnet.model.fixed_point import to_floats
from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Looks:
    """With what auditors compute."""

    computing: Computing
    device: torch.device = CPU


@dataclass(slots=True)
class Compared:
    """What came of one group: of its liars, or of all where nobody lies."""

    lie: str
    seed: int
    windows: dict[PeerId, list[int]] = field(default_factory=dict)
    """How alike each was, in thousandths, in their order."""
    others: int = 0
    """Windows of which nothing can be said so."""
    loss: float = 0.0
    """Held out, nats per token, of the settled weights in the end: nobody is out here."""

    @property
    def alike(self) -> list[int]:
        return [each for of_one in self.windows.values() for each in of_one]

    @property
    def means(self) -> list[float]:
        """Of SEVERAL windows of one peer that follow one another."""
        return [
            mean(of_one[start : start + SEVERAL])
            for of_one in self.windows.values()
            for start in range(len(of_one) - SEVERAL + 1)
        ]

    @property
    def wrong(self) -> int:
        """Of these so many are on the wrong side."""
        return sum((each >= ENOUGH) is bool(self.lie) for each in self.means)


class ComparedPeers(AuditedPeers):
    def __init__(
        self, manifest: Manifest, corpus: Tensor, question: Question, looks: Looks, lie: str, seed: int
    ) -> None:
        liars = question.liars if lie else 0
        super().__init__(
            manifest, corpus, question.peers, liars, lie, 0.0, seed, question.computing, question.device
        )
        self.auditor = Auditor(manifest, self.known, looks.computing, looks.device)
        self.compared = Compared(lie, seed)

    def _look(self, auditor: Peer, round: int, here: Sequence[Peer]) -> None:
        if auditor is not next(peer for peer in here if peer.lie is None):
            return
        for peer in here:
            evidence = peer.evidence(round)
            if evidence is None or (self.played.liars and peer.lie is None):
                continue
            if peer.lie is not None and evidence.window[0].round < FIRST_LIE:
                continue
            finding = self.auditor.judge(evidence)
            if finding.verdict == "alike":
                self.compared.windows.setdefault(peer.me, []).append(finding.likeness)
            else:
                self.compared.others += 1


def bench(question: Question, looks: Looks) -> Iterator[Compared]:
    """A group of honest peers, then one for each lie, of each seed. Raises UserError, TextError."""
    manifest, texts = read_ground(question)
    if (question.computing, question.device) == (looks.computing, looks.device):
        raise UserError("auditors have the peers' own settings: say others by --looks or --looks-device")
    ground = Ground(manifest, texts, 0)
    for lie in ("", *question.lies):
        for seed in range(question.seeds):
            group = ComparedPeers(manifest, texts.corpus, question, looks, lie, seed)
            group.play(question.rounds)
            settled = group.peers[0].replica.settled_units().cpu()
            group.compared.loss = ground.held_out_loss(to_floats(settled[: ground.size]))
            yield group.compared


def rows(found: Iterable[Compared]) -> Iterator[str]:
    """Lines of a table of them."""
    yield (
        f"| lie | windows | alike, mean | least | most | means of {SEVERAL} | on the wrong side | unclear "
        "| held out | against honest |"
    )
    yield "|" + "---|" * 10
    honest = 0.0
    by_lie: dict[str, list[Compared]] = {}
    for each in found:
        by_lie.setdefault(each.lie, []).append(each)
    for lie, plays in by_lie.items():
        alike = [window for play in plays for window in play.alike]
        loss = mean(play.loss for play in plays)
        honest = honest or loss
        said = f"{mean(alike) / 1000:.4f} | {min(alike) / 1000} | {max(alike) / 1000}" if alike else " | | "
        yield (
            f"| {lie or 'nobody'} | {len(alike)} | {said} | {sum(len(each.means) for each in plays)} "
            f"| {sum(each.wrong for each in plays)} | {sum(each.others for each in plays)} "
            f"| {loss:.4f} | {f'{loss / honest - 1:+.1%}' if lie else ''} |"
        )
