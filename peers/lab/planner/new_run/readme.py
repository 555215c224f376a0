"""The commands of a new run, and its README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES


def commands_of(folder: Path, multiaddr: str, options: str) -> tuple[str, str, str]:
    """Return the commands that publish the run in `folder`, start its bootstrap and join it. `multiaddr`: the
    bootstrap's. `options` name the text, the tokenizer and the model to `swarmnet join`."""
    return (
        f"swarmnet publish {quote(str(folder / f'{folder.name}.yaml'))} --bootstrap {multiaddr}",
        f"swarmnet run {quote(str(folder / 'bootstrap.yaml'))}",
        f"swarmnet join {quote(str(folder / f'{folder.name}.run.json'))}{options}",
    )


def readme_of(
    folder: Path, manifest: Manifest, commands: Sequence[str], multiaddr: str, notes: Sequence[str]
) -> str:
    """Return README.md. `notes` are the reasons of the settings, and warnings."""
    publish, bootstrap, join = commands
    published, trained = quote(str(folder / f"{folder.name}.run.json")), quote(f"{folder}-model")
    tokenizer = f" --tokenizer {quote(str(folder / manifest.data.tokenizer))}"
    export = f"swarmnet export --hf {trained} --run {published} --bootstrap {multiaddr}"
    after = [export + tokenizer * (manifest.data.tokenizer != BYTES)]
    if manifest.init_checkpoint.path:
        answers = " --answers" * (manifest.data.format == "messages")
        for model in (quote(str(folder / "model")), trained):
            after.append(f"swarmnet evaluate --from {model} --eval-text HELD_OUT" + answers)
    listed = "".join(f"* {note}\n" for note in notes)
    return f"""# {manifest.name}

The settings are in `{folder.name}.yaml`. Once published, they are fixed.

{listed}
## Train

Fill in contact, intended use and licences. Peers send only text with a `licence` and a `kind` to
others. One command then does steps 1 to 3, runs the run's page, and prints the link by which others
join:

{_block(f"swarmnet host {quote(str(folder / folder.name))}.yaml")}
Or step by step:

1. Sign the run. Keep a copy of the key whose path is printed.

{_block(publish)}
2. Start the bootstrap on this machine, in a terminal of its own. Others must reach its port.

{_block(bootstrap)}
3. Start the first peer that trains.

{_block(join)}
4. Start the others, each on its machine: `publish` has printed their `join` command. A peer of the
   first stage needs the text and the tokenizer there. A second peer on one machine needs its own
   folder: add `--state FOLDER`.

## Afterwards

Export the model while peers run. After a fine-tuning, compare the model before and after on
HELD_OUT: text that is not in the run's.

{_block(*after)}"""


def _block(*commands: str) -> str:
    """Return commands as a block of Markdown."""
    return "```\n" + "".join(f"$ {command}\n" for command in commands) + "```\n"
