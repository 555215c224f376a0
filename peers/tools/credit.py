"""Report what a peer has contributed: the answer to "do my contributions count?"."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.config.errors import UserError, as_user_errors
from peers.config.run_file import load_signed
from peers.runtime.find_running import PEER_FILE
from peers.telemetry.console import counted, printable
from peers.telemetry.reasons import JOIN
from peers.telemetry.snapshot import OwnWork
from peers.worker.rounds.receipt_service import FILE_NAME, own_tokens, read, summary
from peers.worker.watch.totals import PeerTotals

YOUNG_SECONDS = 60.0
"""Seconds of running below which a peer took part in few blocks; a link to a signer takes seconds."""


def from_disk(state: Path) -> dict[str, Any]:
    """Return the credit of a peer that is not running, from its state folder. Receipts are verified."""
    from protocols.signed.identity import IdentityError, load

    run, key = state / "run.json", state / "identity.key"
    if not run.is_file() or not key.is_file():
        raise UserError(
            f"no peer runs with the state folder {state}, and it holds no run.json and identity.key to "
            "count by; start the peer, or name the folder of one"
        )
    signed = load_signed(run)
    start = f"swarmnet join --state {shlex.quote(str(state))}"
    if not (state / PEER_FILE).is_file():
        start = "swarmnet run PEER.yaml"
    with as_user_errors(IdentityError):
        identity = load(key)
    kept = read(state / FILE_NAME, signed, identity.peer_id)
    tokens, totals = own_tokens(kept), PeerTotals(state)
    return {
        "peer": identity.peer_id,
        "run": signed.run_id,
        "name": signed.manifest.name,
        "state": "not running",
        "start": start,
        "every": signed.manifest.rounds.snapshot_interval,
        "own_work": OwnWork(tokens, totals.seconds, joules=totals.joules).text() if tokens else "",
        **summary(kept),
    }


def lines(me: Mapping[str, Any]) -> list[str]:
    """Return the credit as lines for people."""
    report = [str(me["own_work"])] if me.get("own_work") else []
    if me.get("progress"):
        report.append(f"progress  {me['progress']}")
    if me.get("privacy"):
        report.append(f"privacy   {me['privacy']}")
    report += [f"peer      {me['peer']}", f"run       {printable(me['name'])} ({str(me['run'])[:16]}...)"]
    report.append(f"counted   {counted(me['accepted'], 'contribution')} accepted by others")
    if me["accepted"]:
        report.append(f"tokens    {me['tokens']:,} in them, as this peer counted")
        report.append(f"signed    {counted(me['receipts'], 'receipt')} by {counted(me['signers'], 'peer')}")
    if me.get("since") is not None:
        report.append(f"since     {time.strftime('%Y-%m-%d %H:%M', time.localtime(float(me['since'])))}")
    now = str(me["state"])
    if me.get("stage") is not None and me["stage"] >= 0:
        now += f", {'reduces for ' if me.get('role') == 'reducer' else ''}stage {me['stage']}"
    if me.get("uptime_seconds") is not None:
        now += f", up {_duration(float(me['uptime_seconds']))}, moved {me['moves']} times"
    report.append(f"now       {now}")
    if me["unusable"]:
        report.append(
            f"warning   {me['unusable']} lines of {FILE_NAME} are no receipts for this peer: not counted"
        )
    warnings = [printable(str(line)) for line in me.get("warnings", ())]
    if not me["accepted"]:
        report += [f"why 0     {reason}" for reason in warnings or _why_none(me)]
    else:
        report += [f"warning   {line}" for line in warnings]
    return report


def _why_none(me: Mapping[str, Any]) -> list[str]:
    """Return why nothing counts yet, and what to do."""
    every = me["every"]
    if me.get("role") == "reducer":
        return ["it only sums the contributions of others (role: reducer), and makes none"]
    if me["state"] == "not running":
        return [f"it does not run; start it: `{me['start']}`"]
    if str(me["state"]).startswith("paused"):
        return ["it is paused: `swarmnet resume`, if it is you who paused it"]
    if me["state"] != "training":
        return [f"it is {me['state']}: it contributes once it trains; `swarmnet top` shows how far it is"]
    if not me.get("group"):
        return [f"no other peer holds its stage, so none can confirm its work; ask others to join: {JOIN}"]
    if not me["made"] or (me.get("uptime_seconds") or 0.0) < YOUNG_SECONDS:
        return [f"nothing to count yet: others confirm its work after every {every} settled rounds"]
    return [f"others confirm its work after every {every} settled rounds; if it stays 0: `swarmnet doctor`"]


def _duration(seconds: float) -> str:
    """Format a duration such as `3 d 4 h` or `12 min`."""
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes % 60} min"
