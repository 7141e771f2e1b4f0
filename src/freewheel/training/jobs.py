"""Jobs one after the other in one set of processes, and what came of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from freewheel.errors import ConfigError, RunStopped
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.runtime.launch.launcher import Captured, launch
from freewheel.runtime.membership.entries import Options
from freewheel.show.rates import result_of
from freewheel.training.job import Job, name


def train_all(
    jobs: Sequence[Job],
    folder: Path,
    progress: Callable[[int, int], None] = lambda number, done: None,
    tensorboard: Path | None = None,
    typed: str | None = None,
) -> list[Result | RunStopped]:
    """Run jobs one after the other in one set of processes; progress hears which one, and its worker-steps.

    A job that fails leaves its reason in the place of its result; the next one is run all the same.
    """
    homes = [folder / name(number, job) for number, job in enumerate(jobs)]
    for job, home in zip(jobs, homes, strict=True):
        home.mkdir(parents=True, exist_ok=True)
        for old in home.glob("*.json*"):
            old.unlink()
        job.save(home / "job.json")
    output = Captured(folder)
    workers, runs = jobs[0].workers, dict[int, Run]()

    def begun() -> list[int]:
        return [number for number, home in enumerate(homes) if (home / "worker-0.jsonl").exists()]

    def tick() -> None:
        for number in begun()[-1:]:
            run = runs.get(number) or runs.setdefault(number, Run(homes[number]))
            run.poll()
            progress(number, sum(int(life["steps"] + life["resumed_at"]) for life in run.lives))

    code = launch(
        [sys.executable, "-m", "freewheel.training.process", *map(str, homes)],
        workers,
        output=output,
        options=Options(folder=str(folder), tensorboard=tensorboard, typed=typed),
        tick=tick,
        events=lambda: homes[max(begun(), default=0)],
    )
    if code in (130, 143):
        raise KeyboardInterrupt
    results: list[Result | RunStopped] = []
    for job, home in zip(jobs, homes, strict=True):
        try:
            results.append(read_outcome(home, job.workers))
        except RunStopped as error:
            why = str(error) or _last_words(output, workers)
            results.append(RunStopped(f"{job.strategy}: {why} Its logs are in {folder}."))
    return results


def _last_words(output: Captured, workers: int) -> str:
    """The line that says most about a failure: the first worker's last error."""
    for rank in range(workers):
        lines = [line for line in output.lines[rank] if line.strip()]
        if lines and ("Error" in lines[-1] or "freewheel" in lines[-1]):
            return lines[-1].removeprefix("freewheel.errors.")
    return "a worker ended without a word"


def read_outcome(folder: Path, workers: int) -> Result:
    """The figures of a run on real processes, the same that `freewheel report` reads."""
    try:
        failed = [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(workers)]
    except (OSError, ValueError):
        raise RunStopped("") from None  # the worker's last words are in its log
    for why in filter(None, failed):
        raise RunStopped(why)
    try:
        return result_of(Run(folder))
    except ConfigError as error:  # a full disk
        raise RunStopped(f"it ended, but its records cannot be read: {error}") from None
