"""Which windows are drawn follows from run, seed, origin and text alone: what was drawn once is drawn again.

The digests were taken from the reader that drew before both orders had one reader.
"""

import hashlib
import json
from dataclasses import replace
from random import Random

import pytest
from swarm import TextProcess, exchange_alone, sign, tiny_manifest
from tokenizers import Tokenizer

from peers.config.peer_file import PeerFile
from peers.worker.pipeline.text_reader import TextReader
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId, RunId
from swarmnet.run.schema import Data, TextSource

END = "<|end|>"
WORDS = ("call", "me", "by", "my", "name", "naïve", "日本語", "🐝")


def prose(seed: int, words: int) -> str:
    chance = Random(seed)
    return " ".join(chance.choice(WORDS) + "\n" * (chance.random() < 0.1) for _ in range(words))


@pytest.fixture
def places(tmp_path):
    books, letters = tmp_path / "books", tmp_path / "letters.bin"
    for folder in (books / "b", books / "a" / "deep"):
        folder.mkdir(parents=True)
    (books / "z.txt").write_text(prose(1, 3000))
    (books / "c.md").write_text(prose(2, 500))
    (books / "b" / "x.txt").write_bytes(prose(3, 800).encode("utf-16-le")[1:] + b"\xff")
    (books / "a" / "y.ndjson").write_text(lines(range(10, 400)))
    (books / "a" / "deep" / "w.jsonl").write_text(lines(range(400, 420)) + "no JSON\n")
    (books / "a" / "empty.txt").touch()
    (books / "picture.png").write_bytes(b"\0")
    letters.write_bytes(b"a\0letter" * 500)
    return {"books": str(books), "letters": str(letters)}


def lines(seeds) -> str:
    return "".join(json.dumps({"text": prose(seed, seed % 50)}) + "\n" for seed in seeds)


async def digest_of(
    places, tmp_path, *, limit=2**26, tokenizer=None, end="", withdrawn=frozenset(), peer=b"one"
):
    """SHA-256 of four microbatches."""
    sources = tuple(TextSource(name, name) for name in places)
    name = "bytes" if tokenizer is None else "tokenizer.json"
    data = Data(sources, name, seq_len=24, micro_batch_size=3, eos_token=end)
    manifest = tiny_manifest(data=data)
    manifest = replace(manifest, model=replace(manifest.model, vocab_size=400))
    signed, origin = replace(sign(manifest), run_id=RunId("ab" * 32)), Identity.from_seed(peer)
    config = PeerFile(run="ab" * 32, state=tmp_path / "state", data_paths=places, tokenizer=tokenizer)
    config = config.model_copy(update={"max_data_bytes": limit})
    process = TextProcess(config, origin)
    reader = TextReader(
        process=process,
        signed=signed,
        exchange=exchange_alone(process, signed),
        opened=pytest.fail,
        ended=pytest.fail,
    )
    text, digest = await reader.open(withdrawn), hashlib.sha256()
    for counter in range(4):
        inputs, labels = text.microbatch(MicrobatchId(origin.peer_id, counter))
        digest.update(repr((inputs.tolist(), labels.tolist())).encode())
    return digest.hexdigest()[:16]


async def test_a_text_that_is_read_whole(places, tmp_path):
    assert await digest_of(places, tmp_path) == "a961350bc5103b5d"
    assert await digest_of({"books": places["books"]}, tmp_path) == "bf050c8d0bc293bf"
    assert await digest_of(places, tmp_path, peer=b"two") == "6f15a9d5ef0f538f"


async def test_a_part_that_the_peers_key_chooses(places, tmp_path):
    limit = 64 * 1024
    assert await digest_of(places, tmp_path, limit=limit) == "3360c06a2debc4fc"
    assert await digest_of(places, tmp_path, limit=limit, peer=b"two") == "746f9e6838351ec4"
    assert await digest_of(places, tmp_path, limit=limit // 16) == "98be0a4075774622"
    assert await digest_of(places, tmp_path, limit=limit // 16, peer=b"two") == "8cbb68255c9f0954"


async def test_a_text_without_what_was_withdrawn(places, tmp_path):
    gone = {hashlib.sha256(prose(seed, seed % 50).encode()).digest() for seed in (49, 111)}
    gone.add(hashlib.sha256(prose(2, 500).encode()).digest())
    assert await digest_of(places, tmp_path, withdrawn=frozenset(gone)) == "9115d184a9729c42"


async def test_a_text_of_a_tokenizer(places, tmp_path, tokenizer_file):
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(tokenizer_file))
    assert await digest_of(places, tmp_path, tokenizer=tokenizer_file) == "3abd01d669a95128"
    assert await digest_of(places, tmp_path, tokenizer=tokenizer_file, end=END) == "20e5ebf237c817aa"
