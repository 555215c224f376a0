"""The product's methods in the learning benchmark: the real `Method` of each peer and stage, and `Replica`.

The group's weights are the same for all peers of a stage, so one `Replica` serves all of them. Each peer
computes at the weights that it predicts for the next round from its own momentum, as in the product. With a
local-step method a peer adds its local delta.

Shape suffixes: P numbers of the flat vector.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from peers.lab.bench.learning.ground import Ground
from peers.lab.bench.learning.learner import scheduled
from peers.lab.bench.learning.liars import HONEST, Liars, Lies
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.model.experts.merging import ExpertMerging
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.state_layout import with_zero_momentum
from swarmnet.optimizer.agreement.ledger import KeepsLedger
from swarmnet.optimizer.agreement.weight_report import FULL_WEIGHT
from swarmnet.optimizer.method import Method, add_own, method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.optimizer.step import dense
from swarmnet.rounds.history import START
from swarmnet.rounds.result_table import Contributor, tag_of
from swarmnet.run.schema import Sync
from swarmnet.run.sync_methods import SignMuonConfig


class BenchRounds:
    """Peers that train in rounds of `every` microbatches each; a round is applied `delay` rounds later."""

    def __init__(
        self,
        *,
        ground: Ground,
        peers: int,
        sync: Sync,
        peak: float,
        steps: int,
        delay: int = 0,
        every: int = 1,
        away: int = 0,
        late: float = 0.0,
        liars: Liars = HONEST,
    ) -> None:
        self._ground = ground
        self._delay = delay
        self._every = every
        self._sync = scheduled(sync, peak, max(1, steps // every))
        manifest = replace(ground.manifest, sync=self._sync)
        self._names = [PeerId(f"peer {peer}") for peer in range(peers)]
        self._methods = [
            [method_of(manifest, layout, ground.device) for layout in ground.layouts] for _ in self._names
        ]
        self._replicas = []
        self._group_methods = []
        """The method of each replica. Reducers weigh by its ledger."""
        for layout, units in zip(ground.layouts, ground.initial_units(), strict=True):
            method = method_of(manifest, layout, ground.device)
            experts = manifest.model.experts
            merging = ExpertMerging(experts, layout) if experts.merge_rounds else None
            settled = with_zero_momentum(units, method.state).to(ground.device)
            self._group_methods.append(method)
            self._replicas.append(Replica(layout=layout, method=method, units=settled, merging=merging))
        for number, methods in enumerate(self._methods):
            for method in methods:
                if method.held is not None:
                    method.held.hold(number % method.held.groups)
        self._here = range(peers - away), middle_third(steps)
        self._lazy = liars.count if liars.kind == "lazy" else 0
        """Number of peers, the last ones, that compute the same microbatch over and over."""
        config = self._sync.config
        fragments = config.fragments if isinstance(config, SignMuonConfig) else 1
        self._lies = Lies(liars, self._names, max(1, steps // every), fragments, ground.seed)
        self._late = late
        self._chance = Random(f"late {ground.seed}")
        self._held_back: list[tuple[Replica, int, PeerId, bytes]] = []
        """Late contributions, added one round after the others of their round."""
        self._gathered: defaultdict[tuple[int, int], list[tuple[Tensor, int]]] = defaultdict(list)
        """Maps peer and stage to the gradients, with their tokens, that no step has used yet."""
        self._begun = -1
        """Newest round to which peers contributed; -1 if none."""
        self.sent_bytes = 0
        self._noted_weights: list[list[int]] = []
        """For each round and stage, the weight of each peer's votes."""

    def step(self, number: int) -> float:
        """Compute one microbatch of every peer. At the end of a round, peers also contribute and the step is
        applied. Returns the mean loss."""
        losses: list[float] = []
        contributed: defaultdict[int, dict[PeerId, bytes]] = defaultdict(dict)
        """Contributions by peer, for each stage; a stage is named by its offset in the flat vector."""
        live = [replica.live_floats(ahead=False) for replica in self._replicas]
        round, ends = number // self._every, (number + 1) % self._every == 0
        for index, (peer, methods) in enumerate(zip(self._names, self._methods, strict=True)):
            if number in self._here[1] and index not in self._here[0]:
                continue
            microbatch = number if index < len(self._names) - self._lazy else 0
            found = self._ground.gradient(self._where(live, methods), index, microbatch)
            losses.append(found.loss)
            for method, part in zip(methods, self._ground.slices, strict=True):
                whole = found.summed[part]
                gradient = whole if method.held is None else method.held.of(whole)
                gathered = self._gathered[index, part.start]
                gathered.append((gradient, found.tokens))
                tokens = sum(tokens for _, tokens in gathered)
                if not ends and (method.own is None or tokens < method.own.tokens):
                    continue
                summed = torch.stack([gradient for gradient, _ in gathered]).sum(0)
                if ends:
                    contributed[part.start][peer] = method.contribute(summed, tokens, round, peer)
                elif method.own is not None:
                    method.own.step(summed, tokens, round)
                gathered.clear()
        if ends:
            for replica, method, part in zip(
                self._replicas, self._group_methods, self._ground.slices, strict=True
            ):
                honest = contributed[part.start]
                made = self._lies.replace(part.start, round, honest) if self._lies.any else honest
                for contributor, payload in set_of(method, made, round).items():
                    if self._late and self._chance.random() < self._late:
                        self._held_back.append((replica, round, contributor, payload))
                    else:
                        replica.add(round, contributor, payload)
            self._end(round)
        return sum(losses) / len(losses)

    def _end(self, round: int) -> None:
        self._begun = round
        self.sent_bytes += sum(method.payload_bytes for method in self._methods[0])
        due = round - self._delay
        if due < 0:
            return
        for replica, of, contributor, payload in [late for late in self._held_back if late[1] < due]:
            replica.add(of, contributor, payload)
        self._held_back = [late for late in self._held_back if late[1] >= due]
        for replica, method in zip(self._replicas, self._group_methods, strict=True):
            if replica.applied_round > replica.settled_round:
                replica.settle(due - 1)
            replica.apply(due)
            self._note_weights(replica, method, due)
            if not self._late:
                replica.settle(due)

    def _note_weights(self, replica: Replica, method: Method, round: int) -> None:
        """Note the weights by which a round was applied."""
        ledger = method.ledger if isinstance(method, KeepsLedger) else None
        if ledger is not None:
            tags = [tag_of(peer) for peer in self._names]
            self._noted_weights.append(ledger.weights(round - replica.settled_round, tags))

    @property
    def vote_weights(self) -> tuple[float, ...]:
        of_peers = zip(*self._noted_weights, strict=True)
        return tuple(sum(weights) / len(weights) / FULL_WEIGHT for weights in of_peers)

    def weights(self) -> Tensor:
        return torch.cat([replica.live_floats(ahead=False) for replica in self._replicas])

    def _where(self, live: list[Tensor], methods: list[Method]) -> Tensor:
        """Return the weights at which a peer computes: float32 [P].

        While rounds are open, the peer's momentum predicts the next round. Its local delta is added (as in
        `Replica.live_tiles`, but here all peers share the replica).
        """
        applied, found_P = self._replicas[0].applied_round, torch.cat(live)
        leads = self._delay and self._begun > applied
        ground = self._ground
        of_stages = zip(self._replicas, methods, ground.layouts, ground.slices, strict=True)
        for replica, method, layout, part in of_stages:
            ahead = replica.lookahead(method) if leads else None
            if ahead is not None:
                found_P[part] += to_floats(dense(ahead, layout, found_P.device))
            if method.own is not None:
                add_own(method.own, found_P[part], layout, applied)
        return found_P


def middle_third(steps: int) -> range:
    """Return the steps in which absent peers are away."""
    return range(steps // 3, 2 * steps // 3)


def set_of(method: Method, told: dict[PeerId, bytes], round: int) -> dict[PeerId, bytes]:
    """Return the members of a round's set by sender: contributions, or the results of reducers."""
    if method.reduced is None:
        return told
    reducers, slices = method.reduced.draw.reducers(round, told, START), {}
    for peer, payload in told.items():
        who = Contributor.of(peer, ContributionId(tag_of(peer)), 1)
        slices[who] = method.reduced.slices(payload)
    results = {}
    for reducer in set(reducers):
        shards = [shard for shard, drawn in enumerate(reducers) if drawn == reducer]
        of_shards = {shard: {who: cut[shard] for who, cut in slices.items()} for shard in shards}
        results[reducer] = method.reduced.reduce(of_shards)
    return results
