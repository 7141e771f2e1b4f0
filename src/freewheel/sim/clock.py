"""An asyncio event loop in virtual time, and the trace of what happens in it.

The clock stands still while code runs and jumps to the next timer when nothing is left to run. Timers
of the same moment fire in the order in which they were set, so one seed gives one run. There is no
input or output in this loop: when neither a ready callback nor a timer is left, nothing can ever happen
again, and `run_until_idle` returns.

Two runs are the same exactly when the hashes of their traces are: times, losses and sizes are hashed with all
their digits. A file gets a line of JSON for each event: its time, what happened, and what FIELDS says of it.
"""

import asyncio
import hashlib
import heapq
import json
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TextIO, TypeAlias, TypeVar

T = TypeVar("T")
Act: TypeAlias = Callable[..., Any]
FIELDS = {
    "step": ("worker", "step", "loss"),
    "send": ("worker", "to", "message", "bytes"),
    "land": ("worker", "from", "message"),
    "fault": ("fault",),
    "left": ("worker",),
}


class Callback:
    """Something to be called, now or later; cancelling is free, it is skipped when its turn comes."""

    __slots__ = ("args", "run")

    def __init__(self, run: Act, args: tuple[Any, ...]) -> None:
        self.args = args
        self.run: Act | None = run

    def cancel(self) -> None:
        """Never call it."""
        self.run = None


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs tasks, futures and timers; owns the virtual clock.

    It has what asyncio's tasks, futures, timeouts and locks ask of a loop. Context variables are those of
    whoever runs it: callbacks get no context of their own.
    """

    def __init__(self) -> None:
        self._now, self._serial = 0.0, 0
        self._ready: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._stopping = False
        self._failure: BaseException | None = None

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(self, act: Act, *args: Any, context: Any = None) -> Callback:  # type: ignore[override]
        """Run the callback in this moment, after what is already ready."""
        handle = Callback(act, args)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, act: Act, *args: Any, context: Any = None) -> Callback:  # type: ignore[override]
        """Run the callback at a virtual time; the past means now."""
        if when < self._now:
            when = self._now
        timer = Callback(act, args)
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, timer))
        return timer

    def call_later(self, delay: float, act: Act, *args: Any, context: Any = None) -> Callback:  # type: ignore[override]
        """Run the callback after a virtual delay."""
        return self.call_at(self._now + delay, act, *args)

    def create_future(self) -> asyncio.Future[Any]:
        """Make a future that belongs to this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **how: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        """Start a coroutine in this moment."""
        return asyncio.Task(coro, loop=self, **how)

    def get_debug(self) -> bool:
        """Never: asyncio's debug mode reads the wall clock."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep a failure nobody awaited, so that it ends the run instead of vanishing."""
        self._failure = self._failure or context.get("exception") or RuntimeError(context.get("message"))
        self._stopping = True

    def stop(self) -> None:
        """Let `run_until_idle` return after the callback that is running now."""
        self._stopping = True

    def run_until_idle(self) -> None:
        """Run until somebody calls `stop` or nothing can happen any more; raise what nobody caught."""
        self._stopping = False
        asyncio._set_running_loop(self)
        ready, timers = self._ready, self._timers
        try:
            while not self._stopping:
                if ready:
                    handle = ready.popleft()
                    if handle.run is not None:
                        handle.run(*handle.args)
                elif timers:
                    moment, _, handle = heapq.heappop(timers)
                    if handle.run is not None:
                        self._now = moment
                        handle.run(*handle.args)
                else:
                    break
        finally:
            asyncio._set_running_loop(None)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for something")


class Trace:
    """Takes events as tuples; hashes them as text, and writes them out if asked to."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._hash = hashlib.sha256()
        self._events: list[tuple[Any, ...]] = []
        self._file = file
        self.events = 0

    def add(self, event: tuple[Any, ...]) -> None:
        """Add an event: its time, what happened, to whom."""
        self._events.append(event)
        if len(self._events) >= 4096:
            self._flush()

    def sha256(self) -> str:
        """The hash of all events so far."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        self._hash.update("".join(f"{event!r}\n" for event in self._events).encode())
        if self._file is not None:
            for time_s, what, *more in self._events:
                told = dict(zip(FIELDS[what], more, strict=True))
                self._file.write(json.dumps({"time_s": time_s, "event": what, **told}) + "\n")
        self.events += len(self._events)
        self._events.clear()
