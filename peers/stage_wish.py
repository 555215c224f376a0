"""Whether a run has the stages that a person asks for."""

from __future__ import annotations

from peers.errors import UserError
from swarmnet.manifest import Manifest


def check_wish(wish: int | str, stages: int, manifest: Manifest) -> None:
    """UserError if the run has not so many stages from the wished one on; `wish` may be auto."""
    there = len(manifest.stages)
    if stages > there:
        raise UserError(f"stages: {stages}, but the run has {there}; set stages to {there} or less")
    if isinstance(wish, int) and wish + stages > there:
        several = f" with stages: {stages} would be stages {wish} to {wish + stages - 1}"
        raise UserError(
            f"stage: {wish}{several if stages > 1 else ''}, but the run has 0 to {there - 1}; "
            f"set stage to {there - stages} or less, or to auto"
        )
