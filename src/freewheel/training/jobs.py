"""Jobs one after the other in one set of processes, and what came of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from freewheel.errors import RunStopped, first_line
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
    runs = [Run(home) for home in homes]

    def newest() -> int:
        begun = (number for number, home in enumerate(homes) if (home / "worker-0.jsonl").exists())
        return max(begun, default=0)

    def tick() -> None:
        run = runs[number := newest()]
        if run.poll():
            progress(number, sum(int(life["steps"] + life["resumed_at"]) for life in run.lives))

    output = Captured(folder)
    code = launch(
        [sys.executable, "-m", "freewheel.training.process", *map(str, homes)],
        jobs[0].workers,
        output=output,
        options=Options(folder=str(folder), tensorboard=tensorboard, typed=typed),
        tick=tick,
        events=lambda: homes[newest()],
    )
    if code in (130, 143):
        raise KeyboardInterrupt
    return [outcome(job, home, output) for job, home in zip(jobs, homes, strict=True)]


def outcome(job: Job, home: Path, output: Captured) -> Result | RunStopped:
    """The figures of a run, the same that `freewheel report` reads; or why there are none."""
    try:
        failed = [json.loads((home / f"outcome-{rank}.json").read_text()) for rank in range(job.workers)]
        if not any(failed):
            return result_of(Run(home))
        why = next(filter(None, failed))
    except FileNotFoundError:  # a worker was lost
        lasts = [line for rank in range(job.workers) for line in list(output.lines[rank])[-1:]]
        why = next((line for line in lasts if "Error" in line), "a worker ended without a word.")
    except (OSError, ValueError) as error:  # a full disk
        why = f"it has no result ({first_line(error)})."
    return RunStopped(f"{job.strategy}: {why} The logs of its workers are in {home.parent}.")
