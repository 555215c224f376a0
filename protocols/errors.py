"""The exception tree of the wire protocol. A peer that causes a WireError is refused and counted."""

from __future__ import annotations


class WireError(Exception):
    """Base class of errors that come from network input or from a failed connection. `code` is the value that
    metrics and `Refuse` messages carry."""

    code = "wire"


class Malformed(WireError):
    """Bytes that no honest peer sends: wrong length, hash, type, depth or order."""

    code = "malformed"


class TooLarge(Malformed):
    """A length exceeds what the message or the run allows. It is refused before anything is allocated."""

    code = "too_large"


class BadSignature(WireError):
    """The signature does not match the peer id, the run or the bytes."""

    code = "bad_signature"


class WrongRun(WireError):
    """The data may be honest, but it was made for another run."""

    code = "wrong_run"


class PeerGone(WireError):
    """The other side closed the link, was lost, or did not answer within the deadline."""

    code = "gone"


class Backlog(WireError):
    """The send queue for this peer is full. The caller must wait or choose another peer."""

    code = "backlog"


class NoPlace(WireError):
    """The peer wants a link and gets none in return, because others have all places."""

    code = "no_place"


class Unreachable(WireError):
    """No address of the peer, or of any bootstrap, answered."""

    code = "unreachable"


class CannotStart(Exception):
    """p2pd cannot run as configured. The message says why and what to do."""
