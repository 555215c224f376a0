"""The contributors of a run on the observer's disk, so that the leaderboard outlives a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec

from peers.config.atomic_files import write_atomically
from peers.network.discovery.claimed_tokens import Contributions, ContributorTotal
from swarmnet.identifiers import RunId

FILE_NAME = "people.json"
"""File in the observer's state folder."""
KEEP_SECONDS = 60.0
"""Time between two writes. A crash forgets no tokens, because records claim them again; it forgets hours."""


class _KeptPeople(msgspec.Struct, frozen=True):
    run: str
    people: list[ContributorTotal]


def restore_people(folder: Path, run: RunId, contributions: Contributions) -> str | None:
    """Restore the contributors of `run` that an earlier observer kept in the state `folder`. Returns why the
    file cannot be used, or None. A missing file, or one of another run, restores nothing."""
    try:
        kept = msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=_KeptPeople)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    if kept.run == run:
        contributions.restore(kept.people)
    return None


def keep_people(folder: Path, run: RunId, people: list[ContributorTotal]) -> None:
    """Write the contributors to the state `folder`. Raises UserError."""
    write_atomically(folder / FILE_NAME, msgspec.json.encode(_KeptPeople(run, people)))
