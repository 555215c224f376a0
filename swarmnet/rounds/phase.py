"""Summarizes the state of a group's rounds in one word, for displays and metrics."""

from __future__ import annotations

from typing import Literal

from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.machine import GroupRounds

Phase = Literal["catching_up", "gathering", "contributing", "waiting", "settling"]


def phase_of(rounds: GroupRounds) -> Phase:
    """Return the phase of the oldest round that is not applied here. Rounds overlap: while that round waits
    for contributions, the next one accumulates gradients.

    - "catching_up": The group has settled the round, but it is not applied here.
    - "contributing": This peer's own contribution is being computed.
    - "waiting": Contributions of other peers are missing.
    - "settling": The round accumulates gradients, and it cannot close before older rounds settle.
    - "gathering": The round accumulates gradients."""
    oldest = rounds.applied + 1
    if not rounds.in_step:
        return "catching_up"
    if oldest in rounds.pending:
        return "contributing"
    if oldest < rounds.current:
        return "waiting"
    return "settling" if rounds.current > rounds.settled + kept_rounds(rounds.rules) else "gathering"
