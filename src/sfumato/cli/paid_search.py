"""`sfumato search --paid`: the best of a secret number of private runs."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sfumato import config
from sfumato.cli import output
from sfumato.errors import InputError
from sfumato.reporting import formats

if TYPE_CHECKING:
    from sfumato.scaling.search.result import PrivateSearchResult


def refuse(given: dict[str, Any], sampler: str | None) -> None:
    """Refuses options that would void the accounting.

    Raises:
        InputError: Naming it, and why.
    """
    if sampler not in (None, "random"):
        raise InputError(
            f"--paid with --sampler {sampler}: trials must be drawn independently, and {sampler} "
            "looks at those before. Leave --sampler out."
        )
    why = {
        "--prune": "a trial that is given up early would tell of its score. ",
        "--storage": "others who read the storage would learn how many trials there are. ",
        "--worker": "others would learn how many trials there are. ",
        "--batch-size": "trials are whole private runs, not simulations. ",
        "--seeds": "a public seed would make every trial public. ",
    }
    for option, value in given.items():
        if value is not None and value is not False:
            raise InputError(f"--paid does not go with {option}: {why[option]}Leave it out.")


def run(recipe: config.Recipe, trials: int, folder: Path, **options: Any) -> "PrivateSearchResult":
    """The whole search; says nothing that depends on how many trials there are."""
    from sfumato.scaling.search.private_search import private_search
    from sfumato.training.interrupt import Interrupted

    try:
        return private_search(recipe, trials, output=folder, report=output.note, **options)
    except (Interrupted, KeyboardInterrupt):
        output.note(
            f"interrupted; everything is kept. Go on with the same command: {shlex.join(['sfumato', *sys.argv[1:]])}"
        )
        raise typer.Exit(1) from None


def show(found: "PrivateSearchResult") -> None:
    """The result in words."""
    output.say(
        f"selected {found.best.run}: {output.per_cent(found.best.accuracy)} on the images by which it was selected"
    )
    output.say(f"held-out accuracy {output.per_cent(found.accuracy)}")
    output.say(
        f"epsilon {formats.epsilon_text(found.epsilon_search_inclusive)} at delta "
        f"{formats.delta_text(found.delta)}, the search included (by RDP)"
    )
    output.say("not covered: the running time; how many trials there were must stay secret, and nothing here tells")
