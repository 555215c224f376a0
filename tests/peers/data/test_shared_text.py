"""The text that peers send to each other: what publishing states, what a peer keeps, and what is refused."""

import hashlib
import json
from dataclasses import replace

import pytest
from swarm import tiny_manifest

from peers.config.peer_file import PeerFile
from peers.config.run_file import load_manifest, publish
from peers.data.documents import ReadSummary, TextError
from peers.data.local_text import kept_shards, missing_text, places_here, tokenizer_here
from peers.data.shards import INDEX, read_index
from peers.data.shared_text import needed_blobs, require_tokenizer, shared_files
from peers.state.chunks.file_download import FileDownload
from peers.state.chunks.text_shelf import TextShelf
from peers.tools.owner.run_check import counted_data
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest_check import ManifestError, check
from swarmnet.run.schema import Data, TextSource

OWNER = Identity.from_seed(b"owner")
FILES, FILE_BYTES = 6, 3000


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr("peers.data.shards.MIN_SHARD_BYTES", 1000)


def written(folder, access="open", **source):
    """The run file of a run whose text is in `books` beside it."""
    books = folder / "books"
    books.mkdir(exist_ok=True)
    for number in range(FILES):
        (books / f"{number}.txt").write_bytes(bytes([97 + number]) * FILE_BYTES)
    keys = {"name": "shared", "access": access, "data": {"seq_len": 16, "sampling": "epoch"}}
    keys["data"]["sources"] = [{"name": "books", "path": "books", "licence": "CC0-1.0", **source}]
    file = folder / "run.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    return file


def published(folder, **keys):
    file = written(folder, **keys)
    data = counted_data(load_manifest(file, PeerId("")), folder, None)
    return publish(file, OWNER, folder / "run.json", data=data)[0]


def test_publishing_states_index_number_and_size_of_a_free_text_and_again_gives_the_same_run(tmp_path):
    first = published(tmp_path)
    (source,) = first.manifest.data.sources
    assert source.is_shared
    assert (source.files, source.file_bytes) == (FILES, FILES * FILE_BYTES)
    assert source.index == hashlib.sha256((tmp_path / "books" / INDEX).read_bytes()).hexdigest()
    assert published(tmp_path).run_id == first.run_id
    (tmp_path / "books" / "0.txt").write_bytes(b"changed")
    with pytest.raises(TextError, match=r"swarmnet index .* --replace"):
        counted_data(load_manifest(tmp_path / "run.yaml", PeerId("")), tmp_path, None)


@pytest.mark.parametrize(
    "keys",
    [
        {"access": "invite"},
        {"licence": "unknown"},
        {"kind": "private"},
        {"kind": "crawled"},
        {"shared": "none"},
    ],
    ids=str,
)
def test_a_text_that_is_not_free_stays_where_it_is(tmp_path, keys):
    (source,) = published(tmp_path, **keys).manifest.data.sources
    assert not source.is_shared
    assert not (tmp_path / "books" / INDEX).exists()


def test_one_file_is_shared_as_a_folder_is(tmp_path):
    written(tmp_path)
    (tmp_path / "book.txt").write_bytes(b"one book " * 1000)
    signed = published(tmp_path, path="book.txt")
    (source,) = signed.manifest.data.sources
    assert (source.files, source.file_bytes, source.is_shared) == (1, 9000, True)
    assert (tmp_path / "book.txt.index.json").exists()
    (entry,) = read_index(source, str(tmp_path / "book.txt"))
    assert entry.name == "book.txt"


@pytest.mark.parametrize("source", [{"licence": "unknown"}, {"kind": "private"}, {"kind": "users"}], ids=str)
def test_a_text_that_may_not_be_given_away_is_not_shared_on_request_either(source):
    books = TextSource("books", "books", **{"licence": "MIT", "shared": "peers", **source})
    data = Data((books,), seq_len=16)
    with pytest.raises(ManifestError, match="gives the text to anyone"):
        check(tiny_manifest(data=data))


# -- a peer without a copy -----------------------------------------------------------------------------


def peer(folder, **keys):
    return PeerFile(run="ab" * 32, state=folder / "state", **keys)


def with_index(folder, signed, config):
    """What `TextExchange.prepare` does: the index is here."""
    (source,) = signed.manifest.data.sources
    fetched = config.state / "text" / "fetched"
    fetched.mkdir(parents=True)
    (fetched / source.index).write_bytes((folder / "books" / INDEX).read_bytes())


def kept(signed, config, key=b"\1" * 32, withdrawn=frozenset(), data=None):
    data = data or signed.manifest.data
    shards = kept_shards(signed.manifest, data, config, key, withdrawn, ReadSummary())
    return [file.name for some in shards.values() for shard in some for file in shard.files]


def test_the_user_decides_whether_and_how_much_comes(tmp_path):
    signed = published(tmp_path)
    manifest, config = signed.manifest, peer(tmp_path)
    assert missing_text(manifest, config) == ""
    assert "max_text_bytes is 0" in missing_text(manifest, peer(tmp_path, max_text_bytes=0))
    assert needed_blobs(manifest, config, places_here(manifest, config)) == {
        manifest.data.sources[0].index: "the index of `books`"
    }
    with_index(tmp_path, signed, config)
    assert needed_blobs(manifest, config, places_here(manifest, config)) == {}
    assert len(kept(signed, config)) == FILES
    few = peer(tmp_path, max_text_bytes=2 * FILE_BYTES + 1)
    parts = {tuple(kept(signed, few, bytes([key]) * 32)) for key in range(8)}
    assert {len(part) for part in parts} == {2}
    assert len({name for part in parts for name in part}) > 2, "peers keep different parts"
    with pytest.raises(TextError, match=r"the smallest has 3,000 bytes, and max_text_bytes leaves 10"):
        kept(signed, peer(tmp_path, max_text_bytes=10))


def test_with_random_sampling_only_what_is_read_comes(tmp_path):
    signed, config = published(tmp_path), peer(tmp_path, max_data_bytes=1 << 16)
    with_index(tmp_path, signed, config)
    sampled = replace(signed.manifest.data, sampling="random")
    assert len(kept(signed, config, data=sampled)) == FILES
    small = config.model_copy(update={"max_data_bytes": 2 * FILE_BYTES})
    assert len(kept(signed, small, data=sampled)) == 2


def test_an_index_that_states_more_than_the_run_is_refused(tmp_path):
    signed, config = published(tmp_path), peer(tmp_path)
    with_index(tmp_path, signed, config)
    (source,) = signed.manifest.data.sources
    less = replace(source, file_bytes=source.file_bytes - 1)
    with pytest.raises(TextError, match=r"6 files of 18,000 bytes; the run states 6 of 17,999"):
        read_index(less, places_here(signed.manifest, config)["books"])


def test_the_tokenizer_comes_too_and_another_one_is_refused(tmp_path):
    signed = published(tmp_path)
    sha256 = hashlib.sha256(b"{}").hexdigest()
    data = replace(signed.manifest.data, tokenizer="tokenizer.json", tokenizer_sha256=sha256)
    manifest, config = replace(signed.manifest, data=data), peer(tmp_path)
    assert missing_text(manifest, config) == ""
    assert needed_blobs(manifest, config, places_here(manifest, config))[sha256] == "the tokenizer"
    (tmp_path / "mine.json").write_text("[]")
    own = peer(tmp_path, tokenizer=tmp_path / "mine.json")
    with pytest.raises(TextError, match=r"mine.json is not the run's"):
        require_tokenizer(manifest, tokenizer_here(manifest, own))


async def test_a_file_that_changed_on_disk_is_not_sent(tmp_path):
    signed = published(tmp_path)
    config, shelf = peer(tmp_path, data_paths={"books": str(tmp_path / "books")}), TextShelf()
    shelf.replace(shared_files(signed.manifest, config, places_here(signed.manifest, config), ()), {})
    entry = read_index(signed.manifest.data.sources[0], str(tmp_path / "books"))[0]
    digest = bytes.fromhex(entry.sha256)
    assert await shelf.find(digest, 0) == b"a" * FILE_BYTES
    assert await shelf.find(digest, 1) is None
    (tmp_path / "books" / "0.txt").write_bytes(b"b" * FILE_BYTES)
    assert await shelf.find(digest, 0) is None
    (tmp_path / "books" / "0.txt").unlink()
    assert await shelf.find(digest, 0) is None


async def test_a_download_keeps_what_is_right_and_gets_its_name_when_it_is_whole(tmp_path):
    size, chunk = 300_000, 128 * 1024
    content = bytes(range(250)) * 1200
    hashes = [hashlib.sha256(content[at : at + chunk]).digest() for at in range(0, size, chunk)]
    path = tmp_path / "text" / "file"
    first = FileDownload(path, hashes, size)
    assert await first.resume() == set()
    first.put(1, content[chunk : 2 * chunk])
    await first.close()
    assert not path.exists()
    part = path.with_name("file.part")
    damaged = bytearray(part.read_bytes())
    second = FileDownload(path, hashes, size)
    assert await second.resume() == {1}
    damaged[chunk + 5] ^= 1
    part.write_bytes(damaged)
    third = FileDownload(path, hashes, size)
    assert await third.resume() == set()
    for index in range(3):
        third.put(index, content[index * chunk : (index + 1) * chunk])
    await third.finish()
    assert path.read_bytes() == content
    assert not part.exists()


async def test_a_full_disk_ends_a_download_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.state.chunks.file_download.FREE_BYTES", 1 << 62)
    with pytest.raises(OSError, match=r"make room there, or lower max_text_bytes"):
        await FileDownload(tmp_path / "file", [b""], 10).resume()
