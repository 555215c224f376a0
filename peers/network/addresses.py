"""The addresses of a peer: those announced to others, and those it listens on.

Addresses are libp2p multiaddrs. A helper is another peer that is asked to dial this one back. A circuit
address leads through a relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.daemon.multiaddr import is_circuit
from protocols.reachability.fresh_dial import ADDRESSES, DialOutcome
from swarmnet.membership.address_ranges import NAME_KINDS, beginning, host_ip, ip_of, is_public

TRIED = ("reached", "refused", "silent", "no_way", "other_peer", "not_libp2p")
LOOPBACK = ("/ip4/127.", "/ip6/::1/")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the peer that is examined, as multiaddrs without /p2p/."""

    announced: tuple[str, ...]
    """Addresses announced to other peers."""
    chosen: bool
    """True if the user chose them (`announce`), False if p2pd determined them."""
    ports: tuple[int, ...]
    """TCP ports that the peer listens on."""

    @classmethod
    def of(cls, announce: Sequence[str], listen: Sequence[str], reported: Sequence[str]) -> Addresses:
        """Combine the address lists of a peer. It announces the configured addresses `announce`, or without
        these the addresses `reported` by p2pd and relays. The TCP ports are those of `listen`, or of
        `announce` if `listen` has none."""
        listen_ports = [port for port in map(tcp_port, listen) if port]
        announced_ports = [port for port in map(tcp_port, announce) if port]
        ports = dict.fromkeys(listen_ports or announced_ports)  # In order, without duplicates.
        return cls(tuple(announce) or tuple(reported), bool(announce), tuple(ports))

    def to_ask(self, observed: str) -> tuple[str, ...]:
        """Return the addresses that a helper is asked to dial, at most `ADDRESSES`: announced ones, and the
        IP in `observed`, the address at which the helper saw this peer. Relayed addresses are left out, and
        loopback ones unless `observed` is one."""
        observed_is_loopback = observed.startswith(LOOPBACK)
        direct = [
            address
            for address in self.announced
            if not is_circuit(address) and (observed_is_loopback or not address.startswith(LOOPBACK))
        ]
        observed_addresses = self.doors(observed)
        # Announced addresses come first, but leave places for the observed ones.
        announced = direct[: ADDRESSES - len(observed_addresses)]
        return tuple(dict.fromkeys([*announced, *observed_addresses]))

    def doors(self, observed: str) -> tuple[str, ...]:
        """Return the multiaddrs of the IP in `observed` with the first two ports that this peer listens on.
        Returns none if `observed` contains no IP."""
        parts = observed.split("/")
        if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
            return ()
        return tuple(f"/{parts[1]}/{parts[2]}/tcp/{port}" for port in self.ports[:2])

    @property
    def relayed(self) -> tuple[str, ...]:
        """The announced addresses that lead through a relay."""
        return tuple(each for each in self.announced if is_circuit(each))


def is_public_address(address: str) -> bool:
    """Return True if the address is on the public internet. A host name counts as public. Text that is
    neither a host name nor an IP does not, because other peers' records may contain anything."""
    kind, host = beginning(address)
    is_host_name = kind in NAME_KINDS
    ip = host_ip(host) if is_host_name else ip_of(host)  # A host name may be the text of an IP.
    return is_host_name if ip is None else is_public(ip)


def has_untried(dialled: Sequence[DialOutcome]) -> bool:
    """Return True if a helper did not try a public address. For example, it saw the peer at an IPv6 address
    and skipped an IPv4 one. It then cannot prove that the peer is unreachable."""
    return any(each.outcome == "not_tried" and is_public_address(each.address) for each in dialled)


def tcp_port(address: str) -> int:
    """Return the TCP port of a multiaddr, or 0 if it has none."""
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdecimal() else 0
