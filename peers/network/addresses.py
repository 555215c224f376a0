"""The addresses of a peer: which it tells others, which it listens on, and which stand in the open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.daemon.multiaddr import is_circuit
from protocols.reachability.fresh_dial import ADDRESSES, Dialled
from swarmnet.membership.address_ranges import NAME_KINDS, beginning, host_ip, ip_of, is_public

TRIED = ("reached", "refused", "silent", "no_way", "other_peer", "not_libp2p")
LOOPBACK = ("/ip4/127.", "/ip6/::1/")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of the peer that is looked at; multiaddrs without /p2p/."""

    announced: tuple[str, ...]
    """What others are told."""
    chosen: bool
    """Whether a person chose those (`announce`), rather than p2pd from what it knows."""
    ports: tuple[int, ...]
    """TCP ports it listens on."""

    @classmethod
    def of(cls, announce: Sequence[str], listen: Sequence[str], told: Sequence[str]) -> Addresses:
        """`announce` as in the peer file; `listen` with the ports that p2pd got; `told`: what p2pd and the
        relays say."""
        listening = [port for each in listen if (port := tcp_port(each))]
        announced = [port for each in announce if (port := tcp_port(each))]
        ports = dict.fromkeys([*listening, *([] if listening else announced)])
        return cls(tuple(announce) or tuple(told), bool(announce), tuple(ports))

    def to_ask(self, observed: str) -> tuple[str, ...]:
        """What a helper that saw this peer at `observed` is asked to dial."""
        local = observed.startswith(LOOPBACK)
        announced = [each for each in self.announced if local or not each.startswith(LOOPBACK)]
        direct = [each for each in announced if not is_circuit(each)]
        doors = self.doors(observed)
        # What a person chose goes first, and the own door must have a place.
        return tuple(dict.fromkeys([*direct[: ADDRESSES - len(doors)], *doors]))

    def doors(self, observed: str) -> tuple[str, ...]:
        """The own door: where the helper saw this peer, at the ports it listens on."""
        parts = observed.split("/")
        if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
            return ()
        return tuple(f"/{parts[1]}/{parts[2]}/tcp/{port}" for port in self.ports[:2])

    @property
    def relayed(self) -> tuple[str, ...]:
        return tuple(each for each in self.announced if is_circuit(each))



def in_the_open(address: str) -> bool:
    """Whether whoever is there stands in the open internet: what it reaches, anyone reaches. A name does;
    what only claims to be an address (anybody may write anything into a record) does not."""
    kind, host = beginning(address)
    ip = host_ip(host) if kind in NAME_KINDS else ip_of(host)
    return kind in NAME_KINDS if ip is None else is_public(ip)



def has_untried(dialled: Sequence[Dialled]) -> bool:
    """Whether a helper left out an address of the open internet, such as an IPv4 address of a peer that it
    saw at an IPv6 one: then it cannot show that nothing gets in."""
    return any(each.outcome == "not_tried" and in_the_open(each.address) for each in dialled)


def tcp_port(address: str) -> int:
    """0: none."""
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdecimal() else 0
