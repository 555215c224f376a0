"""Judge how other peers reach this one: reachable, wrongly announced, or firewalled.

This module is pure: it judges what a helper found when it dialled. The helper dials two kinds of addresses.
The first kind is announced to other peers. The second kind is the IP that the helper sees, with the ports
that this peer listens on. If an announced address works, the peer is reachable. If only an observed address
works, the announcement is wrong. If none works, a firewall blocks the peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from peers.config.errors import how_to_install
from peers.network.addresses import TRIED, Addresses, has_untried
from peers.tools.doctor.line import CheckResult, Level
from protocols.reachability.fresh_dial import DialOutcome

Verdict = Literal["reachable", "wrongly_announced", "firewalled", "unknown"]
NAME_ONE = "bootstrap: [MULTIADDR] in the peer file; the run's publisher knows one"


def no_bootstrap(lan: bool | Literal["auto"], zeroconf: bool) -> CheckResult:
    """Return the result for a peer file without a bootstrap. `lan`: its key; `zeroconf`: installed or not."""
    if lan and zeroconf:
        text = "no bootstrap is named: only peers on the local network can find this peer"
        return CheckResult("bootstrap", "warn", text, NAME_ONE)
    alone = "only peers that are given its address can find this peer"
    if not lan:
        text = f"no bootstrap is named, and the search on the local network is off (lan): {alone}"
        return CheckResult("bootstrap", "warn", text, NAME_ONE)
    text = f"no bootstrap is named, and zeroconf, which finds local peers, is not installed: {alone}"
    fix = f"{NAME_ONE}; for peers on the local network: {how_to_install('lan')}"
    return CheckResult("bootstrap", "warn", text, fix)


def undialled(reasons: Sequence[str], must_be_reached: bool) -> CheckResult:
    """Return the result if no peer dialled back. `reasons`: one of each peer that answered. A worker can
    train in a swarm without helpers, so this is no fault of it."""
    data = {"verdict": "unknown"}
    why = "; ".join(reasons) or "no peer of the swarm answers"
    if reasons and not must_be_reached:
        text = f"cannot be checked in this swarm: {why}; training works without it"
        return CheckResult("reachability", "ok", text, data=data)
    fix = "name a bootstrap that has py-libp2p, or try again in a minute"
    return CheckResult("reachability", "warn", f"no peer could dial back: {why}", fix, data)


@dataclass(frozen=True, slots=True)
class ReachabilityCheck:
    verdict: Verdict
    text: str
    fix: str
    level: Level


def judge(
    addresses: Addresses, observed: str, dialled: Sequence[DialOutcome], must_be_reached: bool
) -> ReachabilityCheck:
    """Return the verdict on the dialled addresses. `must_be_reached`: true for a bootstrap; other peers may
    train with outgoing connections only."""
    met = {each.address: each for each in dialled if each.outcome in TRIED}
    doors = addresses.doors(observed)
    announced = [met[each] for each in addresses.announced if each in met]
    leads_here = [each for each in announced if each.outcome == "reached"]
    wrong = [each for each in announced if each.outcome != "reached"]
    open_doors = [each for each in doors if each in met and met[each].outcome == "reached"]
    if not met or (not leads_here and not open_doors and has_untried(dialled)):
        failures = [f"{each.address}: {each.detail}" for each in dialled if each.detail]
        why = "; ".join(failures) or "it has no address to dial"
        return ReachabilityCheck(
            "unknown", f"not every address of this peer could be tried: {why}", _FIX_PORT, "warn"
        )
    if leads_here and (not wrong or not addresses.chosen):
        where = ", ".join(f"{each.address} ({1000 * each.seconds:.0f} ms)" for each in leads_here)
        return ReachabilityCheck("reachable", f"reachable directly at {where}", "", "ok")
    if leads_here:
        text = f"reachable at {_named(leads_here)}, but wrongly announced as well: {_dial_results(wrong)}"
        return ReachabilityCheck(
            "wrongly_announced", text, _announce([each.address for each in leads_here]), "warn"
        )
    if open_doors:
        what = _dial_results(wrong) if wrong else "the address that works is not announced"
        text = f"wrongly announced: {what}; yet this peer is reached at {', '.join(open_doors)}"
        # p2pd may correct addresses that no person chose, once four peers have seen it there (go-libp2p).
        level: Level = "fail" if addresses.chosen else "warn"
        return ReachabilityCheck("wrongly_announced", text, _announce(open_doors), level)
    return _shut(addresses, observed, met, wrong, must_be_reached)


def _shut(
    addresses: Addresses, observed: str, met: dict[str, DialOutcome], wrong: Sequence[DialOutcome], must: bool
) -> ReachabilityCheck:
    """Return the check's result for a peer that cannot be dialled. `must`: its role needs to be reached."""
    doors = [met[each] for each in addresses.doors(observed) if each in met]
    others = [each for each in wrong if each not in doors] if addresses.chosen else []
    text = f"firewalled: incoming connections are blocked ({_dial_results(doors or list(met.values()))})"
    if others:
        text += f"; and wrongly announced: {_dial_results(others)}"
    if addresses.relayed:
        text += f"; other firewalled peers reach it through a relay, which is slower: {addresses.relayed[0]}"
    elif not must:
        text += "; it can train, over connections that it opens itself"
        text += ", but not to other firewalled peers: no bootstrap has a free relay slot"
    port = addresses.ports[0] if addresses.ports else 31331
    fix = (
        f"forward TCP port {port} of the router to this machine, let it in (sudo ufw allow {port}/tcp), with "
        f"listen: [/ip4/0.0.0.0/tcp/{port}] in the peer file, so that the port stays the same"
    )
    return ReachabilityCheck("firewalled", text, fix, "fail" if must else "warn")


def _named(found: Sequence[DialOutcome]) -> str:
    return ", ".join(each.address for each in found)


def _dial_results(found: Sequence[DialOutcome]) -> str:
    """Return each address with the outcome of its dial."""
    return ", ".join(f"{each.address}: {_in_words(each)}" for each in found)


def _in_words(met: DialOutcome) -> str:
    if met.outcome == "other_peer":
        return f"another peer answers, {met.detail}"
    words = {"refused": "nothing listens", "silent": "no answer", "not_libp2p": "something else listens"}
    return words.get(met.outcome, met.detail)


def _announce(addresses: Sequence[str]) -> str:
    return f"announce: [{', '.join(addresses)}] in the peer file"


_FIX_PORT = "listen: [/ip4/0.0.0.0/tcp/31331] in the peer file (TCP is what can be tried)"


def line_of(
    finding: ReachabilityCheck, observed: str, dialled: Sequence[DialOutcome], helper: str
) -> CheckResult:
    data = {
        "verdict": finding.verdict,
        "observed": observed,
        "helper": helper,
        "dialled": [
            {"address": each.address, "outcome": each.outcome, "detail": each.detail, "seconds": each.seconds}
            for each in dialled
        ],
    }
    return CheckResult("reachability", finding.level, finding.text, finding.fix, data)
