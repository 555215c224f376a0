"""What a run *is*: data only, no import paths, no code. Its SHA-256 is the run's id.

The canonical form is JSON with sorted keys and no spaces; whoever has the bytes can check the id, and
with the owner's signature over the id, who published it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import cos, pi
from typing import Literal

from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.activation_sizes import LABEL_BYTES, Codec, Rounding, encoded_bytes, token_bytes
from swarmnet.run.boundary import Boundary
from swarmnet.run.local_steps import MOMENTUM_PRESETS, PRESETS, InnerName, LocalStepConfig, RestName, SentName
from swarmnet.run.path_rules import Rules

WIRE_VERSION = 2
MANIFEST_LIMIT = 16 * 1024
"""Bytes of the longest canonical manifest with its signature: what the directory stores."""


def owner_statement(run_id: RunId) -> bytes:
    """What a run's owner signs. The words before keep that signature from meaning anything else."""
    return b"swarmnet manifest v1" + bytes.fromhex(run_id)


class ManifestError(ValueError):
    """The manifest contradicts itself; the message says where and what would fit."""


ADDED = "added"
"""Marks a key that the first published runs did not have."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of each layer's feed-forward (with `qk_norm`, as in Qwen3-MoE)."""

    num_experts: int = 0
    """Experts of each layer; 0: one feed-forward for all tokens."""
    top_k: int = 0
    """Experts that a token takes in each layer."""
    aux_loss_coef: float = 0.01
    """What a loss counts that is 1 for each token where all experts have as much to do, and more where they
    have not; 0: nothing keeps the load even. 0.01 is what SPES and Switch use."""
    groups: int = 1
    """Of so many groups of experts each peer trains one, and computes with all; 1: each peer trains all."""
    merge_rounds: int = 0
    """After every so many rounds experts that are alike move towards one another; 0: never."""
    merge_until: int = 10_000
    """The round after which they do so no more; until then they move ever less."""
    merge_share: float = 0.01
    """How far at first, of the way to the mean of those nearest to them. SPES has 500, 10000 and 0.01."""
    merge_nearest: int = 4
    """To so many others."""

    @property
    def of_group(self) -> int:
        """Experts of each layer in a group."""
        return self.num_experts // self.groups

    def group_of(self, expert: int) -> int:
        """Experts whose numbers follow one another are a group."""
        return expert * self.groups // self.num_experts

    def members(self, group: int) -> range:
        """Those of a group, by their numbers in a layer."""
        return range(group * self.of_group, (group + 1) * self.of_group)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, as Hugging Face names them."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank factors beside frozen matrices (LoRA, arXiv:2106.09685, section 4.1): a layer's W x becomes
    W x + alpha / rank B A x, and only the factors A and B are trained and sent."""

    rank: int = 0
    """Rows of A and columns of B; 0: no factors, every matrix is trained itself."""
    alpha: float = 16.0
    """What B A counts, times rank."""
    targets: tuple[str, ...] = PROJECTIONS
    """Which matrices of each layer have factors."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the Llama family (with `qk_norm`: Qwen3)."""

    vocab_size: int = 256
    """Tokens; 256 is the byte-level vocabulary."""
    hidden_size: int = 128
    """Numbers per token between layers (hidden size)."""
    num_hidden_layers: int = 4
    """Decoder layers, of all stages together."""
    num_attention_heads: int = 4
    """Query heads per layer."""
    num_key_value_heads: int = 4
    """Heads that keys and values have; fewer than `heads`: shared by groups of query heads (GQA)."""
    head_dim: int = 32
    """Numbers per head; even."""
    intermediate_size: int = 384
    """Inner width of the SwiGLU feed-forward layer; of each expert, where there are experts."""
    qk_norm: bool = False
    """Normalise queries and keys per head (Qwen3)."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    max_position_embeddings: int = 2048
    """Longest sequence in tokens."""
    initializer_range: float = 0.05
    """Standard deviation of the initial matrices; 0.02 learns too slowly below width 256 (docs/lessons.md)"""
    residual_init_scale: float = 0.0
    """What the last matrices of attention and feed-forward begin with and are stepped by, times the others'.
    0: 1 / sqrt(2 x layers), so that a deep model is no louder than a shallow one."""
    boundary: Boundary = field(default=Boundary(), metadata={ADDED: True})
    """How hidden states go from stage to stage."""
    experts: Experts = field(default=Experts(), metadata={ADDED: True})
    """Several feed-forwards in each layer, of which a token takes a few."""
    lora: Lora = field(default=Lora(), metadata={ADDED: True})
    """Train low-rank factors beside the matrices that the run starts with; needs `start`."""

    @property
    def crossing(self) -> int:
        """Numbers per token between stages."""
        return self.boundary.width or self.hidden_size  # An open boundary has no width of its own.

    @property
    def active_feed_forward(self) -> int:
        """Inner width of all feed-forwards together that one token takes in a layer."""
        return self.intermediate_size * (self.experts.top_k if self.experts.num_experts else 1)


STANDARD_LIBRARY = "python-stdlib"
"""The path of a source that every peer has: the modules of its own Python."""
BYTES = "bytes"
"""The tokenizer that is no file: a token is a byte."""
SourceKind = Literal["public", "licensed", "private", "crawled", "users", "synthetic", "other"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where text comes from, for the people who read the manifest and for the peers that fetch it."""

    name: str
    """By which a peer file's `text` says where this machine keeps it."""
    path: str
    """`python-stdlib`, or what the `.txt`, `.jsonl` or folder is called, without the way to it: peers read it
    where their own peer file says, and nowhere else."""
    licence: str = "unknown"
    """SPDX name of the text's licence."""
    origin: str = ""
    """Where the text came from: a URL or a sentence."""
    kind: SourceKind = "other"
    """By the EU's template for the summary of training content: a public dataset, a dataset licensed by its
    rightsholders, another private one, crawled, from users, synthetic, or something else."""
    collected: str = ""
    """When it was gathered, as 2023-01 to 2024-06."""
    languages: str = ""
    """Which human or programming languages it is in."""
    bytes: int = 0
    """How long the text is; 0: not stated."""
    sha256: str = ""
    """Of the file, where there is one; for people, nothing is refused by it."""
    processing: str = ""
    """What was done to it: filters, opt-outs that were respected, removal of illegal or personal content."""
    weight: float = field(default=0.0, metadata={ADDED: True})
    """Of a run that is read in epochs: how much is read of this source beside the others' weights, however
    long each is. 0, for all of them: each comes once in an epoch."""
    index: str = field(default="", metadata={ADDED: True})
    """SHA-256 of the text's `index.json` (`swarmnet index FOLDER`), which names each file with its own: peers
    read nothing else. Empty: every peer reads what its folder holds."""
    documents: int = field(default=0, metadata={ADDED: True})
    """How many the text has; 0: not stated. Publishing fills in this, `bytes` and `sha256`, unless they are
    stated, where the text lies beside the run file."""


@dataclass(frozen=True, slots=True)
class Start:
    """The weights that the run begins with, in place of those that `seed` draws."""

    path: str = ""
    """What the folder with the model is called (config.json and safetensors files, as Hugging Face writes a
    Llama or a Qwen3): peers read it where their own peer file says, or get their stage's part from others.
    A URL of such a folder is fetched when the run is published, and by no peer that is not told so. Empty:
    the seed draws them."""
    sha256: str = ""
    """Of the lines that `sha256sum config.json *.safetensors` prints in that folder. Empty: publishing fills
    it in."""
    origin: str = ""
    """Where the model comes from, for people: a URL or a sentence."""
    digests: tuple[str, ...] = ()
    """Of each stage the digest of its first weights, by which every peer checks what it begins with. Filled
    in by publishing."""


OrderName = Literal["random", "epoch"]


@dataclass(frozen=True, slots=True)
class Data:
    sources: tuple[Source, ...] = (
        Source(STANDARD_LIBRARY, STANDARD_LIBRARY, "PSF-2.0", "the Python installation of each peer"),
    )
    """The texts that are trained on, all of them by every peer of the first stage."""
    tokenizer: str = BYTES
    """`bytes`, or what the run's `tokenizer.json` is called: each peer's own file says where it is."""
    seq_len: int = 128
    """Length of a training sequence in tokens."""
    micro_batch_size: int = 4
    """Sequences per microbatch."""
    eos_token: str = field(default="", metadata={ADDED: True})
    """The tokenizer's token that stands between two documents, such as `<|endoftext|>`: the model learns to
    stop, and whoever it writes for stops there. Empty: an empty line stands between them."""
    sampling: OrderName = field(default="random", metadata={ADDED: True})
    """drawn: each sequence from anywhere in the text, of which a peer reads `max_data_bytes`; epochs: a shard
    after the other, all of it once, then again, however long it is; each peer in its own order."""

    @property
    def is_library_alone(self) -> bool:
        """Whether all of the text is Python's library, of which some modules are held out."""
        return all(source.path == STANDARD_LIBRARY for source in self.sources)


@dataclass(frozen=True, slots=True)
class Rounds:
    """When a group steps. Times in seconds."""

    global_batch_tokens: int = 2048
    """A round closes when the group's peers have committed this many tokens together ..."""
    max_seconds: float = 30.0
    """... or this long after it opened, if anything was committed."""
    contribution_timeout_seconds: float = 2.0
    """After closing, how long to wait for the contributions that are still expected."""
    window: int = 4
    """Open rounds: a late contribution corrects within them."""
    finality_timeout_seconds: float = 10.0
    """How long to wait for the neighbours to name the same set before a round settles without them."""
    snapshot_interval: int = 16
    """Every so many settled rounds the group's peers keep a snapshot for newcomers."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Which stages a microbatch may leave out or take in another order (SkipPipe, arXiv:2502.19913)."""

    skip_ratio: float = 0.0
    """Largest share of the stages that a microbatch leaves out, rounded down. The first and the last are
    never left out, and one between them must stay."""
    swaps: int = 0
    """How often a microbatch may go back to the stage before the furthest it has reached."""
    full_path_warmup_rounds: int = 0
    """Rounds of the first stage, from the run's beginning, in which microbatches leave nothing out: the whole
    model is better for it. A quarter of `sync.decay_rounds` is worth most of what can be had."""
    full_path_fraction: float = 0.0
    """Share of the microbatches after these rounds that leave nothing out either: the more, the better the
    whole model, and the less time skipping saves."""


MethodName = Literal[
    "demo-sign",
    "demo",
    "low-rank",
    "hybrid",
    "local-steps",
    "diloco",
    "streaming-diloco",
    "sparse-loco",
    "sparta",
]
"""Every sync method that a run can name; swarmnet/optimizer/method.py says which class each one is."""


ExchangeName = Literal["all-gather", "sharded-reduce"]


CutName = Literal["flat", "tiled"]


@dataclass(frozen=True, slots=True)
class Sync:
    """How contributions are made and applied."""

    method: MethodName = "demo-sign"
    """demo-sign: exact one-bit votes, bit-identical everywhere; demo: values as DeMo sends them;
    low-rank: of each matrix what its momentum is in `rank` directions that a seed draws, and an orthogonal
    step in them, votes for the rest; hybrid: the same, and votes also on what those directions left over;
    local-steps: every peer steps by itself and tells in each round what it moved of a part of the weights, a
    bit each. Of the same kind: diloco: it tells what it moved in eight bits, and the group steps by the mean
    with a momentum; streaming-diloco: likewise of a quarter in turn, in four bits; sparse-loco: the largest
    of what it moved, and keeps the rest for later rounds; partitioned: of a sixteenth in turn, in eight bits,
    the mean of the peers' weights."""
    selection: Literal["top-k", "group"] = "group"
    """Which coefficients are sent: the largest of each chunk, or the largest of each group."""
    transform: Literal["hadamard", "dct", "fine-dct"] = "hadamard"
    """What turns a chunk of momentum into coefficients. fine-dct: its inverse as exact as float32, for
    demo; that of dct is rounded, and gives 0.4 % of the weights another sign."""
    topk_per_chunk: int = 128
    """Votes per chunk of 4096 coefficients."""
    momentum: float = 0.95
    """Share of the momentum kept from round to round."""
    learning_rate: float = 4e-3
    """Peak step per round and weight."""
    warmup_rounds: int = 20
    """Rounds of linear warm-up to the peak."""
    decay_rounds: int = 2000
    """Cosine from the peak to `min_lr_ratio` of it; constant afterwards."""
    min_lr_ratio: float = 0.1
    """Share of the peak learning rate at the end."""
    max_grad_norm: float = 1.0
    """Largest 2-norm of a block's mean gradient before it enters the momentum."""
    inner_optimizer: InnerName | Literal["method"] = field(default="method", metadata={ADDED: True})
    """Of peers that step by themselves: what with; Muon is for the matrices of layers, AdamW for the rest
    then, too. method: as the method has it, Muon for local-steps, AdamW for the others."""
    inner_batch_tokens: int = field(default=0, metadata={ADDED: True})
    """Of peers that step by themselves: each steps whenever it has gathered the gradients of so many tokens;
    0: of a microbatch. So between two rounds it takes its share of `rounds.global_batch_tokens` over this
    many steps."""
    fragments: int = field(default=0, metadata={ADDED: True})
    """Of peers that step by themselves: a round is about one of so many parts of the weights, in turn; a
    power of two. 0: as the method has it: 4 for local-steps and streaming-diloco, 16 for sparta, 1 (all)
    for the others."""
    delta_codec: SentName | Literal["method"] = field(default="method", metadata={ADDED: True})
    """Of peers that step by themselves, how they tell a number: bit: its sign; e3m0: its sign and a
    power of two, or nothing (E3M0); int8: whole steps of a power of two; largest: the largest of each
    chunk alone, in two bits. method: as the method has it."""
    residual: RestName | Literal["method"] = field(default="method", metadata={ADDED: True})
    """Of peers that step by themselves, what becomes of what one moved and did not tell: live: it stays in
    the peer's own weights; feedback: it waits outside of them and is added to what is told next; dropped:
    nothing. method: as the method has it: live for local-steps and sparta, feedback for sparse-loco,
    dropped for the others."""
    error_feedback_decay: float = field(default=0.95, metadata={ADDED: True})
    """Where the rest is fed back: the share of it that is kept from round to round."""
    sparse_topk: int = field(default=64, metadata={ADDED: True})
    """Where the largest are sent: how many of 4096; a power of two."""
    outer_lr: float = field(default=0.0, metadata={ADDED: True})
    """Of diloco and streaming-diloco: the group steps by so many times the mean; counted in thousandths. 0:
    as the method has it, 0.7 and 0.4."""
    outer_momentum: float = field(default=0.9, metadata={ADDED: True})
    """Of diloco and streaming-diloco: the group's momentum, of Nesterov's kind; counted in thousandths, at
    most 0.99; 0: none. It is settled and travels as the weights do, so that a newcomer fetches twice the
    bytes."""
    optimizer_warmup_steps: int = field(default=8, metadata={ADDED: True})
    """Of peers that step by themselves: a newcomer warms its optimizer up with so many steps that move
    nothing, before it is counted."""
    topology: ExchangeName = field(default="all-gather", metadata={ADDED: True})
    """everyone: each peer of a stage hears what each other contributes; sharded, where peers step by
    themselves and do not send the largest alone: each sends its contribution in slices to reducers, and
    hears the means, in four bits a number, so that groups of any size cost a peer the same."""
    expert_lr_scale: float = field(default=1.0, metadata={ADDED: True})
    """Of experts in groups (`model.experts.groups`): what peers step them by, times the learning rate. With
    few holders an expert steps by fewer tokens than what is shared."""
    rank: int = field(default=16, metadata={ADDED: True})
    """Of low-rank and hybrid: directions of a matrix that one round tells; all have their turn."""
    chunking: CutName = field(default="flat", metadata={ADDED: True})
    """Of demo-sign and demo. runs: chunks of 4096 numbers as they lie; tiles: of each matrix tiles of
    up to 64 x 64, as DeMo's paper has it, with a DCT."""
    shards: int = field(default=16, metadata={ADDED: True})
    """Of a sharded exchange: into so many slices a contribution is cut; reducers are drawn for each."""
    trainable: tuple[str, ...] = field(default=(), metadata={ADDED: True})
    """Which parameters are trained, by their Hugging Face names or patterns (`model.layers.*`,
    `*.mlp.*`); the others stay as they began and are never sent. Empty: all, or where `model.lora` has a
    rank, its factors alone, to which these come then."""

    def step_microbatches(self, microbatch_tokens: int) -> int:
        """After how many a peer takes a step of its own, where it takes any."""
        return max(1, -(-self.inner_batch_tokens // microbatch_tokens))

    @property
    def local_steps(self) -> LocalStepConfig | None:
        """How peers step by themselves; None: they do not."""
        if self.method not in PRESETS:
            return None
        told = PRESETS[self.method]
        if self.method in MOMENTUM_PRESETS:
            told = replace(told, outer_lr=self.outer_lr or told.outer_lr, outer_momentum=self.outer_momentum)
        return replace(
            told,
            inner_optimizer=told.inner_optimizer
            if self.inner_optimizer == "method"
            else self.inner_optimizer,
            fragments=self.fragments or told.fragments,
            delta_codec=told.delta_codec if self.delta_codec == "method" else self.delta_codec,
            residual=told.residual if self.residual == "method" else self.residual,
        )

    @property
    def settles_momentum(self) -> bool:
        """Whether the group has a momentum of its own, beside the weights."""
        return self.local_steps is not None and self.local_steps.settles_momentum


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    """Shown to people."""
    owner: PeerId
    """Who signs the run."""
    seed: int = 0
    """Decides the initial weights and which text is read when."""
    stages: tuple[int, ...] = (2, 1, 1)
    """Decoder layers per stage."""
    activation_codec: Codec = "bf16"
    """How hidden states and their gradients travel: 2, about 1, 4, about 0.6 or 0.9 bytes per number."""
    gradient_codec: Codec | Literal["same"] = field(default="same", metadata={ADDED: True})
    """How gradients travel, where that is another way than `activation_codec`: they bear fewer bits less
    well."""
    gradient_rounding: Rounding = field(default="nearest", metadata={ADDED: True})
    """How gradients in int8 or tiles are rounded. stochastic: up or down by chance, right on the mean."""
    wire_version: int = WIRE_VERSION
    """Version of the messages that all peers of the run speak."""
    access: Literal["open", "invite"] = "open"
    """open: whoever likes takes part; invite: whom the owner gave an invite (`swarmnet invite RUN.json --peer
    PEER`)."""
    listed: bool = False
    """Whether its peers put the run into the registry, where anybody finds it (`swarmnet registry list`)."""
    intended_use: str = ""
    """What the model is for, for those who think of joining."""
    contact: str = ""
    """How to reach the run's creator."""
    license: str = field(default="", metadata={ADDED: True})
    """License of the trained model, as an SPDX identifier such as `apache-2.0`; the exported model card names
    it. Empty: not stated."""
    model: ModelShape = field(default_factory=ModelShape)
    data: Data = field(default_factory=Data)
    rounds: Rounds = field(default_factory=Rounds)
    paths: Paths = field(default_factory=Paths)
    sync: Sync = field(default_factory=Sync)
    init_checkpoint: Start = field(default=Start(), metadata={ADDED: True})

    def canonical(self) -> bytes:
        """Every key but those that were added later and say nothing, sorted, without spaces."""
        return json.dumps(
            _plain_data(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()

    def run_id(self) -> RunId:
        return RunId(hashlib.sha256(self.canonical()).hexdigest())

    @property
    def microbatch_tokens(self) -> int:
        return self.data.micro_batch_size * self.data.seq_len

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """[B, T, D] of a microbatch between two stages, or [B, T, R] where boundaries are narrow."""
        return self.data.micro_batch_size, self.data.seq_len, self.model.crossing

    @property
    def body_bytes(self) -> int:
        """Of a microbatch on its way down."""
        return encoded_bytes(self.hidden_shape, self.activation_codec) + self.text_bytes

    @property
    def text_bytes(self) -> int:
        """Of the tokens that go down with hidden states: labels, which only the last stage reads; where
        boundaries are narrow, each sequence with the token that follows it, for all stages, and packed."""
        if not self.model.boundary.is_narrow:
            return LABEL_BYTES * self.microbatch_tokens
        tokens = self.microbatch_tokens + self.data.micro_batch_size
        return tokens * token_bytes(self.model.vocab_size)

    @property
    def codec_back(self) -> Codec:
        """Of gradients."""
        return self.activation_codec if self.gradient_codec == "same" else self.gradient_codec

    @property
    def gradient_bytes(self) -> int:
        """Of a microbatch on its way back up."""
        return encoded_bytes(self.hidden_shape, self.codec_back)

    def beside(self, stage: int) -> tuple[int, ...]:
        """The stages with whose peers one of this stage works."""
        reach = self.path_rules().reach
        near = range(max(0, stage - reach), min(len(self.stages), stage + reach + 1))
        return tuple(each for each in near if each != stage)

    def path_rules(self) -> Rules:
        paths = self.paths
        return Rules.of(
            len(self.stages),
            paths.skip_ratio,
            paths.swaps,
            paths.full_path_warmup_rounds,
            paths.full_path_fraction,
        )

    def span(self, stage: int) -> Span:
        first = sum(self.stages[:stage])
        return Span(first, first + self.stages[stage], stage == 0, stage == len(self.stages) - 1)


def _plain_data(value: object) -> object:
    """Plain data, as `asdict`: a key that came after the first runs stands only where it is not the default,
    so that those runs are what they were, and programs of then understand whoever does not use it."""
    if is_dataclass(value):
        return {
            each.name: _plain_data(getattr(value, each.name))
            for each in fields(value)
            if not (each.metadata.get(ADDED) and getattr(value, each.name) == each.default)
        }
    return [_plain_data(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Span:
    """The slice of the model that one stage holds: layers [first, stop)."""

    first: int
    stop: int
    has_embedding: bool
    has_head: bool


def learning_rate(sync: Sync, round: int) -> float:
    """Linear warm-up, then a cosine to `min_lr_ratio` of the peak (DeMo's schedule, section 4)."""
    if round < sync.warmup_rounds:
        return sync.learning_rate * (round + 1) / sync.warmup_rounds
    passed = min(1.0, (round - sync.warmup_rounds) / max(1, sync.decay_rounds - sync.warmup_rounds))
    return sync.learning_rate * (sync.min_lr_ratio + (1 - sync.min_lr_ratio) * 0.5 * (1 + cos(pi * passed)))
