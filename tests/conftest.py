import gc
import os
import signal
import sys
from typing import Any

# Whatever the environment says, bytecode is kept: else each process that a test starts compiles all anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# torch's store asks for the name of each address it is connected with: a name server that does not answer
# would hold up a test for five seconds, or ten.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Ray's workers are nice to all other processes: beside busy tests they took minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# Two test processes with two threads each get in each other's way on a machine with two cores.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "freewheel", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("freewheel")

# The background job of a script ignores interrupts, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one process's, so that what it starts for all its tests (a cluster, a browser) starts once.

    Files stay in order: the many short ones of `unit` come last, and leave nobody without work for long.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_finish() -> None:
    """What is imported stays: looking through it for garbage takes a tenth of what a simulation does."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def signals_as_before():
    """Some libraries (Ray) leave a handler behind that ends the process, and others' tests with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


@pytest.fixture
def no_environment(monkeypatch):
    """Nobody has launched this process."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
