"""`scripts/soak wan links`: what one link of the data lane carries on the WAN, as its subflows come.

Two transports in namespaces of their own; one posts microbatch-sized messages to the other, a few on their way at a
time, and every message is timed from posting to its acknowledgement.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import wan
from wan_swarm import HOME

BODY_BYTES = 66_000
ON_THE_WAY_BYTES = 1_000_000
REPORT_SECONDS = 5.0


async def links(folder, arguments):
    with wan.Wan(seed=5) as net:
        a, b = net.host("a", **HOME), net.host("b", **HOME)
        receiver = b.popen([sys.executable, __file__, "receive", folder / "b", b.address, folder / "told"])
        while not (folder / "told").exists():
            await asyncio.sleep(0.1)
        sender = a.popen([sys.executable, __file__, "send", folder / "a", a.address, folder / "told", arguments.seconds])
        while sender.poll() is None:
            await asyncio.sleep(0.2)
        receiver.terminate()
    return json.loads((folder / "a.json").read_text())


class Deaf:
    def received(self, peer, lane, message, body, wire_bytes): ...

    def lost(self, peer, lane, reason): ...

    def refused(self, peer, code, reason):
        print("refused", peer, code, reason, flush=True)


async def start(path, address):
    from protocols.daemon import DaemonOptions
    from protocols.identity import create
    from protocols.p2pd import P2pdTransport

    create(path)
    options = DaemonOptions(listen=(f"/ip4/{address}/tcp/0",), auto_nat=False, nat_port_map=False, relay=False)
    transport = await P2pdTransport.start(path, options)
    transport.listen(Deaf())
    return transport


async def receive(path, address, told):
    transport = await start(path, address)
    draft = told.with_name("draft")
    draft.write_text(json.dumps([transport.peer, list(transport.addresses)]))
    draft.rename(told)
    await asyncio.sleep(600)


async def send(path, address, told, seconds):
    from protocols.messages import Act
    from protocols.subflows import P2pdLink

    transport = await start(path, address)
    peer, addresses = json.loads(told.read_text())
    link = await transport.open(peer, "data", 10.0, addresses)
    took, arrived, rows = [], 0, []
    original = P2pdLink.acknowledged

    def acknowledged(self, outgoing, after):
        nonlocal arrived
        took.append(after)
        arrived += outgoing.whole
        original(self, outgoing, after)

    P2pdLink.acknowledged = acknowledged
    act = Act(peer, 1, 1, 1, 10.0, (4, 128, 128))
    began = since = time.monotonic()
    before = 0
    while time.monotonic() < began + seconds:
        while link.on_its_way < ON_THE_WAY_BYTES:
            link.post(act, bytes(BODY_BYTES))
        await asyncio.sleep(0.01)
        if time.monotonic() > since + REPORT_SECONDS:
            took.sort()
            spent, since = time.monotonic() - since, time.monotonic()
            rows.append({
                "streams": 1 + len(link.carriers), "mbit": round(8e-6 * (arrived - before) / spent, 2),
                "seconds_median": round(took[len(took) // 2], 2), "seconds_p95": round(took[int(0.95 * len(took))], 2),
            })  # fmt: skip
            print(rows[-1], flush=True)
            before = arrived
            took.clear()
    path.with_suffix(".json").write_text(json.dumps({"rows": rows, "repeated": link.repeated}))
    await transport.close()


if __name__ == "__main__":
    what, path, address, told, *rest = sys.argv[1:]
    if what == "receive":
        asyncio.run(receive(Path(path), address, Path(told)))
    else:
        asyncio.run(send(Path(path), address, Path(told), float(rest[0])))
