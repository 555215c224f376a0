"""`swarmnet demo`: real peers on this machine train a model; one is killed, another joins; it generates text.

Every peer is a process of its own with its own p2pd on 127.0.0.1. The demo's process only starts the peers,
kills one, shows their status, and reads their event logs afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from peers.config.atomic_files import require_free, write_atomically
from peers.config.errors import UserError
from peers.config.peer_file import DemoOptions
from peers.config.run_file import SignedManifest, publish
from peers.data.documents import held_out_text
from peers.lab.processes import demo_report
from peers.lab.processes.demo_table import Moment, table
from peers.lab.processes.local_processes import DemoPeer, start
from peers.state.checkpoint_file import CheckpointError, Model, newest
from peers.telemetry.event_log import LOG_FILE
from peers.tools.model.evaluate import score_weights
from peers.tools.model.export import export
from peers.tools.model.generate import generate
from protocols.signed.identity import load_or_create
from swarmnet.run.sync_methods import METHOD_CONFIGS, PRESETS, MethodName

KILL_AT, JOIN_AT = 0.4, 0.5
"""Parts of the demo's time after which a peer is killed, and a new one is started."""
TRAINING = "training"
"""State of a worker that is training, in its status."""
DRAIN_SECONDS = 8.0
LOOK_SECONDS = 0.25
SAMPLE_TOKENS = 240
PROMPT = "def "
EXPERT_GROUPS = 2
EXPERTS: Mapping[str, object] = {
    "qk_norm": True,
    "intermediate_size": 192,
    "experts": {"num_experts": 4, "top_k": 2, "groups": EXPERT_GROUPS},
}
"""Model keys of a run with experts; a token uses as wide a feed-forward layer as without experts."""
LOOPBACK = {
    "listen": ["/ip4/127.0.0.1/tcp/0"],
    "relay": False,
    "nat": False,
    "metrics": {"listen": "127.0.0.1:0"},
    "log": "json",
    "drain_seconds": DRAIN_SECONDS,
    "auto_rebalance": False,
}


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return 0 if it trained, and 1 if something that it shows did not happen."""
    if options.peers < options.stages:
        raise UserError(f"{options.peers} peers cannot hold {options.stages} stages: one each at least")
    if options.seconds < 10:
        raise UserError("a demo shorter than 10 seconds ends before its peers have started")
    with _folder(options.keep) as folder:
        return asyncio.run(Demo(options, folder).run())


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder for the peers' states: `keep`, or a temporary folder that is printed at the end."""
    if keep is None:
        yield Path(tempfile.mkdtemp(prefix="swarmnet-demo-"))
        return
    require_free(keep, "--keep")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.absolute()


def by_method(method: MethodName, sharded: bool) -> dict[str, Mapping[str, object]]:
    """Return the values of the run file for a method."""
    sync: dict[str, object] = {"method": method}
    values: dict[str, Mapping[str, object]] = {"sync": sync}
    if rate := METHOD_CONFIGS[method].small_model_rate:
        sync["learning_rate"] = rate
    common_steps = METHOD_CONFIGS[method].orthogonalizes_gradients
    if common_steps or method in PRESETS:  # A demo has a few hundred rounds.
        sync |= {"warmup_rounds": 5, "decay_rounds": 500}
    if common_steps:
        sync["fragments"] = 1  # Its links carry all votes of each round.
    if method in PRESETS:  # Eight local steps a round with two peers.
        values["rounds"] = {"global_batch_tokens": 8192}
    if sharded:
        sync["topology"] = "sharded-reduce"
    return values


def stage_layers(stages: int) -> list[int]:
    """Return the layers of each stage, at least four in all.

    The first stages get the remainder, because they have no loss to compute.
    """
    layers = max(4, stages)
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


class Demo:
    def __init__(self, options: DemoOptions, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.console = Console(stderr=False)
        self.peers: list[DemoPeer] = []
        self.boot: DemoPeer | None = None
        self.victim: DemoPeer | None = None
        self.newcomer: DemoPeer | None = None
        self.happened: list[str] = []
        self.began = time.monotonic()

    async def run(self) -> int:
        signed = self._publish()
        try:
            await self._start()
            if self.console.is_terminal:
                with Live(console=self.console, refresh_per_second=4, transient=False) as live:
                    await self._watch(lambda: live.update(self._table(self.happened[-4:])))
                    live.update(self._table(()))  # All events are printed below.
            else:
                await self._watch(lambda: None)
                self.console.print(self._table(()))
        finally:
            trained = time.monotonic() - self.began
            await self._stop()
        return await asyncio.to_thread(self._finish, signed, trained)

    # -- the swarm ------------------------------------------------------------------------------------

    def _publish(self) -> SignedManifest:
        layers = stage_layers(self.options.stages)
        run: dict[str, Any] = {
            "name": "demo",
            "seed": self.options.seed,
            "stages": layers,
            "model": {"num_hidden_layers": sum(layers), **(EXPERTS if self.options.experts else {})},
            "intended_use": "to see a swarm work",
            **by_method(self.options.method, self.options.sharded),
        }
        file = self.folder / "run.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
        signed, _ = publish(file, load_or_create(self.folder / "owner.key"), self.folder / "run.json")
        return signed

    async def _start(self) -> None:
        self._notify("starting a bootstrap and the peers, each with its own p2pd on 127.0.0.1")
        keys: dict[str, object] = {"role": "bootstrap", "run": "run.json", **LOOPBACK}
        self.boot = await start(self.folder, "bootstrap", keys)
        await self.boot.until_listening()
        for number in range(self.options.peers):
            stage = number * self.options.stages // self.options.peers
            self.peers.append(await self._start_worker(f"peer-{number + 1}", stage))

    async def _start_worker(self, name: str, stage: int | str) -> DemoPeer:
        assert self.boot is not None
        keys = {
            "run": "run.json",
            "bootstrap": self.boot.addresses,
            "stage": stage,
            "in_flight": 2,
            "slots": 8,
            **LOOPBACK,
        }
        return await start(self.folder, name, keys)

    def _table(self, happened: Sequence[str]) -> Group:
        elapsed = time.monotonic() - self.began
        return table(Moment(elapsed, self.options.seconds, tuple(self.peers), tuple(happened)))

    async def _watch(self, show: Callable[[], None]) -> None:
        """Show the swarm, kill a peer and start another, until the time is over."""
        seconds = self.options.seconds
        while (elapsed := time.monotonic() - self.began) < seconds:
            show()
            if not self.options.undisturbed and self.victim is None and elapsed >= KILL_AT * seconds:
                self._kill_one()
            if self.newcomer is None and self.victim is not None and elapsed >= JOIN_AT * seconds:
                self.newcomer = await self._start_worker(f"peer-{len(self.peers) + 1}", "auto")
                self.peers.append(self.newcomer)
                self._notify(f"a fresh peer joins as {self.newcomer.name}")
            for peer in self.peers:
                if not peer.alive and peer.killed_at is None:
                    words = " | ".join(list(peer.said)[-3:])
                    raise UserError(f"{peer.name} ended with code {peer.process.returncode}: {words}")
            await asyncio.sleep(LOOK_SECONDS)

    def _kill_one(self) -> None:
        """Send SIGKILL to a random training peer whose stage has another one.

        If there is none and some peers still start, do nothing; on a slow machine the start takes longer.
        """
        training = [peer for peer in self.peers if peer.alive and peer.status.get("state") == TRAINING]
        stages = [peer.status["stage"] for peer in training]
        spare = [peer for peer in training if stages.count(peer.status["stage"]) > 1]
        if not spare and len(training) < len(self.peers):
            return
        self.victim = Random(self.options.seed).choice(spare or training)
        self.victim.kill()
        self._notify(f"{self.victim.name} of stage {self.victim.status.get('stage')} is killed with SIGKILL")

    async def _stop(self) -> None:
        everyone = [*self.peers, *([self.boot] if self.boot is not None else [])]
        await asyncio.gather(*(peer.stop(DRAIN_SECONDS + 4.0) for peer in self.peers))
        await asyncio.gather(*(peer.stop(DRAIN_SECONDS) for peer in everyone))

    def _notify(self, text: str) -> None:
        """Add a message; print it at once unless the live table shows it."""
        self.happened.append(f"{time.monotonic() - self.began:5.1f} s  {text}")
        if not self.console.is_terminal:
            self.console.print(f"  {self.happened[-1]}", highlight=False)

    # -- afterwards -----------------------------------------------------------------------------------

    def _finish(self, signed: SignedManifest, trained: float) -> int:
        """Export and score the trained model, and print and write the report. Returns the exit code: 1 if no
        loss was measured or if digests differ."""
        late = [peer.name for peer in self.peers if not (peer.state / LOG_FILE).exists()]
        if late:
            raise UserError(
                f"{', '.join(late)} had not even started after {trained:.0f} s: slow or busy machine; "
                f"give them longer (--seconds). Their words are in {self.folder}"
            )
        stories = {peer.name: demo_report.read_story(peer.state) for peer in self.peers}
        for peer in self.peers:
            stories[peer.name].alive = peer.killed_at is None
            stories[peer.name].started_at = peer.started_at
        model = self._model(trained)
        weights = model.whole()
        shape, data = model.manifest.model, model.manifest.data
        score = score_weights(weights, shape, held_out_text(), window=data.seq_len)
        folder = self.folder / "model"
        export(folder, shape, model.path())
        victim = self.victim
        killed = (stories[victim.name], victim.killed_at) if victim and victim.killed_at else None
        newcomer = stories[self.newcomer.name] if self.newcomer else None
        report = demo_report.build(
            signed.manifest,
            list(stories.values()),
            killed,
            newcomer,
            score.bits_per_byte,
            score.sha256,
            trained,
        )
        text = b"".join(
            generate(
                weights, shape, PROMPT.encode(), SAMPLE_TOKENS, seed=self.options.seed, window=data.seq_len
            )
        ).decode(errors="replace")
        path = self.options.report or self.folder / "report.json"
        write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())
        self._print_report(report, text, folder, path)
        return 0 if report["loss_end"] is not None and not report["unequal_digests"] else 1

    def _model(self, trained: float) -> Model:
        """Return the newest model of the peers. Raises UserError if a stage has no checkpoint yet."""
        try:
            return newest(self.folder)
        except CheckpointError as error:
            raise UserError(
                f"{error}; the peers settled too few rounds in {trained:.0f} s: give them longer "
                f"(--seconds {3 * self.options.seconds:.0f})"
            ) from None

    def _print_report(self, report: dict[str, object], text: str, model: Path, path: Path) -> None:
        """Print the report: times after the faults, loss, digests, a sample of the model, and its files."""
        notify = self.console.print
        notify()
        for line in self.happened if self.console.is_terminal else ():
            notify(f"  {line}", highlight=False)
        seconds = {
            "next commit in its stage after": report["kill_to_commit_seconds"],
            "first contribution of the newcomer after": report["join_to_contribution_seconds"],
        }
        if self.options.experts:
            seconds["its experts are taken up by another after"] = report["kill_to_experts_seconds"]
        if self.victim is None:  # No peer joined either.
            seconds.clear()
            too_few = "too few trained in time; give them longer (--seconds)"
            why = "as asked" if self.options.undisturbed else too_few
            notify(f"  no peer was killed: {why}", highlight=False)
        for what, value in seconds.items():
            shown = f"{value:.2f} s" if isinstance(value, float) else "never"
            notify(f"  {what} {shown}", highlight=False)
        notify(
            f"  loss {report['loss_start']:.3f} -> {report['loss_end']:.3f} nats per byte, "
            f"{report['bits_per_byte']:.3f} bits per byte on held-out text, "
            f"{report['tokens']:,} tokens, {report['rounds']} rounds",
            highlight=False,
        )
        unequal = report["unequal_digests"]
        notify(f"  digests: {'all shared rounds equal' if not unequal else f'UNEQUAL: {unequal}'}")
        notify()
        notify("  what it writes:", highlight=False)
        for line in (PROMPT + text).splitlines():
            notify(f"    {line}", highlight=False, markup=False)
        notify()
        notify(f"  model       {model}  (Hugging Face format)", highlight=False)
        notify(f"  report      {path}", highlight=False)
        notify(f"  peers       {self.folder}  (checkpoints, event logs, peer files)", highlight=False)
        if self.options.keep is None:
            notify(f"  remove with rm -r {self.folder}", highlight=False)
