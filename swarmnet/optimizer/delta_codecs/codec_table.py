"""Select the delta codec that a run configures."""

from __future__ import annotations

from swarmnet.optimizer.delta_codecs.delta_codec import DeltaCodec
from swarmnet.optimizer.delta_codecs.e3m0_codec import E3M0Codec
from swarmnet.optimizer.delta_codecs.int8_codec import Int8Codec
from swarmnet.optimizer.delta_codecs.sign_codec import SignCodec
from swarmnet.optimizer.delta_codecs.top_k_codec import TopKCodec
from swarmnet.run.local_step_config import DeltaCodecName
from swarmnet.run.schema import Sync


def code_of(sent: DeltaCodecName, sync: Sync) -> DeltaCodec:
    codes: dict[DeltaCodecName, DeltaCodec] = {
        "sign": SignCodec(),
        "e3m0": E3M0Codec(),
        "int8": Int8Codec(),
        "topk-2bit": TopKCodec(sync.sparse_topk),
    }
    return codes[sent]
