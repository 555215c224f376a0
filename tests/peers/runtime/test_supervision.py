"""A peer whose p2pd dies or hangs goes on; one that cannot go on says why and ends, and never just hangs."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import QUIET, p2pd_of, times, until

from peers.config.errors import UserError
from peers.config.run_file import publish
from peers.lab.processes.local_processes import DemoPeer, start
from peers.process.sessions import with_ports
from peers.runtime.supervision import (
    HANG_LOOKS,
    FatalError,
    Watchdog,
    is_memory,
    reason,
    unless_failed,
    until_one_ends,
)
from peers.telemetry import event_log
from protocols.signed.identity import load_or_create

ROOT = Path(__file__).parents[3]

RUN = """
name: small
seed: 1
stages: [1]
model: {num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2,
  num_key_value_heads: 2, head_dim: 16, intermediate_size: 64}
data: {seq_len: 64, micro_batch_size: 2}
rounds: {global_batch_tokens: 256}
"""


@pytest.fixture
def run_json(tmp_path):
    """A published run of one small stage; its folder."""
    (tmp_path / "run.yaml").write_text(RUN)
    publish(tmp_path / "run.yaml", load_or_create(tmp_path / "owner.key"), tmp_path / "run.json")
    return tmp_path


@contextlib.asynccontextmanager
async def training(folder: Path):
    """One peer that trains alone."""
    peer = await start(folder, "alone", {"run": "run.json", "stage": 0, **QUIET})
    try:
        await peer.until_listening()
        await until(lambda: len(times(peer.state, "settled")) > 3, "it trains")
        yield peer
    finally:
        await peer.stop(60.0)


async def goes_on(peer: DemoPeer, after: float) -> None:
    before = peer.addresses[-1]
    await until(lambda: any(at > after for at in times(peer.state, "in_step")), "in step again")
    again = max(times(peer.state, "in_step"))
    await until(lambda: max(times(peer.state, "committed")) > again, "it commits")
    assert peer.alive
    assert peer.addresses[-1] == before, "the same identity and port"
    restored = [event for event in event_log.read(peer.state / "events.jsonl") if event.name == "restored"]
    assert restored, "it went on with the weights it had, not from the seed"


@pytest.mark.loopback
@pytest.mark.slow
async def test_a_peer_whose_p2pd_is_killed_starts_it_again_where_it_was_and_trains_on(run_json):
    async with training(run_json) as peer:
        killed = time.time()
        os.kill(p2pd_of(peer.process.pid), signal.SIGKILL)
        await goes_on(peer, killed)
    assert peer.process.returncode == 0


@pytest.mark.loopback
@pytest.mark.slow
async def test_a_p2pd_that_hangs_is_noticed_killed_and_started_again(run_json):
    async with training(run_json) as peer:
        frozen = time.time()
        os.kill(p2pd_of(peer.process.pid), signal.SIGSTOP)
        await until(lambda: any("hung" in text for text in peer.said), "it notices")
        await goes_on(peer, frozen)
    assert peer.process.returncode == 0


def run_with(folder: Path, sabotage: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run the peer in a process that first does `sabotage` to itself; `more` keys of its peer file."""
    keys = {"run": "run.json", "state": "alone", "stage": 0, **QUIET, **more}
    file = folder / "alone.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    program = textwrap.dedent(sabotage) + textwrap.dedent(f"""
        from peers.cli.main import main
        main(["run", {str(file)!r}])
    """)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=180.0,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def assert_ended_with(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 1, done.stderr
    said = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    faults = [line["text"] for line in said if line["event"] == "fault"]
    assert len(faults) == 1, done.stderr
    assert words in faults[0]


@pytest.mark.loopback
@pytest.mark.slow
def test_a_fault_in_the_compute_thread_ends_the_peer_with_its_reason(run_json):
    done = run_with(run_json, """
        from swarmnet.model.stage_compute import StageCompute
        original, calls = StageCompute.finish, []
        def finish(self, *arguments):
            calls.append(1)
            if len(calls) > 5:
                raise ZeroDivisionError("a mistake in the program")
            return original(self, *arguments)
        StageCompute.finish = finish
    """)  # fmt: skip
    assert_ended_with(done, "ZeroDivisionError: a mistake in the program")
    assert "Traceback" not in done.stderr


@pytest.mark.loopback
@pytest.mark.slow
def test_a_peer_out_of_memory_ends_with_advice(run_json):
    done = run_with(run_json, """
        import resource, torch
        from pathlib import Path
        from swarmnet.model.stage_compute import StageCompute
        original, calls = StageCompute.finish, []
        def finish(self, *arguments):
            calls.append(1)
            if len(calls) == 6:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), used + (32 << 20)))
            if len(calls) > 6:
                self.hoard = [*getattr(self, "hoard", []), torch.zeros(1 << 20)]
            return original(self, *arguments)
        StageCompute.finish = finish
    """)  # fmt: skip
    assert_ended_with(done, "out of memory")
    assert "fewer `slots`" in done.stderr


@pytest.mark.loopback
@pytest.mark.slow
def test_a_blocked_event_loop_ends_the_peer_with_all_stacks(run_json):
    done = run_with(run_json, """
        import time
        from peers.runtime import supervision
        from peers.runtime.liveness import Pulse
        supervision.HANG_LOOKS = 3
        original = Pulse.run
        async def run(self):
            import asyncio
            asyncio.get_running_loop().call_later(3.0, lambda: time.sleep(3600))
            await original(self)
        Pulse.run = run
    """)  # fmt: skip
    assert_ended_with(done, "the event loop has not turned")
    assert "time.sleep(3600)" in done.stderr or "in <lambda>" in done.stderr


@pytest.mark.loopback
@pytest.mark.slow
def test_a_peer_whose_disk_is_full_says_so_trains_on_and_saves_again_when_there_is_room(run_json):
    done = run_with(run_json, """
        import os, resource, signal, sys, threading, time
        from pathlib import Path
        limit = resource.RLIMIT_FSIZE  # A write beyond it fails as on a full disk.
        hard = resource.getrlimit(limit)[1]
        heard = ""
        say = sys.stderr.write
        def listen(text):
            global heard
            heard += text
            return say(text)
        sys.stderr.write = listen
        def story():
            folder = Path("STATE/checkpoints")
            while not list(folder.glob("*.safetensors")):
                time.sleep(0.1)
            resource.setrlimit(limit, (4096, hard))
            end = time.monotonic() + 60
            while not all(text in heard for text in ("older checkpoint is intact", "events wait")):
                if time.monotonic() > end:
                    os._exit(3)  # The disk was full for a minute and nothing was said.
                time.sleep(0.1)
            before = sorted(path.name for path in folder.iterdir())
            resource.setrlimit(limit, (hard, hard))
            (folder.parent / "before").write_text(" ".join(before))
            while sorted(path.name for path in folder.glob("*.safetensors")) == before:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=story, daemon=True).start()
    """.replace("STATE", str(run_json / "alone")), checkpoint_seconds=1)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    warnings = [line["text"] for line in said if line["event"] in ("event_log", "checkpoint_failed")]
    assert any("cannot be written" in text and "older checkpoint is intact" in text for text in warnings)
    assert any("training continues, events wait" in text for text in warnings)
    assert any("events lost meanwhile: 0" in text for text in warnings)
    state = run_json / "alone"
    kept = (state / "before").read_text().split()
    assert all(name.endswith(".safetensors") for name in kept)
    settled = [event.fields["round"] for event in event_log.read(state / "events.jsonl")
               if event.name == "settled"]  # fmt: skip
    assert settled == list(range(settled[-1] + 1)), "no round is missing in its log"


# -- the parts --------------------------------------------------------------------------------------------


async def test_work_that_waits_for_ever_ends_when_something_else_fails():
    failed = asyncio.get_running_loop().create_future()
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    asyncio.get_running_loop().call_soon(failed.set_result, ZeroDivisionError("no"))
    with pytest.raises(FatalError, match="ZeroDivisionError: no"):
        await unless_failed(work(), failed)
    assert ended == [True]


async def test_of_works_done_at_once_the_first_that_fails_ends_the_others_and_is_raised():
    ended = []

    async def for_ever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asyncio.current_task().get_name())

    async def fails():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await until_one_ends(one=for_ever(), two=fails(), three=for_ever())
    assert sorted(ended) == ["one", "three"]


async def test_what_no_restart_would_mend_is_no_fault():
    failed = asyncio.get_running_loop().create_future()
    failed.set_result(UserError("the run's owner has banned this peer"))
    with pytest.raises(UserError, match="has banned this peer"):
        await unless_failed(asyncio.Event().wait(), failed)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_no_memory_is_told_from_other_faults(error, memory):
    assert is_memory(error) == memory
    assert ("out of memory" in reason(error)) == memory


@pytest.mark.parametrize(
    ("turning", "seconds", "words"),
    [(False, 0.0, "event loop has not turned"), (True, 1e6, "one piece of compute")],
)
def test_the_watchdog_ends_a_process_that_hangs(turning, seconds, words, capfd):
    ended, said, turns = [], [], iter(range(10**9))
    dog = Watchdog(
        turns=lambda: next(turns) if turning else 7,
        working_seconds=lambda: seconds,
        notify=said.append,
        end=ended.append,
        look_seconds=0.001,
    )
    dog.start()
    dog._thread.join(30)
    assert ended == [1]
    assert words in said[0]
    assert "test_the_watchdog_ends_a_process_that_hangs" in capfd.readouterr().err


def test_the_watchdog_lets_a_process_live_that_turns():
    ended, looks = [], []

    def turns():
        looks.append(1)
        if len(looks) > 3 * HANG_LOOKS:
            dog.stop()
        return len(looks) // (HANG_LOOKS - 1)  # Slow, but it turns.

    dog = Watchdog(
        turns=turns,
        working_seconds=lambda: 0.0,
        notify=lambda text: None,
        end=ended.append,
        look_seconds=0.001,
    )
    dog.start()
    dog._thread.join(30)
    assert ended == []


def test_a_restarted_p2pd_listens_on_the_ports_that_it_had():
    listen = ("/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/4001", "/dns/a")
    addresses = ("/ip4/10.0.0.1/tcp/1111", "/ip4/127.0.0.1/tcp/1111", "/ip4/127.0.0.1/udp/2222/quic-v1")
    assert with_ports(listen, addresses) == (
        "/ip4/0.0.0.0/tcp/1111", "/ip4/127.0.0.1/udp/2222/quic-v1", "/ip4/127.0.0.1/tcp/4001", "/dns/a",
    )  # fmt: skip
    assert with_ports(listen, ()) == listen
