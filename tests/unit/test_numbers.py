"""Numbers as people read them."""

from __future__ import annotations

import pytest

from freewheel.numbers import column, share, short, speed


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 3, "–"),
        (0.0, 3, "0"),
        (1000, 3, "1,000"),
        (999.6, 3, "1,000"),
        (920.4, 2, "920"),
        (99.7, 2, "100"),
        (12.34, 3, "12.3"),
        (1488.2, 4, "1488"),
        (0.00123456, 3, "0.00123"),
        (-1234567.0, 3, "-1,234,567"),
        (0.00001, 3, "1.0e-05"),
    ],
)
def test_a_few_digits_and_no_exponent(value, digits, text):
    assert short(value, digits) == text


def test_speeds_have_the_unit_that_suits_them():
    assert [speed(one) for one in (93.7, 1000, 999_960)] == ["93.7 Mbit/s", "1 Gbit/s", "1,000 Gbit/s"]


def test_no_share_is_more_than_the_whole():
    assert [share(one) for one in (None, 0.25, 1.0, 1.004, 1.3)] == [
        "–",
        "25.0 %",
        "100.0 %",
        "100.0 %",
        "100.0 %",
    ]


def test_in_a_column_nothing_reads_as_zero_that_is_not():
    assert column([0.0, 0.04, 512.0]) == ["0", "4.0e-02", "512"]
    assert column([1e-5, None], 4) == ["1.0e-05", "–"]
