"""Run tasks of lm-evaluation-harness (the `[eval]` extra) on a model of this program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from peers.config.errors import UserError
from peers.tools.model.likelihood import ModelScorer

ANSWER_TOKENS = 256
"""Maximum tokens of an answer if a task gives none: the default of the harness."""


class HarnessModel(LM):  # type: ignore[misc]  # lm_eval has no types
    """Adapter that implements the harness's model interface."""

    def __init__(self, reader: ModelScorer) -> None:
        super().__init__()
        self._reader = reader

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood in nats of each (context, continuation), and whether the continuation is
        the likeliest."""
        found = self._reader.continuations([request.args for request in requests])
        return [(each.nats, each.likeliest) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood in nats of each request's text."""
        return [each.nats for each in self._reader.texts([request.args[0] for request in requests])]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the generated text after each request's context."""
        return [self._written(*request.args) for request in requests]

    def _written(self, context: str, options: Mapping[str, Any]) -> str:
        until = options.get("until") or []
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        tokens = int(options.get("max_gen_toks") or ANSWER_TOKENS)
        return self._reader.write(context, [until] if isinstance(until, str) else until, tokens, temperature)


def run_tasks(
    reader: ModelScorer, tasks: Sequence[str], folder: Path | None, limit: int | None
) -> dict[str, dict[str, float]]:
    """Return task -> metric -> value. `folder`: own tasks; `limit`: documents per task. Raises UserError.

    Tasks of the harness download their texts, and may run Python code of their own. Run only tasks that you
    would run as a program."""
    manager = TaskManager(include_path=str(folder) if folder is not None else None)
    known = set(manager.all_tasks)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise UserError(
            f"lm-evaluation-harness knows no task {', '.join(unknown)}; `lm-eval ls tasks` lists its own, "
            "--tasks-folder names a folder of yours"
        )
    try:
        found = simple_evaluate(
            model=HarnessModel(reader),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=0,
        )
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise UserError(f"lm-evaluation-harness stops: {type(error).__name__}: {error}") from error
    results: Mapping[str, Mapping[str, object]] = found["results"] if found else {}
    return {task: _numbers(metrics) for task, metrics in results.items()}


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics without the filter name: the harness calls a metric `acc,none`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "_stderr" not in name
    }
