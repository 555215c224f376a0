"""The emulated wide-area network imposes what it says. Needs root; where it cannot be made, that is said, and
where it must be (SWARMNET_WAN=required, as in .ci/run) that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import wan
from needs import REASON, without_network

if REASON is not None:
    print(f"NO EMULATED NETWORK HERE, its tests do not run: {REASON}", file=sys.__stderr__)

REQUIRED = os.environ.get("SWARMNET_WAN") == "required"


@pytest.mark.skipif(not REQUIRED, reason="SWARMNET_WAN is not `required`")
def test_there_is_an_emulated_network_where_one_is_required():
    assert REASON is None, f"no emulated network: {REASON}"


@pytest.fixture
def pair():
    with wan.Wan(seed=1) as net:
        yield net, net.host("a", up=10, down=100, delay=12.5), net.host("b", up=10, down=100, delay=12.5)


@without_network
def test_delay_bandwidth_and_loss_are_what_was_asked_for(pair):
    _, a, b = pair
    lost, round_trip = wan.ping(a, b)
    assert lost == 0
    assert round_trip >= 50
    assert wan.tcp(a, b, 4_000_000) < 10
    b.set(loss=0.3)
    lost, _ = wan.ping(a, b, 100)
    assert 0.3 < lost < 0.7  # each way: 1 - 0.7 * 0.7


@without_network
def test_a_partition_cuts_both_ways_a_block_one_way_and_healing_ends_them(pair):
    net, a, b = pair
    net.partition(["a"], ["b"])
    assert wan.ping(a, b, 5)[0] == 1.0
    net.heal()
    assert wan.ping(a, b, 5)[0] == 0.0
    net.block("a", "b")
    before = net.stats()["hosts"]
    wan.ping(b, a, 5)
    after = net.stats()["hosts"]
    assert after["a"]["received_bytes"] > before["a"]["received_bytes"]  # b's packets arrive,
    assert after["b"]["received_bytes"] == before["b"]["received_bytes"]  # the answers do not


@without_network
def test_nothing_is_left_behind():
    with wan.Wan() as net:
        host = net.host("only", up=1)
        sleeper = host.popen(["sleep", "600"])
        namespace = host.namespace
    assert sleeper.poll() is not None
    assert not Path("/run/netns", namespace).exists()


AT_ONCE = """
import socket, sys, time
own, other = (sys.argv[1], 5003), (sys.argv[2], 5003)
until = time.monotonic() + 6
while time.monotonic() < until:
    dial = socket.socket(); dial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    dial.bind(own); dial.settimeout(2)
    try: dial.connect(other); print("connected", flush=True); time.sleep(1); break
    except OSError: dial.close()
"""


@without_network
@pytest.mark.parametrize("translated", [False, True])
def test_two_firewalls_that_are_dialled_through_at_once_let_in_unless_they_translate(translated):
    with wan.Wan(seed=1) as net:
        a, b = (net.host(name, delay=5, firewall=True, translated=translated) for name in "ab")
        dials = [
            here.popen(
                [sys.executable, "-c", AT_ONCE, here.address, there.address],
                stdout=subprocess.PIPE,
                text=True,
            )
            for here, there in ((a, b), (b, a))
        ]
        said = {dial.communicate(timeout=60)[0].strip() for dial in dials}
    assert said == ({""} if translated else {"connected"})
