"""Pass each message to the methods that handle its kind.

A service marks such a method with `@handles(Kind)`. Which messages a role handles, and the largest bodies
that it accepts, follow from these marks and from what each message class declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from protocols.fields import Message, RunSizes
from protocols.messages.terms import Bodies
from swarmnet.identifiers import PeerId

Service = TypeVar("Service")
Kind = TypeVar("Kind", bound=Message)
Method = Callable[[Service, PeerId, Kind, bytes], None]
Handler = Callable[[PeerId, Any, bytes], None]
"""Handles a message and its body from a peer."""


def handles(kind: type[Kind]) -> Callable[[Method[Service, Kind]], Method[Service, Kind]]:
    """Mark a method as a handler of messages of this kind. Its arguments are peer, message and body."""

    def mark(method: Method[Service, Kind]) -> Method[Service, Kind]:
        marked: Any = method
        marked.handled_kind = kind
        return method

    return mark


def handled(service: type) -> Iterator[tuple[type[Message], str]]:
    """Yield the kinds of messages that a class of services handles, with the names of its methods."""
    for name in dir(service):
        kind = getattr(getattr(service, name), "handled_kind", None)
        if kind is not None:
            yield kind, name


class MessageRouter:
    """The handlers of all messages that one `Receiver` or role expects."""

    def __init__(self, *services: type) -> None:
        """Expect the messages that `services` handle. They are dropped until an instance is added."""
        self._handlers: dict[type[Message], dict[type, Handler]] = {
            kind: {} for service in services for kind, _ in handled(service)
        }

    def add(
        self,
        service: object,
        accepts: Callable[[PeerId], bool] = lambda peer: True,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Pass messages to a service from now on, instead of an earlier one of its class. If several services
        handle a kind, all of them get it, in the order in which they were added. Messages of peers that
        `accepts` rejects are dropped; `after()` is called after each of the others."""

        def guarded(handler: Handler, peer: PeerId, message: Message, body: bytes) -> None:
            if accepts(peer):
                handler(peer, message, body)
                after()

        for kind, name in handled(type(service)):
            handler = partial(guarded, getattr(service, name))
            self._handlers.setdefault(kind, {})[type(service)] = handler

    def refuse(self, service: type, refuse: Callable[[PeerId], None]) -> None:
        """Call `refuse` with the sender of each message of a service that this run does without."""
        for kind, _ in handled(service):
            self._handlers.setdefault(kind, {})[service] = lambda peer, _message, _body: refuse(peer)

    def dispatch(self, peer: PeerId, message: Message, body: bytes) -> bool:
        """Pass a message to its handlers. Returns False if messages of its kind are not expected."""
        found = self._handlers.get(type(message))
        for handler in tuple((found or {}).values()):
            handler(peer, message, body)
        return found is not None

    def bodies(self, run: RunSizes) -> Bodies:
        """Return the largest accepted body in bytes of each expected kind of message."""
        return {kind: kind.body(run) for kind in self._handlers if kind.body is not None}
