"""What several devices contribute and settle together, share by share, is what one does: to the bit."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import method_cases
import pytest
import torch
from method_cases import PEERS, gradient_of, shapes_of

from swarmnet.identifiers import ContributionId
from swarmnet.model.computing.shares import Shares
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.state_layout import ledger_layout
from swarmnet.optimizer.device_groups.device_group import MultiDevice
from swarmnet.optimizer.device_groups.payload import Divisible, divided, put_together
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.rounds.result_table import Contributor
from swarmnet.run.schema import Sync
from swarmnet.run.sync_methods import PRESETS

LAYOUT = layout_of(shapes_of(3, width=72))
REDUCED = {"topology": "sharded-reduce", "shards": 3}
CASES = [
    {"method": "demo-sign", "selection": "top-k", "transform": "dct"},
    {"method": "demo-sign", "selection": "group"},
    {"method": "demo", "selection": "top-k", "transform": "fine-dct"},
    {"method": "demo", "selection": "group"},
    *({"method": method} for method in PRESETS),
    {"method": "sign-muon"},
    {"method": "sign-muon", "fragments": 1},
    {"method": "local-steps", "inner_optimizer": "adamw", "fragments": 1},
    {"method": "local-steps", "outer_lr": 1.4, "residual": "drop"},
    {"method": "low-rank", "rank": 5},
    {"method": "hybrid", "rank": 5},
    {"method": "sign-muon", **REDUCED},
    {"method": "sign-muon", "weights": "agreement", **REDUCED},
    *({"method": method, **REDUCED} for method in PRESETS),
    {"method": "local-steps", "outer_lr": 1.4, "residual": "drop", **REDUCED},
]
CALM = 1e-4
"""A gradient that no clip touches: else the norm of all shares, added in another order, may differ by a
bit."""


class Devices:
    """Threads in place of processes; where they need each other they meet."""

    def __init__(self, manifest, count):
        self.shares = Shares(LAYOUT, count)
        self._meeting, self._brought = Barrier(count), [None] * count
        self._threads = ThreadPoolExecutor(count)
        self.methods = [method_of(manifest, self.shares.layout(device)) for device in range(count)]
        for device, method in enumerate(self.methods):
            assert isinstance(method, Divisible)
            method.use_device_group(MultiDevice(self.shares, device, partial(self._sum, device)))
        self.replicas = [
            Replica(
                layout=self.shares.layout(device),
                method=method,
                units=torch.zeros(method.state.size, dtype=torch.int32),
            )
            for device, method in enumerate(self.methods)
        ]

    def _sum(self, device, numbers):
        self._brought[device] = numbers
        self._meeting.wait(60)
        total = sum(self._brought)
        self._meeting.wait(60)
        return total

    def contribute(self, gradient, round):
        """What each says of its share."""

        def of_one(device):
            own = [gradient[run.start : run.stop] for run in self.shares.runs() if run.device == device]
            return self.methods[device].contribute(torch.cat(own), 7, round, PEERS[0])

        return list(self._threads.map(of_one, range(len(self.methods)), timeout=120))

    def live(self, ahead):
        """The live weights of each."""

        def of_one(replica):
            return torch.cat([tile for _, tile in replica.live_tiles(ahead)])

        return list(self._threads.map(of_one, self.replicas, timeout=120))

    def parts(self, payload, sections):
        return zip(self.replicas, divided(payload, sections, self.shares), strict=True)

    def whole(self, parts):
        """Of shares of the state the state, with the agreement ledger, if there is one, from the first."""
        copies, ledger = divmod(parts[0].numel(), self.shares.layout(0).size)
        if ledger:
            copies, ledger = 1, ledger_layout(Sync(method="sign-muon", weights="agreement")).size
        size, flat = LAYOUT.size, torch.empty(copies * LAYOUT.size + ledger, dtype=parts[0].dtype)
        flat[copies * LAYOUT.size :] = parts[0][parts[0].numel() - ledger :]
        at = [0] * len(parts)
        for copy in range(copies):
            for run in self.shares.runs():
                length = run.stop - run.start
                numbers = parts[run.device][at[run.device] :][:length]
                flat[copy * size + run.start : copy * size + run.stop] = numbers
                at[run.device] += length
        return flat


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_shares_contribute_to_the_byte_and_settle_to_the_bit_what_one_device_does(case, count):
    manifest = method_cases.manifest(**case)
    alone = method_of(manifest, LAYOUT)
    replica = Replica(layout=LAYOUT, method=alone, units=torch.zeros(alone.state.size, dtype=torch.int32))
    devices = Devices(manifest, count)
    lost_shards = (0,) if alone.reduced else ()
    for round in range(3):
        gradient = CALM * gradient_of(LAYOUT, round)
        mine = alone.contribute(gradient, 7, round, PEERS[0])
        told = devices.contribute(gradient, round)
        assert put_together(told, alone.sections, devices.shares) == mine
        assert divided(mine, alone.sections, devices.shares) == told

        others = method_of(manifest, LAYOUT).contribute(CALM * gradient_of(LAYOUT, 50), 7, round, PEERS[1])
        added = {PEERS[1]: others, PEERS[0]: mine}
        if alone.reduced is not None:
            added = results_of(method_of(manifest, LAYOUT, "meta").reduced, added)
        for peer, payload in added.items():
            replica.add(round, peer, payload)
            for held, part in devices.parts(payload, () if alone.reduced else alone.sections):
                held.add(round, peer, part)
        for held in (replica, *devices.replicas):
            held.apply(round)
        live = devices.live(round == 1)
        assert torch.equal(devices.whole(live), replica.live_floats(round == 1))
        if round == 1:  # The group goes on without it: it leaves the round, and comes again.
            replica.remove(round, PEERS[0])
            alone.give_back(mine, round, PEERS[0], lost_shards)
            for held, method, part in zip(devices.replicas, devices.methods, told, strict=True):
                held.remove(round, PEERS[0])
                method.give_back(part, round, PEERS[0], lost_shards)
        for held in (replica, *devices.replicas):
            held.close(round)
        settled = [held.settled_now() for held in devices.replicas]
        assert torch.equal(devices.whole(settled), replica.settled_now())


def results_of(reduced, payloads):
    """The results of two reducers, of which one has the first shard alone, by a method without values."""
    slices = {}
    for number, (peer, payload) in enumerate(payloads.items()):
        for shard, data in enumerate(reduced.slices(payload)):
            contributor = Contributor.of(peer, ContributionId(bytes([number]) * 32), 7)
            slices.setdefault(shard, {})[contributor] = data
    first = {0: slices.pop(0)}
    return {PEERS[1]: reduced.reduce(slices), PEERS[0]: reduced.reduce(first)}
