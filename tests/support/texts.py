"""What a `TextReader` uses of a process, and what it was told."""

from types import SimpleNamespace

from protocols.signed.identity import Identity


class TextProcess(SimpleNamespace):
    def __init__(self, config, identity=None):
        self.events, self.lines = [], []
        report = SimpleNamespace(say=lambda _topic, line, level: self.lines.append(f"{level}: {line}"))
        super().__init__(
            config=config, identity=identity or Identity.from_seed(b"origin"), report=report,
            log=SimpleNamespace(record=self.events.append), tell=self.events.append,
            say=lambda _topic, line: self.lines.append(line),
        )  # fmt: skip
