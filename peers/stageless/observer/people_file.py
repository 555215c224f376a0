"""The contributors of a run on the observer's disk, so that the leaderboard outlives a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.network.discovery.claimed_tokens import Contributions, ContributorTotal
from peers.state.archive import RUN as RUN_FILE
from peers.state.archive import Archive
from peers.state.archive_store import open_store
from swarmnet.identifiers import RunId

FILE_NAME = "people.json"
"""File in the observer's state folder."""
KEEP_SECONDS = 60.0
"""Time between two writes. A crash forgets no tokens, because records claim them again; it forgets hours."""


class _KeptPeople(msgspec.Struct, frozen=True):
    run: str
    people: list[ContributorTotal]
    rounds: int = 0


def restore_people(folder: Path, run: RunId, contributions: Contributions, archive: str = "") -> str | None:
    """Restore the contributors of `run` that an earlier observer kept in the state `folder`. Without such a
    file, or with one of another run, restore those in the run's archive at the place `archive`; empty: none.
    Returns why one of them cannot be used, or None."""
    try:
        kept = msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=_KeptPeople)
    except FileNotFoundError:
        return _restore_archived(archive, run, contributions) if archive else None
    except (OSError, msgspec.DecodeError) as error:
        return f"{folder / FILE_NAME} is not used: {error}"
    if kept.run != run:
        return _restore_archived(archive, run, contributions) if archive else None
    contributions.restore(kept.people)
    contributions.rounds = kept.rounds
    return None


def _restore_archived(place: str, run: RunId, contributions: Contributions) -> str | None:
    """Restore the contributors of an archive. An archivist that has not begun yet has written none."""
    try:
        archive = Archive(open_store(place))
        if archive.store.read(RUN_FILE) is None:
            return None
        if archive.open().run_id != run:
            return f"{archive.store.url} is not used: it is the archive of another run"
    except UserError as error:
        return f"the archive is not used: {error}"
    for entry in archive.contributors():
        contributions.restore_archived(entry)
    contributions.rounds = max((entry.round for entry in archive.entries), default=-1) + 1
    return None


def keep_people(folder: Path, run: RunId, people: list[ContributorTotal], rounds: int) -> None:
    """Write the contributors, and how many rounds the run has, to the state `folder`. Raises UserError."""
    write_atomically(folder / FILE_NAME, msgspec.json.encode(_KeptPeople(run, people, rounds)))
