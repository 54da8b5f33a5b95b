"""Faults that are planted in the code itself.

A fault is a change to the text of a function as it stands in the package: the changed text is compiled in the
function's module and takes its place, wherever the package holds it. Text that is not found once and only once is an
error, so that a fault cannot outlive the line that it was made for.
"""

import contextlib
import dataclasses
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change.

    Attributes:
        place: "module:function" or "module:Class.method", below `sfumato`.
        before: Text of that function.
        after: What stands there instead.
    """

    place: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Fault:
    """A way to break the code.

    Attributes:
        name: In words.
        edits: What is changed.
        law: By which it is caught at least (`laws.LAWS`).
    """

    name: str
    edits: tuple[Edit, ...]
    law: str


@contextlib.contextmanager
def planted(*edits: Edit) -> Iterator[None]:
    """Within, the code is changed."""
    undo = []
    try:
        for edit in edits:
            undo += _plant(edit)
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _plant(edit: Edit) -> list[tuple[object, str, object]]:
    """Puts the changed function in its places; returns what was there."""
    module_name, _, path = edit.place.partition(":")
    module = importlib.import_module(f"sfumato.{module_name}")
    owner = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = inspect.getattr_static(owner, name)
    text = textwrap.dedent(_SOURCES.get(real) or inspect.getsource(real))
    if text.count(edit.before) != 1:
        raise ValueError(f"{edit.place} does not hold this text once: {edit.before}")
    changed_text = text.replace(edit.before, edit.after)
    made: dict[str, object] = {}
    exec(compile(changed_text, f"<planted in {edit.place}>", "exec"), module.__dict__, made)
    changed = made[name]
    _SOURCES[changed] = changed_text
    places = [(owner, name)]
    if owner is module:  # others may have taken it by name
        users = [each for key, each in list(sys.modules.items()) if key.startswith("sfumato.") and each is not module]
        places += [(user, key) for user in users for key, value in list(vars(user).items()) if value is real]
    for place, key in places:
        setattr(place, key, changed)
    return [(place, key, real) for place, key in places]


_SOURCES: dict[object, str] = {}
"""Of functions that were changed already: a fault may change one in several places."""
