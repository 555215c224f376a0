"""What a run's owner orders: one complete document per run, of which the newest counts.

No order touches what a group has settled, so it does not matter when it reaches whom: most stop microbatches
from being started, links from being made and documents from being read. A learning rate is part of the sets
that a group settles from then on (rates.py), and an end is a round after which it makes none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from swarmnet.identifiers import PeerId
from swarmnet.run.rates import LARGEST_FACTOR, MOST_RATES, Rate, Rates, in_words

ORDER_LIMIT = 16 * 1024
"""Bytes of the longest order with its envelope, as for a manifest."""
REASON_LIMIT = 200
"""Characters."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INVITE = re.compile(r"[0-9a-f]{32}")
Item = TypeVar("Item")


class OrderError(ValueError):
    """An order that makes no sense; the message says what would."""


@dataclass(frozen=True, slots=True)
class Ban:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawal:
    document: str
    """SHA-256 of its bytes, 64 hexadecimal digits."""
    reason: str


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that holds. The default is what holds where no order was ever given."""

    sequence: int = 0
    """Time of signing in microseconds since 1970, and larger than any before; 0: no order yet."""
    reason: str = ""
    """Of the newest change."""
    paused: bool = False
    checkpoint: int = 0
    """Counts the requests to write a checkpoint."""
    bans: tuple[Ban, ...] = ()
    withdrawn: tuple[Withdrawal, ...] = ()
    revoked: tuple[str, ...] = ()
    """Ids of invites that no longer count, 32 hexadecimal digits each."""
    rates: Rates = ()
    """Of the learning rate; at most MOST_RATES."""
    ends: int | None = None
    """The run's last round."""

    def banned(self, peer: PeerId) -> str | None:
        """Why, or None."""
        return next((ban.reason or "no reason given" for ban in self.bans if ban.peer == peer), None)

    def documents(self) -> frozenset[bytes]:
        """SHA-256 of what is not to be read any more."""
        return frozenset(bytes.fromhex(withdrawal.document) for withdrawal in self.withdrawn)


NO_ORDER = Order()


def next_sequence(held: Order, now_seconds: float) -> int:
    """For the order after `held`. The time orders those of an owner who has lost what was held before."""
    return max(held.sequence + 1, int(now_seconds * 1e6))


def pause(held: Order, reason: str) -> Order:
    _check(reason, held.paused, "the run is paused already")
    return replace(held, reason=reason, paused=True)


def resume(held: Order, reason: str) -> Order:
    _check(reason, not held.paused, "the run is not paused")
    return replace(held, reason=reason, paused=False)


def checkpoint(held: Order, reason: str) -> Order:
    _check(reason)
    return replace(held, reason=reason, checkpoint=held.checkpoint + 1)


def ban(held: Order, peer: PeerId, reason: str) -> Order:
    _check(reason, held.banned(peer) is not None, f"{peer} is banned already")
    return replace(held, reason=reason, bans=(*held.bans, Ban(peer, reason)))


def unban(held: Order, peer: PeerId, reason: str) -> Order:
    bans = _without(held.bans, lambda ban: ban.peer == peer)
    _check(reason, bans == held.bans, f"{peer} is not banned")
    return replace(held, reason=reason, bans=bans)


def withdraw(held: Order, document: str, reason: str) -> Order:
    if not _DIGEST.fullmatch(document):
        raise OrderError(f"{document!r} is no SHA-256 (64 hexadecimal digits); sha256sum FILE prints it")
    there = any(withdrawal.document == document for withdrawal in held.withdrawn)
    _check(reason, there, f"{document} is withdrawn already")
    return replace(held, reason=reason, withdrawn=(*held.withdrawn, Withdrawal(document, reason)))


def revoke(held: Order, invite: str, reason: str) -> Order:
    if not _INVITE.fullmatch(invite):
        raise OrderError(f"{invite!r} is no id of an invite (32 hexadecimal digits); `invite` printed it")
    _check(reason, invite in held.revoked, f"the invite {invite} is revoked already")
    return replace(held, reason=reason, revoked=(*held.revoked, invite))


def rate(held: Order, factor: int, from_round: int, reason: str) -> Order:
    """The learning rate is `factor` thousandths of the manifest's, from a round on."""
    if not 1 <= factor <= LARGEST_FACTOR:
        largest = in_words(LARGEST_FACTOR)
        raise OrderError(f"a factor of {in_words(factor)}; it must lie between 0.001 and {largest}")
    ordered = Rate(from_round, factor)
    _check(reason, held.rates[-1:] == (ordered,), f"{_told_rate(ordered)} already")
    return replace(held, reason=reason, rates=(*held.rates, ordered)[-MOST_RATES:])


def end(held: Order, last_round: int, reason: str) -> Order:
    """Nothing is made for any later round."""
    _check(reason, held.ends == last_round, f"the run ends at round {last_round} already")
    return replace(held, reason=reason, ends=last_round)


def _told_rate(rate: Rate) -> str:
    times = f"{in_words(rate.factor)} times the manifest's"
    return f"the learning rate is {times} from round {rate.from_round} on"


def _without(items: tuple[Item, ...], gone: Callable[[Item], bool]) -> tuple[Item, ...]:
    return tuple(item for item in items if not gone(item))


def _check(reason: str, pointless: bool = False, why: str = "") -> None:
    """Raises OrderError for a change that changes nothing, and for a reason that is none."""
    if pointless:
        raise OrderError(why)
    if len(reason) > REASON_LIMIT or not reason.isprintable():
        raise OrderError(f"a reason is one line of at most {REASON_LIMIT} characters")


def told(old: Order, new: Order) -> list[str]:
    """What an order changes, in lines for people."""
    lines = []
    if new.paused != old.paused:
        lines.append("the run is paused" if new.paused else "the run goes on")
    if new.checkpoint > old.checkpoint:
        lines.append("everybody writes a checkpoint")
    lines += [f"{ban.peer} is banned: {ban.reason}" for ban in new.bans if ban not in old.bans]
    peers = {ban.peer for ban in new.bans}
    lines += [f"{ban.peer} is no longer banned" for ban in old.bans if ban.peer not in peers]
    fresh = len(new.documents() - old.documents())
    if fresh:
        lines.append(f"documents withdrawn from the text: {fresh}")
    lines += [f"the invite {invite} is revoked" for invite in new.revoked if invite not in old.revoked]
    lines += [_told_rate(rate) for rate in new.rates if rate not in old.rates]
    if new.ends != old.ends:
        lines.append(f"round {new.ends} is the last one" if new.ends is not None else "the run does not end")
    return lines or ["nothing changes"]
