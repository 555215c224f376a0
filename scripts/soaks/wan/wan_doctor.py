"""`swarmnet doctor` on the emulated network: three peers that hivemind's own check finds reachable alike.

scripts/soak wan-doctor [NAME ...]       needs root

reachable    announces nothing of its own, everybody gets in
firewalled   nothing comes in but answers; the bootstrap is its relay
wrong        everybody gets in, but it announces an address of another peer and one where nobody is
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import wan

from peers.config.run_file import publish
from peers.lab.processes.local_processes import start
from protocols.signed.identity import load_or_create

NAMES = ("reachable", "firewalled", "wrong")
PORT = 31331
NOBODY = f"/ip4/{wan.SUBNET}.0.200/tcp/4001"
RUN = "name: doctor\nstages: [1, 1]\nmodel: {hidden_size: 64, num_hidden_layers: 2}\n"
KEYS = {"nat": False, "metrics": {"listen": "off"}, "log": "json"}
DOCTOR_SECONDS, HIVEMIND_SECONDS = 200, 100

NODE = """
import asyncio, sys
from protocols.daemon.hivemind_imports import P2P, DHTNode
async def main():
    node = await DHTNode.create(p2p=await P2P.create(host_maddrs=[sys.argv[1]]))
    print((await node.get_visible_maddrs())[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.shutdown()
asyncio.run(main())
"""
"""A node of hivemind's DHT, nothing of ours in it (hivemind_imports leaves out what it does not need)."""
CHECK = """
import asyncio, sys
from protocols.daemon.hivemind_imports import P2P, DHTNode, PeerID
async def main():
    listen, other, *announce = sys.argv[1:]
    p2p = await P2P.create(host_maddrs=[listen], announce_maddrs=announce or None, initial_peers=[other])
    node = await DHTNode.create(p2p=p2p, initial_peers=[other])
    peer = PeerID.from_base58(other.rpartition("/p2p/")[2])
    try:
        found = await node.protocol.call_ping(peer, validate=True, strict=True)
        print("no answer" if found is None else "reachable", flush=True)
    except Exception as error:
        print("unreachable", error, flush=True)
    await node.shutdown()
    await p2p.shutdown()
asyncio.run(main())
"""
"""hivemind's own: `rpc_ping(validate=True)` lets the other ping back; `strict` makes a failure an error."""


async def examine(folder, names=NAMES):
    """By name: what the doctor says (its reachability line), and what hivemind says."""
    (folder / "run.yaml").write_text(RUN)
    publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")
    with wan.Wan(seed=1) as net:
        host = net.host("bootstrap", delay=5)
        for name in names:
            net.host(name, delay=10, firewall=name == "firewalled")
        listen = {"role": "bootstrap", "listen": [f"/ip4/{host.address}/tcp/0"], **KEYS}
        boot = await start(folder, "bootstrap", listen, host.prefix)
        try:
            await boot.until_listening()
            announced = {"wrong": [boot.addresses[0].partition("/p2p/")[0], NOBODY]}
            doctors = (
                asyncio.to_thread(
                    doctor, net.hosts[name], folder, name, boot.addresses, announced.get(name, [])
                )
                for name in names
            )
            said = await asyncio.gather(*doctors)  # one helper for all: who finds it busy asks again
            answers = await asyncio.to_thread(hivemind, net, announced, names)
            return {
                name: {"doctor": line, "hivemind": answers[name]}
                for name, line in zip(names, said, strict=True)
            }
        finally:
            await boot.stop(3.0)


def doctor(host, folder, name, bootstraps, announce):
    """Its line on reachability; the peer is not running, so it listens in its stead."""
    keys = {
        "run": "run.json", "bootstrap": bootstraps, "listen": [f"/ip4/{host.address}/tcp/{PORT}"],
        "announce": announce, "state": name, **KEYS,
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    command = [sys.executable, "-m", "peers.cli.main", "doctor", file, "--json", "--only", "reachability"]
    done = host.run(command, DOCTOR_SECONDS)
    checks = json.loads(done.stdout)["checks"] if done.stdout else []
    lines = [line for line in checks if line["check"] == "reachability"]
    return {**lines[0], "exit": done.returncode} if lines else {"said": done.stdout + done.stderr}


def hivemind(net, announced, names):
    """What hivemind's DHT says of nodes of its own in those hosts, by name."""
    boot = net.hosts["bootstrap"]
    node = boot.popen(
        [sys.executable, "-c", NODE, f"/ip4/{boot.address}/tcp/0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with node.stdin, node.stdout:
        address = node.stdout.readline().strip()
        checks = {}
        for name in names:
            listen = f"/ip4/{net.hosts[name].address}/tcp/{PORT}"
            command = [sys.executable, "-c", CHECK, listen, address, *announced.get(name, [])]
            checks[name] = net.hosts[name].popen(command, stdout=subprocess.PIPE, text=True)
        said = {name: check.communicate(timeout=HIVEMIND_SECONDS)[0] for name, check in checks.items()}
    return {name: text.strip() for name, text in said.items()}


def main():
    reason = wan.why_not()
    if reason is not None:
        sys.exit(f"error: no emulated network here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are taken down
    with tempfile.TemporaryDirectory(prefix="swarmnet-wan-") as folder:
        print(json.dumps(asyncio.run(examine(Path(folder), sys.argv[1:] or NAMES)), indent=1))


if __name__ == "__main__":
    main()
