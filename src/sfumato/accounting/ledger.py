"""From the ledger's lines to the mechanism that really ran."""

from typing import Any

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError


def run_line(mechanism: Mechanism, clipping_norm: float | None, recipe_digest: str) -> dict[str, Any]:
    """The first line of a ledger: everything public but the number of steps, and which recipe it belongs to."""
    return {
        "kind": "run",
        "num_examples": mechanism.num_examples,
        "batch_size": mechanism.batch_size,
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling": mechanism.sampling,
        "clipping_norm": clipping_norm,
        "recipe_digest": recipe_digest,
    }


def session_line(session: int, first_step: int, from_session: int | None, environment: dict[str, Any]) -> dict[str, Any]:
    """A session begins: its updates from ``first_step`` on, after one of ``from_session``, are drawn afresh."""
    return {"kind": "session", "session": session, "first_step": first_step, "from_session": from_session, "environment": environment}


def step_line(session: int, step: int) -> dict[str, Any]:
    """One release: an update that is about to be applied."""
    return {"kind": "step", "session": session, "step": step}


def releases(lines: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """The (session, step) of every release."""
    return {(line["session"], line["step"]) for line in lines if line["kind"] == "step"}


def last_session(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest session line."""
    return next(line for line in reversed(lines) if line["kind"] == "session")


def spent_mechanism(lines: list[dict[str, Any]]) -> Mechanism:
    """The mechanism whose num_steps counts what was released, each release once.

    An update that was repeated in its own environment is the same release and stands in
    the ledger once; one that was drawn afresh in another session counts again.

    Raises:
        InputError: If the lines do not form a ledger.
    """
    if not lines or lines[0]["kind"] != "run":
        raise InputError("the ledger has no first line that states the mechanism, so its epsilon is not known. Restore it from a copy.")
    steps = [line for line in lines if line["kind"] == "step"]
    counted = releases(lines)
    if len(counted) != len(steps):
        raise InputError("the ledger names one update twice, so its epsilon is not known. Restore it from a copy.")
    first = lines[0]
    return Mechanism(first["num_examples"], first["batch_size"], first["noise_multiplier"], len(counted), first["sampling"])
