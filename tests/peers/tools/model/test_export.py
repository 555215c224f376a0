import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sharp_weights import LLAMA, stage_weights
from torch import Tensor
from torch.nn import functional

from peers.tools.model.export import export, load_end, load_shape, load_weights
from peers.tools.model.export_folder import ExportError
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole
from swarmnet.run.schema import Experts, ModelShape

QWEN = replace(LLAMA, qk_norm=True, rms_norm_eps=1e-6)
MIXED = replace(QWEN, intermediate_size=24, experts=Experts(num_experts=5, top_k=2, aux_loss_coef=0.0))
NAMES = {LLAMA: "LlamaForCausalLM", QWEN: "Qwen3ForCausalLM", MIXED: "Qwen3MoeForCausalLM"}


def merged(stages: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def in_transformers(folder: Path, shape: ModelShape) -> tuple[torch.nn.Module, Mapping[str, list[str]]]:
    with warnings.catch_warnings():
        # Raised inside transformers and torch while they import and load, not by this project.
        from transformers import AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, dtype=torch.float32
        )
    assert type(model).__name__ == NAMES[shape]
    return model, report


@pytest.mark.parametrize("shape", [LLAMA, QWEN, MIXED], ids=["llama", "qwen", "experts"])
def test_transformers_loads_every_parameter_and_computes_the_same(shape: ModelShape, tmp_path: Path) -> None:
    stages = stage_weights(shape, (1, 2))
    export(tmp_path / "model", shape, stages)
    theirs, report = in_transformers(tmp_path / "model", shape)
    assert {kind: list(names) for kind, names in report.items() if names} == {}
    weights = {name: tensor.clone().requires_grad_() for name, tensor in merged(stages).items()}
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    ours, expected = forward(weights, shape, whole(shape), tokens), theirs(tokens).logits
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    for logits in (ours, expected):
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: weight.grad for name, weight in weights.items()}
    for name, parameter in theirs.named_parameters():
        found = gradients[name] if name in gradients else as_one_tensor(name, gradients, shape)
        torch.testing.assert_close(found, parameter.grad, atol=1e-6, rtol=1e-4)


def as_one_tensor(name: str, gradients: Mapping[str, Tensor | None], shape: ModelShape) -> Tensor:
    """What transformers holds of all experts of a layer, gate and up one below the other."""
    layer, _, which = name.rpartition("experts.")
    parts = ["gate_proj", "up_proj"] if which == "gate_up_proj" else [which]
    experts = range(shape.experts.num_experts)
    found = [[gradients[f"{layer}experts.{one}.{part}.weight"] for part in parts] for one in experts]
    return torch.stack([torch.cat([tensor for tensor in of_one if tensor is not None]) for of_one in found])


def test_transformers_generates_bytes_with_the_exported_tokenizer(tmp_path: Path) -> None:
    export(tmp_path / "model", LLAMA, stage_weights(LLAMA, (3,)))
    model, _ = in_transformers(tmp_path / "model", LLAMA)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    text = "def naïve():\n\treturn '日本🐝'  # end\r\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert model.generation_config.eos_token_id is None
    assert model.generation_config.bos_token_id is None
    made = model.generate(torch.tensor([list(b"def ")]), attention_mask=torch.ones(1, 4), max_new_tokens=20)
    assert made.shape == (1, 24)


@pytest.mark.parametrize("stages", [(3,), (1, 1, 1)])
@pytest.mark.parametrize("shape", [QWEN, MIXED], ids=["qwen", "experts"])
def test_what_is_exported_is_read_back_to_the_bit(
    shape: ModelShape, stages: tuple[int, ...], tmp_path: Path
) -> None:
    weights = stage_weights(shape, stages)
    export(tmp_path / "model", shape, weights)
    assert load_shape(tmp_path / "model") == shape
    read = load_weights(tmp_path / "model")
    assert sorted(read) == sorted(merged(weights))
    assert all(torch.equal(tensor, read[name]) for name, tensor in merged(weights).items())
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == len(stages)


def test_an_own_tokenizer_travels_with_the_model(tmp_path: Path) -> None:
    tokenizer = tmp_path / "own.json"
    tokenizer.write_text("{}")
    export(tmp_path / "model", LLAMA, stage_weights(LLAMA, (3,)), tokenizer=tokenizer)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    tokenizer.write_text('{"truncation": {"max_length": 5}}')
    export(tmp_path / "other", LLAMA, stage_weights(LLAMA, (3,)), tokenizer=tokenizer)
    assert json.loads((tmp_path / "other" / "tokenizer.json").read_text()) == {"truncation": None}


def test_an_existing_folder_is_replaced_only_when_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export(folder, LLAMA, stage_weights(LLAMA, (1, 1, 1)))
    with pytest.raises(ExportError, match="exists already: name another folder or add --replace"):
        export(folder, LLAMA, stage_weights(LLAMA, (3,)))
    assert len(list(folder.glob("*.safetensors"))) == 3
    export(folder, LLAMA, stage_weights(LLAMA, (3,)), replace=True)
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_only_an_export_or_an_empty_folder_is_ever_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "state" / "identity.key"
    precious.parent.mkdir()
    precious.write_text("secret")
    weights = stage_weights(LLAMA, (3,))
    with pytest.raises(ExportError, match="holds no exported model, so it is not replaced"):
        export(precious.parent, LLAMA, weights, replace=True)
    with pytest.raises(ExportError, match="is no folder"):
        export(precious, LLAMA, weights, replace=True)
    assert precious.read_text() == "secret"
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", LLAMA, weights, replace=True)
    assert (tmp_path / "empty" / "config.json").is_file()


def spoiled(change: str) -> list[dict[str, Tensor]]:
    stages = stage_weights(LLAMA, (1, 2))
    if change == "missing":
        del stages[1]["lm_head.weight"]
    elif change == "unknown":
        stages[0]["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    elif change == "twice":
        stages[1]["model.embed_tokens.weight"] = stages[0]["model.embed_tokens.weight"]
    else:
        stages[1]["model.norm.weight"] = torch.ones(31)
    return stages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "1 parameters are missing, first lm_head.weight"),
        ("unknown", "model.layers.9.mlp.up_proj.weight is twice there or no parameter"),
        ("twice", "model.embed_tokens.weight is twice there"),
        ("shape", r"model.norm.weight is \(31,\), the model has \(32,\)"),
    ],
)
def test_a_model_that_is_not_whole_is_not_exported(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export(tmp_path / "model", LLAMA, spoiled(change))
    assert not list(tmp_path.iterdir())


def test_a_missing_tokenizer_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"tokenizer .*absent\.json does not exist"):
        export(tmp_path / "model", LLAMA, stage_weights(LLAMA, (3,)), tokenizer=tmp_path / "absent.json")
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def full_disk(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        written.append(file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peers.tools.model.export.save_file", full_disk)
    with pytest.raises(ExportError, match="No space left on device"):
        export(tmp_path / "model", LLAMA, stage_weights(LLAMA, (3,)))
    assert written
    assert not list(tmp_path.iterdir())


def test_a_damaged_folder_is_refused_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ExportError, match=r"cannot read .*config\.json"):
        load_weights(folder)
    export(folder, LLAMA, stage_weights(LLAMA, (1, 2)))
    shard = folder / "model-00002-of-00002.safetensors"
    whole_file = shard.read_bytes()
    shard.write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(ExportError, match=r"cannot read .*model-00002-of-00002\.safetensors"):
        load_weights(folder)
    shard.unlink()
    with pytest.raises(ExportError, match=r"cannot read .*model-00002-of-00002\.safetensors"):
        load_weights(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {"model.norm.weight": 3}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ExportError, match="has no weight_map"):
        load_weights(folder)
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ExportError, match=r"config\.json is not of an exported model"):
        load_weights(folder)
    (folder / "config.json").write_text("[1")
    with pytest.raises(ExportError, match="is not JSON"):
        load_shape(folder)


def test_the_end_of_a_text_is_the_models_and_its_tokenizers_and_all_files_are_as_readable(
    tmp_path: Path,
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet())[:200])
    made.add_special_tokens(["<|end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    end = made.token_to_id("<|end|>")
    folder = tmp_path / "model"
    export(
        folder, LLAMA, stage_weights(LLAMA, (3,)), tokenizer=tmp_path / "tokenizer.json", end=("<|end|>", end)
    )
    model, _ = in_transformers(folder, LLAMA)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (end, end)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", end)
    assert load_end(folder) == "<|end|>"
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_chat_templates_are_kept_with_the_tokens_that_they_name(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    source, folder = tmp_path / "base", tmp_path / "model"
    (source / "additional_chat_templates").mkdir(parents=True)
    made = Tokenizer(models.BPE(vocab={chr(97 + number): number for number in range(26)}, merges=[]))
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(source / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{eos_token}}"
    started = {"content": "<s>", "lstrip": False}
    settings = {"chat_template": template, "bos_token": started, "eos_token": "<other>", "pad_token": None}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    weights, end = stage_weights(LLAMA, (3,)), ("</s>", made.token_to_id("</s>"))
    export(folder, LLAMA, weights, tokenizer=source / "tokenizer.json", end=end)

    def chat() -> str:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)

    assert chat() == "<s>user: hi</s>"
    assert load_end(folder) == "</s>"
    (source / "chat_template.jinja").write_text("of the file")
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    export(folder, LLAMA, weights, tokenizer=source / "tokenizer.json", end=end, replace=True)
    assert (folder / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
    assert chat() == "of the file"
    (source / "tokenizer_config.json").write_text("[")
    with pytest.raises(ExportError, match=r"tokenizer_config\.json is not JSON"):
        export(folder, LLAMA, weights, tokenizer=source / "tokenizer.json", end=end, replace=True)
    assert chat() == "of the file", "the export before is still there"
