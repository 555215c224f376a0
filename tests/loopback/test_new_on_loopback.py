"""From a folder of text to three peers that train, by the commands that `swarmnet new` prints alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from chats import VOCABULARY, chat_folder, riddles, write_lines
from public_models import LLAMA, save
from shell import Shell, loss_of, settled

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(900)]
ROUNDS = 20


@pytest.fixture
def shell(tmp_path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.stop()


@pytest.mark.parametrize("tuned", [False, True], ids=["from a text", "a fine-tuning"])
def test_four_commands_lead_to_three_peers_that_train(shell, unused_port, tuned):
    folder, options = shell.folder, ""
    (folder / "text").mkdir()
    if tuned:
        save(folder / "base", replace(LLAMA, vocab_size=VOCABULARY))
        chat_folder(folder / "base")
        write_lines(folder / "text" / "talks.jsonl", riddles(3000))
        write_lines(folder / "held.jsonl", riddles(100, seed=1))
        options = " --from base --lora 8"
    else:
        (folder / "text" / "a.txt").write_text("".join(f"line {n} of a text\n" for n in range(20_000)))
    began = time.monotonic()
    told = shell.run(f"swarmnet new tale --text text --address 127.0.0.1:{unused_port} --hours 0.1{options}")
    publish, bootstrap, join = re.findall(r"^next   (.*)$", told, re.MULTILINE)
    shell.run(publish)
    shell.start(bootstrap)
    states = [folder / f"peer-{number}" for number in range(3)]
    for state in states:
        shell.start(f"{join} --state {state}")
    shell.until(lambda: min(map(settled, states)) >= 0, "all three train")
    print(f"all three train after {time.monotonic() - began:.0f} s")
    if not tuned:
        return
    before = loss_of(shell.run("swarmnet evaluate --from tale/model --eval-text held.jsonl --answers"))
    shell.until(lambda: min(map(settled, states)) >= ROUNDS, "rounds settle")
    live = f"--run tale/tale.run.json --bootstrap {publish.split()[-1]} --tokenizer tale/tokenizer.json"
    answer = shell.run(f"swarmnet generate {live} --chat --tokens 8 'What is it?'")
    print(f"the live peers answer: {answer.strip()}")
    assert answer.strip(), "the live peers answer, by the run's chat template"
    shell.stop()
    shell.running.clear()
    tokenizer = "--tokenizer tale/tokenizer.json"
    shell.run(f"swarmnet export --hf tale-model --from peer-0 {tokenizer} --no-score")
    after = loss_of(shell.run("swarmnet evaluate --from tale-model --eval-text held.jsonl"))
    print(f"answers: {before:.3f} nats per token before, {after:.3f} after")
    assert after < before - 1.0
