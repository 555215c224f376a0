"""A swarm of real peers on the emulated WAN, for what scripts/soak wan measures."""

import sys
from pathlib import Path

from model_sizes import model_keys
from rich.console import Console

from peers.lab.processes.chaos import ChaosSwarm
from peers.telemetry import event_log

HOME = {"up": 10.0, "down": 100.0, "delay": 12.5, "loss": 0.005}
"""A home line. A packet crosses two: 50 ms round trip, 1 % loss."""
MODELS = {
    "1M": {"hidden_size": 128, "num_hidden_layers": 4},
    "25M": model_keys(width=512, layers=8, heads=8, kv_heads=8, inner=1408, initializer_range=0.02),
}


class WanSwarm(ChaosSwarm):
    """Every peer in a namespace of its own; `net` None: all on loopback."""

    quic = False
    subflows = 2
    paced = 0.0
    """Seconds a microbatch takes on each stage without the processor (scripts/soaks/wan/wan_paced.py); 0: it
    computes."""

    def __init__(self, options, folder, net, model, keys=(), run=(), line=HOME):
        super().__init__(options, folder, Console(highlight=False))
        self.net, self.model, self.keys, self.run, self.line = net, model, dict(keys), dict(run), line

    def run_keys(self):
        shape, count = MODELS[self.model], self.options.stages
        return {
            "name": f"wan-{self.model}", "seed": 0, "stages": [shape["num_hidden_layers"] // count] * count,
            "activation_codec": "int8", **self.run, "model": shape | self.run.get("model", {}),
        }  # fmt: skip

    def place(self, name):
        prefix, keys = self.line_of(name)
        if self.paced and name != "bootstrap":
            program = Path(__file__).with_name("wan_paced.py")
            prefix = [*prefix, sys.executable, str(program), str(self.paced), str(self.subflows)]
        return prefix, keys

    def line_of(self, name):
        if self.net is None:
            return (), self.keys
        host = self.net.hosts.get(name)
        if host is None:
            line = {"delay": self.line["delay"]} if name == "bootstrap" else self.line
            host = self.net.host(name, **line)
        listen = f"/ip4/{host.address}/" + ("udp/0/quic-v1" if self.quic else "tcp/0")
        return host.prefix, {**self.keys, "listen": [listen]}


def events(folder, name):
    for log in sorted(folder.glob("*/events.jsonl")):
        for event in event_log.read(log):
            if event.name == name:
                yield log.parent.name, event


def sent_megabits(swarm, before, after):
    """What every peer that was there before has sent since."""
    return {
        peer.name: 8e-6 * (after["hosts"][peer.name]["sent_bytes"] - before["hosts"][peer.name]["sent_bytes"])
        for peer in swarm.peers
        if peer.name in before["hosts"]
    }
