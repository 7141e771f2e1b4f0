import signal

import hypothesis
import pytest
import torch

# Two test processes with two threads each get in each other's way on a machine with two cores.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "freewheel", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("freewheel")

# The background job of a script ignores interrupts, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def signals_as_before():
    """Some libraries (Ray) leave a handler behind that ends the process, and others' tests with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)
