"""What goes to stdout and what to stderr."""

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import typer

from sfumato.reporting.lines import note, plain


def print_json(value: Any) -> None:
    """Exactly one strict JSON object on stdout."""
    print(json.dumps(value, allow_nan=False))


def say(text: str) -> None:
    """A line of the result, on stdout."""
    print(plain(text))


def warn(text: str) -> None:
    """One line that the user should read, on stderr."""
    note(f"warning: {text}")


def per_cent(fraction: float | None) -> str:
    """A fraction as per cent, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def less_than_sure(probability: float) -> str:
    """A probability as per cent, never as certainty."""
    if probability < 0.0001:
        return "below 0.01 %"
    return "above 99.99 %" if probability > 0.9999 else per_cent(probability)


def print_augtest(views: int, vote: float | None, mean: float | None) -> None:
    """One line on stdout, if a test with views was done."""
    if views:
        say(
            f"with {views} random views of each image: {per_cent(vote)} by majority, "
            f"{per_cent(mean)} by mean probability"
        )


@contextlib.contextmanager
def interruptible(*more: str) -> Iterator[None]:
    """Ends the command with status 1 where the block is interrupted, and says how to go on.

    Args:
        more: Options that the same command needs besides.
    """
    from sfumato.training.interrupt import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as interrupted:
        again = shlex.join(["sfumato", *sys.argv[1:], *more])
        again = re.sub(r"://([^:@/ ]*):[^@ ]*@", r"://\1:***@", again)  # a storage's password is not for logs
        what = str(interrupted) if isinstance(interrupted, Interrupted) else "interrupted"
        note(f"{what}; what was finished is kept. Go on with the same command: {again}")
        raise typer.Exit(1) from None
