"""Fine-tuning on 3,000 prompt and answer pairs by three peers, beside the same on one machine.

    scripts/soak tuning [--pairs 3000] [--lora 8]

A small model is trained on Python's library, alone. The pairs are the head of a function of that library and
the first line of its docstring; 300 others are held out. `swarmnet new --from` makes the run, three peers on
127.0.0.1 train all its rounds, and `swarmnet export` merges the factors. Beside it, AdamW trains as many
tokens in about as many steps in one process, at the best rate that it finds. Prints JSON with the losses on
the held-out answers in nats a token. Ends with 1 if the swarm's model is worse than the base, or more than
a tenth worse than that of AdamW.
"""

import argparse
import ast
import json
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random

import torch
from chats import CHATML, END, START, pair, write_lines
from shell import Shell, loss_of, settled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional

from peers.config.run_file import load_manifest
from peers.data.documents import read_text
from peers.lab.processes.demo_report import read_story
from protocols.messages.table import Contribution
from swarmnet.identifiers import PeerId
from swarmnet.run.schema import STANDARD_LIBRARY

HELD_OUT, PEERS = 300, 3
VOCABULARY, WIDTH, LAYERS, LENGTH = 1024, 64, 2, 128
BASE_STEPS, BASE_BATCH, BASE_RATE = 300, 16, 4e-3
PATIENCE_SECONDS = 1800.0
LARGEST_RATIO = 1.1


def pairs_of(count: int) -> list[dict]:
    """Return the head of each documented function, and the first line of its docstring; each head once."""
    found: dict[str, str] = {}
    for path in sorted(Path(ast.__file__).parent.rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (told := ast.get_docstring(node)):
                continue
            head, line = f"def {node.name}({ast.unparse(node.args)})", told.splitlines()[0].strip()
            if len(head) < 120 and 8 < len(line) < 100:
                found.setdefault(head, line)
    pairs = [pair(head, line) for head, line in sorted(found.items())]
    Random(0).shuffle(pairs)
    assert len(pairs) >= count, f"Python's library has {len(pairs)} documented functions of that form"
    return pairs[:count]


def train_base(folder: Path) -> None:
    """Train a tokenizer with a chat template, and a small Llama on Python's library, as others would."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir()
    torch.set_num_threads(1)
    text = read_text(STANDARD_LIBRARY, print).decode("utf-8", "replace")[:8_000_000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = text.splitlines(keepends=True)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>", START, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(lines[::4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": END, "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = torch.tensor([id for each in tokenizer.encode_batch_fast(lines) for id in each.ids])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, intermediate_size=3 * WIDTH, max_position_embeddings=LENGTH,
            initializer_range=0.05, tie_word_embeddings=False,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
    for step in range(BASE_STEPS):
        starts = torch.randint(len(tokens) - LENGTH - 1, (BASE_BATCH,))
        batch = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])
        logits = model(batch[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = BASE_RATE * (1 - step / BASE_STEPS)
        optimizer.step()
    model.save_pretrained(folder)


def tune(folder: Path, shell: Shell, lora: int) -> dict[str, object]:
    """Make the run, train it with three peers, and return the losses and what each peer has sent."""
    evaluate = "--eval-text held.jsonl --answers"
    before = loss_of(shell.run(f"swarmnet evaluate --from base {evaluate}"))
    options = f"--from base --lora {lora} --peers {PEERS} --address 127.0.0.1"
    told = shell.run(f"swarmnet new tale --text text {options}")
    publish, bootstrap, join = re.findall(r"^next   (.*)$", told, re.MULTILINE)
    manifest = load_manifest(folder / "tale" / "tale.yaml", PeerId(""))
    shell.run(publish)
    shell.start(bootstrap)
    states = [folder / f"peer-{number}" for number in range(PEERS)]
    began = time.monotonic()
    for state in states:
        shell.start(f"{join} --state {state}")
    last = manifest.sync.decay_rounds - 1
    shell.until(lambda: min(map(settled, states)) >= last, f"round {last} settles", PATIENCE_SECONDS)
    seconds = time.monotonic() - began
    shell.stop()
    shell.running.clear()
    shell.run("swarmnet export --hf tuned --from peer-0 --tokenizer tale/tokenizer.json --no-score")
    after = loss_of(shell.run(f"swarmnet evaluate --from tuned {evaluate}"))
    stories = [read_story(state) for state in states]
    return {
        "rounds": 1 + min(map(settled, states)), "tokens_of_a_round": manifest.rounds.global_batch_tokens,
        "tokens": sum(tokens for story in stories for _, _, _, tokens, _ in story.commits),
        "loss_before": before, "loss_after": after, "seconds": round(seconds),
        "bytes_sent_by_peer": [sum(story.sent.values()) for story in stories],
        "bytes_of_contributions_by_peer": [story.sent.get(Contribution.kind, 0) for story in stories],
    }  # fmt: skip


def tune_alone(folder: Path, shell: Shell, rounds: int, tokens: int) -> dict[str, object]:
    """Train the same run by AdamW in one process, with as many tokens in batches of about the same size;
    return its best loss."""
    manifest = load_manifest(folder / "tale" / "tale.yaml", PeerId(""))
    batch = max(1, round(tokens / rounds / manifest.microbatch_tokens))
    shell.run(
        f"swarmnet bench learning tale/tale.yaml --method adamw --peers {batch} --delay 0 --seeds 1 "
        f"--tokens {tokens} --eval-text held.jsonl --out alone",
        PATIENCE_SECONDS,
    )
    (file,) = (folder / "alone").rglob("trials.jsonl")
    trials = [json.loads(line) for line in file.read_text().splitlines()]
    best = min(trials, key=lambda trial: trial["loss"])
    return {"loss_alone": best["loss"], "trial_alone": best["trial"], "trials_alone": len(trials)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--lora", type=int, default=8)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pairs = pairs_of(told.pairs + HELD_OUT)
        write_lines(folder / "text" / "pairs.jsonl", pairs[HELD_OUT:])
        write_lines(folder / "held.jsonl", pairs[:HELD_OUT])
        train_base(folder / "base")
        shell = Shell(folder)
        try:
            seen = tune(folder, shell, told.lora)
        finally:
            shell.stop()
        print(json.dumps(seen, indent=1), flush=True)
        seen |= tune_alone(folder, shell, seen["rounds"], seen["tokens"])
    print(json.dumps(seen, indent=1))
    if not seen["loss_after"] < min(seen["loss_before"], LARGEST_RATIO * seen["loss_alone"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
