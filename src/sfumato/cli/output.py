"""What goes to stdout and what to stderr."""

import json
from typing import Any

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
