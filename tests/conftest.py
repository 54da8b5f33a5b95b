"""What all tests share."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Files whose tests take longest, first: one that begins last would keep one core, and leave the other idle.
LONG = (
    "test_canary.py",
    "test_planted_faults.py",
    "test_compiled.py",
    "test_resume.py",
    "test_publication.py",
    "test_plan.py",
    "test_replay.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)
