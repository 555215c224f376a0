"""Read run files, which a run's creator writes, and sign and check the published form that all others get.

A run file (YAML) has exactly the keys of `Manifest`, which defines a run. The published file is readable JSON
with the manifest, the run id and the owner's Ed25519 signature over the id. The run id is the SHA-256 of the
canonical manifest: JSON with every key, sorted, without spaces. Its digests are the hashes of the initial
weights of each stage. A source is a text that the run trains on.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from peers.config.atomic_files import is_file, is_there, write_atomically
from peers.config.errors import ConfigError, UserError
from peers.config.quantities import bootstrap_multiaddr
from peers.config.validation import validate
from peers.config.yaml_lines import Location, ParsedYaml, override_values, read
from swarmnet.identifiers import PeerId, RunId
from swarmnet.model.parameters import check_trained
from swarmnet.run.canonical_form import MANIFEST_LIMIT, owner_statement
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import BYTES, STANDARD_LIBRARY, WIRE_VERSION, Data, InitCheckpoint, TextSource

if TYPE_CHECKING:
    from protocols.signed.identity import Identity

SIGNATURE_BYTES = 64
MAX_BOOTSTRAPS = 8
"""Maximum number of bootstraps in a published file. A peer needs one that responds, and tries to dial
each."""
MAX_ADDRESS_CHARACTERS = 256
"""Maximum length of a bootstrap address. A DNS name has up to 253 characters; /dns4/, port and peer id add
few."""
MEASURED = ("bytes", "documents", "sha256", "index", "shared", "files", "file_bytes")
"""Keys of a source that publishing fills in."""
FILLED_IN = "is filled in by publishing; leave it out"


class RunFileError(UserError):
    """A published run file is invalid."""


class OtherVersion(RunFileError):
    """A published run is valid but uses another wire version than this program."""


class RunFile(BaseModel):
    """The manifest's dataclasses, validated as strictly as a peer file: the settings apply to them, too."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A run as its owner published it. Only `publish` and `load_signed` create it, after all checks."""

    manifest: Manifest
    signature: bytes
    """The owner's signature over `owner_statement(run_id)`, 64 bytes."""
    run_id: RunId
    bootstraps: tuple[str, ...] = field(default=(), compare=False)
    """Multiaddrs in the published file next to the manifest. The owner's signature does not cover them."""

    def wire(self) -> bytes:
        """Return the canonical manifest and the signature, as messages and the DHT carry them."""
        return self.manifest.canonical() + self.signature


def load_manifest(path: Path, owner: PeerId, overrides: Mapping[str, str] | None = None) -> Manifest:
    """Return the manifest that a run file describes, with this `owner`. `overrides` maps dotted keys to YAML
    text. Raises ConfigError with file and line, also for keys that publishing fills in."""
    typed = read(path)
    options = {tuple(key.split(".")): (text, "--set") for key, text in (overrides or {}).items()}
    override_values(typed, options)
    for key in ("owner", "wire_version"):
        if key in typed.data:
            raise ConfigError([f"{typed.place((key,))}: {key}: {FILLED_IN}"])
    typed.data.setdefault("name", path.stem)
    typed.data["owner"] = owner
    manifest = validate(RunFile, typed, inside=("manifest",)).manifest
    if "weights" not in (typed.data.get("sync") or {}) and not manifest.data.private:
        # A published manifest without the key means equal weights, so that it keeps its meaning.
        manifest = replace(manifest, sync=manifest.sync.with_method(manifest.sync.method))
    if manifest.init_checkpoint.digests:
        raise ConfigError(
            [f"{typed.place(('init_checkpoint', 'digests'))}: init_checkpoint.digests: {FILLED_IN}"]
        )
    try:
        _check(manifest)
    except ManifestError as error:
        raise ConfigError([_with_place(str(error), typed)]) from None
    _require_names(manifest, typed)
    return manifest


def load_straight_manifest(path: Path) -> Manifest:
    """Return the manifest of a run file for a plan or a measurement. These let microbatches pass the stages
    from the first to the last. Raises UserError for a U-shaped run, and ConfigError."""
    manifest = load_manifest(path, PeerId(""), {})
    if manifest.is_u_shaped:
        raise UserError(
            f"{path}: data.u_shaped_layers is {manifest.data.u_shaped_layers}, and plans and measurements do "
            "not follow microbatches back to their origin; copy the file, and leave u_shaped_layers and "
            "private out"
        )
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ManifestError if the manifest contradicts itself."""
    check(manifest)
    check_trained(manifest)
    if manifest.moderators.keys:
        from protocols.signed.identity import public_key_bytes

        try:
            for peer in manifest.moderators.keys:
                public_key_bytes(peer)
        except ValueError as error:
            raise ManifestError(
                f"moderators.keys: {error}; `swarmnet identity FILE` prints a key's id"
            ) from None


def _require_names(manifest: Manifest, typed: ParsedYaml) -> None:
    """Raise ConfigError if the path of a source, the tokenizer or the initial model may leave its folder.

    A published run must not choose which files other peers read: it only names a text, and each peer file
    has the path to its copy.
    """
    # The location of the key, its path, and the line that a peer file would have.
    paths: list[tuple[Location, str, str]] = [
        (
            ("data", "sources", number, "path"),
            source.path,
            f"data_paths: {{{as_key(source.name)}: {source.path}}}",
        )
        for number, source in enumerate(manifest.data.sources)
    ]
    tokenizer, start = manifest.data.tokenizer, manifest.init_checkpoint.path
    paths.append((("data", "tokenizer"), tokenizer, f"tokenizer: {tokenizer}"))
    paths.append((("init_checkpoint", "path"), start, f"init_checkpoint: {start}"))
    problems = [
        f"{typed.place(key)}: {'.'.join(map(str, key))}: {path!r} is a place on one machine; write only "
        f"a name ({PureWindowsPath(path).name.strip('.~') or 'library'}), and the place in each peer file, "
        f"such as: {peer_file_line}"
        for key, path, peer_file_line in paths
        if _may_leave_folder(path)
    ]
    if problems:
        raise ConfigError(problems)


def _may_leave_folder(path: str) -> bool:
    """Return whether a path starts at a root, a drive or a home folder, or contains `..`. The rules of all
    operating systems apply."""
    windows = PureWindowsPath(path)
    return path.startswith("~") or bool(windows.anchor) or ".." in windows.parts


def beside(folder: Path, name: str) -> Path | None:
    """Return the absolute path of the file `name` in the folder of a run file; None if there is none."""
    path = (folder / name).absolute()
    return path if is_there(path) else None


def find_source_text(folder: Path, source: TextSource) -> str | None:
    """Return the path of a source's text in the folder of the run file; None if it is not there. The text of
    Python's own library has no path but the name STANDARD_LIBRARY."""
    if source.path == STANDARD_LIBRARY:
        return STANDARD_LIBRARY
    path = beside(folder, source.path)
    return None if path is None else str(path)


def text_settings(manifest: Manifest, folder: Path, tokenizer: Path | None = None) -> str:
    """Return the `--set` options that name the run's text and tokenizer to `swarmnet join`, quoted for a
    shell; empty if the run needs none, because its text is Python's library and its tokens are bytes.

    Files are looked for in `folder`; for a missing one the option has the word PATH. `tokenizer` is the path
    of the tokenizer if it is elsewhere.
    """
    data = manifest.data

    def path_or_placeholder(name: str, given: Path | None = None) -> str:
        path = given.absolute() if given else beside(folder, name)
        return str(path or "PATH")

    sources = [source for source in data.sources if source.path != STANDARD_LIBRARY]
    text_paths = {source.name: path_or_placeholder(source.path) for source in sources}
    settings = [f"data_paths={json.dumps(text_paths)}"] if text_paths else []
    if data.tokenizer != BYTES:
        settings.append(f"tokenizer={path_or_placeholder(data.tokenizer, tokenizer)}")
    return "".join(f" --set {shlex.quote(setting)}" for setting in settings)


def initial_model_option(manifest: Manifest, folder: Path, given: Path | None = None) -> str:
    """Return the `--set` option that names this computer's copy of the run's initial model; empty if the run
    starts from random weights. The copy is `given`, or in the run file's `folder`, else written as PATH."""
    if not manifest.init_checkpoint.path:
        return ""
    place = given.absolute() if given else beside(folder, manifest.init_checkpoint.path) or "PATH"
    return f" --set {shlex.quote(f'init_checkpoint={place}')}"


def export_hint(signed: SignedManifest, state: Path, bootstraps: Sequence[str]) -> str:
    """Return a sentence with the command that exports the trained model.

    With one stage, the command reads the state folder `state` of a peer. With several, no peer has the whole
    model, so the command downloads it from live peers through `bootstraps`.
    """
    if len(signed.manifest.stages) == 1:
        return f"export the model with `swarmnet export --hf FOLDER --from {shlex.quote(str(state))}`"
    through = " --bootstrap ".join(bootstraps or ["ADDRESS"])
    return (
        f"the model needs all {len(signed.manifest.stages)} stages: while peers of each are here, export it "
        f"with `swarmnet export --hf FOLDER --run {signed.run_id} --bootstrap {through}`"
    )


def as_key(name: str) -> str:
    """Return a source's name as a YAML key for a peer file, quoted if needed. The name is untrusted."""
    return name if re.fullmatch(r"[A-Za-z][\w.-]*", name, re.ASCII) else json.dumps(name)


def _with_place(message: str, typed: ParsedYaml) -> str:
    """Return an error message with file and line in front: those of the first key in the message that the
    file sets, else those of the whole file."""
    words: list[Location] = [tuple(word.split(".")) for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message)]
    for location in words:
        if location in typed.places:
            return f"{typed.places[location]}: {message}"
    return f"{typed.place(())}: {message}"


def publish(
    run_file: Path,
    identity: Identity,
    out: Path | None = None,
    overrides: Mapping[str, str] | None = None,
    start: InitCheckpoint | None = None,
    bootstraps: Sequence[str] = (),
    data: Data | None = None,
) -> tuple[SignedManifest, Path]:
    """Sign the run of a run file, write the published file, and return the signed run and the file's path:
    `out`, or `<name>.run.json` next to the run file. Raises ConfigError or UserError.

    `start` describes the initial model, if there is one. `bootstraps` are addresses for the published file,
    which the signature does not cover. `data` is the run's, with the measured sizes of its text; None if
    nothing was measured. A run that is published already keeps its sizes.
    """
    manifest = replace(load_manifest(run_file, PeerId(""), overrides), owner=PeerId(identity.peer_id))
    if start is not None:
        manifest = replace(manifest, init_checkpoint=start)
    try:
        _require_digests(manifest)
    except ManifestError as error:
        raise ConfigError([f"{run_file}: {error}"]) from None
    path = out or run_file.with_name(f"{_file_name(manifest.name)}.run.json")
    manifest = _with_text_sizes(manifest, data, path)
    run_id = manifest.run_id()
    try:
        checked_bootstraps = _checked_bootstraps(list(bootstraps))
    except ValueError as error:
        raise ConfigError([f"--bootstrap: {error}"]) from None
    signed = SignedManifest(manifest, identity.sign(owner_statement(run_id)), run_id, checked_bootstraps)
    if len(signed.wire()) > MANIFEST_LIMIT:
        raise ConfigError(
            [
                f"{run_file}: is {len(signed.wire())} bytes when published; "
                f"the limit is {MANIFEST_LIMIT}: shorten the list of sources"
            ]
        )
    _refuse_another_run(path, signed)
    write_atomically(path, published_text(signed).encode())
    return signed, path


def _with_text_sizes(manifest: Manifest, data: Data | None, path: Path) -> Manifest:
    """Return the manifest with the sizes of its text.

    If `path` is already the published file of this run, return its manifest, which keeps the run id. Else the
    sizes are those of `data`; if it is None, return the manifest unchanged.
    """
    with suppress(RunFileError):
        published = load_signed(path).manifest if is_file(path) else manifest
        typed_sources = {source.name: source for source in manifest.data.sources}
        # Undo the measured sizes in the published manifest: it is the same run if nothing else differs.
        unmeasured_sources = []
        for source in published.data.sources:
            typed = typed_sources.get(source.name)
            if typed is not None:
                unmeasured_sources.append(
                    replace(source, **{name: getattr(typed, name) for name in MEASURED})
                )
        unmeasured_data = replace(
            published.data,
            sources=tuple(unmeasured_sources),
            tokenizer_sha256=manifest.data.tokenizer_sha256,
            chat_template_sha256=manifest.data.chat_template_sha256,
        )
        if published != manifest and replace(published, data=unmeasured_data) == manifest:
            return published
    return manifest if data is None else replace(manifest, data=data)


def _require_digests(manifest: Manifest) -> None:
    """Raise ManifestError if the run starts from a model but lacks the digests of its weights."""
    if manifest.init_checkpoint.path and not manifest.init_checkpoint.digests:
        raise ManifestError(
            "init_checkpoint.digests: the weights of no stage are named; publishing fills them in"
        )


def _refuse_another_run(path: Path, signed: SignedManifest) -> None:
    """Raise UserError if `path` holds another published run: its owner may still need it, for invites for
    instance."""
    if not is_file(path):
        return
    try:
        existing = load_signed(path)
    except RunFileError:
        return
    if existing.run_id != signed.run_id:
        keys = ", ".join(_differing_keys(existing.manifest, signed.manifest))
        raise UserError(
            f"{path} is the published run {existing.run_id[:16]}, and this would be another, "
            f"{signed.run_id[:16]}, with another value of {keys}: a run's id is computed from its keys; name "
            "another file with --out, or move that one away"
        )


def _differing_keys(one: object, other: object, name: str = "") -> Iterator[str]:
    """Yield the dotted keys in which two manifests differ."""
    if not is_dataclass(one):
        if one != other:
            yield name
        return
    for key in fields(one):
        dotted = f"{name}.{key.name}" if name else key.name
        yield from _differing_keys(getattr(one, key.name), getattr(other, key.name), dotted)


def published_text(signed: SignedManifest) -> str:
    """Return the published file as readable JSON."""
    return (
        json.dumps(
            {
                "run_id": signed.run_id,
                "signature": signed.signature.hex(),
                "manifest": json.loads(signed.manifest.canonical()),
                **({"bootstraps": signed.bootstraps} if signed.bootstraps else {}),
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def load_signed(source: Path | bytes, run_id: RunId | None = None) -> SignedManifest:
    """Return a published run from its file, or from the bytes of `SignedManifest.wire` that a peer sent.

    Manifest and signature are checked, and the run id if `run_id` is given. Raises RunFileError.
    """
    if isinstance(source, bytes):
        return from_wire(source, run_id)
    try:
        raw = source.read_bytes()
    except FileNotFoundError:
        raise RunFileError(f"{source}: no such file, and no run id (64 hexadecimal digits)") from None
    except OSError as error:
        raise RunFileError(f"{source}: cannot be read: {error.strerror}") from None
    return from_published(raw, str(source), run_id)


def from_published(raw: bytes, source: str, run_id: RunId | None = None) -> SignedManifest:
    """Return the run in the bytes of a published file, after all checks. `source` names the file in errors.
    Raises RunFileError, also if the run is not `run_id`."""
    if len(raw) > 4 * MANIFEST_LIMIT:  # Readable JSON is longer than the canonical form.
        raise RunFileError(f"{source}: is {len(raw)} bytes, too long for a published run")
    try:
        content = _json_object(raw)
        manifest, claimed, signature = (content[key] for key in ("manifest", "run_id", "signature"))
        bootstraps = _checked_bootstraps(content.pop("bootstraps", []))
        if len(content) != 3 or not isinstance(manifest, dict):  # `bootstraps` was removed by `pop`.
            raise ValueError("expected exactly run_id, signature and manifest, and bootstraps or none")
        signed = _checked(_canonical(manifest), bytes.fromhex(signature), run_id)
        if claimed != signed.run_id:
            raise ValueError(f"names run {claimed}, but its manifest is run {signed.run_id}")
    except OtherVersion as error:
        raise OtherVersion(f"{source}: {error}") from None
    except KeyError as error:
        raise RunFileError(f"{source}: is no published run file: {error} is missing") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RunFileError(f"{source}: is no valid published run: {error}") from None
    return replace(signed, bootstraps=bootstraps)


def _checked_bootstraps(addresses: object) -> tuple[str, ...]:
    """Return checked bootstrap addresses. Raises ValueError for too many, or one without a peer id."""
    if not isinstance(addresses, list) or len(addresses) > MAX_BOOTSTRAPS:
        raise ValueError(f"bootstraps: expected a list of at most {MAX_BOOTSTRAPS} multiaddrs")
    for address in addresses:
        if not isinstance(address, str) or not address.isprintable() or len(address) > MAX_ADDRESS_CHARACTERS:
            raise ValueError(f"bootstraps: {str(address)[:80]!r} is no multiaddr")
        bootstrap_multiaddr(address)
    return tuple(addresses)


def parse(canonical: bytes) -> Manifest:
    """Return the manifest in canonical bytes, after checks without a signature. Raises RunFileError."""
    try:
        manifest = _parse(canonical)
        _check(manifest)
    except ValueError as error:
        raise RunFileError(f"is no valid manifest: {error}") from None
    return manifest


def from_wire(data: bytes, run_id: RunId | None = None) -> SignedManifest:
    """Return the manifest in `SignedManifest.wire()` bytes from an untrusted peer. Raises RunFileError."""
    try:
        if not SIGNATURE_BYTES < len(data) <= MANIFEST_LIMIT:
            raise ValueError(f"{len(data)} bytes are not a manifest with its signature")
        return _checked(data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:], run_id)
    except OtherVersion:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise RunFileError(f"the manifest that a peer sent is not valid: {error}") from None


def _checked(canonical: bytes, signature: bytes, run_id: RunId | None) -> SignedManifest:
    """Return the run after all checks: canonical form, keys and values, run id, and the owner's signature.

    Raises ValueError, or OtherVersion if the manifest is for another wire version. If the bytes are of
    another run than `run_id`, it is always ValueError, because the version does not matter then."""
    from protocols.signed.identity import verify  # Loads the cryptography library.

    if run_id is None or hashlib.sha256(canonical).hexdigest() == run_id:
        _require_version(canonical)
    manifest = _parse(canonical)
    if manifest.canonical() != canonical:
        raise ValueError("the manifest is not in canonical form (every key written, sorted, no spaces)")
    actual = manifest.run_id()
    if run_id is not None and actual != run_id:
        raise ValueError(f"it is run {actual}, not {run_id}")
    if not verify(manifest.owner, owner_statement(actual), signature):
        raise ValueError(f"the signature is not the owner's ({manifest.owner}); get the file again")
    _check(manifest)
    _require_digests(manifest)
    return SignedManifest(manifest, signature, actual)


def _require_version(canonical: bytes) -> None:
    """Raise OtherVersion if the manifest has another wire version than this program. Bytes that are no
    manifest are left to later checks."""
    try:
        content = json.loads(canonical)
    except (ValueError, RecursionError):
        return  # The later checks report what is wrong with it.
    version = content.get("wire_version") if isinstance(content, dict) else None
    if type(version) is int and version != WIRE_VERSION:  # `isinstance` would accept true and false.
        advice = "the run is of an older one; ask"
        if version > WIRE_VERSION:
            advice = "this machine's swarmnet is too old; update it (git pull && scripts/setup), or ask"
        raise OtherVersion(
            f"the run speaks wire version {version}, this program {WIRE_VERSION}: {advice} the run's owner "
            "which version to take"
        )


def _parse(canonical: bytes) -> Manifest:
    """Return the manifest in JSON bytes. Raises ValueError, which names a key of the wrong type or value."""
    try:
        # RunFile is a pydantic model with the one key `manifest`.
        return RunFile.model_validate_json(b'{"manifest":' + canonical + b"}").manifest
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(map(str, detail["loc"][1:])) or "manifest"
        raise ValueError(f"{key}: {detail['msg']}") from None


def _json_object(raw: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a key occurs twice, TypeError if `raw` is no object."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    content = json.loads(raw, object_pairs_hook=refuse_duplicates)
    if not isinstance(content, dict):
        raise TypeError("expected a JSON object")
    return content


def _canonical(manifest: dict[str, Any]) -> bytes:
    """Return a manifest's JSON in canonical form."""
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def require_stage(wish: int | str, manifest: Manifest) -> None:
    """Raise UserError if the run lacks the stage that the user wants; `auto` is always possible."""
    last = len(manifest.stages) - 1
    if isinstance(wish, int) and wish > last:
        raise UserError(
            f"stage: {wish}, but the run has 0 to {last}; set stage to {last} or less, or to auto"
        )
