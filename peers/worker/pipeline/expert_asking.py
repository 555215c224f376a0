"""What a stage without experts of its own does with its layers' tokens: sends them to peers that have these
experts, and hands what comes back to the microbatch that waits. Carries out what `ExpertCalls` decides.

Computing is `MicrobatchWork`'s, in the compute thread; everything here runs on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from peers.network.neighbourhood import Neighbourhood
from peers.runtime.timer import Timer
from peers.telemetry import events as noted
from peers.worker.pipeline.microbatch_compute import Answer, Calls, EncodedCall, Trouble
from protocols.messages.table import AskExperts, ExpertsDecline, ExpertsSay
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.inference.machine import ASKED_AT_ONCE
from swarmnet.model.activation_codec import HiddenError
from swarmnet.model.experts.routed_trunk import ExpertCall
from swarmnet.pipeline import expert_calls
from swarmnet.pipeline.expert_calls import CallEvent, CallId, ExpertCalls
from swarmnet.run.manifest import Manifest

Resume = Callable[[Mapping[int, Answer | None]], None]
"""Takes what came, by group."""


class Layers(Protocol):
    """Whose layers' experts are others'."""

    missing: frozenset[int]
    """Groups of which nobody is there."""


class Encoder(Protocol):
    """What a call is made by, in the compute thread and here."""

    @property
    def complaints(self) -> deque[tuple[int, int, Trouble]]: ...

    def encoded_call(self, key: MicrobatchId, call: ExpertCall, exact: bool) -> bytes:
        """Raises HiddenError."""


@dataclass(slots=True)
class _Waiting:
    """A microbatch, at one layer."""

    calls: dict[int, EncodedCall]
    """By group."""
    resume: Resume
    answers: dict[int, Answer | None] = field(default_factory=dict)


class ExpertAsking:
    """Of one peer, for its microbatches or for its visitors: these two are let in apart where experts are."""

    def __init__(
        self, manifest: Manifest, stage: int, trunk: Layers, work: Encoder,
        neighbourhood: Neighbourhood, chance: Random, note: noted.Note,
    ) -> None:  # fmt: skip
        self.manifest, self.stages = manifest, manifest.expert_stages(stage)
        self.trunk, self.work, self.neighbourhood, self.note = trunk, work, neighbourhood, note
        self.is_sibling = neighbourhood.transport.is_near
        longest = manifest.call_bytes(manifest.call_rows, backward=True)
        self.machine = ExpertCalls(len(self.stages), chance, self._holders, self.is_sibling, longest)
        self.clock = neighbourhood.clock
        self._waiting: dict[tuple[MicrobatchId, int, bool], _Waiting] = {}
        self._came: dict[CallId, Answer] = {}
        self._timer = Timer(partial(self._feed, expert_calls.Look()), self.clock)
        self.look()

    def close(self) -> None:
        self._timer.close()

    def look(self) -> tuple[int, ...]:
        """See which groups have nobody; the stages of those."""
        missing = self.machine.missing()
        self.trunk.missing = missing
        return tuple(self.stages[group] for group in sorted(missing))

    def holders(self) -> list[int]:
        """How many peers each group has."""
        return [len(self._holders(group)) for group in range(len(self.stages))]

    @property
    def has_somebody(self) -> bool:
        """Whether any expert is there."""
        return len(self.trunk.missing) < len(self.stages)

    def guess(self) -> frozenset[int]:
        """Groups of which a sibling will probably be asked."""
        return frozenset(
            group for group in range(len(self.stages)) if any(map(self.is_sibling, self._holders(group)))
        )

    def ask(self, key: MicrobatchId, calls: Calls, resume: Resume) -> None:
        """`resume` is called once each of them is answered, or given up."""
        first = calls.calls[0].call
        backward = first.gradient is not None
        by_group = {one.call.group: one for one in calls.calls}
        self._waiting[key, first.layer, backward] = _Waiting(by_group, resume)
        for group in by_group:
            self._feed(expert_calls.Wanted(CallId(key, first.layer, group, backward)))

    def drop(self, key: MicrobatchId) -> None:
        """Nobody wants it any more."""
        self.machine.drop(key)
        for waiting in [waiting for waiting in self._waiting if waiting[0] == key]:
            del self._waiting[waiting]

    def message(self, peer: PeerId, message: ExpertsSay | ExpertsDecline, body: bytes) -> None:
        known = self.neighbourhood.membership.peers.get(peer)
        if known is None or known.stage not in self.stages:
            self.neighbourhood.refused(peer, "wrong_stage", "an answer of experts that it does not hold")
            return
        key, group = MicrobatchId(PeerId(message.origin), message.counter), known.stage - self.stages[0]
        call = CallId(key, message.layer, group, message.backward)
        if isinstance(message, ExpertsDecline):
            self._feed(expert_calls.DeclineArrived(peer, call, message.attempt, message.code))
            return
        if self.machine.expects(peer, call, message.attempt):
            asked = self._call(call)
            exact, rows = self._exact(asked, peer), sum(asked.call.counts)
            by = message.round == asked.round if asked.round != -1 else message.round is not None
            if not by or len(body) != self.manifest.said_bytes(rows, message.backward, exact):
                reason = f"experts say {len(body)} bytes, by round {message.round}"
                self.neighbourhood.refused(peer, "malformed", reason)
                self._feed(expert_calls.DeclineArrived(peer, call, message.attempt, "malformed"))
                return
            self._came[call] = Answer(peer, body, exact, message.round)
        self._feed(expert_calls.SaidArrived(peer, call, message.attempt))
        self._came.clear()

    def told(self, peer: PeerId, slots: int, service_seconds: float, waiting: int) -> bool:
        """A CREDIT. False: it is of a peer that holds no experts."""
        known = self.neighbourhood.membership.peers.get(peer)
        if known is None or known.stage not in self.stages:
            return False
        router = self.machine.routers[known.stage - self.stages[0]]
        router.told(peer, slots, service_seconds, waiting)
        self._feed(expert_calls.Look())
        return True

    def lost(self, peer: PeerId) -> None:
        self.look()
        self._feed(expert_calls.HolderLost(peer))

    def complained(self) -> None:
        """What peers said that is no good, since the last time."""
        complaints = self.work.complaints
        while complaints:
            layer, group, trouble = complaints.popleft()
            assert trouble.peer is not None, "it said something"
            self.neighbourhood.refused(trouble.peer, trouble.code, f"layer {layer}: {trouble.reason}")
            now, router = self.clock.time(), self.machine.routers[group]
            if trouble.out_of_line:
                router.shun(trouble.peer, now)
                self.neighbourhood.part_from(trouble.peer, "out_of_line", trouble.reason)
            else:
                router.failed(trouble.peer, now)

    def _holders(self, group: int) -> list[PeerId]:
        return self.neighbourhood.membership.live(self.stages[group])

    def _call(self, call: CallId) -> EncodedCall:
        return self._waiting[call.key, call.layer, call.backward].calls[call.group]

    def _feed(self, event: CallEvent) -> None:
        """Give the machine an event and do what it says."""
        events: list[CallEvent] = [event]
        ready: list[tuple[CallId, Answer | None]] = []
        while events:
            for effect in self.machine.handle(events.pop(), self.clock.time()):
                call = effect.call
                match effect:
                    case expert_calls.SendCall():
                        if not self._send(effect):  # No link, or too much waits on it.
                            busy = expert_calls.DeclineArrived(effect.peer, call, effect.attempt, "busy")
                            events.append(busy)
                    case expert_calls.TakeAnswer():
                        ready.append((call, self._came[call]))
                    case expert_calls.GiveUp():
                        ready.append((call, None))
        self._timer.arm(self.machine.next_deadline())
        for call, answer in ready:
            self._answered(call, answer)

    def _answered(self, call: CallId, answer: Answer | None) -> None:
        place = call.key, call.layer, call.backward
        waiting = self._waiting.get(place)
        if waiting is None:
            return
        waiting.answers[call.group] = answer
        if answer is None:
            stage = self.stages[call.group]
            self.note(noted.GaveUpExperts(stage=stage, layer=call.layer, backward=call.backward))
        if len(waiting.answers) == len(waiting.calls):
            del self._waiting[place]
            waiting.resume(waiting.answers)

    def _send(self, send: expert_calls.SendCall) -> bool:
        call, encoded = send.call, self._call(send.call)
        exact = self._exact(encoded, send.peer)
        if exact != encoded.exact:
            try:
                encoded.body = self.work.encoded_call(call.key, encoded.call, exact)
            except HiddenError:
                return False
            encoded.exact = exact
        if encoded.round is not None:  # It takes as many as of a visitor, and tells of no more.
            self.machine.routers[call.group].told(send.peer, ASKED_AT_ONCE, 0.0, 0)
        ask = AskExperts(
            *call.key, send.attempt, call.layer, call.backward, send.deadline_seconds, encoded.call.counts,
            encoded.round,
        )  # fmt: skip
        return self.neighbourhood.post(send.peer, "data", ask, encoded.body)

    def _exact(self, encoded: EncodedCall, peer: PeerId) -> bool:
        return encoded.round is not None or self.is_sibling(peer)
