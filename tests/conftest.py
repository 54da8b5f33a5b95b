"""What all tests share."""

import os
import signal

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Each of several processes takes its share of the cores. Tests of threads set their number themselves.
PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // PROCESSES)))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files whose tests take longest, first: one that begins last would keep one core, and leave the other idle.
LONG = ("test_resume.py", "test_compiled.py", "test_command.py", "test_study.py", "test_ranks.py", "test_use.py")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than the cores that may be used: a test often waits for processes of its own."""
    return (yield) + 1


@pytest.fixture
def set_threads():
    """PyTorch's number of threads, for one test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)
