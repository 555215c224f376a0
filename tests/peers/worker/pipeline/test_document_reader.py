"""Private documents are read a limited number of times, whatever happens to the process."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from swarm import TextProcess, sign, tiny_manifest

from peers.config.errors import UserError
from peers.config.peer_file import PeerFile
from peers.worker.pipeline.document_reader import DocumentReader, noise_of, privacy_of, reader_of
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.sampling import IGNORE_INDEX
from swarmnet.run.schema import Data, DocumentPrivacy, TextSource

DOCUMENTS = 21
DATA = Data(
    (TextSource("own", "own"),), seq_len=16, micro_batch_size=4, private=True,
    privacy=DocumentPrivacy(8.0, epochs=2),
)  # fmt: skip
SIGNED = sign(tiny_manifest((3,), data=DATA))


@pytest.fixture
def process(tmp_path):
    (tmp_path / "own").mkdir()
    for number in range(DOCUMENTS):
        (tmp_path / "own" / f"{number:02}.txt").write_bytes(bytes([65 + number]) * (number + 2))
    config = PeerFile(run="ab" * 32, state=tmp_path / "state", data_paths={"own": str(tmp_path / "own")})
    return TextProcess(config)


def reader(process):
    return DocumentReader(process=process, signed=SIGNED, opened=lambda: None, ended=lambda task: None)


async def read(text, most=1000):
    """The documents of all microbatches until there is none, or of so many."""
    found, waits = [], 0
    while len(found) < most and waits < 20:
        microbatch = text.microbatch(MicrobatchId("me", 0))
        if microbatch is None:
            waits += 1
            await asyncio.sleep(0.02)
            continue
        waits = 0
        found.append(microbatch)
    return found


def documents_of(found):
    """Which documents the rows are excerpts of; the letter tells."""
    return Counter(
        int(labels[labels != IGNORE_INDEX][0]) - 65
        for _, rows in found
        for labels in rows
        if (labels != IGNORE_INDEX).any()
    )


async def test_each_document_is_used_once_an_epoch_and_then_no_more(process):
    text = await reader(process).open(frozenset())
    found = await read(text)
    assert documents_of(found) == dict.fromkeys(range(DOCUMENTS), 2)
    assert len(found) == 2 * 6, "the last of an epoch is filled with empty rows"
    inputs, labels = found[0]
    assert inputs.shape == labels.shape == (4, 16)
    assert text.microbatch(MicrobatchId("me", 0)) is None
    spent = privacy_of(text)
    assert spent.epsilon == pytest.approx(8.0)
    assert (spent.documents, spent.epochs, spent.max_epochs) == (DOCUMENTS, 2, 2)
    assert any("as often as data.privacy allows: epsilon 8.00 of 8 spent" in line for line in process.lines)
    await text.close()
    again = await reader(process).open(frozenset())
    assert not await read(again), "nor after a restart"
    await again.close()


async def test_a_killed_peer_uses_no_document_twice_in_an_epoch(process):
    used = Counter()
    for _ in range(40):
        text = await reader(process).open(frozenset())
        used += documents_of(await read(text, most=1))
        for task in text._tasks:  # Killed: nothing is written any more.
            task.cancel()
        await asyncio.gather(*text._tasks, return_exceptions=True)
    assert max(used.values()) <= 2
    assert used.total() > DOCUMENTS, "little is lost"


async def test_a_clean_end_loses_nothing(process):
    used = Counter()
    for _ in range(12):
        text = await reader(process).open(frozenset())
        used += documents_of(await read(text, most=1))
        await text.close()
    assert used == dict.fromkeys(range(DOCUMENTS), 2)


async def test_a_changed_text_is_refused_because_its_uses_are_not_known(process, tmp_path):
    text = await reader(process).open(frozenset())
    await text.close()
    (tmp_path / "own" / "new.txt").write_bytes(b"another document")
    with pytest.raises(
        UserError, match=r"the private text has changed since this peer began, and .*documents"
    ):
        await reader(process).open(frozenset())
    (tmp_path / "own" / "new.txt").unlink()
    (process.config.state / "text" / "documents.json").write_bytes(b"{")
    with pytest.raises(UserError, match="cannot be read"):
        await reader(process).open(frozenset())


async def test_a_text_of_one_document_is_refused(process, tmp_path):
    for path in sorted((tmp_path / "own").iterdir())[1:]:
        path.unlink()
    with pytest.raises(UserError, match=r"has 1 documents, and data\.privacy protects documents: write each"):
        await reader(process).open(frozenset())


async def test_only_a_run_with_noise_is_read_by_documents(process):
    plain = sign(replace(SIGNED.manifest, data=replace(DATA, privacy=DocumentPrivacy())))
    arguments = {"process": process, "exchange": None, "opened": print, "ended": print}
    text = reader_of(signed=plain, **arguments)
    assert noise_of(text, plain.manifest, "cpu") is privacy_of(text) is None
    noisy = await reader_of(signed=SIGNED, **arguments).open(frozenset())
    assert noise_of(noisy, SIGNED.manifest, "cpu").documents_per_sum() == DOCUMENTS // 2
    await noisy.close()
