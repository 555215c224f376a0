"""What a stranger's name is looked up as obeys the rule for addresses, and p2pd gets no name."""

import pytest

from peers.lab.world.virtual_time import run as run_virtual
from protocols.daemon.names import MAX_NAMES, look_up, resolve_dialable

PUBLIC, HOME = "/ip4/203.0.114.5/tcp/1", "/ip4/192.168.1.5/tcp/1"
NAMES = {
    "public.example": ["8.8.8.8", "2a01:4f8::1"],
    "ip6-localhost": ["::1"],
    "metadata.google.internal": ["169.254.169.254"],
    "both.example": ["127.0.0.1", "8.8.4.4", "192.168.1.7"],
    "nat64.example": ["64:ff9b::7f00:1", "64:ff9b::808:808"],
}


async def names(host):
    return NAMES.get(host, ())


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("/dns/public.example/tcp/4001", ["/ip4/8.8.8.8/tcp/4001", "/ip6/2a01:4f8::1/tcp/4001"]),
        ("/dns4/public.example/tcp/1/p2p/R/p2p-circuit", ["/ip4/8.8.8.8/tcp/1/p2p/R/p2p-circuit"]),
        ("/dns6/public.example/tcp/1", ["/ip6/2a01:4f8::1/tcp/1"]),
        ("/dns6/ip6-localhost/tcp/1", []),
        ("/dns4/metadata.google.internal/tcp/80", []),
        ("/dns4/both.example/tcp/1", ["/ip4/8.8.4.4/tcp/1"]),
        ("/dns/nat64.example/tcp/1", ["/ip6/64:ff9b::808:808/tcp/1"]),
        ("/dns4/unknown.example/tcp/1", []),
        (PUBLIC, [PUBLIC]),
        (HOME, []),
    ],
)
def test_a_name_leads_where_its_addresses_may_lead(address, dialled):
    assert run_virtual(resolve_dialable([address], [PUBLIC], names)) == tuple(dialled)


def test_a_name_leads_home_only_who_is_there():
    found = run_virtual(resolve_dialable(["/dns4/both.example/tcp/1"], [HOME], names))
    assert found == ("/ip4/8.8.4.4/tcp/1", "/ip4/192.168.1.7/tcp/1")


def test_few_names_of_one_peer_are_looked_up():
    asked = []

    async def count(host):
        asked.append(host)
        return ()

    run_virtual(resolve_dialable([f"/dns4/{n}.example/tcp/1" for n in range(20)], [PUBLIC], count))
    assert len(asked) == MAX_NAMES


@pytest.mark.parametrize("name", ["127.1", "2130706433", "0x7f.1", "0177.1"])
def test_a_number_for_a_name_is_an_address(name):
    assert run_virtual(look_up(name)) == ("127.0.0.1",)
