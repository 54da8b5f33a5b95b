"""The two ways in which a command ends without doing its work, and what its line may suggest."""

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_MOST_SHOWN = 40  # a line of a thousand names is none
_ALIKE = 0.4  # of names, from 0 to 1


class InputError(ValueError):
    """The user's input is wrong: exit status 2.

    The message is one line: the object, the reason, the remedy.

    Attributes:
        is_said: By the first rank of the same run, so that this one need not.
    """

    is_said = False


class MachineError(RuntimeError):
    """The machine failed, not the input (a full disk, a fault): exit status 1.

    The message is one line: what failed, what is left, how to go on.
    """


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Begins the line of an InputError with what it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from None


def refusal(call: Callable[..., Any], *given: Any) -> str | None:
    """What an InputError says that a call raises; None: it raises none."""
    try:
        call(*given)
    except InputError as error:
        return str(error)
    return None


@contextlib.contextmanager
def refusing(what: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within, errors of these kinds become an InputError: what failed, what they say, the remedy. No memory left is no
    fault of the input.
    """
    try:
        yield
    except (InputError, MachineError):
        raise
    except kinds as error:
        if is_out_of_memory(error):
            raise
        said = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{what}: {said.rstrip('.')[:200]}. {remedy}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has no memory left."""
    is_torchs = type(error).__name__ == "OutOfMemoryError"  # by name: torch is not imported here
    return isinstance(error, MemoryError) or is_torchs or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """The first words of an error, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def nearest(name: str, known: Sequence[str]) -> str:
    """Which known name was probably meant, as a sentence; of keys, their last part counts too."""
    last = [key.rsplit(".")[-1] for key in known]
    near = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    near = near or difflib.get_close_matches(name.rsplit(".")[-1], last, n=1, cutoff=_ALIKE)
    if near:
        return f"Did you mean {near[0]}?"
    more = f" and {len(known) - _MOST_SHOWN} more" if len(known) > _MOST_SHOWN else ""
    return f"Known are {', '.join(known[:_MOST_SHOWN])}{more}." if known else "It has none."
