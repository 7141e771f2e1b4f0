"""What several failing workers print, as a person reads it."""

from __future__ import annotations

import pytest

from freewheel.cli import run as tracebacks
from freewheel.cli.run import Tracebacks

BEGIN = "Traceback (most recent call last):"


def failed(rank: int, error: str = "ValueError: shape 3") -> list[str]:
    return [BEGIN, '  File "train.py", line 7, in <module>', f"    build({rank})", error]


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.output = Tracebacks(lambda rank, text, error: self.lines.append(f"{rank} {text}"))

    def mixed(self, *blocks: list[str]) -> None:
        """The lines of all workers as they may come, one of each in turn."""
        for k in range(max(map(len, blocks))):
            for rank, block in enumerate(blocks):
                if k < len(block):
                    self.output(rank, block[k], True)


@pytest.fixture
def screen():
    return Screen()


def of(rank: int, lines: list[str]) -> list[str]:
    return [f"{rank} {line}" for line in lines]


def test_the_same_error_is_shown_once_and_in_one_piece(screen):
    blocks = [failed(0), failed(1), failed(2, "KeyError: 'x'")]
    screen.mixed(*blocks)
    screen.output(1, "on stdout", False)
    assert screen.lines == ["1 on stdout"]
    for rank in (1, 0, 2):
        screen.output(None, f"worker {rank} ended with exit code 1; others go on", True)
    ends = [f"None worker {rank} ended with exit code 1; others go on" for rank in (1, 0, 2)]
    assert screen.lines[1:] == [
        *of(1, blocks[1]), ends[0],
        "0 the same error as worker 1: ValueError: shape 3", ends[1],
        *of(2, blocks[2]), ends[2],
    ]  # fmt: skip


def test_what_is_said_after_an_error_is_not_taken_for_it(screen):
    screen.mixed(*([*failed(rank), "a warning at exit"] for rank in (0, 1)))
    screen.output.tick(0.0)
    assert screen.lines[-1] == "1 the same error as worker 0: ValueError: shape 3"


def test_a_worker_that_fails_again_and_again_says_so_in_a_line(screen):
    for _ in range(2):
        screen.mixed(failed(0))
        screen.output(None, "worker 0 ended with exit code 1; it starts again (1 of 2)", True)
    assert screen.lines[5] == "0 the same error as worker 0: ValueError: shape 3"


def test_a_worker_that_goes_on_is_not_kept_silent(screen):
    block = failed(0)
    screen.mixed(block)
    screen.output.tick()
    assert not screen.lines  # more may come
    screen.output.tick(held_s=0.0)
    assert screen.lines == of(0, block)
    screen.output(0, "what it says next", True)
    assert screen.lines[4:] == ["0 what it says next"]


def test_what_is_held_at_the_end_is_shown(screen):
    screen.mixed(failed(0)[:2])
    screen.output.tick(0.0)
    assert screen.lines == of(0, failed(0)[:2])


def test_a_script_that_cannot_be_read_is_shown_once(screen):
    block = ['  File "train.py", line 3', "    for x in:", "             ^", "SyntaxError: invalid syntax"]
    screen.mixed(block, block)
    screen.output.tick(0.0)
    assert screen.lines == [*of(0, block), "1 the same error as worker 0: SyntaxError: invalid syntax"]


def test_what_goes_on_for_long_is_not_held(screen, monkeypatch):
    """A handled error may be followed by lines and lines; and not all that looks like one has an end."""
    now = 0.0
    monkeypatch.setattr(tracebacks.time, "monotonic", lambda: now)
    for line in failed(0):
        screen.output(0, line, True)
    for k in range(40):
        now += 0.1
        screen.output(0, f"still here {k}", True)
        screen.output.tick()
    assert len(screen.lines) > 4 + 15
    screen.output(1, '  File "train.py", line 3 in wait', True)  # as faulthandler writes
    now += 3.0
    screen.output.tick()
    assert screen.lines[-1] == '1   File "train.py", line 3 in wait'


def test_a_mistake_that_freewheel_explains_is_one_line(screen):
    block = failed(0, "freewheel.errors.ConfigError: wire must be fp32 or bf16, not 'x'.")
    inside = f'  File "{tracebacks.NOT_THE_SCRIPT[-1]}/api.py", line 3, in attach'
    block[3:3] = [inside, "    raise ConfigError(text)"]
    screen.mixed(block)
    screen.output.tick(0.0)
    assert screen.lines == ["0 ConfigError: wire must be fp32 or bf16, not 'x'. (train.py, line 7)"]


def test_one_that_has_a_cause_is_shown_whole(screen):
    chain = ["", "The above exception was the direct cause of the following exception:", ""]
    block = [*failed(0), *chain, *failed(0, "freewheel.errors.ConfigError: no.")]
    screen.mixed(block)
    screen.output.tick(0.0)
    assert screen.lines == of(0, block)
