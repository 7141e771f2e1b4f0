"""An asyncio event loop in virtual time, and the trace of what happens in it.

The clock stands still while code runs and jumps to the next timer when nothing is left to run. Timers of the
same moment fire in the order in which they were set, so one seed gives one run. The loop has no input or
output: when neither a ready callback nor a timer is left, `run_until_idle` returns.

Two runs are equal if and only if the hashes of their traces are: times, losses and sizes are hashed with all
their digits.
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
# What a trace file says of each kind of event, beside its time.
FIELDS = {
    "step": ("worker", "step", "loss"),
    "send": ("worker", "to", "message", "bytes"),
    "land": ("worker", "from", "message"),
    "fault": ("fault",),
    "left": ("worker",),
}


class Callback:
    """Something to be called, now or later; one that was cancelled is skipped when its turn comes."""

    __slots__ = ("args", "run")

    def __init__(self, run: Act, args: tuple[Any, ...]) -> None:
        self.args = args
        self.run: Act | None = run

    def cancel(self) -> None:
        self.run = None


class VirtualLoop(asyncio.AbstractEventLoop):
    """Owns the virtual clock, and has what asyncio's tasks, futures, timeouts and locks ask of a loop.

    Callbacks get no context of their own: context variables are those of whoever runs the loop.
    """

    def __init__(self) -> None:
        self._now, self._serial = 0.0, 0
        self._ready: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._stopping = False
        self._failure: BaseException | None = None

    def time(self) -> float:
        return self._now

    def call_soon(self, act: Act, *args: Any, context: Any = None) -> Callback:  # type: ignore[override]
        handle = Callback(act, args)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, act: Act, *args: Any, context: Any = None) -> Callback:  # type: ignore[override]
        timer = Callback(act, args)
        self._serial += 1
        heapq.heappush(self._timers, (max(when, self._now), self._serial, timer))
        return timer

    def call_later(self, delay: float, act: Act, *args: Any, context: Any = None) -> Callback:  # type: ignore[override]
        return self.call_at(self._now + delay, act, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **how: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **how)

    def get_debug(self) -> bool:
        return False  # the debug mode reads the wall clock

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Let a failure that nobody awaited end the run."""
        self._failure = self._failure or context.get("exception") or RuntimeError(context.get("message"))
        self._stopping = True

    def stop(self) -> None:
        self._stopping = True  # after the callback that is running now

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
    """Run a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for something")


class Trace:
    """Hashes events as text, and writes a line of JSON for each to a file, if there is one."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._hash = hashlib.sha256()
        self._events: list[tuple[Any, ...]] = []
        self._file = file
        self.events = 0

    def add(self, event: tuple[Any, ...]) -> None:
        self._events.append(event)
        if len(self._events) >= 4096:
            self._flush()

    def sha256(self) -> str:
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
