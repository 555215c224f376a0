"""The decoders of tensors and files: what peers hand on, archives hold, and people are given by others."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from fuzz_inputs import (
    ALICE,
    BOB,
    TEXTS,
    Decoder,
    anything_in_json,
    bent,
    built,
    fields_of,
    replaced,
    written,
)
from fuzz_wire import bent_or_signed, run_id
from safetensors.torch import load, save
from swarm import OWNER, TINY_MODEL, sign, tiny_manifest

from peers.compute.stage_part import build_stage_part
from peers.config import peer_file, run_file, yaml_lines
from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.network.discovery.bootstrap import PeerCache
from peers.network.discovery.claimed_tokens import Contributions
from peers.runtime import control_client
from peers.runtime.control_server import Control
from peers.stageless.archivist.archivist import Archivist
from peers.state import checkpoint_file as checkpoint
from peers.state import start_folder
from peers.state.archive import INDEX, RUN, Archive
from peers.state.archive_store import FolderStore
from peers.state.checkpoint_file import CheckpointError
from peers.state.snapshot_service import SnapshotService
from peers.state.snapshot_store import Snapshots, Weights
from peers.telemetry import event_log, snapshot
from peers.tools.model import provenance
from peers.tools.model.export import load_shape, load_weights
from peers.tools.model.export_folder import ExportError
from peers.worker.inference.forward_compute import ForwardWork
from peers.worker.pipeline import validate_act
from peers.worker.pipeline.microbatch_compute import ComputeError
from peers.worker.rounds import receipt_service as receipts
from peers.worker.rounds.digest_gossip import SignedDigests
from protocols.messages.table import Act, ForwardRequest, SnapshotOffer
from protocols.signed.envelope import EnvelopeKind, seal
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.lineage import NO_RETURN
from swarmnet.model import activation_codec
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.method import METHODS, Method, method_of
from swarmnet.optimizer.step import dense
from swarmnet.rounds.history import START
from swarmnet.rounds.result_table import Contributor, head_of, read_head, tag_of
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import InitCheckpoint, Lora, Sync

CODECS: tuple[Any, ...] = ("bf16", "int8", "fp32", "int4-tiles", "int6-tiles")
SHAPE = (2, 16, 32)
STEPS = 50
"""Of so many contributions one is made into a step: that takes longer than all else."""


@cache
def signed_manifest() -> SignedManifest:
    return sign(tiny_manifest())


@cache
def narrow_manifest() -> Manifest:
    """Of a vocabulary that two bytes hold, with tokens of them outside."""
    boundary = Boundary("token-anchored", width=8, after=(1, 2))
    return tiny_manifest(model=replace(TINY_MODEL, vocab_size=5000, boundary=boundary))


@cache
def further_manifest() -> Manifest:
    """Of a run that trains a part of a model that it starts from."""
    model = replace(TINY_MODEL, lora=Lora(rank=2, targets=("q_proj",)))
    sync = Sync(trainable=("model.layers.*.mlp.*", "*norm*"))
    return tiny_manifest(
        model=model, sync=sync, init_checkpoint=InitCheckpoint("model", "ab" * 32, "", ("cd" * 32,) * 3)
    )


# -- runs -------------------------------------------------------------------------------------------------


def hostile_manifest(chance: Random) -> bytes:
    """On the wire: signed by the run's owner, who may write what he likes."""
    canonical = chance.choice((signed_manifest().manifest, narrow_manifest(), further_manifest())).canonical()
    if chance.random() < 0.3:
        return bent(canonical + bytes(64), chance)
    content = replaced(json.loads(canonical), chance)
    canonical = written(content) if chance.random() < 0.9 else bent(written(content), chance)
    run = hashlib.sha256(canonical).hexdigest()
    return canonical + OWNER.sign(owner_statement(run))  # type: ignore[arg-type]


def published(chance: Random) -> bytes:
    good = run_file.published_text(signed_manifest()).encode()
    if chance.random() < 0.05:
        return chance.choice((b'{"a":' * 12_000, b"[" * 60_000, b'{"run_id":' + b"9" * 60_000 + b"}"))
    return bent(good, chance) if chance.random() < 0.5 else written(replaced(json.loads(good), chance))


# -- the data path ----------------------------------------------------------------------------------------


@cache
def methods() -> tuple[tuple[Method, bytes], ...]:
    """Every way to contribute, with an honest contribution."""
    kinds = [Sync(selection=selection) for selection in ("top-k", "group")]
    found = []
    for sync in (*kinds, *(Sync(method=name) for name in METHODS if name != Sync().method)):
        manifest = tiny_manifest(sync=sync)
        layout = layout_of(parameter_shapes(manifest.model, manifest.span(1)))
        method = method_of(manifest, layout)
        gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
        found.append((method, method.contribute(gradient, 256, 0, PeerId(ALICE.peer_id))))
    return (*found, through_reducers())


def through_reducers() -> tuple[Method, bytes]:
    """With a result of two contributors."""
    manifest = tiny_manifest(sync=Sync(method="local-steps", topology="sharded-reduce", shards=3))
    layout = layout_of(parameter_shapes(manifest.model, manifest.span(1)))
    slices: dict[int, dict[Contributor, bytes]] = {shard: {} for shard in range(3)}
    for number, who in enumerate((ALICE, BOB)):
        method = method_of(manifest, layout)
        gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(number))
        payload = method.contribute(gradient, 256, 0, PeerId(who.peer_id))
        assert method.reduced is not None
        for shard, data in enumerate(method.reduced.slices(payload)):
            slices[shard][Contributor(tag_of(PeerId(who.peer_id)), bytes(16), 256)] = data
    return method, method.reduced.reduce(slices)


def named_again(result: bytes, payload: bytes) -> bytes:
    """A bent result as its liar would sign it: the head names the sums that follow."""
    table, start = read_head(result, 3)
    return head_of(table, payload[start:]) + payload[start:]


def contribution(chance: Random) -> tuple[int, bytes, bool]:
    """Of which method; the payload; whether a step is made of it."""
    number, way = chance.randrange(len(methods())), chance.random()
    good = methods()[number][1]
    if way < 0.5:
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        payload = bytes(data)
    else:
        payload = bent(good, chance) if way < 0.8 else chance.randbytes(len(good))
    if methods()[number][0].reduced is not None and way < 0.7:
        payload = named_again(good, payload)
    return number, payload, chance.randrange(STEPS) == 0


def take_contribution(made: tuple[int, bytes, bool], _folder: Path) -> None:
    number, payload, steps = made
    method = methods()[number][0]
    method.check(payload)
    tally = method.tally(0)
    tally.add(PeerId(BOB.peer_id), payload)
    if steps:
        assert torch.isfinite(dense(tally.step(), layout()).double()).all()
        tally.remove(PeerId(BOB.peer_id))


def hidden_states(chance: Random) -> tuple[bytes, Any]:
    codec = chance.choice(CODECS)
    way = chance.random()
    if way < 0.5:
        seeded = torch.Generator().manual_seed(chance.randrange(2**32))
        values = torch.randn(SHAPE, generator=seeded) * 10.0 ** chance.randrange(-30, 30)
        return bent(activation_codec.encode(values, codec), chance), codec
    return chance.randbytes(chance.choice((4096, 2048, 1152, 1088, 640, 0, 7))), codec


def take_hidden_states(body: tuple[bytes, Any], _folder: Path) -> None:
    decoded = activation_codec.decode(body[0], SHAPE, body[1])
    assert torch.isfinite(decoded).all()
    assert decoded.shape == SHAPE


def microbatch(chance: Random) -> tuple[Manifest, Act, bytes]:
    manifest = chance.choice((signed_manifest().manifest, narrow_manifest(), further_manifest()))
    size = manifest.body_bytes
    bodies = (bytes(size), chance.randbytes(size), b"\x7f" * size, b"", bytes(chance.randrange(size)))
    act = built(Act, chance)
    shape = manifest.hidden_shape if chance.random() < 0.9 else act.shape
    return manifest, msgspec.structs.replace(act, shape=shape), chance.choice(bodies)


def take_microbatch(sent: tuple[Manifest, Act, bytes], _folder: Path) -> None:
    manifest, act, body = sent
    key, header = MicrobatchId(PeerId(act.origin), act.counter), act.path.header()
    came = validate_act.arrival_of(validate_act.ActForm.of(manifest), key, header, act, body)
    refused(came if isinstance(came, ComputeError) else None)


class Refused(Exception):
    """What a decoder answers instead of raising."""


def refused(trouble: ComputeError | None) -> None:
    if trouble is not None:
        raise Refused(trouble.reason)


@cache
def forward_work(stage: int, narrow: bool = False) -> ForwardWork:
    """Stage 0 takes tokens, the last one labels besides, and behind narrow boundaries all take tokens."""
    manifest = narrow_manifest() if narrow else signed_manifest().manifest
    part = build_stage_part(manifest, stage)
    snapshots = Snapshots(identity=ALICE, run_id=run_id(), stage=stage, rules=manifest.rounds)
    snapshots.hold(Weights(part.first_units(), 3, START))
    return ForwardWork(manifest=manifest, stage=stage, part=part, snapshots=snapshots)


def request(chance: Random) -> tuple[bool, ForwardRequest, bytes]:
    stage, narrow = chance.randrange(3), chance.random() < 0.5
    ask = ForwardRequest(1, 1, stage, -1, 3, 2, 16, chance.random() < 0.5, chance.random() < 0.5, 5.0)
    size = forward_work(stage, narrow).body_bytes(ask)
    return narrow, ask, chance.choice((bytes(size), chance.randbytes(size), b"\x7f" * size, b"\xff" * size))


def answer_request(asked: tuple[bool, ForwardRequest, bytes], _folder: Path) -> None:
    narrow, ask, body = asked
    answer = forward_work(ask.stage, narrow).run(ask, body)
    refused(answer if isinstance(answer, ComputeError) else None)


# -- the state path ---------------------------------------------------------------------------------------


@cache
def snapshots() -> Snapshots:
    return forward_work(1).snapshots


def snapshot_root(chance: Random) -> bytes:
    held = snapshots().held[0]
    if chance.random() < 0.2:  # What a run starts from.
        first = fields_of(msgspec.structs.replace(held.root, round=-1, chain=START))
        return bent_or_signed(held.signed, EnvelopeKind.SNAPSHOT, first, chance, 1, 0)
    return bent_or_signed(
        held.signed, EnvelopeKind.SNAPSHOT, fields_of(held.root), chance, 1, held.root.round
    )


def take_snapshot_root(data: bytes, _folder: Path) -> None:
    def refuse(_peer: str, _code: str, reason: str) -> None:
        raise Refused(reason)

    held = snapshots().held[0]
    path = SimpleNamespace(
        snapshots=snapshots(), start=held.root.digest, state_bytes=len(held.data),
        lineage=NO_RETURN, vouched=lambda peer, root: True, neighbourhood=SimpleNamespace(refused=refuse),
    )  # fmt: skip
    for root in SnapshotService._valid_roots(
        path, PeerId(ALICE.peer_id), SnapshotOffer(1, 3, 3, bytes(32), [data], 0)
    ):  # type: ignore[arg-type]
        assert root.size == path.state_bytes


def statement(chance: Random) -> bytes:
    round = chance.choice((3, 7, 11, 2**32 - 1))
    payload, stage = bent(START + bytes(32), chance), chance.choice((1, 1, 1, 0))
    return bent(seal(ALICE, run_id(), EnvelopeKind.SETTLED, stage, round, round, payload), chance)


@cache
def digests() -> SignedDigests:
    def note(event: Any) -> None:
        raise Refused(event.reason)

    return SignedDigests(
        identity=BOB,
        signed=signed_manifest(),
        stage=1,
        neighbourhood=SimpleNamespace(),  # type: ignore[arg-type]
        wrong=lambda event: None,
        heard=lambda statement: None,
        log_event=note,
    )


# -- checkpoints and archives -----------------------------------------------------------------------------


@cache
def layout() -> Any:
    manifest = signed_manifest().manifest
    return layout_of(parameter_shapes(manifest.model, manifest.span(1)))


@cache
def honest_checkpoint() -> tuple[bytes, dict[str, Any], bytes]:
    """The file, its header, and its tensors."""
    manifest = signed_manifest().manifest
    units = torch.zeros(layout().size, dtype=torch.int32)
    signed = seal(ALICE, run_id(), EnvelopeKind.SETTLED, 1, 7, 7, START + bytes(32))
    data = checkpoint.content(manifest, 1, 7, START, units, layout(), [signed])
    (length,) = struct.unpack("<Q", data[:8])
    return data, json.loads(data[8 : 8 + length]), data[8 + length :]


_LIES = (
    "", "x", "-1", "99", "9" * 4000, "9" * 5000, "[" * 5000, "{}", "null", "\0", "zz", "1e999", "٣", "00",
    "00" * 5000, '{"1":[["a","b",1]]}', '{"1":[["a","AAAA",1]]}', '{"x":1}', "-9223372036854775809",
)  # fmt: skip
"""For whatever a checkpoint says of itself: it is all text."""


def checkpoint_file(chance: Random) -> bytes:
    good, header, tensors = honest_checkpoint()
    way = chance.randrange(6)
    if way == 0:
        return bent(good, chance)
    if way == 1:
        return struct.pack("<Q", chance.choice((0, 1, 2**31, 2**63, 2**64 - 1, 10**8))) + good[8:]
    if way == 2:
        return _forged(chance)
    header = json.loads(json.dumps(header))
    place = header[chance.choice([name for name in header if name != "__metadata__"])]
    lies: dict[str, tuple[Any, ...]] = {
        "data_offsets": ([0, 2**63], [-1, 4], [4, 0], [0, 0], [0, len(good)], [2**64, 2**65], ["a", 1], []),
        "shape": ([2**40, 2**40], [-1], [0], [2**63], [[1]], [1.5], []),
        "dtype": ("F64", "I64", "BOOL", "F8_E4M3", "X", "", 5),
    }
    if way == 3:
        header["__metadata__"][chance.choice(list(header["__metadata__"]))] = chance.choice(_LIES)
    else:
        key = chance.choice(list(lies))
        place[key] = chance.choice(lies[key])
    raw = written(header)
    return struct.pack("<Q", len(raw)) + raw + tensors


def _forged(chance: Random) -> bytes:
    """Whose hash of all that it holds fits: whoever writes a file can compute it."""
    good, header, _ = honest_checkpoint()
    metadata = {key: value for key, value in header["__metadata__"].items() if key != "content"}
    for _ in range(chance.randrange(1, 3)):
        metadata[chance.choice(list(metadata))] = chance.choice(_LIES)
    tensors = load(good)
    metadata["content"] = checkpoint.content_hash(metadata, tensors)
    return bytes(save(tensors, metadata))


def restore_checkpoint(data: bytes, folder: Path) -> None:
    file = folder / "stage-1-round-00000007.safetensors"
    file.write_bytes(data)
    round, _, units = checkpoint.restore(file, run_id(), 1, layout())
    assert 0 <= round < 2**63
    assert units.count_nonzero() == 0, "these are the weights whose digest it names"


def tell_of_checkpoint(data: bytes, folder: Path) -> None:
    """What `card` and `evaluate` read of it before anything is verified."""
    file = folder / "stage-1-round-00000007.safetensors"
    file.write_bytes(data)
    provenance.facts(file, signed_manifest().manifest)
    checkpoint.newest(file)


HELD = b"12345"
"""What the archive's only checkpoint holds."""


def archive_index(chance: Random) -> bytes:
    name = "stage-1-round-00000007.safetensors"
    entry = {
        "name": name, "stage": 1, "round": 7, "bytes": len(HELD), "sha256": hashlib.sha256(HELD).hexdigest(),
        "signers": [ALICE.peer_id], "archived": 1.0,
    }  # fmt: skip
    names = ("../x", "/etc/passwd", f"{name}/../x", f"{name}\n", "stage-٣-round-٣٣٣٣٣٣٣٣.safetensors")
    for _ in range(chance.randrange(3)):
        key = chance.choice([*entry, "extra", "name"])
        entry[key] = chance.choice(names) if key == "name" else anything_in_json(chance)
    checkpoints = chance.choice(([entry], [entry, entry], entry))
    index = {"format": chance.choice((1, 1, 1, 1, 2, "1")), "checkpoints": checkpoints}
    if chance.random() < 0.02:
        return chance.choice((b"[" * 10**6, b'{"format":1,"checkpoints":[' + b"{}," * 10**5 + b"{}]}"))
    return bent(written(index), chance) if chance.random() < 0.3 else written(index)


def open_archive(index: bytes, folder: Path) -> None:
    run = folder / RUN
    if not run.exists():
        run.write_text(run_file.published_text(signed_manifest()))
        (folder / "stage-1-round-00000007.safetensors").write_bytes(HELD)
    (folder / INDEX).write_bytes(index)
    archive = Archive(FolderStore(folder))
    archive.open(signed_manifest())
    for entry in archive.newest(1):
        assert "/" not in entry.name
        archive.checkpoint(entry)


# -- files that people are given --------------------------------------------------------------------------

PEER_FILE = b"""run: %s
stage: auto
bootstrap: [/ip4/127.0.0.1/tcp/1/p2p/%s]
limits: {memory: 4 GB, hours: "22:00-08:00"}
data_paths: {stories: /data/stories}
name: x
"""


def peer_yaml(chance: Random) -> bytes:
    if chance.random() < 0.05:
        return chance.choice((
            b"a: &a [x,x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: [*b,*b,*b,*b]\n", b"? {a: b}\n: c\n",
            b"x: !!python/object/apply:os.system [id]\n", b"a: 1\na: 2\n", b"%YAML 9.9\n---\na: 1\n",
            b"x: " + b"[" * 200, b"".join(b"k%d: 1\n" % number for number in range(100)),
        ))  # fmt: skip
    lines = (PEER_FILE % (run_id().encode(), ALICE.peer_id.encode())).splitlines(keepends=True)
    if chance.random() < 0.4:
        key = lines[chance.randrange(len(lines))].partition(b":")[0]
        lines.append(key + b": " + written(anything_in_json(chance)) + b"\n")
    return bent(b"".join(lines), chance)


def read_peer_yaml(data: bytes, folder: Path) -> None:
    typed = yaml_lines.parse(data.decode("utf-8", "replace"), "peer.yaml")
    peer_file.validate_peer_file(typed, folder, "peer", {"HOME": str(folder)})


def _config(chance: Random) -> bytes:
    """An exported model's."""
    good = {
        "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 64, "architectures": ["LlamaForCausalLM"],
        "rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "initializer_range": 0.02,
    }  # fmt: skip
    data = written(replaced(good, chance))
    return b"[" * 10**5 if chance.random() < 0.01 else bent(data, chance) if chance.random() < 0.3 else data


def load_export(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    (folder / "model.safetensors").write_bytes(honest_checkpoint()[0])
    index = folder / "model.safetensors.index.json"
    index.write_bytes(data)
    if len(data) % 2:
        index.unlink()
    load_shape(folder)
    load_weights(folder)


def open_start(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    (folder / "model.safetensors").write_bytes(honest_checkpoint()[0] if len(data) % 2 else data)
    (folder / "model.safetensors.index.json").write_bytes(data)
    start_folder.open_model(folder, signed_manifest().manifest)


def lines_of(make: Callable[[Random], object]) -> Callable[[Random], bytes]:
    """Files of one to four lines of JSON, of which some are bent."""

    def file(chance: Random) -> bytes:
        found = b""
        for _ in range(chance.randrange(1, 5)):
            line = written(replaced(make(chance), chance)) if chance.random() < 0.7 else written(make(chance))
            found += (bent(line, chance) if chance.random() < 0.3 else line) + b"\n"
        return b"[" * 10**5 + b"\n" if chance.random() < 0.01 else found

    return file


def _event(chance: Random) -> dict[str, Any]:
    base = {"time": 1.0, "monotonic": 1.0, "event": "settled", "ids": ["ab"]}
    others = (
        {},
        {"event": "started", "peer": ALICE.peer_id},
        {"event": "committed", "origin": "a", "tokens": 5},
    )
    continued = {"event": event_log.CONTINUED, "standing": [{"event": "started"}]}
    return {**base, **chance.choice((*others, continued))}


def read_event_log(data: bytes, folder: Path) -> None:
    file = folder / "events.jsonl"
    file.write_bytes(data)
    for _ in event_log.read_lately(file):
        pass


def _addresses(_chance: Random) -> dict[str, Any]:
    return {"addresses": [f"/ip4/127.0.0.1/tcp/1/p2p/{ALICE.peer_id}", *TEXTS]}


def _contributors(_chance: Random) -> list[Any]:
    return [{"peer": ALICE.peer_id, "name": "alice", "tokens": {"0": 5, "1": 7}, "signed": 2}]


def read_contributors(data: bytes, folder: Path) -> None:
    """What an archivist remembers of its earlier life, or of another's."""
    (folder / "contributors.json").write_bytes(data.splitlines()[0])
    archivist = SimpleNamespace(contributions=Contributions(), signed={}, devices={})
    for one in Archive(FolderStore(folder)).contributors():
        Archivist._restore_contributor(archivist, one)  # type: ignore[arg-type]
    assert all(0 < count < 2**63 for count in archivist.contributions.tokens.values())


def _receipt(chance: Random) -> dict[str, Any]:
    return chance.choice((
        {"older": 5}, {"stage": 1, "own": 4, "made": 1, "tokens": 5}, {"receipt": "AAAA"},
    ))  # fmt: skip


def read_receipts(data: bytes, folder: Path) -> None:
    """The peer's own list, and what a card makes of somebody's state."""
    file = folder / "receipts.jsonl"
    file.write_bytes(data)
    receipts.read(file, signed_manifest(), PeerId(ALICE.peer_id))
    provenance._read_receipts(provenance.ModelProvenance(), file, run_id(), 4)
    provenance._read_claims(provenance.ModelProvenance(), file)


def read_peer_cache(data: bytes, folder: Path) -> None:
    file = folder / "peers.json"
    file.write_bytes(data)
    for address in PeerCache(file).read():
        assert isinstance(address, str)


# -- between the programs of one machine ------------------------------------------------------------------


def _snapshot(_chance: Random) -> dict[str, Any]:
    row = snapshot.PeerRow(ALICE.peer_id, 0, "trains", loss=3.5)
    return snapshot.as_json(snapshot.SwarmSnapshot("here", 1.0, rows=(row,), losses=(3.5,), sent={"act": 5}))


async def answer_control(data: bytes, folder: Path) -> None:
    async def answer(_request: object) -> dict[str, Any]:
        return {}

    control = Control(folder)
    control.answers["status"] = answer
    assert (await control._answer(data)).endswith(b"\n")


def read_control_answer(data: bytes, folder: Path) -> None:
    snapshot.from_json(control_client._decode_answer(data, folder))


FILE = (UserError,)
RUN_FILE = (run_file.RunFileError,)
DECODERS = (
    Decoder(
        "manifests of a hostile owner", hostile_manifest, lambda data, _: run_file.from_wire(data), RUN_FILE
    ),
    Decoder("published runs", published, lambda data, _: run_file.from_published(data, "x"), RUN_FILE),
    Decoder("contributions of every method", contribution, take_contribution, (ContributionError,)),
    Decoder(
        "hidden states in every codec", hidden_states, take_hidden_states, (activation_codec.HiddenError,)
    ),
    Decoder("microbatches", microbatch, take_microbatch, (Refused,)),
    Decoder("requests of visitors", request, answer_request, (Refused,)),
    Decoder("snapshot roots", snapshot_root, take_snapshot_root, (Refused,)),
    Decoder("signed digests", statement, lambda data, _: digests().restore([data]), (Refused,)),
    Decoder("checkpoints", checkpoint_file, restore_checkpoint, (CheckpointError,)),
    Decoder("checkpoints of strangers", checkpoint_file, tell_of_checkpoint, FILE),
    Decoder("archive indexes", archive_index, open_archive, FILE),
    Decoder("contributors of an archive", lines_of(_contributors), read_contributors, ()),
    Decoder("peer files", peer_yaml, read_peer_yaml, FILE),
    Decoder("exported models", _config, load_export, (ExportError,)),
    Decoder("models to start from", _config, open_start, (start_folder.StartError,)),
    Decoder("event logs", lines_of(_event), read_event_log, FILE),
    Decoder("lists of receipts", lines_of(_receipt), read_receipts, FILE),
    Decoder("remembered peers", lines_of(_addresses), read_peer_cache, ()),
    Decoder("control requests", lines_of(lambda _: {"do": "status"}), answer_control, ()),
    Decoder("control answers", lines_of(_snapshot), read_control_answer, FILE),
)
