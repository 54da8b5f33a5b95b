"""Which tests call which functions of the package: a pytest plugin that writes it down.

    SFUMATO_CALLERS=FOLDER python -m pytest -p benchmarks.callers

Each process adds lines to a file of its own in FOLDER: a test, its seconds, and "FILE::FUNCTION" of all that it called,
in its fixtures too. What runs in a process of its own is not seen.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "sfumato"
_PREFIX = f"{PACKAGE}{os.sep}"
_called: set[tuple[str, str]] = set()
_of_fixtures: dict[Any, set[tuple[str, str]]] = {}


def _note(frame: Any, event: str, argument: Any) -> None:
    code = frame.f_code
    if code.co_filename.startswith(_PREFIX):
        _called.add((code.co_filename[len(_PREFIX) :], code.co_qualname))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    """Another test that takes the same fixture calls the same, though it is set up once."""
    before = set(_called)
    _called.clear()
    try:
        return (yield)
    finally:
        _of_fixtures.setdefault(fixturedef, set()).update(_called)
        _called.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Writes one test's line."""
    _called.clear()
    threading.settrace(_note)
    sys.settrace(_note)
    start = time.monotonic()
    try:
        return (yield)
    finally:
        sys.settrace(None)
        for fixture in chain.from_iterable(item._fixtureinfo.name2fixturedefs.values()):
            _called.update(_of_fixtures.get(fixture, ()))
        line = {
            "test": item.nodeid,
            "seconds": round(time.monotonic() - start, 3),
            "calls": sorted("::".join(call) for call in _called),
        }
        with Path(os.environ["SFUMATO_CALLERS"], f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
