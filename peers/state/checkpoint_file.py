"""Local checkpoints: one safetensors file per stage and round, with Hugging Face names, written atomically.

The group sums weights as int32 fixed-point integers, called units. The file stores them as float32, which is
exact below 4 in magnitude, and tensors with larger weights as float64. A layout says where each tensor lies
in a stage's vector of weights. The set of a round has the contributions that were summed in it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from peers.config.atomic_files import is_file, write_atomically
from peers.config.errors import UserError
from peers.config.run_file import RunFileError, parse
from peers.state.archive import GIVEN_UP
from peers.state.safetensors_file import MAX_TENSORS, open_tensors
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.lineage import ERA_BYTES
from swarmnet.model.decoder import scaled
from swarmnet.model.fixed_point import UNIT, to_floats, to_units
from swarmnet.model.flat_layout import Layout
from swarmnet.model.state_layout import BESIDE_WEIGHTS, state_layout
from swarmnet.placement.standstill import OnDisk
from swarmnet.rounds.events import Reference, Sets
from swarmnet.rounds.history import START, Earlier
from swarmnet.rounds.own_contributions import LEARNED_ROUNDS, MAX_REFERENCES, NOTHING_PAST, RestartState
from swarmnet.run.manifest import Manifest

DIGEST_BYTES = 32
STATEMENT_BYTES = len(START) + ERA_BYTES + DIGEST_BYTES
"""Largest statement that peers sign about a round: the chain value and the digest of the settled weights."""
KEPT = 2
REFERENCE_CHARACTERS = 160
"""Characters per member of a set: a peer id has 52, a contribution id at most 44, a size 10."""


class CheckpointError(UserError):
    """A checkpoint cannot be used. The message names the file and the reason."""


class OtherCheckpoint(CheckpointError):
    """An intact checkpoint of another run or stage."""


DiskError = UserError
"""Raised by `write` when the disk refuses."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of one checkpoint file."""

    run_id: RunId
    manifest: str
    """The run's manifest as canonical JSON, so that the file describes its model."""
    stage: int
    round: int
    digest: bytes
    """The value of `Replica.digest()` for the settled weights."""
    chain: bytes
    """The value of the chain of settled sets at that round (swarmnet/rounds/history.py)."""
    tensors: dict[str, Tensor]
    signed: tuple[bytes, ...] = ()
    """Envelopes in which peers of the group signed the weights after that round
    (worker/rounds/digest_gossip.py)."""
    past: RestartState = NOTHING_PAST
    """What the writer knew of the rounds up to that one."""
    tokens: int | None = None
    """Number of tokens in all settled rounds up to that one; None if the writer did not know."""

    def units(self, layout: Layout) -> Tensor:
        """Return the weights as one int32 vector [layout.size] in fixed point. Raises CheckpointError if a
        tensor is missing or has another shape."""
        units = torch.zeros(layout.size, dtype=torch.int32)
        for entry in layout.entries:
            tensor = self.tensors.get(entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape:
                raise CheckpointError(f"the checkpoint of stage {self.stage} has no fitting {entry.name}")
            units[entry.place] = to_units(tensor.flatten())
        return units


def state_digest(round: int, units: Tensor) -> bytes:
    """Return SHA-256 over the round and the little-endian int32 weights, like `Replica.digest()`."""
    data = units.cpu().numpy().astype("<i4", copy=False).tobytes()
    return hashlib.sha256(round.to_bytes(8, "little", signed=True) + data).digest()


def write(
    folder: Path,
    manifest: Manifest,
    stage: int,
    round: int,
    chain: bytes,
    units: Tensor,
    layout: Layout,
    signed: Sequence[bytes] = (),
    past: RestartState = NOTHING_PAST,
    tokens: int | None = None,
    damaged: Collection[Path] = (),
) -> Path:
    """Write a checkpoint, the bytes of `content`, to `stage-S-round-R.safetensors`, and return its path. Then
    delete all but the stage's newest KEPT files. Files in `damaged` stay unchanged and do not count, because
    a person may be able to repair them. Raises DiskError."""
    path = folder / f"stage-{stage}-round-{round:08d}.safetensors"
    write_atomically(path, content(manifest, stage, round, chain, units, layout, signed, past, tokens))
    usable = [file for file in files(folder, stage) if file not in damaged]
    for old in [*usable[KEPT:], *folder.glob(".stage-*.part")]:
        old.unlink()  # `.part` files were left by writers that were killed.
    return path


def content(
    manifest: Manifest,
    stage: int,
    round: int,
    chain: bytes,
    units: Tensor,
    layout: Layout,
    signed: Sequence[bytes] = (),
    past: RestartState = NOTHING_PAST,
    tokens: int | None = None,
) -> bytes:
    """Return the bytes of a checkpoint file: the weights `units`, int32 [layout.size], as named tensors, and
    metadata. `signed` has peers' signatures, `past` what is known of the rounds up to `round`."""
    tensors = {}
    for entry in layout.entries:
        values = units[entry.place]
        tensor = to_floats(values)
        if not torch.equal(to_units(tensor), values):  # float32 is not exact here.
            tensor = values.to(torch.float64) * UNIT
        tensors[entry.name] = tensor.view(entry.shape)
    metadata = {
        "format": "pt",
        "run": manifest.run_id(),
        "manifest": manifest.canonical().decode(),
        "stage": str(stage),
        "round": str(round),
        "digest": state_digest(round, units).hex(),
        "chain": chain.hex(),
        "signed": " ".join(data.hex() for data in signed),
        "sets": _encode_sets(past.sets),
        "earlier": msgspec.json.encode(past.earlier).decode(),
    }
    if tokens is not None:
        metadata["tokens"] = str(tokens)
    metadata["content"] = content_hash(metadata, tensors)
    data: bytes = save(tensors, metadata)
    return data


def read(path: Path, max_tensors: int = MAX_TENSORS) -> Checkpoint:
    """Read one file and check the hash of its content. Raises CheckpointError if it is unusable."""
    try:
        with open_tensors(path, max_tensors) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if metadata.pop("content") != content_hash(metadata, tensors):
            raise ValueError("it is damaged: its content does not have the hash that it names")
        digest, chain = bytes.fromhex(metadata["digest"]), bytes.fromhex(metadata["chain"])
        if len(chain) > len(START) + ERA_BYTES or len(digest) != DIGEST_BYTES:
            raise ValueError(f"a digest of {len(digest)} bytes and a chain of {len(chain)}")
        checkpoint = Checkpoint(
            RunId(metadata["run"]),
            metadata["manifest"],
            number(metadata["stage"]),
            number(metadata["round"]),
            digest,
            chain,
            tensors,
            signed=tuple(bytes.fromhex(data) for data in metadata.get("signed", "").split()),
            past=RestartState(
                _decode_sets(metadata.get("sets", "{}")),
                msgspec.json.decode(metadata.get("earlier", "null"), type=Earlier | None),
            ),
            tokens=token_count(metadata.get("tokens", "")),
        )
    except (SafetensorError, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is no checkpoint that can be used ({error})") from None
    return checkpoint


def number(text: str) -> int:
    """Parse a stage or round. Raises ValueError for a number that no run has."""
    if not re.fullmatch(r"[0-9]{1,10}", text):  # As in the names of archived files (archive.py).
        raise ValueError(f"{text[:20]!r} is no number of a stage or round")
    return int(text)


def token_count(text: str) -> int | None:
    """Parse a number of tokens; None for an empty text. Raises ValueError for a number that no run has."""
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{text[:20]!r} is no number of tokens")
    return int(text)


def _encode_sets(sets: Sets) -> str:
    """Return settled sets as JSON: a map from round to (peer, contribution id, size) of each contribution."""
    members = {
        round: [(entry.peer, entry.id, entry.size) for entry in references]
        for round, references in sets.items()
    }
    return msgspec.json.encode(members).decode()


def _decode_sets(text: str) -> Sets:
    """Return the settled sets in JSON text. Raises msgspec.MsgspecError if it is invalid, and ValueError if
    it has more sets or contributions than a peer keeps."""
    if len(text) > REFERENCE_CHARACTERS * MAX_REFERENCES:
        raise ValueError(f"it has {len(text)} characters of sets")
    members = msgspec.json.decode(text, type=dict[int, list[tuple[str, bytes, int]]])
    if len(members) > LEARNED_ROUNDS or sum(map(len, members.values())) > MAX_REFERENCES:
        raise ValueError(f"it has the sets of {len(members)} rounds")
    return {
        round: tuple(Reference(round, PeerId(peer), ContributionId(id), size) for peer, id, size in entries)
        for round, entries in members.items()
    }


def content_hash(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over all metadata and tensors of a file, in hexadecimal. It covers more than the
    digest of the weights: also the chain value, and bit flips that change a float by less than a unit."""
    hasher = hashlib.sha256()
    for key in sorted(metadata):
        hasher.update(f"{key} {len(metadata[key])} {metadata[key]}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def files(folder: Path, stage: int) -> list[Path]:
    """Return a stage's checkpoints, newest first."""
    return sorted(folder.glob(f"stage-{stage}-round-*.safetensors"), reverse=True)


def on_disk(folder: Path, run_id: RunId) -> list[OnDisk]:
    """Return stage and round of the run's newest intact checkpoint of each stage in `folder`. The most
    recently written file comes first. Whole files are read to check them."""
    newest_of: dict[int, tuple[float, OnDisk]] = {}
    for path in sorted(folder.glob("stage-*-round-*.safetensors"), key=stage_and_round, reverse=True):
        stage, round = stage_and_round(path)
        if stage in newest_of:
            continue
        with suppress(CheckpointError):
            checkpoint = read(path)
            if (checkpoint.run_id, checkpoint.stage) == (run_id, stage):
                newest_of[stage] = (_written_at(path), OnDisk(stage, round))
    latest_first = sorted(newest_of.values(), key=lambda time_and_entry: -time_and_entry[0])
    return [entry for _, entry in latest_first]


def newer_files(folder: Path, stage: int, round: int, damaged: Collection[Path] = ()) -> list[Path]:
    """Return a stage's checkpoints that are newer than `round`, without the files in `damaged`."""
    return [path for path in files(folder, stage) if stage_and_round(path)[1] > round and path not in damaged]


def set_aside(paths: Iterable[Path]) -> list[Path]:
    """Rename checkpoints to `.given-up`, so that no start uses them. Returns the new paths."""
    return [path.replace(path.with_suffix(GIVEN_UP)) for path in paths]


def restore(path: Path, run_id: RunId, stage: int, layout: Layout) -> tuple[int, bytes, Tensor]:
    """Return (round, chain value, weights as fixed-point integers) of one file. Raises CheckpointError if it
    is damaged or of another run or stage."""
    checkpoint, units = restore_signed(path, run_id, stage, layout)
    return checkpoint.round, checkpoint.chain, units


def restore_signed(
    path: Path, run_id: RunId, stage: int, layout: Layout, *, max_tensors: int = MAX_TENSORS
) -> tuple[Checkpoint, Tensor]:
    """Read a checkpoint file and check it. Returns its whole content, which includes the peers' signatures,
    and its weights as fixed-point integers (units), in the order of `layout`.

    The signatures are not checked here. Raises OtherCheckpoint if the file is of another run or stage, and
    CheckpointError if it is damaged."""
    checkpoint = read(path, max_tensors)
    if checkpoint.run_id != run_id or checkpoint.stage != stage:
        raise OtherCheckpoint(
            f"{path} is stage {checkpoint.stage} of the run {checkpoint.run_id[:16]}, "
            f"not stage {stage} of {run_id[:16]}"
        )
    units = checkpoint.units(layout)
    if state_digest(checkpoint.round, units) != checkpoint.digest:
        raise CheckpointError(f"{path} is damaged: its weights do not have the digest that it names")
    return checkpoint, units


@dataclass(frozen=True, slots=True)
class Model:
    """A complete model, assembled from its stages' newest checkpoints."""

    manifest: Manifest
    stages: tuple[dict[str, Tensor], ...]
    """Trained weights by stage; use `whole` for inference."""
    round: int
    """The oldest of the stages' rounds."""
    passed_over: tuple[str, ...] = ()
    """Newer files that could not be used, with the reasons."""

    def path(self, without: Collection[int] = ()) -> tuple[dict[str, Tensor], ...]:
        """Return the weights by name of each stage that a microbatch visits if it skips the stages in
        `without`. They are scaled for the number of stages on that path (`Rules.branch_scale`)."""
        visited = [stage for stage in range(len(self.stages)) if stage not in without]
        rules = self.manifest.path_rules()
        # Stages after `rules.last` hold routed experts and do not count.
        length = sum(stage <= rules.last for stage in visited)
        return tuple(scaled(self.stages[stage], rules.branch_scale(stage, length)) for stage in visited)

    def whole(self) -> dict[str, Tensor]:
        """Return all weights of the unsplit model by their global names."""
        return {name: tensor for stage in self.path() for name, tensor in stage.items()}


def newest(source: Path | None) -> Model:
    """Return the newest model in `source`: a checkpoint file, or a folder that is searched with its
    subfolders (None: the working directory). The last written file decides the run. The model has the newest
    usable checkpoint of each stage, without momenta. Raises CheckpointError if a stage has none."""
    place = source or Path()
    files = [place] if is_file(place) else sorted(place.rglob("stage-*-round-*.safetensors"))
    if not files:
        raise CheckpointError(f"{place} holds no checkpoint (stage-S-round-R.safetensors)")
    run_id, manifest = _latest_run(files)
    found: dict[int, Checkpoint] = {}
    problems: list[str] = []
    for file in sorted(files, key=stage_and_round, reverse=True):
        if stage_and_round(file)[0] in found:
            continue
        try:
            checkpoint = read(file)
            if checkpoint.run_id == run_id:
                _require_digest(checkpoint, manifest)
                found[checkpoint.stage] = checkpoint
        except CheckpointError as error:
            problems.append(str(error))
    missing = [stage for stage in range(len(manifest.stages)) if stage not in found]
    if missing:
        stages = ", ".join(map(str, missing))
        raise CheckpointError(
            problems[0]
            if problems
            else (
                f"{place} holds no checkpoint of stage {stages} of the run {run_id[:16]}: a model needs "
                f"all {len(manifest.stages)} stages; name a folder that holds the states of peers of "
                "every stage"
            )
        )
    tensors = tuple(
        {
            name: tensor.to(torch.float32)
            for name, tensor in found[stage].tensors.items()
            if not name.startswith(BESIDE_WEIGHTS)
        }
        for stage in sorted(found)
    )
    return Model(manifest, tensors, min(checkpoint.round for checkpoint in found.values()), tuple(problems))


def _latest_run(files: Iterable[Path]) -> tuple[RunId, Manifest]:
    """Return id and manifest of the run in the most recently written of these files, skipping unreadable
    ones. Weights are not checked. Raises CheckpointError with the first problem if all are unreadable."""
    problem: CheckpointError | None = None
    for file in sorted(files, key=_written_at, reverse=True):
        try:
            with open_tensors(file) as opened:
                metadata = opened.metadata() or {}
            return RunId(metadata["run"]), parse(metadata["manifest"].encode())
        except (SafetensorError, OSError, KeyError, RunFileError) as error:
            text = f"{file} is no checkpoint that can be used ({error})"
            problem = problem or CheckpointError(text)
    assert problem is not None, "of at least one file"
    raise problem


def _written_at(file: Path) -> float:
    """Return the Unix time of the last change; 0 if the file is gone (a running peer deletes old ones)."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def stage_and_round(file: Path) -> tuple[int, int]:
    """Return stage and round from a file's name, or (-1, -1) for another name."""
    named = re.fullmatch(r"stage-(\d+)-round-(\d+)", file.stem)
    return (int(named[1]), int(named[2])) if named is not None else (-1, -1)


def _require_digest(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Raise CheckpointError if the weights do not match the checkpoint's digest."""
    stage, at = checkpoint.stage, checkpoint.round
    if 0 <= stage < len(manifest.stages):
        layout = state_layout(manifest, stage)
        if state_digest(at, checkpoint.units(layout)) == checkpoint.digest:
            return
    raise CheckpointError(f"the checkpoint of stage {stage}, round {at} is damaged")
