"""Decide which peers are admitted, by the bans and invites in the owner's newest order and the manifest.

An invite is a token by which the run's owner admits one peer; the owner can revoke it by an order. A
convicted peer is one of which a signed message proves a false result."""

from __future__ import annotations

from collections.abc import Callable, Container

from peers.config.errors import UserError
from peers.network.orders.order_book import OrderBook
from protocols.dht.swarm_time import MAX_OFFSET_SECONDS
from protocols.errors import WireError
from protocols.messages.table import Message, OrderUpdate
from protocols.signed.invites import Invite, open_invite
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import MAX_PEERS
from swarmnet.run.owner_orders import Ban

INVITE_GRACE_SECONDS = MAX_OFFSET_SECONDS
"""Seconds by which an invite's expiry is extended. The swarm's time comes from other peers and may be ahead
of this machine's clock by that much. Thus no invite ends before this clock says so."""
LIAR = "invalid_reduction"
"""Refusal code of a peer that was convicted of a false result or contribution."""
REMEMBERED_INVITES = MAX_PEERS
"""Maximum number of remembered invites: one per known peer."""


class Gatekeeper:
    """The `Admission` of a run whose owner gives orders."""

    def __init__(self, book: OrderBook, invite: bytes, now: Callable[[], float]) -> None:
        """Create the gatekeeper. `invite` is this peer's own as shown to others (`prove_invite`), or empty;
        `now` returns the swarm's time in seconds."""
        self.book = book
        self.invite = invite
        self.now = now
        self._admitted_invites: dict[PeerId, tuple[bytes, Invite]] = {}
        """The verified invites that admitted peers have shown in `Hello` or in records."""
        self.convicted: Container[PeerId] = frozenset()
        """Peers convicted with proof (swarmnet/rounds/audits.py)."""

    def refusal(self, peer: PeerId, invite: bytes) -> tuple[str, str] | None:
        """Return code and reason why a peer is refused; None if it is admitted.

        A peer is refused if the owner has banned it or if it was convicted with proof. In a run with `access:
        invite`, a peer other than the owner also needs a valid invite that is not revoked. The invite of an
        admitted peer is remembered."""
        ban = self.book.order.banned(peer)
        if ban is not None:
            return "banned", _describe_ban(ban)
        if peer in self.convicted:
            return LIAR, "it has published a result that is not the sum of its slices, and there is proof"
        manifest = self.book.signed.manifest
        if manifest.access == "open" or peer == manifest.owner:
            return None
        try:
            verified = self._open(peer, invite)
        except WireError as error:
            return "not_invited", str(error)
        defect = verified.refusal(peer, self.now() - INVITE_GRACE_SECONDS)
        if defect is None and verified.id in self.book.order.revoked:
            defect = "the run's owner has revoked the invite"
        if defect is not None:
            return "not_invited", defect
        if peer not in self._admitted_invites and len(self._admitted_invites) >= REMEMBERED_INVITES:
            oldest = next(iter(self._admitted_invites))
            self._admitted_invites.pop(oldest)
        self._admitted_invites[peer] = (invite, verified)
        return None

    def invited(self, peer: PeerId, invite: bytes) -> bool:
        """Return True if a peer is admitted by the `invite` in its record, or by an earlier one if that is
        empty. In a run that is open to all, a peer is admitted unless it is banned or convicted."""
        earlier_data, earlier = self._admitted_invites.get(peer, (b"", None))
        if earlier is None or invite not in (b"", earlier_data):
            return self.refusal(peer, invite) is None
        # An admitted peer stays admitted when its invite expires.
        return earlier.id not in self.book.order.revoked and not self.shuns(peer)

    @property
    def record_invite(self) -> bytes:
        """This peer's own invite for its record; empty if the run is open to all."""
        return self.invite if self.by_invite else b""

    def shuns(self, peer: PeerId) -> bool:
        """Return whether the peer must not be dialled either: it is banned or convicted."""
        return peer in self.convicted or self.book.order.banned(peer) is not None

    def evidence(self) -> list[Message]:
        return [OrderUpdate(document) for document in self.book.documents]

    @property
    def by_invite(self) -> bool:
        """Whether the run admits only invited peers. Nothing is then sent to a peer that has not shown an
        invite."""
        return self.book.signed.manifest.access == "invite"

    def parted(self) -> dict[PeerId, tuple[str, str]]:
        """Return the peers that the newest order excludes, mapped to code and reason: all banned ones, and
        those whose invite it revokes."""
        order = self.book.order
        banned = {ban.peer: ("banned", _describe_ban(ban)) for ban in order.bans}
        revoked = {
            peer: ("not_invited", "the run's owner has revoked the invite")
            for peer, (_, invite) in self._admitted_invites.items()
            if invite.id in order.revoked
        }
        return {**revoked, **banned}

    def check_self(self, me: PeerId) -> None:
        """Raise UserError if this peer (`me`) cannot take part. It says why and how to reach the owner."""
        refused = self.refusal(me, self.invite)
        if refused is None:
            return
        code, reason = refused
        if code == "banned":
            raise UserError(f"{reason}. Ask the owner: {self._contact()}")
        problem = f"the key `invite`: {reason}" if self.invite else "this peer has none (key `invite`)"
        advice = f"Ask the owner for one for this peer, {me}: {self._contact()}"
        raise UserError(f"the run takes peers by invite only; {problem}. {advice}")

    def _contact(self) -> str:
        manifest = self.book.signed.manifest
        return manifest.contact or manifest.owner

    def _open(self, peer: PeerId, invite: bytes) -> Invite:
        """Verify and return an invite; one that this peer has shown before is not verified again. Raises
        NoInvite if it is empty, and WireError if it is not valid for this peer and run."""
        if not invite:
            raise NoInvite("the run takes peers by invite only, and none was shown")
        earlier_data, earlier = self._admitted_invites.get(peer, (b"", None))
        if earlier is not None and invite == earlier_data:
            return earlier
        return open_invite(invite, self.book.signed.run_id, self.book.signed.manifest.owner, peer)


def _describe_ban(ban: Ban) -> str:
    """Return who has banned a peer, and why."""
    who = "owner has" if ban.by == "owner" else "moderators have"
    return f"the run's {who} banned this peer: {ban.reason or 'no reason given'}"


class NoInvite(WireError):
    """No invite was shown where one is required."""

    code = "not_invited"
