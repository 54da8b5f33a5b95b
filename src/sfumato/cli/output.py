"""What goes to stdout and what to stderr."""

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Exactly one strict JSON object on stdout."""
    print(json.dumps(value, allow_nan=False))


def note(text: str) -> None:
    """One line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """One line that the user should read, on stderr."""
    note(f"warning: {text}")


def per_cent(fraction: float | None) -> str:
    """A fraction as per cent, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def print_augtest(facts: dict[str, Any]) -> None:
    """One line on stdout, if a test with views was done."""
    if facts.get("test_views"):
        vote, mean = per_cent(facts["test_accuracy_augtest_vote"]), per_cent(facts["test_accuracy_augtest_mean"])
        print(f"with {facts['test_views']} random views of each image: {vote} by majority, {mean} by mean probability")
