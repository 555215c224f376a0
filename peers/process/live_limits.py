"""The limits of a running peer, which its user may change: `swarmnet limit` and the page of this computer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peers.config.atomic_files import is_file
from peers.config.errors import UserError
from peers.config.limits import LimitsFile
from peers.config.peer_file import PeerFile
from peers.config.rewriting import set_key
from peers.config.yaml_lines import read
from peers.runtime.control_server import Request
from peers.runtime.find_running import PEER_FILE

LIMITS = (
    "upload",
    "traffic_per_month",
    "hours",
    "only_when_idle",
    "share_when_busy",
    "only_when_plugged_in",
)
"""Keys of `limits` that a running peer follows at once. `memory` decides which stage fits, at the start."""
DUTY_CYCLE = "compute_duty_cycle"
FOR_EVERY_ROLE = ("upload",)


class LiveLimits:
    """The peer file with the limits that hold now."""

    def __init__(self, config: PeerFile) -> None:
        self.config = config
        self.listeners: list[Callable[[], None]] = []
        """Called after each change, on the event loop."""

    async def answer(self, request: Request) -> dict[str, Any]:
        """Answer the control request `limit`: apply and save the limits in `set`, if any, and return all of
        them. Raises UserError for an unknown or invalid one; nothing is changed then."""
        wishes = request.get("set", {})
        if not isinstance(wishes, Mapping) or not all(isinstance(key, str) for key in wishes):
            raise UserError('expected {"do": "limit", "set": {LIMIT: VALUE}}')
        saved = True
        if wishes:
            changed = self._changed(wishes)
            saved = await asyncio.to_thread(self._save, dict(wishes))
            self.config = changed
            for listener in self.listeners:
                listener()
        return {"limits": self.values(), "saved": saved}

    def values(self) -> dict[str, Any]:
        """Return the limits as plain data: rates in bytes per second, and None for no limit."""
        limits = self.config.limits
        return {**{key: getattr(limits, key) for key in LIMITS}, DUTY_CYCLE: self.config.compute_duty_cycle}

    def _changed(self, wishes: Mapping[str, Any]) -> PeerFile:
        """Return the peer file with these limits. Raises UserError."""
        role = self.config.role
        for key in wishes:
            if key not in (*LIMITS, DUTY_CYCLE):
                raise UserError(f"{key[:40]!r} is no limit; there are: {', '.join((*LIMITS, DUTY_CYCLE))}")
            if role != "worker" and key not in FOR_EVERY_ROLE:
                raise UserError(f"{key} is for workers; this peer ({role}) has only the limit upload")
        share = wishes.get(DUTY_CYCLE, self.config.compute_duty_cycle)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.01 <= share <= 1:
            raise UserError(f"{DUTY_CYCLE} is {str(share)[:40]!r}; expected a share from 0.01 to 1")
        merged = self.config.limits.model_dump() | {key: wishes[key] for key in LIMITS if key in wishes}
        try:
            limits = LimitsFile.model_validate(merged)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            message = str(detail["msg"]).removeprefix("Value error, ")
            raise UserError(f"{'.'.join(map(str, detail['loc']))} {message}") from None
        return self.config.model_copy(update={"limits": limits, DUTY_CYCLE: float(share)})

    def _save(self, wishes: dict[str, Any]) -> bool:
        """Write the limits into the peer file that `swarmnet join` made. Returns False if there is none: they
        then hold until this peer stops. Raises UserError if the file cannot be edited."""
        file: Path = self.config.state / PEER_FILE
        if not is_file(file):
            return False
        if DUTY_CYCLE in wishes:
            set_key(file, DUTY_CYCLE, wishes.pop(DUTY_CYCLE), "share of the time to compute, 0.01 to 1")
        before = read(file).data.get("limits")
        kept = {**(before if isinstance(before, Mapping) else {}), **wishes}
        if wishes:
            limits = {key: value for key, value in kept.items() if value not in (None, False, 0)}
            set_key(file, "limits", limits, "what the swarm may use of this computer")
        return True
