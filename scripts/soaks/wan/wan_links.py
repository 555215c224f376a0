"""`scripts/soak wan links`: how many microbatches the lines of a swarm carry, without the computers.

Three origins send to three peers of the next stage, on links of the data lane as a swarm's, messages of a
microbatch's size, and each is answered at once by one as long. An origin keeps so many under way and sends
to whom the fewest are; what a microbatch takes is all network. `--subflows 0`: one connection per pair.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

import wan
from wan_swarm import HOME

from protocols.daemon.p2pd import DaemonOptions
from protocols.errors import PeerGone
from protocols.messages.table import Act, Grad
from protocols.p2pd import multipath_dialer
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import create

TOKENS = 512
ACT_BYTES, GRAD_BYTES = 71_680, 69_632
"""Of the 1M-parameter model: 128 int8 numbers and two scales a token; the labels go down with them."""
DIAL_SECONDS = 20.0
SIDE = 3


async def links(folder, arguments):
    async def told(names):
        async with asyncio.timeout(60):
            while not all((folder / name).exists() for name in names):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def begin(host, role, name):
        command = [sys.executable, __file__, role, folder, name, host.address, options]
        return host.popen(list(map(str, command)))

    options = json.dumps({
        "seconds": arguments.seconds, "under_way": arguments.in_flight or 8, "subflows": arguments.subflows,
        "after": arguments.warm_seconds,
    })  # fmt: skip
    with wan.Wan(seed=5) as net:
        lasts = [f"last-{number}" for number in range(SIDE)]
        origins = [f"origin-{number}" for number in range(SIDE)]
        for name in lasts:
            begin(net.host(name, **HOME), "last", name)
        await told([f"{name}.peer" for name in lasts])
        running = [begin(net.host(name, **HOME), "origin", name) for name in origins]
        await told([f"{name}.counting" for name in origins])
        before, began = net.stats(), time.monotonic()
        await asyncio.sleep(arguments.seconds)
        after, seconds = net.stats(), time.monotonic() - began
        while any(process.poll() is None for process in running):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    found = [json.loads((folder / f"{name}.found").read_text()) for name in origins]
    sent = {
        name: 8e-6 * (after["hosts"][name]["sent_bytes"] - before["hosts"][name]["sent_bytes"]) / seconds
        for name in (*origins, *lasts)
    }
    return {
        "under_way": arguments.in_flight or 8,
        "microbatches_per_second": round(sum(one["done"] for one in found) / arguments.seconds, 1),
        "tokens_per_second": round(TOKENS * sum(one["done"] for one in found) / arguments.seconds),
        "answer_seconds_median": [one["median"] for one in found],
        "answer_seconds_p95": [one["p95"] for one in found],
        "subflows": [one["subflows"]["open"] for one in found],
        "uplink_mbit": {name: round(megabits, 2) for name, megabits in sent.items()},
        "router_cpu_share": round((after["cpu_seconds"] - before["cpu_seconds"]) / seconds, 3),
    }


class Side:
    """What both sides have: a transport, and a link to each peer that it was told or heard of."""

    def __init__(self):
        self.links, self.opening = {}, set()

    async def start(self, folder, name, address, options):
        path = folder / name
        create(path)
        listen = DaemonOptions(
            listen=(f"/ip4/{address}/tcp/0",), auto_nat=False, nat_port_map=False, relay=False
        )
        self.transport = await P2pdTransport.start(path, listen)
        self.transport.listen(self)
        return self

    async def open(self, peer, addresses):
        async with asyncio.timeout(DIAL_SECONDS):
            while peer not in self.links:
                with contextlib.suppress(PeerGone):  # A SYN was lost, and libp2p waits before it dials again.
                    self.links[peer] = await self.transport.open(peer, "data", DIAL_SECONDS, addresses)

    def received(self, peer, lane, message, body, wire_bytes): ...

    def lost(self, peer, lane, reason): ...

    def refused(self, peer, code, reason):
        print("refused", peer, code, reason, flush=True)


class Last(Side):
    """Answers. The addresses of an origin come with its microbatches, in the place of a name."""

    def received(self, peer, lane, message, body, wire_bytes):
        if peer in self.links:
            link = self.links[peer]
            if message.counter not in self.answered[peer]:  # A repeated one: as the data path counts it.
                self.answered[peer].add(message.counter)
                link.post(
                    Grad("", message.counter, 1, 1.0, TOKENS, 0.1, 0.1, (4, 128, 128)), bytes(GRAD_BYTES)
                )
        elif peer not in self.opening:
            self.opening.add(peer)
            self.answered[peer] = set()
            self.task = asyncio.create_task(self.open(peer, [message.origin]))


class Origin(Side):
    def __init__(self):
        super().__init__()
        self.sent, self.with_, self.took, self.counter = {}, Counter(), [], 0
        self.counting = False

    def received(self, peer, lane, message, body, wire_bytes):
        sent = self.sent.pop(message.counter, None)
        if sent is None:
            return
        self.with_[peer] -= 1
        if self.counting:
            self.took.append(time.monotonic() - sent)
        self.send()

    def send(self):
        peer = min(self.links, key=lambda peer: self.with_[peer])
        self.counter += 1
        self.sent[self.counter] = time.monotonic()
        self.with_[peer] += 1
        act = Act(self.transport.addresses[0], self.counter, 1, 1, 10.0, (4, 128, 128))
        self.links[peer].post(act, bytes(ACT_BYTES))


async def last(folder, name, address, options):
    side = Last()
    side.answered = {}
    await side.start(folder, name, address, options)
    draft = folder / f"{name}.draft"
    draft.write_text(json.dumps([side.transport.peer, list(side.transport.addresses)]))
    draft.rename(folder / f"{name}.peer")
    await asyncio.sleep(600)


async def origin(folder, name, address, options):
    side = await Origin().start(folder, name, address, options)
    for path in folder.glob("*.peer"):
        await side.open(*json.loads(path.read_text()))
    for link in side.links.values():  # So that it opens a link back.
        link.post(Act(side.transport.addresses[0], 0, 1, 1, 10.0, (4, 128, 128)))
    await asyncio.sleep(1.5)
    for _ in range(options["under_way"]):
        side.send()
    await asyncio.sleep(options["after"])
    side.counting = True
    (folder / f"{name}.counting").touch()
    await asyncio.sleep(options["seconds"])
    took = sorted(side.took)
    found = {
        "done": len(took), "median": round(took[len(took) // 2], 3),
        "p95": round(took[int(0.95 * len(took))], 3),
        "subflows": dict(side.transport.subflows),
    }  # fmt: skip
    await side.transport.close()
    (folder / f"{name}.found").write_text(json.dumps(found))


if __name__ == "__main__":
    role, folder, name, address, options = sys.argv[1:]
    options = json.loads(options)
    multipath_dialer.MAX_CARRIERS = options["subflows"]
    asyncio.run({"last": last, "origin": origin}[role](Path(folder), name, address, options))
