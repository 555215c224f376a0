"""What can go wrong on the wire, one tree. A peer that causes any of these is refused and counted."""

from __future__ import annotations


class WireError(Exception):
    """Anything that came from, or failed on, the network. `code` is what metrics and REFUSE carry."""

    code = "wire"


class Malformed(WireError):
    """Bytes that no honest peer sends: wrong length, hash, type, depth or order."""

    code = "malformed"


class TooLarge(Malformed):
    """A length above what the message or the run allows; refused before anything is allocated."""

    code = "too_large"


class BadSignature(WireError):
    """The signature does not fit the peer id, the run or the bytes."""

    code = "bad_signature"


class WrongRun(WireError):
    """Honest, perhaps, but made for another run."""

    code = "wrong_run"


class PeerGone(WireError):
    """The other side ended, was lost, or did not answer within the deadline."""

    code = "gone"


class Backlog(WireError):
    """More is queued for this peer than it takes; the caller must wait or choose another peer."""

    code = "backlog"


class Unreachable(WireError):
    """No address of the peer, or of any bootstrap, answered."""

    code = "unreachable"


class CannotStart(Exception):
    """p2pd cannot run as configured; the message says why and what to do."""
