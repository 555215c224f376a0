"""The machines for which a run is proposed: named by the user, or as fast as this one."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from ipaddress import ip_address

from peers.config.errors import UserError
from peers.lab.planner.speeds import DEFAULT_LINE, MEGABIT, PeerClass, peer_classes
from swarmnet.identifiers import PeerId
from swarmnet.model.flops import operations_per_token
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, ModelShape

MAX_PEERS = 100_000
MEASURED_SECONDS = 0.5
BOOTSTRAP_PORT = 31330
PROBE = Manifest(
    "probe",
    PeerId(""),
    stages=(4,),
    model=ModelShape(hidden_size=256, num_attention_heads=8, num_key_value_heads=8, intermediate_size=768),
    data=Data(seq_len=128, micro_batch_size=4),
)
"""The run whose model is timed on this machine."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Peers that will train."""

    named: tuple[PeerClass, ...]
    """Classes that the user named, with tokens per second of whatever model; empty: as this machine."""
    count: int
    memory: int
    """Bytes of memory of the smallest; 0: unknown."""
    operations_per_second: float
    """Speed of each machine as this one; 0 if classes are named."""

    def classes(self, operations_per_token: int) -> tuple[PeerClass, ...]:
        """Return the classes of peers for a model that costs so many operations a token."""
        if self.named:
            return self.named
        down, up = (MEGABIT * rate for rate in DEFAULT_LINE)
        speed = self.operations_per_second / operations_per_token
        return (PeerClass(self.count, speed, down, up, memory=self.memory),)

    def __str__(self) -> str:
        if self.named:
            return ", ".join(map(str, self.named))
        return (
            f"{self.count} as this machine: {self.operations_per_second / 1e9:,.0f} GFlop/s in training, "
            f"and {self.memory / 1e9:.3g} GB; lines of {DEFAULT_LINE[0]:g}/{DEFAULT_LINE[1]:g} Mbit/s"
        )


def machines_of(text: str) -> Machines:
    """Return the machines that `--peers` names: a number of machines as this one, which is timed, or classes
    as for `swarmnet plan`. Raises UserError."""
    if not text.isdecimal():
        try:
            named = peer_classes(text)
        except ValueError as error:
            raise UserError(f"--peers: {error}; or give a number of machines such as this one") from None
        smallest = min(each.memory for each in named)
        return Machines(named, sum(each.count for each in named), smallest, 0.0)
    if not 1 <= int(text) <= MAX_PEERS:
        raise UserError(f"--peers {text}: give 1 to {MAX_PEERS:,}")
    import torch

    from peers.compute.process_memory import memory_bytes
    from peers.compute.stage_part import computing_of, device_of
    from peers.config.compute_file import ComputeFile
    from swarmnet.model.fixed_point import to_floats
    from swarmnet.model.flat_layout import trained_layout
    from swarmnet.model.stage_compute import StageCompute, copied
    from swarmnet.model.state_layout import first_state

    device = device_of("auto")
    compute = StageCompute(
        shape=PROBE.model,
        span=PROBE.span(0),
        layout=trained_layout(PROBE, 0),
        computing=computing_of(ComputeFile(), device),
        device=device,
    )
    compute.publish(copied(to_floats(first_state(PROBE, 0)).to(device)))
    tokens_BT = torch.zeros(PROBE.data.micro_batch_size, PROBE.data.seq_len, dtype=torch.int64)
    compute.finish("warm up", tokens_BT, tokens_BT)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < MEASURED_SECONDS:
        compute.finish(count, tokens_BT, tokens_BT)
        count += 1
    per_second = operations_per_token(PROBE, 0) * PROBE.microbatch_tokens * count / passed
    return Machines((), int(text), memory_bytes(device), per_second)


def bootstrap_place(given: str | None) -> tuple[str, int]:
    """Return the beginning of the bootstrap's multiaddr, such as /ip4/192.0.2.7, and its port. `given` is
    HOST or HOST:PORT; None: this machine's address in its network. Raises UserError."""
    match = re.fullmatch(r"(?P<host>[A-Za-z0-9.-]+)(:(?P<port>\d+))?", given or _own_address())
    if match is None or not 0 < int(match["port"] or BOOTSTRAP_PORT) < 2**16:
        raise UserError(f"--address {given}: expected HOST or HOST:PORT, such as 203.0.113.5:31330")
    host, port = match["host"], int(match["port"] or BOOTSTRAP_PORT)
    try:
        return f"/ip{ip_address(host).version}/{host}", port
    except ValueError:
        return f"/dns4/{host}", port


def _own_address() -> str:
    """Return the address from which this machine would reach the internet. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: no such host.
            return str(probe.getsockname()[0])
        except OSError:  # This machine has no network.
            return "127.0.0.1"
