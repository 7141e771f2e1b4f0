from __future__ import annotations

import asyncio
import gc
import time

import pytest

from freewheel.sim.clock import VirtualLoop
from lab import play


def test_time_jumps_and_costs_nothing():
    loop = VirtualLoop()

    async def nap():
        await asyncio.sleep(1e6)
        return loop.time()

    begin = time.monotonic()
    assert play(loop, nap()) == 1e6
    assert time.monotonic() - begin < 5  # a million virtual seconds


def test_timers_of_one_moment_fire_in_the_order_they_were_set():
    loop, order = VirtualLoop(), []
    for name in "abcdefgh":
        loop.call_at(1.0, order.append, name)
    loop.call_at(0.5, order.append, "first")
    loop.run_until_idle()
    assert order == ["first", *"abcdefgh"]
    assert loop.time() == 1.0


def test_a_cancelled_timer_neither_fires_nor_moves_the_clock():
    loop, fired = VirtualLoop(), []
    loop.call_at(5.0, fired.append, 1).cancel()
    loop.run_until_idle()
    assert not fired
    assert loop.time() == 0.0


def test_asyncio_locks_events_timeouts_and_groups_work():
    loop = VirtualLoop()

    async def main():
        event, lock, log = asyncio.Event(), asyncio.Lock(), []

        async def holder():
            async with lock:
                await asyncio.sleep(2)
                log.append(("held", loop.time()))
                event.set()

        async def waiter():
            await event.wait()
            async with lock:
                log.append(("waited", loop.time()))

        async with asyncio.TaskGroup() as group:
            group.create_task(holder())
            group.create_task(waiter())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.sleep(10)
        log.append(("timeout", loop.time()))
        return log

    assert play(loop, main()) == [("held", 2), ("waited", 2), ("timeout", 5)]


def test_nothing_left_to_wait_for_is_seen():
    loop = VirtualLoop()

    async def forever():
        await loop.create_future()

    task = loop.create_task(forever())
    loop.run_until_idle()
    assert not task.done()
    task.cancel()
    loop.run_until_idle()
    assert task.cancelled()


def test_a_failure_nobody_awaits_is_raised():
    loop = VirtualLoop()

    def explode():
        raise ZeroDivisionError

    loop.call_at(1.0, explode)
    with pytest.raises(ZeroDivisionError):
        loop.run_until_idle()

    async def fail():
        raise KeyError("lost")

    def run_and_collect():
        loop.run_until_idle()
        gc.collect()  # asyncio reports a lost exception when the task is collected
        loop.run_until_idle()

    loop.create_task(fail())
    with pytest.raises(KeyError, match="lost"):
        run_and_collect()
