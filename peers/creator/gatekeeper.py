"""Who is let in: bans and invites, as the owner's newest order and the manifest say."""

from __future__ import annotations

from collections.abc import Callable

from peers.creator.order_book import OrderBook
from peers.errors import UserError
from protocols.errors import WireError
from protocols.invites import Invite, open_invite
from protocols.messages import Message, OrderIs
from protocols.swarm_time import MOST_OFFSET_SECONDS
from swarmnet.identifiers import PeerId

REMEMBERED_INVITES = 1024
INVITE_GRACE_SECONDS = MOST_OFFSET_SECONDS
"""So much later an invite ends: the swarm's time is what others say, and may be ahead of this machine's clock
by as much. None ends before that clock says so."""


class Gatekeeper:
    """`Admission` of a run with an owner who orders."""

    def __init__(self, book: OrderBook, invite: bytes, now: Callable[[], float]) -> None:
        """`invite`: the own one, or empty; `now`: the swarm's time in seconds."""
        self.book = book
        self.invite = invite
        self.now = now
        self._shown: dict[PeerId, str] = {}
        """Ids of the invites with which peers came in."""

    def refusal(self, peer: PeerId, invite: bytes) -> tuple[str, str] | None:
        """See `Admission.refusal`."""
        why = self.book.order.banned(peer)
        if why is not None:
            return "banned", f"the run's owner has banned this peer: {why}"
        manifest = self.book.signed.manifest
        if manifest.access == "open" or peer == manifest.owner:
            return None
        try:
            found = self._open(invite)
        except WireError as error:
            return "not_invited", str(error)
        unfit = found.refusal(peer, self.now() - INVITE_GRACE_SECONDS)
        if unfit is None and found.id in self.book.order.revoked:
            unfit = "the run's owner has revoked the invite"
        if unfit is not None:
            return "not_invited", unfit
        if len(self._shown) >= REMEMBERED_INVITES:
            self._shown.pop(next(iter(self._shown)))
        self._shown[peer] = found.id
        return None

    def shuns(self, peer: PeerId) -> bool:
        """See `Admission.shuns`."""
        return self.book.order.banned(peer) is not None

    def evidence(self) -> list[Message]:
        """See `Admission.evidence`: the owner's order, if there is one."""
        return [OrderIs(self.book.held.data)] if self.book.held is not None else []

    @property
    def by_invite(self) -> bool:
        """See `Admission.by_invite`."""
        return self.book.signed.manifest.access == "invite"

    def parted(self) -> dict[PeerId, tuple[str, str]]:
        """Who is to go by the newest order: code and reason by peer."""
        order = self.book.order
        banned = {
            ban.peer: ("banned", f"the run's owner has banned this peer: {ban.reason}") for ban in order.bans
        }
        revoked = {
            peer: ("not_invited", "the run's owner has revoked the invite")
            for peer, invite in self._shown.items()
            if invite in order.revoked
        }
        return {**revoked, **banned}

    def check_self(self, me: PeerId) -> None:
        """Raise UserError if this peer cannot take part, whatever others would say of it."""
        refused = self.refusal(me, self.invite)
        if refused is None:
            return
        code, reason = refused
        if code == "banned":
            raise UserError(f"{reason}. Ask the owner: {self._contact()}")
        have = f"the key `invite`: {reason}" if self.invite else "this peer has none (key `invite`)"
        ask = f"Ask the owner for one for this peer, {me}: {self._contact()}"
        raise UserError(f"the run takes peers by invite only; {have}. {ask}")

    def _contact(self) -> str:
        manifest = self.book.signed.manifest
        return manifest.contact or manifest.owner

    def _open(self, invite: bytes) -> Invite:
        if not invite:
            raise NoInvite("the run takes peers by invite only, and none was shown")
        return open_invite(invite, self.book.signed.run_id, self.book.signed.manifest.owner)


class NoInvite(WireError):
    """Nothing was shown where an invite is needed."""

    code = "not_invited"
