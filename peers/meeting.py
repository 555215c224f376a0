"""Whether a peer has met its group, so that it may decide where to start from."""

from __future__ import annotations

from swarmnet.membership import Membership


def met(membership: Membership) -> bool:
    """All neighbours in the group are linked; or somebody who takes part is, and the others did not
    answer: a record outlives its peer by up to two minutes.

    Where nobody takes part the silent are waited for: all may be starting again, and have to agree."""
    group = [
        known
        for peer, known in membership.peers.items()
        if known.stage == membership.stage and (peer in membership.wanted() or not known.present)
    ]
    if not any(known.linked for known in group):
        return False
    if all(known.linked for known in group):
        return True
    tried = all(known.linked or (known.failures > 0 and not known.dialing) for known in group)
    return tried and any(known.linked and known.ready for known in group)
