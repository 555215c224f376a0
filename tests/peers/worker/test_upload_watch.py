"""A volunteer hears that the upload is too slow: before it trains, and by what becomes of its work."""

from dataclasses import replace

import pytest
from swarm import Swarm, sign, tiny_manifest

from peers.config.peer_file import PeerFile
from peers.lab.world.virtual_time import run
from peers.telemetry.event_fold import PeerTimeline
from peers.telemetry.event_log import LogLine
from peers.worker.watch.upload_watch import UploadWatch, upload_words, weakest_stage
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import SignedRecord
from swarmnet.resources.upload_need import UploadVerdict, needed_upload

MANIFEST = tiny_manifest()


def record(name, stage, speed=20_000.0, state="training"):
    return SignedRecord(peer=name, record=PeerRecord(name, stage, "worker", [], 7, speed, "0", state=state),
                        sequence=1)  # fmt: skip


OTHERS = {name: record(name, stage) for stage, name in enumerate("abc")}


def watch(state, upload=None, story=None):
    """A watch, and what it says."""
    config = PeerFile(run="ab" * 32, state=state, limits={"upload": upload} if upload else {})
    said = []
    return UploadWatch(lambda: config, story or PeerTimeline(), lambda _topic, text: said.append(text)), said


def test_a_limit_that_is_too_low_is_named_before_training_with_the_command_that_raises_it(tmp_path):
    found, said = watch(tmp_path, "80kbit/s")
    (tmp_path / "peer.yaml").touch()
    found.look(sign(MANIFEST), OTHERS, 1)
    found.look(sign(MANIFEST), OTHERS, 1)
    (words,) = said
    assert found.warnings == (words,)
    assert "Your upload (0.1 Mbit/s) is too slow for this run. It needs about " in words
    assert f"`swarmnet join --state {tmp_path} --set limits.upload=" in words
    raised = words.rpartition("limits.upload=")[2].rstrip("`")
    faster, _ = watch(tmp_path, raised)
    faster.look(sign(MANIFEST), OTHERS, 1)
    assert faster.warnings == (), "the printed limit is enough"


def test_a_newcomer_is_given_no_command_of_a_peer_that_is_not_there(tmp_path):
    config = PeerFile(run="ab" * 32, state=tmp_path, limits={"upload": "80kbit/s"})
    verdict = UploadVerdict(config.limits.upload, 2 * config.limits.upload)
    _, cure = upload_words(config, verdict, runs=False)
    assert cure == "`swarmnet join RUN --set limits.upload=0.2Mbit/s`"


@pytest.mark.parametrize(
    "others", [None, {}, {"a": OTHERS["a"]}, {**OTHERS, "b": record("b", 1, state="joining")}]
)
def test_nothing_is_said_where_the_pace_of_the_run_is_not_known(tmp_path, others):
    found, _ = watch(tmp_path, "80kbit/s")
    found.look(sign(MANIFEST), others, 1)
    assert not found.warnings


def test_a_newcomer_is_judged_for_the_slowest_stage():
    others = [record("a", 0).record, record("b", 1, 900.0).record, record("c", 2).record]
    assert weakest_stage(MANIFEST, others) == 1


def test_a_peer_whose_line_is_too_slow_for_its_rounds_says_so(tmp_path):
    """Three peers hold the whole model; the line of one bears a tenth of its group's contributions."""
    manifest = tiny_manifest((3,))
    manifest = replace(manifest, rounds=replace(manifest.rounds, global_batch_tokens=64))
    tale = PeerTimeline()
    found, _ = watch(tmp_path, story=tale)

    async def story():
        swarm.open()
        for name in "abc":
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: swarm.committed() > 100, 60.0)
        pace = swarm.committed() * manifest.microbatch_tokens / swarm.loop.time()
        slow = swarm.members["c"]
        line = swarm.network.transports[slow.peer].uplink
        line.bytes_per_second = needed_upload(manifest, 0, pace, 3) / 10
        await swarm.during(30.0)
        for note in swarm.notes:
            if note.name == "c":
                tale.take(LogLine(note.time, note.time, note.what))
        swarm.check()
        for name in swarm.living():
            await swarm.crash(name)

    swarm = Swarm(manifest, stub=True)
    run(story())
    assert found.is_doubted
    found.look(swarm.signed, {}, 0)
    assert "contributions came too late" in found.warnings[0]
