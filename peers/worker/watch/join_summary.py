"""The lines that `swarmnet join` shows before a person agrees: what will happen to this computer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from peers.compute.gpu import nvml_of
from peers.compute.memory_budget import all_needs, gib
from peers.compute.stage_part import computing_of, device_of, devices_of
from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest
from peers.network.discovery.record_reader import usual_loss, usual_round
from peers.state.checkpoint_file import KEPT
from peers.telemetry.console import amount, counted, printable
from peers.telemetry.snapshot import IN_STEP
from peers.worker.watch.startup_summary import share_of_day
from peers.worker.watch.upload_watch import upload_need_of, weakest_stage
from protocols.signed.peer_record import PeerRecord
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.resources.bandwidth_estimate import MONTH_SECONDS
from swarmnet.run.manifest import Manifest, Span
from swarmnet.run.progress import planned_rounds, progress_text

DISK_BYTES_PER_PARAMETER = 4
"""A checkpoint has the weights on a grid of 4 bytes (swarmnet/resources/memory_estimate.py)."""
MEGABIT = 125_000


def summarize(config: PeerFile, signed: SignedManifest | None, records: Sequence[PeerRecord]) -> list[str]:
    """Return what joining means, a line for each subject. `signed` is None, and `records` of the other peers
    are empty, if the run was not reached yet. Raises UserError if this computer lacks the device that the
    peer file names."""
    lines = [*_run_lines(signed, records)]
    if signed is not None:
        lines += [_disk_line(config, signed), _memory_line(config, signed)]
    lines += [_upload_line(config, signed, records), _hours_line(config), _power_line(config)]
    return lines


def _run_lines(signed: SignedManifest | None, records: Sequence[PeerRecord]) -> list[str]:
    if signed is None:
        return ["run       not reached yet; this computer keeps trying"]
    manifest = signed.manifest
    lines = [
        f"run       {printable(manifest.name)}: a model of "
        f"{_parameters(manifest, whole(manifest.model)):,} parameters in "
        f"{counted(len(manifest.stages), 'stage')}; owner ...{manifest.owner[-8:]}"
    ]
    training = [record for record in records if record.stage >= 0 and record.state in IN_STEP]
    round, loss = usual_round(training), usual_loss(training)
    if round is None:
        return [*lines, "swarm     no peer trains now"]
    progress = progress_text(round, planned_rounds(manifest.sync, None), None)
    shown_loss = f", loss {loss:.3f}" if loss is not None else ""
    return [*lines, f"swarm     {counted(len(training), 'peer')} training, {progress}{shown_loss}"]


def _parameters(manifest: Manifest, span: Span) -> int:
    return sum(map(prod, parameter_shapes(manifest.model, span).values()))


def _disk_line(config: PeerFile, signed: SignedManifest) -> str:
    manifest = signed.manifest
    sizes = [_parameters(manifest, manifest.span(stage)) for stage in range(len(manifest.stages))]
    line = f"disk      checkpoints of {amount(KEPT * DISK_BYTES_PER_PARAMETER * max(sizes))} at most"
    shared = sum(source.file_bytes for source in manifest.data.sources if source.is_shared)
    if shared and config.max_text_bytes:
        line += (
            f"; for the first stage also text, {amount(min(shared, config.max_text_bytes))}, and its tokens"
        )
    return f"{line}, in {config.state}"


def _memory_line(config: PeerFile, signed: SignedManifest) -> str:
    device = device_of(config.device)
    devices = devices_of(config.compute, device)
    computing = computing_of(config.compute, devices[0])
    count, remote = len(devices), config.compute.remote_devices
    needs = all_needs(signed.manifest, device, config.max_data_bytes, computing, count, remote)
    least, most = min(need.least for need in needs), max(need.least for need in needs)
    where = "GPU memory" if device.type == "cuda" else "memory"
    limit = config.limits.memory
    bound = f"; never more than {gib(limit)}" if limit is not None else ""
    span = f"{gib(most)} of {where}"
    if least < most:  # Such as: 487 to 550 MiB of memory, by stage.
        amount_least, unit = gib(least).split()
        shown_least = amount_least if gib(most).endswith(unit) else gib(least)
        span = f"{shown_least} to {span}, by stage"
    return f"memory    {span}; more with several microbatches at once{bound}"


def _upload_line(config: PeerFile, signed: SignedManifest | None, records: Sequence[PeerRecord]) -> str:
    limit = config.limits.upload
    bound = f"; limited to {limit / MEGABIT:.3g} Mbit/s" if limit is not None else "; no limit is set"
    if signed is None or not any(record.state in IN_STEP and record.stage >= 0 for record in records):
        return f"upload    not known before others train{bound}"
    need = upload_need_of(signed.manifest, records, weakest_stage(signed.manifest, records))
    if not need:  # The others have not measured their speed yet.
        return f"upload    not known before others train{bound}"
    month = amount(need * MONTH_SECONDS * share_of_day(config.limits))
    return f"upload    at least {need / MEGABIT:.3g} Mbit/s while it trains, {month} a month{bound}"


def _hours_line(config: PeerFile) -> str:
    limits = config.limits
    words = [f"at {limits.hours}" if limits.hours is not None else "day and night"]
    if limits.only_when_idle:
        busy = limits.share_when_busy
        less = f"{busy:.0%} of the time while another program needs this computer"
        words.append(less if busy else "only while no other program needs this computer")
    if limits.only_when_plugged_in:
        words.append("not on battery")
    if config.compute_duty_cycle < 1.0:
        words.append(f"{config.compute_duty_cycle:.0%} of the time")
    return f"hours     {', '.join(words)}, until you stop it"


def _power_line(config: PeerFile) -> str:
    """Return the most that the GPU can take; what the rest of a computer takes is not measured."""
    device = device_of(config.device)
    nvml = nvml_of(device) if device.type == "cuda" else None
    watts = nvml.limit_watts() if nvml is not None else None
    if watts is None:
        threads = counted(config.threads, "busy CPU thread")
        return f"power     not measured here; {'a busy GPU' if device.type == 'cuda' else threads}"
    hours = 24 * share_of_day(config.limits) * config.compute_duty_cycle
    return f"power     the GPU takes {watts:.0f} W at most: {watts / 1000 * hours:.1f} kWh a day"
