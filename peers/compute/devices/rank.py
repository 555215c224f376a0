"""The process of one device: carries out the peer's orders, in step with the other devices.

Each device has a share of the stage's weights and optimizer state. The process ends when the peer closes the
connection. It communicates only with the other devices of its peer, writes nothing to the disk, and has no
identity."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as group
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from peers.compute.devices import device_requests as orders
from peers.compute.devices.channel import Channel, ChannelClosed
from peers.compute.devices.device_requests import Answer, DeviceFailed, Done, InputRefused, Order
from peers.compute.process_memory import trim
from peers.config.quantities import split_host_and_port
from peers.config.run_file import parse
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import Computing
from swarmnet.model.computing.shares import Shares
from swarmnet.model.flat_layout import trained_layout
from swarmnet.model.stage_compute import LastStageResult, StageCompute, StageError
from swarmnet.model.state_layout import ledger_layout
from swarmnet.optimizer.device_groups.device_group import MultiDevice
from swarmnet.optimizer.device_groups.payload import Divisible
from swarmnet.optimizer.method import GradientError, method_of
from swarmnet.optimizer.replica import Replica

OTHERS_SECONDS = 120.0
"""Time limit of a collective operation. Devices start within milliseconds of each other, so one may be ahead
by the longest part of a layer's work. After it this process ends, and with it all."""

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): a signal for the end of the parent."""
TRIM_SECONDS = 30.0
"""The same interval as in the peer's own process (`peers/worker/role.py`)."""


class Device:
    """This device's share of a stage."""

    def __init__(self, begin: orders.Begin) -> None:
        from swarmnet.model.computing.spread_weights import SpreadWeights, total

        manifest, device = parse(begin.manifest), torch.device(begin.device)
        torch.set_num_threads(begin.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_store_of(begin),
            rank=begin.rank,
            world_size=begin.devices,
            timeout=timedelta(seconds=OTHERS_SECONDS),
        )
        span = manifest.span(begin.stage)
        # All parameters: runs with frozen ones are refused before.
        whole = trained_layout(manifest, begin.stage)
        computing = Computing(begin.dtype, begin.activation_checkpointing)
        weights = SpreadWeights(
            shape=manifest.model, span=span, layout=whole, computing=computing, device=device
        )
        self.compute = StageCompute(
            shape=manifest.model, span=span, layout=whole, computing=computing, device=device, weights=weights
        )
        shares = Shares(whole, begin.devices)
        self.layout = shares.layout(begin.rank)
        self.device = device
        self.method = method_of(manifest, self.layout, device)
        assert isinstance(self.method, Divisible), "peers/compute/devices/part.py refuses all others"
        self.method.use_device_group(MultiDevice(shares, begin.rank, total))
        if self.method.own is not None and begin.optimizer_state == "cpu":
            self.method.own.offload_optimizer_state()
        self._ledger_size = ledger_layout(manifest.sync).size
        self._state_to_send = self.method.state.size - (self._ledger_size if begin.rank else 0)
        """Numbers of the state that this device sends. Every device has the whole agreement ledger, and the
        first one sends it."""
        self._replica: Replica | None = None

    @property
    def replica(self) -> Replica:
        assert self._replica is not None, "Hold comes first"
        return self._replica

    def do(self, order: Order, tensors: list[Tensor]) -> tuple[Answer, list[Tensor]]:
        """Carry out an order. Returns the answer and its tensors: for some orders this device's share of the
        settled state, or the ledger in it. Input that the stage or the optimizer method refuses is answered
        with `InputRefused`; other errors are raised."""
        try:
            if isinstance(order, orders.Forward | orders.Finish | orders.Backward):
                return self._compute_microbatch(order, tensors)
            if isinstance(order, orders.GetSettledState):
                return Done(), [self.replica.settled_now()[: self._state_to_send]]
            if isinstance(order, orders.GetLedger):
                return Done(), [self.replica.settled_now()[-self._ledger_size :]]
            return self._change_state(order, tensors), []
        except StageError as error:
            return InputRefused("stage", str(error)), []
        except GradientError as error:
            return InputRefused("gradient", str(error)), []

    def _compute_microbatch(
        self, order: orders.Forward | orders.Finish | orders.Backward, tensors: list[Tensor]
    ) -> tuple[Answer, list[Tensor]]:
        """Compute this device's sequences of a microbatch: forward, backward, or both in the last stage
        (`Finish`). Returns the answer with the outputs or the gradients at the inputs. There is no tensor if
        this device has none of the sequences, or in the first stage, whose inputs have no gradient."""
        match order:
            case orders.Forward(key, scale):
                inputs, *tokens = tensors
                output = self.compute.forward(key, inputs, scale, *tokens)
                has_sequences = self.compute.counts(len(inputs))
                return Done(), [output] if has_sequences else []
            case orders.Finish(key):
                return _last_stage_answer(self.compute.finish(key, *tensors))
            case orders.Backward(key):
                gradient = self.compute.backward(key, *tensors)
                return Done(), [] if gradient is None else [gradient]

    def _change_state(self, order: Order, tensors: list[Tensor]) -> Answer:
        """Carry out an order on the weights, rounds or optimizer of this device's share. A replica is the
        settled weights and open rounds. Returns `Done`, with the result that the order asks for: a payload
        (an encoded contribution) or counts of votes. Raises ValueError for any other order."""
        method = self.method
        match order:
            case orders.Hold(settled_round):
                units = tensors[0].to(self.device)
                self._replica = None  # The old replica is freed first: memory may not suffice for both.
                self._replica = Replica(
                    layout=self.layout, method=method, units=units, settled_round=settled_round
                )
            case orders.Publish(ahead):
                # Compute with these weights from now on; `ahead` adds the expected step of the next round.
                self.compute.publish(self.replica.live_tiles(ahead))
            case orders.Drop(key):
                self.compute.drop(key)  # The autograd graph of a microbatch.
            case orders.Contribute(tokens, round, peer):
                payload = self.compute.use_gradient(
                    lambda gradient: method.contribute(gradient, tokens, round, PeerId(peer))
                )
                return self._payload_answer(payload)
            case orders.LocalStep(tokens, round, factor):
                assert method.own is not None
                optimizer = method.own
                self.compute.use_gradient(lambda gradient: optimizer.step(gradient, tokens, round, factor))
            case orders.EncodeDelta(round, peer):
                assert method.own is not None
                return self._payload_answer(method.own.encode_delta(round, PeerId(peer)))
            case orders.Close(round, chain):
                self.replica.close(round, chain)
                return Done(corrections=self.replica.corrections)
            case orders.RestoreOnDevice(round, peer, payload, shards):
                # The round settled without this contribution: its values return to the momentum.
                method.give_back(payload, round, PeerId(peer), shards)
            case orders.AddOnDevice(round, peer, payload):
                self.replica.add(round, PeerId(peer), payload)
                return Done(corrections=self.replica.corrections)
            case orders.RemoveOnDevice(round, peer):
                self.replica.remove(round, PeerId(peer))
                return Done(corrections=self.replica.corrections)
            case orders.RateOnDevice(round, factor):
                self.replica.rate(round, factor)  # A factor on the learning rate of the round.
                return Done(corrections=self.replica.corrections)
            case orders.ApplyOnDevice(round):
                self.replica.apply(round)
            case orders.MeasureAgreement(round, me):
                votes = self.replica.vote_agreement(round, PeerId(me))
                if votes is not None:
                    return Done(vote_agreement=(votes.agreed, votes.opposed, votes.alone))
            case _:
                raise ValueError(f"no order of a round: {order}")
        return Done()

    def _payload_answer(self, payload: bytes) -> Done:
        return Done(
            payload=payload, gradient_norm=self.method.gradient_norm, momentum_norm=self.method.momentum_norm
        )


def _store_of(begin: orders.Begin) -> Store:
    """Return the store through which the devices find each other: a file on one machine; with several nodes
    a server in the process of the first device."""
    if not begin.store.startswith(orders.TCP):
        return FileStore(begin.store, begin.devices)
    host, port = split_host_and_port(begin.store.removeprefix(orders.TCP))
    timeout, serves = timedelta(seconds=OTHERS_SECONDS), begin.rank == 0
    listener = begin.store_descriptor if serves else None
    return TCPStore(host, port, begin.devices, serves, timeout, master_listen_fd=listener)


def _last_stage_answer(finished: LastStageResult) -> tuple[Answer, list[Tensor]]:
    gradient = finished.hidden_gradient
    return Done(finished.loss_sum, finished.tokens), [] if gradient is None else [gradient]


def serve(channel: Channel[Answer, Order]) -> None:
    """Carry out orders until the peer closes its side; the first, `Begin`, creates the device's share. On an
    error, report it to the peer and raise it. Freed memory returns to the system every TRIM_SECONDS."""
    device: Device | None = None
    trimmed = time.monotonic()
    while True:
        try:
            order, tensors = channel.receive()
        except ChannelClosed:
            return
        try:
            if isinstance(order, orders.Begin):
                device = Device(order)
                reply: tuple[Answer, list[Tensor]] = Done(), []
            else:
                assert device is not None, "Begin comes first"
                reply = device.do(order, tensors)
        except Exception as error:
            channel.send(DeviceFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
            raise
        del order, tensors  # They may be as large as the share.
        channel.send(*reply)
        del reply
        if time.monotonic() > trimmed + TRIM_SECONDS:
            trim()
            trimmed = time.monotonic()


def main() -> None:
    """Run `python -m peers.compute.devices.rank DESCRIPTOR` until the peer ends the connection. DESCRIPTOR is
    the file descriptor of this end of the connection to the peer."""
    if sys.platform == "linux":
        # Linux kills this process when the peer dies. The socket ends too, but a hanging process would not
        # read it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        # These signals are for the peer, which ends this process in time.
        signal.signal(number, signal.SIG_IGN)
    # No code here changes the output of a module in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    serve(Channel(socket.socket(fileno=int(sys.argv[1])), Order, None))
    sys.stdout.flush()
    os._exit(0)  # Other processes of the group end on their own; there is nothing to coordinate.


if __name__ == "__main__":
    main()
