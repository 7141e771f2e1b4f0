"""The ledger of passes: what is closed, whatever numbers others say."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.ledger import BEHIND, Ledger

DEADLINE_S = 20.0
FAR = 10**12


def finished(ledger: Ledger, number: int, batches: int) -> None:
    for batch in range(batches):
        ledger.finish((0, 1), number, batch, batch + 1)


def test_a_pass_far_ahead_does_not_keep_anybody_busy():
    ledger = Ledger(4)
    finished(ledger, 0, 4)
    ledger.open(FAR)
    made = []

    def tidy() -> None:
        made.append(ledger.progress())  # what nobody began counts
        ledger.tidy()
        made.append(ledger.progress())

    tidying = threading.Thread(target=tidy, daemon=True)
    tidying.start()
    tidying.join(DEADLINE_S)
    assert not tidying.is_alive()
    assert (ledger.floor, ledger.past, list(ledger.passes)) == (FAR - BEHIND + 1, 4 * ledger.floor, [FAR])
    assert made == [FAR, FAR]


@given(st.dictionaries(st.integers(0, 12), st.integers(0, 3), max_size=6), st.sets(st.integers(0, 12)))
def test_passes_are_closed_in_order_up_to_the_first_that_somebody_works_on(passes, left):
    ledger = Ledger(3)
    for number, count in passes.items():
        ledger.open(number)
        finished(ledger, number, count)
        if number in left:
            ledger.leave(number)
    before = ledger.progress()
    newest = max(passes, default=0)
    busy = [q for q, count in passes.items() if count < 3 and q not in left]
    ledger.tidy()
    assert ledger.floor == max(0, min([newest - BEHIND + 1, *busy]))
    assert ledger.past == sum(passes.get(q, 3) for q in range(ledger.floor))
    assert ledger.progress() == pytest.approx(before)
    assert all(q >= ledger.floor for q in ledger.passes)
