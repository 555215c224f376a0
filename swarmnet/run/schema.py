"""The keys of a run file: names, types, defaults and meanings.

The keys describe a run completely, without code or import paths. `swarmnet/run/manifest.py` has the values
that follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from swarmnet.identifiers import PeerId
from swarmnet.run.activation_sizes import Codec, Rounding
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.canonical_form import ADDED
from swarmnet.run.local_step_config import (
    DeltaCodecName,
    InnerOptimizerName,
    LocalStepConfig,
    ResidualName,
    TopologyName,
)
from swarmnet.run.method_config import MethodConfig
from swarmnet.run.sync_methods import (
    DEFAULT_METHOD,
    METHOD_CONFIGS,
    ChunkingName,
    MethodName,
    SelectionName,
    TransformName,
    WeightsName,
    meaning_of_methods,
)

WIRE_VERSION = 4
MEANING = "meaning"
"""Marks the meaning of a key that is composed by the program instead of written below the key."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of each layer's feed-forward (with `qk_norm`, as in Qwen3-MoE)."""

    num_experts: int = 0
    """Experts per layer. `0`: an ordinary feed-forward."""
    top_k: int = 0
    """Experts that each token uses per layer."""
    aux_loss_coef: float = 0.01
    """Coefficient of the load-balancing loss (Switch Transformer), which is 1 per token at perfect balance.
    `0`: no balancing. Raise it if few experts get most tokens."""
    groups: int = 1
    """Expert groups (SPES). A peer computes with all experts and trains one group. 1: it trains all. Raise it
    to save memory and upload."""
    merge_rounds: int = 0
    """Rounds between two merges, each of which moves similar experts towards each other. `0`: never. SPES:
    500."""
    merge_until: int = 10_000
    """Round at which merging ends. Its strength falls linearly until then."""
    merge_share: float = 0.01
    """Strength of the first merge: the fraction of the distance to the mean of the nearest experts."""
    merge_nearest: int = 4
    """Nearest experts that each merge averages."""

    @property
    def experts_per_group(self) -> int:
        """Number of experts per layer in each group."""
        return self.num_experts // self.groups

    def group_of(self, expert: int) -> int:
        """Return the group of an expert. A group has experts with consecutive numbers."""
        return expert * self.groups // self.num_experts

    def members(self, group: int) -> range:
        """Return the numbers, within a layer, of the experts in `group`."""
        return range(group * self.experts_per_group, (group + 1) * self.experts_per_group)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, by their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters on frozen matrices (LoRA, arXiv:2106.09685, section 4.1).

    A layer's W x becomes W x + alpha / rank B A x. Only the factors A and B are trained and sent.
    """

    rank: int = 0
    """Rank of the LoRA adapters. `0`: none, the matrices themselves are trained."""
    alpha: float = 16.0
    """LoRA scale: the adapters' output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = PROJECTIONS
    """Matrices of each layer that get adapters."""

    @property
    def scale(self) -> float:
        """Factor on B A x."""
        return self.alpha / self.rank


RopeTypeName = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretched rotary positions, for longer sequences. The keys are those of Hugging Face."""

    rope_type: RopeTypeName = "default"
    """`linear` stretches all positions by `factor`, `llama3` only long wavelengths."""
    factor: float = 1.0
    """Factor on wavelengths."""
    low_freq_factor: float = 1.0
    """llama3: longer wavelengths than original length / this get the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: shorter wavelengths than original length / this stay."""
    original_max_position_embeddings: int = 8192
    """llama3: original length in tokens."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder of the Llama family (with `qk_norm`: Qwen3, with `attention_bias`: Qwen2)."""

    vocab_size: int = 256
    """Tokens in the vocabulary. Byte-level text needs 256."""
    hidden_size: int = 128
    """Width of the hidden states."""
    num_hidden_layers: int = 4
    """Decoder layers, all stages together."""
    num_attention_heads: int = 4
    """Query heads per layer."""
    num_key_value_heads: int = 4
    """Key and value heads per layer. Fewer than query heads: grouped-query attention."""
    head_dim: int = 32
    """Width of a head; must be even."""
    intermediate_size: int = 384
    """Inner width of the SwiGLU feed-forward, or of each expert."""
    qk_norm: bool = False
    """Normalize queries and keys per head (Qwen3)."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    max_position_embeddings: int = 2048
    """Longest sequence in tokens."""
    initializer_range: float = 0.05
    """Standard deviation of the initial weights. 0.02 learns too slowly below hidden size 256
    (docs/lessons.md)."""
    residual_init_scale: float = 0.0
    """Factor on the first values and the steps of `o_proj` and `down_proj`. `0`: 1 / sqrt(2 x layers), so
    that hidden states of deep models do not grow."""
    attention_bias: bool = field(default=False, metadata={ADDED: True})
    """Add trained biases to queries, keys and values (Qwen2)."""
    tie_word_embeddings: bool = field(default=False, metadata={ADDED: True})
    """Use the embedding as head. Only with one stage."""
    rope_scaling: RopeScaling = field(default=RopeScaling(), metadata={ADDED: True})
    """Stretch rotary positions, as the initial model does."""
    boundary: Boundary = field(default=Boundary(), metadata={ADDED: True})
    """How hidden states cross from stage to stage."""
    experts: Experts = field(default=Experts(), metadata={ADDED: True})
    """Several feed-forwards per layer, of which each token uses a few."""
    lora: Lora = field(default=Lora(), metadata={ADDED: True})
    """Train low-rank adapters on the run's initial weights. Requires `init_checkpoint`."""

    @property
    def crossing(self) -> int:
        """Number of values per token that cross between stages."""
        return self.boundary.width or self.hidden_size  # A full boundary has no width of its own.

    @property
    def active_feed_forward(self) -> int:
        """Inner width, summed over all feed-forwards that one token uses in a layer."""
        return self.intermediate_size * (self.experts.top_k if self.experts.num_experts else 1)


STANDARD_LIBRARY = "python-stdlib"
"""Path of a source that every peer has: the modules of its own Python."""
BYTES = "bytes"
"""Name of the tokenizer that needs no file: a token is a byte."""
TokensName = Literal["", "uint16", "uint32"]
SharedName = Literal["auto", "peers", "none"]
SourceKind = Literal["public", "licensed", "private", "crawled", "users", "synthetic", "other"]


@dataclass(frozen=True, slots=True)
class TextSource:
    """One source of training text, as described in the manifest for people and for the peers that read it."""

    name: str
    """Name by which a peer file's `data_paths` locates this source."""
    path: str
    """`python-stdlib`, or the name, without folders, of a `.txt` or `.jsonl` file or of a folder. Each peer
    file locates it."""
    licence: str = "unknown"
    """SPDX name of the text's licence."""
    origin: str = ""
    """Origin of the text: a URL or a sentence."""
    kind: SourceKind = "other"
    """Category in the EU's template for the summary of training content."""
    collected: str = ""
    """Period of collection, such as 2023-01 to 2024-06."""
    languages: str = ""
    """Human or programming languages of the text."""
    bytes: int = 0
    """Size of the text. `0`: not stated."""
    sha256: str = ""
    """SHA-256 of the file. For information only; peers do not check it."""
    processing: str = ""
    """Processing of the text: filters, respected opt-outs, removed illegal or personal content."""
    weight: float = field(default=0.0, metadata={ADDED: True})
    """With `sampling: epoch`, the share of this source relative to the other weights. 0 for all sources: each
    is read once per epoch."""
    index: str = field(default="", metadata={ADDED: True})
    """SHA-256 of the text's `index.json` (printed by `swarmnet index FOLDER`), which lists the files and
    their hashes. Peers read only these files. Empty: peers read whatever their folder holds."""
    documents: int = field(default=0, metadata={ADDED: True})
    """Documents in the text. `0`: not stated. If the text is next to the run file, publishing fills in
    missing `documents`, `bytes` and `sha256`."""
    column: str = field(default="text", metadata={ADDED: True})
    """Field with a document's text in lines of JSON, CSV and Parquet. `a.b` is field b in field a."""
    tokens: TokensName = field(default="", metadata={ADDED: True})
    """Type of the tokens if the files (.bin, .npy) hold tokens of the run's tokenizer. Empty: they hold
    text."""
    shared: SharedName = field(default="auto", metadata={ADDED: True})
    """`peers`: peers send this text to anyone who asks, so newcomers need no copy. `none`: each peer of the
    first stage needs a copy. `auto`: publishing writes `peers` if the run is open, the licence is stated, and
    the kind is `public`, `synthetic` or `other`."""
    files: int = field(default=0, metadata={ADDED: True})
    """Files of a shared text. Publishing fills it in."""
    file_bytes: int = field(default=0, metadata={ADDED: True})
    """Size of these files together, the most that a peer fetches. Publishing fills it in."""

    @property
    def is_shared(self) -> bool:
        """Whether peers send this text to each other."""
        return self.shared == "peers" and bool(self.index)


@dataclass(frozen=True, slots=True)
class InitCheckpoint:
    """The initial weights of a run that does not start from random ones."""

    path: str = ""
    """Name of a folder with a Llama, Mistral, Qwen2 or Qwen3 model (config.json, safetensors). A peer locates
    it in its peer file, or gets its stage from other peers. A URL is fetched only by publishing, and by peers
    whose peer file names it. Empty: random weights."""
    sha256: str = ""
    """SHA-256 of the output of `sha256sum config.json *.safetensors` in that folder. Publishing fills it
    in."""
    origin: str = ""
    """Origin of the model: a URL or a sentence."""
    digests: tuple[str, ...] = ()
    """Digest of each stage's initial weights, which every peer checks. Publishing fills it in."""


@dataclass(frozen=True, slots=True)
class DocumentPrivacy:
    """Differential privacy of every document in a private run (`swarmnet/model/document_privacy.py`)."""

    epsilon: float = 0.0
    """Privacy loss of a document over the whole run: all that its owner sends is (epsilon, delta)-private.
    `0`: no clipping and no noise. 8 is weak, 3 stronger."""
    delta: float = 1e-5
    """Probability with which epsilon may be exceeded. Choose less than 1 / documents of an owner."""
    epochs: int = 1
    """How often each document is used. Then its owner contributes no more. More epochs need more noise."""
    max_norm: float = 1.0
    """2-norm to which the gradient of each document's mean loss is clipped."""


SamplingName = Literal["random", "epoch"]
FormatName = Literal["text", "messages"]


@dataclass(frozen=True, slots=True)
class Data:
    """The text that a run is trained on, and how it becomes microbatches."""

    sources: tuple[TextSource, ...] = (
        TextSource(STANDARD_LIBRARY, STANDARD_LIBRARY, "PSF-2.0", "the Python installation of each peer"),
    )
    """Training texts. Every peer of the first stage reads all of them."""
    tokenizer: str = BYTES
    """`bytes`, or the name of the run's `tokenizer.json`, which each peer file locates."""
    seq_len: int = 128
    """Tokens per training sequence."""
    micro_batch_size: int = 4
    """Sequences per microbatch."""
    eos_token: str = field(default="", metadata={ADDED: True})
    """Token that separates documents, such as `<|endoftext|>`, and ends generated text. Empty: an empty line
    separates documents."""
    sampling: SamplingName = field(default="random", metadata={ADDED: True})
    """`random`: sequences from random places of the text, of which a peer loads `max_data_bytes`. `epoch`:
    the whole text once per epoch, in each peer's own order."""
    tokenizer_sha256: str = field(default="", metadata={ADDED: True})
    """SHA-256 of the tokenizer.json, by which peers fetch it. Publishing fills it in if a text is shared."""
    format: FormatName = field(default="text", metadata={ADDED: True})
    """`messages`: .jsonl lines or Parquet rows with `messages`, or `prompt` and `completion`, rendered by the
    chat template next to the tokenizer. Only the assistant's tokens are learned."""
    chat_template_sha256: str = field(default="", metadata={ADDED: True})
    """SHA-256 of the chat template and the tokens that it names, by which peers fetch it. Publishing fills it
    in with `format: messages`."""
    private: bool = field(default=False, metadata={ADDED: True})
    """Each peer trains on a text of its own, which never leaves its machine: no peer compares, names, hashes
    or sends it. Needs one source without facts, and one stage unless U-shaped (docs/private.md)."""
    u_shaped_layers: int = field(default=0, metadata={ADDED: True})
    """With `private: true`: so many of the model's last layers, and the head, belong to stage 0, which only
    owners serve. Others serve the rest without labels. `0`: off."""
    privacy: DocumentPrivacy = field(default=DocumentPrivacy(), metadata={ADDED: True})
    """Clip and noise the gradients of documents, with `private: true`."""

    @property
    def adds_noise(self) -> bool:
        """Whether the gradients of documents are clipped and noised."""
        return self.privacy.epsilon > 0.0

    @property
    def is_library_alone(self) -> bool:
        """Whether the text is only Python's standard library, some modules of which are kept for
        evaluation."""
        return all(source.path == STANDARD_LIBRARY for source in self.sources)


@dataclass(frozen=True, slots=True)
class Rounds:
    """When the peers of a stage step together. All times are in seconds."""

    global_batch_tokens: int = 2048
    """Tokens after which a round closes, summed over the peers of a stage."""
    max_seconds: float = 30.0
    """Time after which a round closes with fewer tokens, if it has any."""
    contribution_timeout_seconds: float = 2.0
    """How long a closed round waits for expected contributions. Raise it for slow links."""
    window: int = 4
    """Rounds that may be open at once. A late contribution still counts within them."""
    finality_timeout_seconds: float = 10.0
    """How long a round waits until linked peers report the same set of contributions; then it settles
    anyway."""
    snapshot_interval: int = 16
    """Settled rounds between two snapshots, from which new peers start."""

    @property
    def rounds_from_seed(self) -> int:
        """Until other stages have settled this many rounds, a stage that lost all weights begins from the
        seed. It may have had no snapshot: the first is of `snapshot_interval` rounds, and stages settle up to
        about `window` rounds apart."""
        return self.snapshot_interval + self.window


@dataclass(frozen=True, slots=True)
class Paths:
    """Which stages a microbatch may skip (SkipPipe, arXiv:2502.19913)."""

    skip_ratio: float = 0.0
    """Maximum fraction of the stages that a microbatch skips, rounded down. The first, the last and one
    middle stage are always visited."""
    full_path_warmup_rounds: int = 0
    """Initial rounds of the first stage without skipping, which improve the full model. A quarter of
    `sync.decay_rounds` gives most of the benefit."""
    full_path_fraction: float = 0.0
    """Fraction of later microbatches that skip nothing. More improves the full model and saves less time."""


@dataclass(frozen=True, slots=True)
class Sync:
    """How contributions are made and applied."""

    method: MethodName = field(default=DEFAULT_METHOD, metadata={MEANING: meaning_of_methods()})
    selection: SelectionName = "group"
    """Coefficients to send. `top-k`: the largest of each chunk. `group`: the largest of each of
    `topk_per_chunk` groups, which is cheaper to compute and encode."""
    transform: TransformName = "hadamard"
    """Transform from momentum to coefficients. The inverse of `dct` is rounded, which gives 0.4 % of the
    weights another sign. Use `fine-dct`, exact as float32, with demo."""
    topk_per_chunk: int = 128
    """Coefficients sent per chunk of 4096; a power of two. More costs upload."""
    momentum: float = 0.95
    """Fraction of the momentum kept per round; with Muon, per local step."""
    learning_rate: float = 4e-3
    """Peak learning rate. demo-sign changes each weight by this much per round, and sign-muon by a fifth
    of it."""
    warmup_rounds: int = 20
    """Rounds of linear warm-up to the peak."""
    decay_rounds: int = 2000
    """Round at which the cosine decay ends; constant afterwards."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    max_grad_norm: float = 1.0
    """Maximum 2-norm of a block's mean gradient; larger ones are clipped."""
    inner_optimizer: InnerOptimizerName | Literal["method"] = field(default="method", metadata={ADDED: True})
    """Local-step methods: the peer's own optimizer. `muon` steps the layers' matrices and uses AdamW for the
    rest. `method`: muon for local-steps, adamw for the others."""
    inner_batch_tokens: int = field(default=0, metadata={ADDED: True})
    """Local-step methods: tokens per local step. `0`: a step per microbatch."""
    fragments: int = field(default=0, metadata={ADDED: True})
    """sign-muon and local-step methods: fragments of the weights, of which each round synchronizes one; a
    power of two. More sends less per round. `0`: the method's number (4 for sign-muon, local-steps and
    streaming-diloco, 16 for sparta, else 1)."""
    delta_codec: DeltaCodecName | Literal["method"] = field(default="method", metadata={ADDED: True})
    """Local-step methods: encoding of the deltas. `sign`: 1 bit. `e3m0`: 4 bits, a sign and a power of two.
    `int8`: 8 bits. `topk-2bit`: the largest per chunk in 2 bits each. `method`: the method's own."""
    residual: ResidualName | Literal["method"] = field(default="method", metadata={ADDED: True})
    """Local-step methods: what happens to the part of the delta that compression dropped. `local`: it stays
    in the peer's weights. `error-feedback`: it is added to the next delta. `drop`: it is discarded. `method`:
    local for local-steps and sparta, error-feedback for sparse-loco, else drop."""
    error_feedback_decay: float = field(default=0.95, metadata={ADDED: True})
    """With `residual: error-feedback`, the fraction of the residual kept per round."""
    sparse_topk: int = field(default=64, metadata={ADDED: True})
    """With `delta_codec: topk-2bit`, values sent per chunk of 4096; a power of two."""
    outer_lr: float = field(default=0.0, metadata={ADDED: True})
    """Local-step methods: factor on the mean delta, rounded to thousandths, at most 2. `0`: 0.7 for diloco,
    0.4 for streaming-diloco, else 1."""
    outer_momentum: float = field(default=0.9, metadata={ADDED: True})
    """diloco, streaming-diloco: Nesterov momentum of the group, rounded to thousandths, at most 0.99. `0`:
    none. Otherwise new peers download twice the bytes."""
    optimizer_warmup_steps: int = field(default=8, metadata={ADDED: True})
    """Local-step methods: steps at learning rate zero that fill a new peer's moments before it
    contributes."""
    topology: TopologyName = field(default="all-gather", metadata={ADDED: True})
    """`all-gather`: each peer receives every contribution of its stage. `sharded-reduce`: peers send slices
    to reducers and receive four-bit means, or counts of votes, so the cost per peer does not grow with the
    group. It works with sign-muon and local-step methods, but not with topk-2bit."""
    expert_lr_scale: float = field(default=1.0, metadata={ADDED: True})
    """With expert groups, the factor on the experts' learning rate. Few peers train each expert, so its steps
    see fewer tokens."""
    rank: int = field(default=16, metadata={ADDED: True})
    """low-rank, hybrid: directions of each matrix sent per round. All directions have their turn."""
    chunking: ChunkingName = field(default="flat", metadata={ADDED: True})
    """demo-sign, demo: how weights become chunks. `flat`: 4096 consecutive values. `tiled`: tiles of matrices
    up to 64 x 64, as in DeMo's paper; not with hadamard."""
    shards: int = field(default=16, metadata={ADDED: True})
    """sharded-reduce: slices per contribution. Each has its own reducers."""
    weights: WeightsName = field(default="equal", metadata={ADDED: True})
    """Weight of each peer's contributions. `equal`: all count in full. `agreement` (sign-muon): votes that
    disagree with those of others count less or not at all, and copies share one vote. `tokens` (local-step
    methods): by the tokens that a peer trained, at most twice the median. Publishing writes the default of
    the run file into the manifest."""
    secure_owners: int = field(default=0, metadata={ADDED: True})
    """sign-muon: mask votes, so that no peer sees those of another, only sums. The largest number of owners,
    3 to 255. `0`: votes are not masked."""
    trainable: tuple[str, ...] = field(default=(), metadata={ADDED: True})
    """Parameters to train, as Hugging Face names or patterns (`*.mlp.*`); the rest are frozen and not sent.
    Empty: all. With LoRA, the factors are trained, and these in addition."""

    def with_method(self, method: MethodName) -> Sync:
        """Return these keys with another method, and with the weights that a run file without the key has."""
        weights: WeightsName = "agreement" if METHOD_CONFIGS[method].can_weigh else "equal"
        return replace(self, method=method, weights=weights)

    def step_microbatches(self, microbatch_tokens: int) -> int:
        """Return the number of microbatches per local step of `inner_batch_tokens`, at least 1."""
        return max(1, -(-self.inner_batch_tokens // microbatch_tokens))

    @property
    def config(self) -> MethodConfig:
        return METHOD_CONFIGS[self.method].read(self.keys)

    @property
    def keys(self) -> dict[str, object]:
        """The values of all keys by name."""
        return {key.name: getattr(self, key.name) for key in fields(self)}

    @property
    def local_steps(self) -> LocalStepConfig | None:
        """Configuration of the local steps, in which a peer steps its own optimizer between exchanges. None
        for methods without local steps."""
        config = self.config
        return config if isinstance(config, LocalStepConfig) else None

    @property
    def settles_momentum(self) -> bool:
        """Whether the group settles an outer momentum in addition to the weights."""
        return self.local_steps is not None and self.local_steps.settles_momentum


MAX_MODERATORS = 8


@dataclass(frozen=True, slots=True)
class Moderators:
    """People who may ban peers together, besides the run's owner."""

    keys: tuple[PeerId, ...] = ()
    """Their peer ids, at most 8 (`swarmnet identity FILE` prints one)."""
    needed: int = 2
    """Number of moderators that must sign a ban, or lift one."""


@dataclass(frozen=True, slots=True)
class Provider:
    """The provider of the model and its copyright policy, for the public summary of training content
    (`swarmnet report`). The template of the European Commission asks for them."""

    name: str = ""
    """Legal name of the person or organization that provides the model."""
    representative: str = ""
    """Authorised representative in the EU, with contact, if the provider is elsewhere."""
    copyright_policy: str = ""
    """Policy to comply with copyright, or its address."""
    opt_outs: str = ""
    """How reservations against text and data mining (robots.txt and others) were respected."""
    illegal_content: str = ""
    """How illegal content was kept out of the text."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """All keys of one run."""

    name: str
    """Name shown to people."""
    owner: PeerId
    """Peer id of the owner, who signs the run."""
    seed: int = 0
    """Seed of the initial weights and the order of the text."""
    stages: tuple[int, ...] = (2, 1, 1)
    """Decoder layers of each stage."""
    activation_codec: Codec = "bf16"
    """Encoding of hidden states and their gradients: 2, about 1, 4, 0.6 or 0.9 bytes per value. Choose a
    small one for slow links."""
    gradient_codec: Codec | Literal["same"] = field(default="same", metadata={ADDED: True})
    """Encoding of the gradients, which tolerate fewer bits less well. `same`: as `activation_codec`."""
    gradient_rounding: Rounding = field(default="nearest", metadata={ADDED: True})
    """Rounding of int8 and tile-encoded gradients. `stochastic`: unbiased."""
    compared_fraction: float = field(default=0.02, metadata={ADDED: True})
    """Fraction of microbatches whose answer is compared with that of a second peer of the next stage. `0`:
    none. Peers avoid those that answer otherwise. Not in runs that skip stages."""
    wire_version: int = WIRE_VERSION
    """Version of the messages between all peers of the run."""
    access: Literal["open", "invite"] = "open"
    """`open`: anyone may join. `invite`: only peers with an invite (`swarmnet invite RUN.json --peer
    PEER`)."""
    listed: bool = False
    """Announce the run in the public registry (`swarmnet registry list`)."""
    intended_use: str = ""
    """Purpose of the model, for people who consider joining."""
    contact: str = ""
    """How to reach the run's owner."""
    provider: Provider = field(default=Provider(), metadata={ADDED: True})
    moderators: Moderators = field(default=Moderators(), metadata={ADDED: True})
    license: str = field(default="", metadata={ADDED: True})
    """SPDX licence of the trained model, such as `apache-2.0`, for the exported model card."""
    model: ModelShape = field(default_factory=ModelShape)
    data: Data = field(default_factory=Data)
    rounds: Rounds = field(default_factory=Rounds)
    paths: Paths = field(default_factory=Paths)
    sync: Sync = field(default_factory=Sync)
    init_checkpoint: InitCheckpoint = field(default=InitCheckpoint(), metadata={ADDED: True})
