"""Orders of a run's owner: one complete document per run, of which the newest is valid.

All orders but one leave what a group has settled, so the time of arrival does not matter. Most orders stop
new microbatches, links or documents. A roll-back takes contributions out of rounds that have not settled. A
return gives up what was settled after given snapshots (swarmnet/lineage.py). A
learning rate is part of the sets that a group settles afterwards (`rates.py`). An end is a round after which
the group makes no contributions.

`pause`, `resume`, `checkpoint`, `ban`, `roll_back`, `withdraw`, `revoke`, `rate` and others return
the next document: the orders in force (`held`) with one change. They raise OrderError if nothing would
change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from swarmnet.identifiers import PeerId
from swarmnet.lineage import NO_RETURN, Lineage, Return
from swarmnet.run.mixtures import LARGEST_WEIGHT, MAX_MIXTURES, MAX_SOURCES, MixtureChange, Mixtures
from swarmnet.run.rates import LARGEST_FACTOR, MAX_RATES, RateChange, Rates, in_words

ORDER_LIMIT = 16 * 1024
"""Maximum bytes of an order with its envelope, as for a manifest."""
REASON_LIMIT = 200
"""Maximum number of characters of a reason."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INVITE = re.compile(r"[0-9a-f]{32}")
Item = TypeVar("Item")


class OrderError(ValueError):
    """An order that makes no sense; the message says what would."""


@dataclass(frozen=True, slots=True)
class Ban:
    """A peer that no peer may link to."""

    peer: PeerId
    reason: str
    by: Literal["owner", "moderators"] = "owner"
    rolls_back: bool = False
    """Whether its contributions are also taken out of the rounds that are still open."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A document that no peer may read."""

    document: str
    """SHA-256 of its bytes, 64 hexadecimal digits."""
    reason: str


@dataclass(frozen=True, slots=True)
class OwnerOrders:
    """All orders in force. The default holds before any order."""

    sequence: int = 0
    """Time of signing in microseconds since 1970, but larger than any before; 0: no order yet."""
    reason: str = ""
    """Reason of the newest change."""
    paused: bool = False
    checkpoint: int = 0
    """Number of requests to write a checkpoint."""
    bans: tuple[Ban, ...] = ()
    withdrawn: tuple[Withdrawal, ...] = ()
    revoked: tuple[str, ...] = ()
    """Ids of revoked invites, 32 hexadecimal digits each."""
    rates: Rates = ()
    """Changes of the learning rate; at most MAX_RATES."""
    ends: int | None = None
    """The run's last round; None if it does not end."""
    mixtures: Mixtures = ()
    """Changes of the sources' shares; at most MAX_MIXTURES."""
    dismissed: bool = False
    """Whether bans by moderators do not count."""
    returned: Return | None = None
    """The newest return to snapshots; None if there is none."""

    def banned(self, peer: PeerId) -> Ban | None:
        """Return the ban of a peer; None if it is not banned."""
        return next((ban for ban in self.bans if ban.peer == peer), None)

    def lineage(self, stage: int) -> Lineage:
        """Return which weights of a stage belong to the run's present history."""
        return self.returned.lineage(stage) if self.returned is not None else NO_RETURN

    def rolled_back(self) -> frozenset[PeerId]:
        """Return the peers whose contributions leave the open rounds."""
        return frozenset(ban.peer for ban in self.bans if ban.rolls_back)

    def with_bans_of(self, moderators: OwnerOrders | None, owner: PeerId) -> OwnerOrders:
        """Return the owner's orders with the bans by moderators. They cannot ban the owner, and their bans do
        not count while the owner has dismissed them. Sequence and reason are those of the newer one."""
        if moderators is None or self.dismissed:
            return self
        bans = [ban for ban in moderators.bans if ban.peer != owner and self.banned(ban.peer) is None]
        newest = max(self, moderators, key=lambda order: order.sequence)
        return replace(self, sequence=newest.sequence, reason=newest.reason, bans=(*self.bans, *bans))

    def documents(self) -> frozenset[bytes]:
        """Return the SHA-256 of the withdrawn documents."""
        return frozenset(bytes.fromhex(withdrawal.document) for withdrawal in self.withdrawn)


NO_ORDER = OwnerOrders()


def next_sequence(held: OwnerOrders, now_seconds: float) -> int:
    """Return the sequence of the order after `held`. Its time also exceeds orders that the owner lost."""
    return max(held.sequence + 1, int(now_seconds * 1e6))


def pause(held: OwnerOrders, reason: str) -> OwnerOrders:
    _check_change(reason, held.paused, "the run is paused already")
    return replace(held, reason=reason, paused=True)


def resume(held: OwnerOrders, reason: str) -> OwnerOrders:
    _check_change(reason, not held.paused, "the run is not paused")
    return replace(held, reason=reason, paused=False)


def checkpoint(held: OwnerOrders, reason: str) -> OwnerOrders:
    _check_change(reason)
    return replace(held, reason=reason, checkpoint=held.checkpoint + 1)


def ban(held: OwnerOrders, peer: PeerId, reason: str) -> OwnerOrders:
    _check_change(reason, held.banned(peer) is not None, f"{peer} is banned already")
    return replace(held, reason=reason, bans=(*held.bans, Ban(peer, reason)))


def roll_back(held: OwnerOrders, peer: PeerId, reason: str) -> OwnerOrders:
    """Return the orders that ban a peer and take its contributions out of the open rounds."""
    known = held.banned(peer)
    rolls_back = known is not None and known.rolls_back
    _check_change(reason, rolls_back, f"{peer} is rolled back already")
    bans = _without(held.bans, lambda ban: ban.peer == peer)
    return replace(held, reason=reason, bans=(*bans, Ban(peer, reason, rolls_back=True)))


def unban(held: OwnerOrders, peer: PeerId, reason: str) -> OwnerOrders:
    bans = _without(held.bans, lambda ban: ban.peer == peer)
    _check_change(reason, bans == held.bans, f"{peer} is not banned")
    return replace(held, reason=reason, bans=bans)


def dismiss(held: OwnerOrders, reason: str) -> OwnerOrders:
    """Return the orders under which bans by moderators do not count."""
    _check_change(reason, held.dismissed, "the moderators are dismissed already")
    return replace(held, reason=reason, dismissed=True)


def reinstate(held: OwnerOrders, reason: str) -> OwnerOrders:
    """Return the orders under which bans by moderators count again."""
    _check_change(reason, not held.dismissed, "the moderators are not dismissed")
    return replace(held, reason=reason, dismissed=False)


def withdraw(held: OwnerOrders, document: str, reason: str) -> OwnerOrders:
    if not _DIGEST.fullmatch(document):
        raise OrderError(f"{document!r} is no SHA-256 (64 hexadecimal digits); sha256sum FILE prints it")
    is_withdrawn = any(withdrawal.document == document for withdrawal in held.withdrawn)
    _check_change(reason, is_withdrawn, f"{document} is withdrawn already")
    return replace(held, reason=reason, withdrawn=(*held.withdrawn, Withdrawal(document, reason)))


def revoke(held: OwnerOrders, invite: str, reason: str) -> OwnerOrders:
    if not _INVITE.fullmatch(invite):
        raise OrderError(f"{invite!r} is no id of an invite (32 hexadecimal digits); `invite` printed it")
    _check_change(reason, invite in held.revoked, f"the invite {invite} is revoked already")
    return replace(held, reason=reason, revoked=(*held.revoked, invite))


def rate(held: OwnerOrders, factor: int, from_round: int, reason: str) -> OwnerOrders:
    """Return the orders `held` with one more change of the learning rate. From round `from_round` on it is
    `factor` thousandths of the manifest's. Only the newest `MAX_RATES` changes are kept. Raises
    OrderError."""
    if not 1 <= factor <= LARGEST_FACTOR:
        largest = in_words(LARGEST_FACTOR)
        raise OrderError(f"a factor of {in_words(factor)}; it must lie between 0.001 and {largest}")
    change = RateChange(from_round, factor)
    is_newest = held.rates[-1:] == (change,)
    _check_change(reason, pointless=is_newest, why=f"{_describe_rate(change)} already")
    return replace(held, reason=reason, rates=(*held.rates, change)[-MAX_RATES:])


def mixture(
    held: OwnerOrders, weights: tuple[tuple[str, int], ...], from_round: int, reason: str
) -> OwnerOrders:
    """Return the orders `held` with one more change of the sources' shares: `weights` in thousandths, by
    name, from round `from_round` on. Raises OrderError."""
    if not 0 < len(weights) <= MAX_SOURCES or len(dict(weights)) < len(weights):
        raise OrderError(f"name each source once, at most {MAX_SOURCES}")
    if any(not 0 <= weight <= LARGEST_WEIGHT for _, weight in weights) or not any(w for _, w in weights):
        raise OrderError(f"weights lie between 0 and {in_words(LARGEST_WEIGHT)}, and one is above 0")
    change = MixtureChange(from_round, weights)
    _check_change(reason, held.mixtures[-1:] == (change,), f"{_describe_mixture(change)} already")
    return replace(held, reason=reason, mixtures=(*held.mixtures, change)[-MAX_MIXTURES:])


def return_to(held: OwnerOrders, points: tuple[tuple[int, str], ...], reason: str) -> OwnerOrders:
    """Return the orders by which each stage goes back to a snapshot: `points` has its round and digest."""
    _check_change(reason)
    number = 1 + (held.returned.number if held.returned is not None else 0)
    return replace(held, reason=reason, returned=Return(number, points))


def end(held: OwnerOrders, last_round: int, reason: str) -> OwnerOrders:
    """Return the orders that end the run: no contribution is made for any round after `last_round`."""
    _check_change(reason, held.ends == last_round, f"the run ends at round {last_round} already")
    return replace(held, reason=reason, ends=last_round)


def _describe_rate(rate: RateChange) -> str:
    times = f"{in_words(rate.factor)} times the manifest's"
    return f"the learning rate is {times} from round {rate.from_round} on"


def _describe_mixture(change: MixtureChange) -> str:
    shares = ", ".join(f"{name} {in_words(weight)}" for name, weight in change.weights)
    return f"the sources are mixed {shares} from round {change.from_round} on"


def _without(items: tuple[Item, ...], gone: Callable[[Item], bool]) -> tuple[Item, ...]:
    return tuple(item for item in items if not gone(item))


def _check_change(reason: str, pointless: bool = False, why: str = "") -> None:
    """Raise OrderError with the message `why` if a change has no effect (`pointless`). Raise it also if the
    reason is longer than `REASON_LIMIT` or not one printable line."""
    if pointless:
        raise OrderError(why)
    if len(reason) > REASON_LIMIT or not reason.isprintable():
        raise OrderError(f"a reason is one line of at most {REASON_LIMIT} characters")


def describe_news(old: OwnerOrders, new: OwnerOrders) -> str:
    """Return the differences of the orders `new` from `old` as a line for users. The reason is that of the
    newest order; it is left out if older bans by moderators arrived late."""
    changes = "; ".join(describe_changes(old, new))
    return changes if new.sequence == old.sequence else f"{changes} ({new.reason or 'no reason given'})"


def describe_changes(old: OwnerOrders, new: OwnerOrders) -> list[str]:
    """Return the differences of the orders `new` from `old` as lines for users: one per difference. If there
    is none, one line says this."""
    lines = []
    if new.paused != old.paused:
        lines.append("the run is paused" if new.paused else "the run goes on")
    if new.checkpoint > old.checkpoint:  # The number of requests for a checkpoint has grown.
        lines.append("everybody writes a checkpoint")
    if new.dismissed != old.dismissed:
        lines.append("bans by moderators do not count" if new.dismissed else "bans by moderators count again")
    lines += [
        f"{ban.peer} is banned{' by moderators' * (ban.by == 'moderators')}"
        f"{' and taken out of open rounds' * ban.rolls_back}: {ban.reason}"
        for ban in new.bans
        if ban not in old.bans
    ]
    banned_peers = {ban.peer for ban in new.bans}
    lines += [f"{ban.peer} is no longer banned" for ban in old.bans if ban.peer not in banned_peers]
    newly_withdrawn = len(new.documents() - old.documents())
    if newly_withdrawn:
        lines.append(f"documents withdrawn from the text: {newly_withdrawn}")
    lines += [f"the invite {invite} is revoked" for invite in new.revoked if invite not in old.revoked]
    lines += [_describe_rate(rate) for rate in new.rates if rate not in old.rates]
    lines += [_describe_mixture(change) for change in new.mixtures if change not in old.mixtures]
    if new.returned is not None and new.returned != old.returned:
        lines.append(f"the run returns to snapshots: {new.returned.describe()}")
    if new.ends != old.ends:
        lines.append(f"round {new.ends} is the last one" if new.ends is not None else "the run does not end")
    return lines or ["nothing changes"]
