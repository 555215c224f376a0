"""What a group's rounds are at, as one peer sees them: one word, for whoever watches."""

from __future__ import annotations

from typing import Literal

from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.machine import GroupRounds

Phase = Literal["catching_up", "gathering", "contributing", "waiting", "settling"]


def phase_of(rounds: GroupRounds) -> Phase:
    """Of the oldest round that is not applied here. Rounds overlap: while it waits for contributions, the
    next one gathers gradients.

    catching_up: the group has settled it, it is not applied here. contributing: the own contribution is being
    made. waiting: for those of others. settling: it is the round that takes gradients, and may not end before
    older ones have settled. gathering: it takes gradients."""
    oldest = rounds.applied + 1
    if not rounds.in_step:
        return "catching_up"
    if oldest in rounds.pending:
        return "contributing"
    if oldest < rounds.current:
        return "waiting"
    return "settling" if rounds.current > rounds.settled + kept_rounds(rounds.rules) else "gathering"
