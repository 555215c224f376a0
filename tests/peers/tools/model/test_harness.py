"""How likely texts are, and the adapter for lm-evaluation-harness."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from model_sizes import model_shape
from sharp_weights import sharp_weights
from torch import Tensor
from torch.nn import functional

from peers.config.errors import UserError, how_to_install
from peers.data.tokenizer import ByteTokenizer
from peers.tools.model.likelihood import ModelScorer
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole

SHAPE = model_shape(width=32, layers=2, heads=4, kv_heads=2, inner=48, max_position_embeddings=64)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return sharp_weights(SHAPE)


@pytest.fixture
def reader(weights) -> ModelScorer:
    return ModelScorer(weights=weights, shape=SHAPE, tokenizer=ByteTokenizer(), window=16)


def nats(weights: dict[str, Tensor], before: bytes, after: bytes, window: int = 16) -> float:
    """Token by token: each predicted from what stands before it in its window."""
    text, total = list(before + after), 0.0
    for first in range(len(before), len(text), window):
        stop = min(first + window, len(text))
        start = max(0, stop - 1 - window)
        logits = forward(weights, SHAPE, whole(SHAPE), torch.tensor([text[start : stop - 1]]))[0]
        for at in range(first, stop):
            total -= functional.cross_entropy(logits[at - start - 1], torch.tensor(text[at])).item()
    return total


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("def f", "(x):"), ("", "import"), ("a" * 40, "b" * 3), ("a", "0123456789" * 4), ("two ", "words")],
)
def test_a_continuation_is_as_likely_as_its_tokens_one_by_one(reader, weights, context, continuation):
    bare = context.rstrip(" ")
    expected = nats(weights, (bare or "\n").encode(), (context[len(bare) :] + continuation).encode())
    found = reader.continuations([(context, continuation), ("x", "y"), ("def f", "(x):")])
    assert found[0].nats == pytest.approx(expected, rel=1e-4)
    assert found[2].nats == pytest.approx(nats(weights, b"def f", b"(x):"), rel=1e-4)


def test_a_whole_text_follows_a_line_end(reader, weights):
    text = "x = 1\n" * 9
    assert reader.texts([text])[0].nats == pytest.approx(nats(weights, b"\n", text.encode()), rel=1e-4)


@pytest.fixture
def alphabet(reader, monkeypatch) -> ModelScorer:
    """A model that writes the alphabet on."""

    def successor(weights, shape, span, tokens_BT, cache=None):
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        return 100.0 * functional.one_hot((tokens_BT + 1) % 256, 256)

    monkeypatch.setattr("peers.tools.model.likelihood.forward", successor)
    monkeypatch.setattr("peers.tools.model.generate.forward", successor)
    return reader


def test_only_what_the_model_would_write_is_the_likeliest(alphabet):
    found = alphabet.continuations([("abc", "def"), ("abc", "dex"), ("abc", "xef"), ("z", "{")])
    assert [each.likeliest for each in found] == [True, False, False, True]
    assert [each.nats for each in found] == pytest.approx([0, -100, -200, 0], abs=1e-3)


def test_writing_stops_before_the_first_text_that_ends_it(alphabet):
    assert alphabet.write("abc", [], 5) == "defgh"
    assert alphabet.write("abc", ["never there", "hi", "fg", ""], 50) == "de"


class StandIn:
    """What of lm-evaluation-harness 0.4 the adapter touches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, object] = {}
        package, api, model, tasks = (
            ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")
        )
        model.LM = type("LM", (), {})
        tasks.TaskManager = lambda include_path: SimpleNamespace(all_tasks=["capitals", "broken"])
        package.simple_evaluate = self.simple_evaluate
        for module in (package, api, model, tasks):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.delitem(sys.modules, "peers.tools.model.lm_eval", raising=False)

    def simple_evaluate(self, **options: object) -> dict[str, object]:
        self.asked = options
        if options["tasks"] == ["broken"]:
            raise ConnectionError("no text to be had")
        model = options["model"]
        request = lambda *args: SimpleNamespace(args=args)  # noqa: E731 - one expression
        pairs = model.loglikelihood([request("def f", "(x)"), request("", "a")])
        rolling = model.loglikelihood_rolling([request("text")])
        written = model.generate_until([request("def f", {"until": "\n", "max_gen_toks": 3})])
        assert all(isinstance(found, float) and isinstance(likeliest, bool) for found, likeliest in pairs)
        assert rolling[0] < 0
        assert isinstance(written[0], str)
        values = {"alias": "capitals", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1}
        return {"results": {"capitals": values}}


@pytest.fixture
def stand_in(monkeypatch):
    """In place of the harness, whether that is installed or not."""
    yield StandIn(monkeypatch)
    sys.modules.pop("peers.tools.model.lm_eval", None)


def test_the_adapter_answers_what_the_harness_asks(stand_in, reader):
    harness = importlib.import_module("peers.tools.model.lm_eval")
    assert harness.run_tasks(reader, ["capitals"], None, 5) == {"capitals": {"acc": 0.5, "em,strict": 1.0}}
    assert stand_in.asked["limit"] == 5


def test_an_unknown_task_and_one_that_fails_are_one_line_each(stand_in, reader):
    harness = importlib.import_module("peers.tools.model.lm_eval")
    with pytest.raises(UserError, match="knows no task capitels"):
        harness.run_tasks(reader, ["capitals", "capitels"], None, None)
    with pytest.raises(UserError, match="stops: ConnectionError: no text to be had"):
        harness.run_tasks(reader, ["broken"], None, None)


OWN_TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{cities}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def test_the_real_harness_runs_a_task_from_a_folder(reader, weights, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason=f"lm-eval is not installed: {how_to_install('eval')}")
    from peers.tools.model.lm_eval import run_tasks

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = tmp_path / "capitals.jsonl"
    rows.write_text(
        '{"country": "France", "cities": ["Paris", "Rome"], "answer": 0}\n'
        '{"country": "Italy", "cities": ["Paris", "Rome"], "answer": 1}\n'
    )
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "capitals.yaml").write_text(OWN_TASK.format(file=rows))
    right = [
        nats(weights, f"The capital of {country} is".encode(), f" {city}".encode())
        > nats(weights, f"The capital of {country} is".encode(), f" {other}".encode())
        for country, city, other in (("France", "Paris", "Rome"), ("Italy", "Rome", "Paris"))
    ]
    assert run_tasks(reader, ["capitals"], tmp_path / "tasks", None)["capitals"]["acc"] == sum(right) / 2
