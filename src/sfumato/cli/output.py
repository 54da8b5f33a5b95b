"""What goes to stdout and what to stderr."""

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sfumato.accounting.formats import note, per_cent, plain

if TYPE_CHECKING:
    from sfumato.json_record import Record


def print_json(value: Any) -> None:
    """Exactly one strict JSON object on stdout."""
    print(json.dumps(value, allow_nan=False))


def answer(found: "Record | dict[str, Any]", json_: bool, show: Callable[[Any], None]) -> None:
    """What a command ends with: one JSON object, or words."""
    if json_:
        print_json(found if isinstance(found, dict) else found.as_json())
    else:
        show(found)


def say(text: str) -> None:
    """A line of the result, on stdout."""
    print(plain(text))


def warn(text: str) -> None:
    """One line that the user should read, on stderr."""
    note(f"warning: {text}")


def print_augtest(views: int, vote: float | None, mean: float | None) -> None:
    """One line on stdout, if a test with views was done."""
    if views:
        shares = f"{per_cent(vote)} by majority, {per_cent(mean)} by mean probability"
        say(f"with {views} random views of each image: {shares}")


@contextlib.contextmanager
def interruptible(
    *more: str, kept: str = "what was finished is kept", command: Sequence[str] | None = None
) -> Iterator[None]:
    """Ends the command with status 1 where SIGINT or SIGTERM interrupt the block, and says how to go on.

    Args:
        more: Options that the same command needs besides.
        kept: What is.
        command: Goes on with an interrupted run: `sfumato resume RUN ...`; None: the same command does.
    """
    from sfumato.training.process import Interrupted, stop_on_sigterm

    try:
        with contextlib.nullcontext() if command is not None else stop_on_sigterm():
            yield
    except (Interrupted, KeyboardInterrupt) as stopped:
        has_checkpoint = isinstance(stopped, Interrupted)
        if command is not None and not has_checkpoint:
            if not Path(command[2], "recipe.toml").is_file():  # no run has begun
                raise
            kept = "the last checkpoint is kept"
        again = shlex.join(["sfumato", *sys.argv[1:], *more] if command is None else command)
        again = re.sub(r"://([^:@/ ]*):[^@ ]*@", r"://\1:***@", again)  # a storage's password is not for logs
        how = " the same command" if command is None else ""
        note(f"{stopped if has_checkpoint else 'interrupted'}; {kept}. Go on with{how}: {again}")
        raise typer.Exit(1) from None
