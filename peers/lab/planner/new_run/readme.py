"""Write README.md of a new run, with every command filled in."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES


@dataclass(frozen=True, slots=True)
class Readme:
    """What README.md says."""

    folder: Path
    """The run's folder, as the user typed it."""
    manifest: Manifest
    multiaddr: str
    """The bootstrap's address."""
    options: str
    """Options of `swarmnet join` that name the text, the tokenizer and the model, quoted for a shell."""
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands from this folder to a peer that trains."""
        folder = self.folder
        run_file = shlex.quote(str(folder / f"{folder.name}.yaml"))
        published = shlex.quote(str(folder / f"{folder.name}.run.json"))
        return (
            f"swarmnet publish {run_file} --bootstrap {self.multiaddr}",
            f"swarmnet run {shlex.quote(str(folder / 'bootstrap.yaml'))}",
            f"swarmnet join {published}{self.options}",
        )


def readme_of(content: Readme) -> str:
    """Return the text of README.md."""
    publish, bootstrap, join = content.commands
    folder, manifest = content.folder, content.manifest
    published = shlex.quote(str(folder / f"{folder.name}.run.json"))
    tokenizer = f" --tokenizer {shlex.quote(str(folder / manifest.data.tokenizer))}"
    if manifest.data.tokenizer == BYTES:
        tokenizer = ""
    tuned, tuning = f"{folder}-model", bool(manifest.init_checkpoint.path)
    lines = [
        f"# {manifest.name}",
        "",
        f"The settings are in `{folder.name}.yaml`, with a reason for each. Once published, they are fixed.",
        "",
        *(f"* {reason}" for reason in content.reasons),
        *(f"* Warning: {warning}" for warning in content.warnings),
        "",
        "## Train",
        "",
        "1. Sign the run. Keep a copy of the key whose path is printed.",
        "",
        *_block(publish),
        "2. Start the bootstrap on this machine, in a terminal of its own. Others must reach its port.",
        "",
        *_block(bootstrap),
        "3. Start the first peer that trains.",
        "",
        *_block(join),
        "4. Start the others, each on its machine: `publish` has printed their `join` command. A peer of the",
        "   first stage needs the text and the tokenizer there. A second peer on one machine needs its own",
        "   folder: add `--state FOLDER`.",
        "",
        "## Afterwards",
        "",
        *_block(
            f"swarmnet export --hf {shlex.quote(tuned)} --run {published} --bootstrap {content.multiaddr}"
            f"{tokenizer}"
        ),
    ]
    if tuning:
        answers = " --answers" if manifest.data.format == "messages" else ""
        scored = f"--eval-text HELD_OUT{answers}"
        lines += [
            "Compare the model before and after, on text that is not in the run's:",
            "",
            *_block(
                f"swarmnet evaluate --from {shlex.quote(str(folder / 'model'))} {scored}",
                f"swarmnet evaluate --from {shlex.quote(tuned)} {scored}",
            ),
        ]
    return "\n".join(lines).rstrip() + "\n"


def _block(*commands: str) -> list[str]:
    """Return commands as a block of Markdown."""
    return ["```", *(f"$ {command}" for command in commands), "```", ""]
