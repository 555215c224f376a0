"""From what a helper met at this peer's addresses to a verdict: reachable, wrongly announced, or firewalled.

Pure. Two kinds of addresses are asked for: those that others are told (announced), and the IP that the helper
saw this peer at with the ports it listens on (its own door). What is announced and leads here is reachable;
where only the own door does, something wrong is announced; where nothing does, a firewall is between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from peers.doctor.line import Level, Line
from peers.extras import how_to_install
from protocols.dialler import ADDRESSES, Dialled
from protocols.multiaddr import is_circuit

Verdict = Literal["reachable", "wrongly_announced", "firewalled", "unknown"]
TRIED = ("reached", "refused", "silent", "no_way", "other_peer", "not_libp2p")
LOOPBACK = ("/ip4/127.", "/ip6/::1/")
NAME_ONE = "bootstrap: [MULTIADDR] in the peer file; whoever published the run knows one"


def no_bootstrap(lan: bool | Literal["auto"], zeroconf: bool) -> Line:
    """None is named in the peer file. `lan`: its key; `zeroconf`: whether that is installed."""
    if lan and zeroconf:
        text = "no bootstrap is named: only neighbours on the local network would find this peer"
        return Line("bootstrap", "warn", text, NAME_ONE)
    alone = "only who is given its address would find this peer"
    if not lan:
        text = f"no bootstrap is named, and neighbours on the local network are not looked for (lan): {alone}"
        return Line("bootstrap", "warn", text, NAME_ONE)
    text = f"no bootstrap is named, and zeroconf, which finds neighbours, is not installed: {alone}"
    fix = f"{NAME_ONE}; for neighbours on the local network: {how_to_install('lan')}"
    return Line("bootstrap", "warn", text, fix)


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


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    text: str
    fix: str
    level: Level


def judge(addresses: Addresses, observed: str, dialled: Sequence[Dialled], must_be_reached: bool) -> Finding:
    """`must_be_reached`: a bootstrap; for others it is enough to reach out."""
    met = {each.address: each for each in dialled if each.outcome in TRIED}
    doors = addresses.doors(observed)
    announced = [met[each] for each in addresses.announced if each in met]
    leads_here = [each for each in announced if each.outcome == "reached"]
    wrong = [each for each in announced if each.outcome != "reached"]
    open_doors = [each for each in doors if each in met and met[each].outcome == "reached"]
    if not met:
        why = "; ".join(f"{each.address}: {each.detail}" for each in dialled) or "there is none to dial"
        return Finding("unknown", f"no address of this peer could be tried: {why}", _FIX_PORT, "warn")
    if leads_here and (not wrong or not addresses.chosen):
        where = ", ".join(f"{each.address} ({1000 * each.seconds:.0f} ms)" for each in leads_here)
        return Finding("reachable", f"reachable directly at {where}", "", "ok")
    if leads_here:
        text = f"reachable at {_named(leads_here)}, but wrongly announced as well: {_told(wrong)}"
        return Finding("wrongly_announced", text, _announce([each.address for each in leads_here]), "warn")
    if open_doors:
        what = _told(wrong) if wrong else "nobody is told of the address at which others get in"
        text = f"wrongly announced: {what}; yet this peer is reached at {', '.join(open_doors)}"
        # What no person chose p2pd may mend itself, once four peers have seen it there (go-libp2p).
        level: Level = "fail" if addresses.chosen else "warn"
        return Finding("wrongly_announced", text, _announce(open_doors), level)
    return _shut(addresses, observed, met, wrong, must_be_reached)


def _shut(
    addresses: Addresses, observed: str, met: dict[str, Dialled], wrong: Sequence[Dialled], must: bool
) -> Finding:
    doors = [met[each] for each in addresses.doors(observed) if each in met]
    others = [each for each in wrong if each not in doors] if addresses.chosen else []
    text = f"firewalled: nothing that comes in is let through ({_told(doors or list(met.values()))})"
    if others:
        text += f"; and wrongly announced besides: {_told(others)}"
    if addresses.relayed:
        text += f"; who is firewalled too reaches this peer through a relay, slower: {addresses.relayed[0]}"
    elif not must:
        text += "; it can train, over connections that it opens itself"
        text += ", but not with peers that are firewalled too: no bootstrap has a place for it as a relay"
    port = addresses.ports[0] if addresses.ports else 31331
    fix = (
        f"forward TCP port {port} of the router to this machine, let it in (sudo ufw allow {port}/tcp), with "
        f"listen: [/ip4/0.0.0.0/tcp/{port}] in the peer file, so that the port stays the same"
    )
    return Finding("firewalled", text, fix, "fail" if must else "warn")


def _named(found: Sequence[Dialled]) -> str:
    return ", ".join(each.address for each in found)


def _told(found: Sequence[Dialled]) -> str:
    """Each address and what was met there."""
    return ", ".join(f"{each.address}: {_in_words(each)}" for each in found)


def _in_words(met: Dialled) -> str:
    if met.outcome == "other_peer":
        return f"another peer answers, {met.detail}"
    words = {"refused": "nothing listens", "silent": "no answer", "not_libp2p": "something else listens"}
    return words.get(met.outcome, met.detail)


def _announce(addresses: Sequence[str]) -> str:
    return f"announce: [{', '.join(addresses)}] in the peer file"


_FIX_PORT = "listen: [/ip4/0.0.0.0/tcp/31331] in the peer file (TCP is what can be tried)"


def in_the_open(address: str) -> bool:
    """Whether whoever is there stands in the open internet: what it reaches, anyone reaches. A name does;
    what only claims to be an address (anybody may write anything into a record) does not."""
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return True
    try:
        return ip_address(parts[2]).is_global
    except ValueError:
        return False


def tcp_port(address: str) -> int:
    """0: none."""
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdecimal() else 0


def line_of(finding: Finding, observed: str, dialled: Sequence[Dialled], helper: str) -> Line:
    data = {
        "verdict": finding.verdict, "observed": observed, "helper": helper,
        "dialled": [{"address": each.address, "outcome": each.outcome, "detail": each.detail,
                     "seconds": each.seconds} for each in dialled],
    }  # fmt: skip
    return Line("reachability", finding.level, finding.text, finding.fix, data)
