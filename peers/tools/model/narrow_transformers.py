"""Models with narrow boundaries for transformers, which has no such layer. After `register()`,
`AutoModelForCausalLM.from_pretrained` loads an exported folder like any other.

The layers are transformers' own Llama or Qwen3, with a boundary before some of them. A configuration contains
only numbers. The projector is read from the folder. Everything here uses only transformers and torch, so that
a comparison with this program compares two implementations.

Shape suffixes: B sequences, T tokens, D width, R numbers that cross, A rows of anchors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from peers.tools.model.export import BOUNDARY, NARROW_LLAMA, NARROW_QWEN


class NarrowLlamaConfig(LlamaConfig):  # type: ignore[misc]
    model_type = NARROW_LLAMA


class NarrowQwen3Config(Qwen3Config):  # type: ignore[misc]
    model_type = NARROW_QWEN


class NarrowBoundary(nn.Module):
    """Computes x -> (x - before[token]) P^T P + after[token], as in swarmnet/model/boundary.py."""

    def __init__(self, *, tokens: int, width: int, crossing: int, anchor_rows: int) -> None:
        super().__init__()
        self._half_rows = anchor_rows // 2
        self.before = nn.Embedding(anchor_rows or tokens, width)
        self.after = nn.Embedding(anchor_rows or tokens, width)
        self.projector = nn.Linear(width, crossing, bias=False)
        self.projector.weight.requires_grad_(False)

    def forward(self, hidden_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        crossed_BTR: Tensor = self.projector(hidden_BTD - self._anchors(self.before, tokens_BT))
        return crossed_BTR @ self.projector.weight + self._anchors(self.after, tokens_BT)

    def _anchors(self, table: nn.Embedding, tokens_BT: Tensor) -> Tensor:
        half, rows_AD = self._half_rows, table.weight
        if not half:
            return functional.embedding(tokens_BT, rows_AD)
        remainder_BTD = functional.embedding(tokens_BT % half, rows_AD)
        return remainder_BTD + functional.embedding(half + tokens_BT // half, rows_AD)


def _put_boundaries(model: Any, config: Any) -> None:  # noqa: ANN401 - transformers has no types for us
    """Apply each boundary of the configuration to the input of the layer after it."""
    settings = getattr(config, BOUNDARY)
    inner = model.model
    inner.boundaries = nn.ModuleDict(
        {
            str(layer): NarrowBoundary(
                tokens=config.vocab_size,
                width=config.hidden_size,
                crossing=int(settings["width"]),
                anchor_rows=int(settings["anchor_rows"]),
            )
            for layer in settings["after"]
        }
    )
    tokens: list[Tensor] = []

    def note(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = named.get("input_ids", arguments[0] if arguments else None)
        if given is None:
            raise ValueError("narrow boundaries need the tokens: give input_ids, not inputs_embeds")
        tokens[:] = [given]

    def crossing(boundary: nn.Module) -> Any:  # noqa: ANN401 - torch's own type of a hook is private
        def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return boundary(arguments[0], tokens[0].to(arguments[0].device)), *arguments[1:]

        return hook

    inner.register_forward_pre_hook(note, with_kwargs=True)
    for layer, boundary in inner.boundaries.items():
        inner.layers[int(layer)].register_forward_pre_hook(crossing(boundary))


class NarrowLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = NarrowLlamaConfig

    def __init__(self, config: NarrowLlamaConfig) -> None:
        super().__init__(config)
        _put_boundaries(self, config)
        self.post_init()


class NarrowQwen3ForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]
    config_class = NarrowQwen3Config

    def __init__(self, config: NarrowQwen3Config) -> None:
        super().__init__(config)
        _put_boundaries(self, config)
        self.post_init()


def register() -> None:
    """Register these models with transformers in this process. Further calls do nothing."""
    for config, model in (
        (NarrowLlamaConfig, NarrowLlamaForCausalLM),
        (NarrowQwen3Config, NarrowQwen3ForCausalLM),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
