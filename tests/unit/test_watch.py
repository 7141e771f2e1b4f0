"""A run in the terminal: what is said, that it fits, and that it ends when the run does."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import made
from freewheel.cli import show as watch_module
from freewheel.cli.main import main
from freewheel.numbers import column
from freewheel.records.files import check_unused
from freewheel.records.run import Run, find_run
from freewheel.show.rows import history, most_telling, rows, total
from freewheel.show.terminal import plain_line, screen, spark

ALL_HEADINGS = ["rank", "state", "steps", "steps/s", "waiting", "stale", "discrep.", "exch.", "MB/s", "loss"]


@pytest.fixture
def now(monkeypatch):
    """The wall clock, which stands still: a list of one number, to be set."""
    clock = [1009.6]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    return clock


def text(run, width=80, height=None, **options):
    return [line.plain for line in screen(run, width, height, **options)]


def row_of(lines, rank):
    return next(line for line in lines if re.match(rf"\s*{rank}\s", line)).split()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 140])
@pytest.mark.parametrize("ended", [True, False])
def test_every_line_fits_and_every_worker_has_one(tmp_path, now, width, ended):
    run = Run(made.run(tmp_path, workers=12, samples=20, ended=ended, name="a rather long name " * 3))
    console = Console(width=width, file=io.StringIO())
    for line in screen(run, width):
        console.print(line)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for rank in [*range(12), "all"]:
        assert len([line for line in lines if re.match(rf"\s*{rank}\s+\w", line)]) == 1
    assert len(lines) == 2 + 1 + 1 + 12 + 1 + 1 + 2  # nothing has wrapped


def test_columns_are_left_out_in_a_sensible_order(tmp_path, now):
    run = Run(made.run(tmp_path, samples=20, ended=False))
    headings = {width: text(run, width)[3].split() for width in (40, 80, 140)}
    assert headings[40] == ["rank", "state", "steps/s", "waiting", "loss"]
    assert [one for one in ALL_HEADINGS if one != "steps"] == [
        one for one in headings[80] if one not in ("60", "s")
    ]
    assert "60 s" in text(run, 140)[3]
    assert set(ALL_HEADINGS) <= set(headings[140])


def test_nodes_and_restarts_are_shown_where_there_are_any(tmp_path, now):
    for rank in range(2):
        lines = [made.sample(rank, number, 2, life=1 + 2 * rank, node=f"host-{rank}") for number in range(20)]
        made.append(tmp_path / f"worker-{rank}.jsonl", *lines)
    lines = text(Run(tmp_path), 140)
    assert lines[3].split()[:5] == ["rank", "state", "node", "restarts", "steps"]
    assert row_of(lines, 1)[:4] == ["1", "training", "host-1", "2"]
    assert "host-1" in "".join(text(Run(tmp_path), 80))


def test_a_row_says_what_its_worker_does_and_the_last_one_what_all_do(tmp_path, now):
    run = Run(made.run(tmp_path, samples=20, ended=False))
    lines = text(run, 140)
    cells = row_of(lines, 1)
    assert cells[:4] == ["1", "training", "95", "10.0"]
    assert cells[-7:] == ["3.0", "%", "1.50", "0.455", "95", "40", "2.1589"]
    assert row_of(lines, "all")[:5] == ["all", "4", "of", "4", "538"]
    assert row_of(lines, "all")[5] == "56.6"
    assert lines[0].startswith("train.py · adpsgd · 4 workers")
    assert lines[0].endswith("live · wall clock 0:09")
    assert "538 steps · accuracy 50.6 %" in lines[1]


def test_the_rate_is_that_of_the_last_seconds_and_in_the_end_that_of_all_time(tmp_path, now):
    lines = [made.sample(0, number, 1, steps=10 * number) for number in range(20)]
    lines += [made.sample(0, number, 1, steps=190 + number) for number in range(20, 40)]
    made.append(tmp_path / "worker-0.jsonl", *lines)
    now[0] = 1019.6
    (row,) = rows(Run(tmp_path))
    assert row.steps_per_s == pytest.approx(2)
    made.append(tmp_path / "worker-0.jsonl", lines[-1] | {"last": True})
    (row,) = rows(Run(tmp_path))
    assert row.steps_per_s == pytest.approx(229 / 19.5)


def test_the_blocked_share_is_that_of_the_last_seconds(tmp_path, now):
    waits = [
        made.sample(0, n, 1, compute_s=min(n, 10) * 0.5, blocked_s={"data": max(0, n - 10) * 0.5})
        for n in range(30)
    ]
    made.append(tmp_path / "worker-0.jsonl", *waits)
    now[0] = 1014.6
    (row,) = rows(Run(tmp_path))
    assert row.blocked_share == pytest.approx(1)


def test_all_states_are_said_and_who_does_not_train_has_no_rate(tmp_path, now):
    made.run(tmp_path, workers=5, samples=20, ended=False)
    (tmp_path / "worker-4.jsonl").unlink()
    lines = (tmp_path / "worker-2.jsonl").read_text().splitlines()
    (tmp_path / "worker-2.jsonl").write_text("\n".join(lines[:5]) + "\n")
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 19, last=True))
    made.append(tmp_path / "events-0.jsonl", made.event(1009.5, "died", 3, 0))
    shown = text(Run(tmp_path), 140)
    states = {rank: row_of(shown, rank)[1] for rank in range(5)}
    assert states == {0: "finished", 1: "training", 2: "silent", 3: "dead", 4: "joining"}
    assert {rank: row_of(shown, rank)[3] for rank in range(5)} == {0: "–", 1: "10.0", 2: "–", 3: "–", 4: "–"}
    assert row_of(shown, "all")[1:4] == ["1", "of", "5"]


def test_of_too_many_workers_the_dead_and_the_slowest_are_shown(tmp_path, now):
    folder = made.run(tmp_path, workers=64, samples=20, ended=False)
    made.append(folder / "worker-50.jsonl", made.sample(50, 19, 64, 20 / 3) | {"steps_per_s": 3.0})
    made.append(folder / "events-0.jsonl", made.event(1009.5, "died", 40, 0))
    run = Run(folder)
    lines = text(run, 80, 24)
    assert len(lines) <= 24
    assert row_of(lines, 40)[1] == "dead"
    assert row_of(lines, 50)[1] == "training"
    ranks = [int(line.split()[0]) for line in lines if re.match(r"\s*\d+ +[a-z]", line)]
    assert ranks == sorted(ranks)
    assert f"… {64 - len(ranks)} more: {64 - len(ranks)} training" in lines
    assert row_of(lines, "all")[1:4] == ["63", "of", "64"]
    assert [row.rank for row in most_telling(rows(run), 2)] == [40, 50]


@pytest.mark.parametrize("height", range(4, 30))
def test_it_is_never_taller_than_the_terminal(tmp_path, now, height):
    lines = text(Run(made.run(tmp_path, workers=10, ended=False)), 80, height, note="runs/x")
    assert len(lines) <= height
    assert any(re.match(r"\s*\d+ +training", line) for line in lines) or height < 6


def test_events_are_told_once_with_their_time_and_who_noticed(tmp_path, now):
    folder = made.run(tmp_path, samples=20, ended=False)
    made.append(
        folder / "events-launcher.jsonl",
        made.event(1002.2, "died", 3, "launcher", text="signal 9"),
        made.event(1004.2, "restarted", 3, "launcher", text="one \x1b[31m last\ntime"),
    )
    lines = text(Run(folder))
    assert lines[-3:] == [
        "   0:02  worker 3 died: signal 9 (seen by 0, 1, 2, launcher)",
        "   0:03  worker 3 joined: joined 3 (seen by 0, 1, 2)",
        "   0:04  worker 3 was started again: one  [31m last time (seen by launcher)",
    ]


def test_an_event_of_another_kind_is_told_as_it_is(tmp_path, now):
    folder = made.run(tmp_path / "r")
    made.append(folder / "events-1.jsonl", made.event(1003.0, "{odd} {0}", 2, 1))
    assert any("worker 2: {odd} {0}" in line for line in text(Run(folder), 140))


def test_of_many_events_the_last_are_shown(tmp_path, now):
    folder = made.run(tmp_path, samples=20, ended=False)
    made.append(
        folder / "events-0.jsonl", *(made.event(1004 + n / 100, "half", n % 3, 0, life=n) for n in range(60))
    )
    lines = text(Run(folder), 80, 24)
    assert lines[-1].startswith("   0:04  worker 2 was met in half an exchange")
    assert "… 57 earlier events" in lines
    assert len(lines) <= 24


def test_a_simulated_run_is_shown_in_virtual_time(tmp_path):
    made.run(tmp_path, workers=2, samples=0, ended=False, clock="virtual", started=1.7e9)
    for rank in range(2):
        made.append(
            tmp_path / f"worker-{rank}.jsonl",
            *(
                made.sample(rank, 0, 2, time=n / 100, steps=3 * n, elapsed_s=n / 100, last=n == 50)
                for n in range(51)
            ),
        )
    (tmp_path / "events-0.jsonl").unlink()
    made.append(tmp_path / "events-simulator.jsonl", made.event(0.05, "cut", 1, "simulator"))
    run = Run(tmp_path)
    lines = text(run)
    assert lines[0].endswith("simulated · virtual time 0.5 s")
    assert row_of(lines, 0)[:4] == ["0", "finished", "150", "300"]
    assert lines[-1] == " 0.05 s  worker 1 was cut off: cut 1 (seen by simulator)"


def test_what_is_drawn_is_steps_per_second_over_time(tmp_path, now):
    stalls = [made.sample(0, n, 1, steps=10 * min(n, 10) + 10 * max(0, n - 20)) for n in range(31)]
    made.append(tmp_path / "worker-0.jsonl", *stalls)
    now[0] = 1015.0
    drawn = history(Run(tmp_path), 6)
    assert drawn[0] == drawn[None] == pytest.approx([20, 20, 0, 0, 20, 20])
    assert spark([None, 0, 5, 10, 10, None]) == " ▁▅██ "
    assert spark([90, 5, 10, 90]) == "█▅██"
    assert spark([]) == ""
    assert spark([5, 5, 5], top=20.0) == "▃▃▃"  # beside one that is four times as fast
    assert spark([0.0, None]) == "▁ "


def test_numbers_of_a_column_have_the_same_decimals():
    assert column([1.234, 20.0, None, 21.234]) == ["1.2", "20.0", "–", "21.2"]
    assert column([0.5, 0.25, 0.75]) == ["0.50", "0.25", "0.75"]
    assert column([1234.5, 10.0, 2000.4]) == ["1,234", "10", "2,000"]
    assert column([0.0, 3e4, float("nan"), float("inf")]) == ["0", "30,000", "–", "–"]


def test_where_only_ascii_can_be_written_only_ascii_is(tmp_path, now):
    run = Run(made.run(tmp_path, workers=30, samples=20, ended=False, name="größe"))
    lines = text(run, 80, 20, ascii_only=True)
    assert all(line.isascii() for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_worker_without_exchanges_has_merges_or_neither(tmp_path, now):
    none = {"exchanges": {"done": 0}, "merges": {"done": 0}}
    made.append(tmp_path / "a" / "worker-0.jsonl", *(made.sample(0, n, 1, **none) for n in range(20)))
    made.append(
        tmp_path / "b" / "worker-0.jsonl",
        *(made.sample(0, n, 1, **(none | {"merges": {"done": 7, "half": 1}})) for n in range(20)),
    )
    assert not {"exch.", "merges"} & set(" ".join(text(Run(tmp_path / "a"), 140)).split())
    lines = text(Run(tmp_path / "b"), 140)
    assert "merges" in lines[3]
    assert "merges half: 1" in lines[1]


def test_a_line_for_a_log_has_the_totals(tmp_path, now):
    run = Run(made.run(tmp_path, samples=20, ended=False))
    assert plain_line(run) == (
        "0:09  4 training  steps 538  steps/s 56.6  waiting 3.0 %  stale 1.50  exch. 538  MB/s 226  "
        "loss 2.1589"
    )


def test_a_total_of_workers_that_came_and_went_is_that_of_the_run(tmp_path, now):
    made.run(tmp_path, workers=1, samples=21)
    made.append(
        tmp_path / "worker-1.jsonl", *(made.sample(1, n, 2, last=n == 2) for n in range(3))
    )  # a second of its own
    run = Run(tmp_path)
    everyone = rows(run)
    assert [row.steps_per_s for row in everyone] == [20, 20]
    assert total(run, everyone).steps_per_s == pytest.approx(22)


# -- the command --


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["freewheel", "watch", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code or 0


def goes_on(monkeypatch, *acts):
    """Each time the watcher sleeps the next thing happens to the run."""
    left = list(acts)

    def sleep(_):
        assert left, "it goes on watching a run that is over"
        left.pop(0)()

    monkeypatch.setattr(watch_module.time, "sleep", sleep)


@pytest.mark.parametrize("columns", [40, 70])
def test_a_file_is_as_wide_as_somebody_says(tmp_path, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command(monkeypatch, made.run(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert columns - 15 < max(map(len, lines)) <= columns


def test_a_finished_run_is_printed_once(tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, made.run(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("finished · wall clock 0:09")
    assert [row_of(lines, rank)[1] for rank in range(4)] == ["finished"] * 4


def test_a_live_run_is_printed_once_where_one_asks_for_that(tmp_path, now, monkeypatch, capsys):
    assert command(monkeypatch, made.run(tmp_path, ended=False), "--once") == 0
    assert "live" in capsys.readouterr().out


def finish(folder, now, workers=2):
    def act():
        now[0] = 1010.1
        for rank in range(workers):
            made.append(folder / f"worker-{rank}.jsonl", made.sample(rank, 20, workers, last=True))

    return act


def test_without_a_terminal_lines_come_and_events_when_they_happen_until_the_run_ends(
    tmp_path, now, monkeypatch, capsys
):
    folder = made.run(tmp_path, workers=2, ended=False)
    late = made.event(1009.8, "cut", 1, 0, text="silent for 2 s")
    goes_on(
        monkeypatch,
        lambda: None,
        lambda: made.append(folder / "events-0.jsonl", late),
        finish(folder, now),
    )
    assert command(monkeypatch, folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("0:09  2 training  steps 285")
    assert lines[3] == "   0:09  worker 1 was cut off: silent for 2 s (seen by 0)"
    assert lines[4].startswith("0:09  2 training")
    assert lines[5].startswith("0:10  2 finished")
    assert "finished · wall clock 0:10" in lines[6]


def terminal(monkeypatch, **options):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={}, **options)
    monkeypatch.setattr(watch_module, "output", lambda: console)
    return console.file


def test_a_terminal_is_filled_left_as_it_was_and_the_end_is_printed(tmp_path, now, monkeypatch):
    folder = made.run(tmp_path, workers=2, ended=False)
    goes_on(monkeypatch, lambda: None, finish(folder, now))
    file = terminal(monkeypatch, color_system="standard")
    assert command(monkeypatch, folder) == 0
    begin, filled, after = re.split(r"\x1b\[\?1049[hl]", file.getvalue())
    assert begin == ""
    assert filled.count("wall clock") == 3
    assert "\x1b[32mtraining" in filled
    assert "finished · wall clock 0:10" in after
    assert "\x1b[?25h" in after or filled.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_without_colours_there_are_none(tmp_path, now, monkeypatch):
    file = terminal(monkeypatch, no_color=True, color_system="standard")
    assert command(monkeypatch, made.run(tmp_path)) == 0
    assert "finished" in file.getvalue()
    assert not re.search(r"\x1b\[[\d;]*3\dm", file.getvalue())


def test_ctrl_c_ends_at_once_and_leaves_what_was_there(tmp_path, now, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    def left(code):
        raise SystemExit(code)

    goes_on(monkeypatch, interrupt)
    monkeypatch.setattr(watch_module.os, "_exit", left)
    file = terminal(monkeypatch)
    assert command(monkeypatch, made.run(tmp_path, ended=False)) == 130
    assert "live" in file.getvalue().split("\x1b[?1049l")[1]


def test_a_run_that_starts_is_waited_for(tmp_path, now, monkeypatch, capsys):
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(made.about(workers=1)))
    goes_on(monkeypatch, lambda: None, lambda: made.run(folder, workers=1))
    assert command(monkeypatch, folder) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{folder} is starting; waiting for its workers")
    assert "finished" in out


def test_a_run_that_was_killed_is_not_waited_for(tmp_path, monkeypatch, capsys):
    folder = made.run(tmp_path, ended=False)
    for path in folder.iterdir():
        os.utime(path, (1010, 1010))
    assert command(monkeypatch, folder) == 0
    out = capsys.readouterr().out
    assert "silent" in out
    assert "silent" in out
    assert "Nobody has written for" in out


def test_a_simulation_that_was_broken_off_is_not_waited_for(tmp_path, monkeypatch, capsys):
    folder = made.run(tmp_path, ended=False, clock="virtual")
    for path in folder.iterdir():
        os.utime(path, (1010, 1010))
    goes_on(monkeypatch)
    assert command(monkeypatch, folder) == 0
    assert "Nobody has written for" in capsys.readouterr().out


def test_a_dead_worker_may_be_started_again(tmp_path, now, monkeypatch, capsys):
    folder = made.run(tmp_path, workers=1, ended=False)
    made.append(folder / "events-launcher.jsonl", made.event(1009.5, "died", 0, "launcher"))
    again = made.sample(0, 1, 1, time=1012.0, life=2)
    goes_on(
        monkeypatch,
        lambda: None,
        lambda: made.append(folder / "worker-0.jsonl", again),
        lambda: made.append(folder / "worker-0.jsonl", again | {"last": True}),
    )
    assert command(monkeypatch, folder) == 0
    out = capsys.readouterr().out
    assert "1 dead" in out
    assert "1 training" in out


def test_links_that_were_cut_and_lines_that_cannot_be_read_are_said(tmp_path, now):
    folder = made.run(tmp_path, workers=3, ended=False)
    for by, rank in ((1, 2), (2, 1)):
        made.append(folder / f"events-{by}.jsonl", made.event(1009.0, "cut", rank, by, text="silent for 3 s"))
    made.append(folder / "worker-0.jsonl", {"time": "late"})
    lines = text(Run(folder), 140)
    assert "lines that cannot be read: 1" in lines[1]
    assert [line.strip() for line in lines if "cut" in line] == [
        "0:09  the link between 1 and 2 was cut: silent for 3 s"
    ]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.mkdir(), "is no run"),
        (lambda folder: folder.write_text("x"), "is not a folder"),
        (lambda folder: made.run(folder, format=2, freewheel="9.9"), "freewheel 9.9"),
        (lambda folder: made.append(folder / "worker-0.jsonl", {"some": "thing"}), "not what a run writes"),
        (
            lambda folder: made.append(folder / "worker-0.jsonl", made.sample(0, 1, merges=3)),
            "not what a run writes",
        ),
        (lambda folder: made.append(folder / "worker-0.jsonl", made.sample(0, 1, loss="x")), "numbers"),
        (lambda folder: made.run(folder, samples=0, workers=1, ended=False), "still starting"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, capsys, prepare, says):
    folder = tmp_path / "r"
    prepare(folder)
    assert command(monkeypatch, folder, "--once") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert says in told.err


def test_half_a_last_line_is_not_read_yet(tmp_path, now, monkeypatch, capsys):
    folder = made.run(tmp_path, workers=1, ended=False)
    with (folder / "worker-0.jsonl").open("a") as file:
        file.write('{"time": 1010.0, "ra')
    assert command(monkeypatch, folder, "--once") == 0
    assert row_of(capsys.readouterr().out.splitlines(), 0)[1] == "training"


def test_waiting_has_an_end(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.json").write_text(json.dumps(made.about()))
    assert command(monkeypatch, tmp_path, "--wait-s", "0") == 2
    assert "still starting" in capsys.readouterr().err


# -- which run --


def aged(folder, age_s):
    for path in folder.iterdir():
        os.utime(path, (time.time() - age_s,) * 2)
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def test_a_file_that_takes_anothers_place_while_runs_are_looked_through_is_no_error(tmp_path, monkeypatch):
    folder = made.run(tmp_path / "r")
    (folder / ".worker-0.jsonl.1.part").write_text("")
    is_file = Path.is_file

    def gone_then(path):
        found = is_file(path)
        if path.suffix == ".part":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", gone_then)
    assert find_run(tmp_path).run.folder == folder
    assert not (folder / ".worker-0.jsonl.1.part").exists()


def test_a_run_that_never_began_is_not_waited_for(tmp_path, monkeypatch, capsys):
    path = tmp_path / "r" / "events-launcher.jsonl"
    path.parent.mkdir()
    path.write_text("")  # as a launcher leaves it
    check_unused([path.parent], force=False)
    goes_on(monkeypatch, lambda: os.utime(path, (1000.0, 1000.0)))
    assert command(monkeypatch, path.parent) == 2
    told = capsys.readouterr()
    assert "is starting; waiting for its workers" in told.out
    assert "no worker has written anything" in told.err


def writes(folder, **changes):
    """A sample of this moment."""
    now = time.time()
    made.append(folder / "worker-0.jsonl", made.sample(0, 90, 1, time=now, began=now - 45.0, **changes))


def test_the_newest_run_is_picked_and_a_live_one_before_it(tmp_path):
    old = aged(made.run(tmp_path / "2026-01-01_00-00-00", workers=1), 7200)
    new = aged(made.run(tmp_path / "a", workers=1), 3600)
    assert find_run(tmp_path).run.folder == new
    assert find_run(old).run.folder == old
    writes(old)
    assert find_run(tmp_path).run.folder == old
    assert find_run(tmp_path).others == []
    writes(new)
    assert (find_run(tmp_path).run.folder, find_run(tmp_path).others) == (new, [old])
    writes(new, last=True)  # it has just ended, and is not live any more
    assert (find_run(tmp_path).run.folder, find_run(tmp_path).others) == (old, [])


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path, monkeypatch, capsys):
    good = aged(made.run(tmp_path / "good", workers=1), 3600)
    bad = made.run(tmp_path / "bad", workers=1, format=9, freewheel="9.9")
    assert find_run(tmp_path).run.folder == good
    assert command(monkeypatch, tmp_path, "--once") == 0
    told = capsys.readouterr()
    assert str(good) in told.out
    assert told.err.count("\n") == 1
    assert "left out" in told.err
    assert str(bad) in told.err
    assert "freewheel 9.9" in told.err
    (bad / "run.json").unlink()  # now its samples say nothing
    (bad / "worker-0.jsonl").write_text('{"some": "thing"}\n')
    (bad / "evaluations.jsonl").unlink()
    assert command(monkeypatch, tmp_path, "--once") == 0
    assert "is not what a run writes" in capsys.readouterr().err
    (good / "run.json").write_text("[]")
    assert command(monkeypatch, tmp_path, "--once") == 2


def test_without_a_folder_the_newest_in_runs_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made.run(tmp_path / "runs" / "one")
    assert command(monkeypatch, "--once") == 0
    assert "runs/one" in capsys.readouterr().out
