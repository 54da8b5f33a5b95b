"""From the ledger's lines to the mechanism that really ran."""

import secrets
from typing import Any

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError


def run_line(run_id: str, mechanism: Mechanism, clipping_norm: float | None, recipe_digest: str) -> dict[str, Any]:
    """The first line of a ledger: which run and recipe it belongs to, and everything public but the number of steps."""
    return {
        "kind": "run",
        "run_id": run_id,
        "num_examples": mechanism.num_examples,
        "batch_size": mechanism.batch_size,
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling": mechanism.sampling,
        "clipping_norm": clipping_norm,
        "recipe_digest": recipe_digest,
    }


def first_session_line(environment: dict[str, Any]) -> dict[str, Any]:
    """The session in which a run begins."""
    return {"kind": "session", "session": 0, "first_step": 1, "from_session": None, "salt": None, "environment": environment}


def next_session_line(last: dict[str, Any], step: int, of_session: int | None, environment: dict[str, Any]) -> dict[str, Any]:
    """Another session begins: updates after update ``step`` of session ``of_session`` are drawn afresh.

    Its salt is random, so that two copies of a run that both begin a session have nothing in common from then on.
    """
    begins = {"session": last["session"] + 1, "first_step": step + 1, "from_session": of_session}
    return {"kind": "session", **begins, "salt": secrets.token_hex(16), "environment": environment}


def step_line(session: int, step: int, sum_mac: str | None) -> dict[str, Any]:
    """One release: an update that is about to be applied.

    Args:
        sum_mac: Authenticates the clipped sum under the run's key; None where nothing is kept secret.
    """
    return {"kind": "step", "session": session, "step": step, "sum_mac": sum_mac}


_NUMBERS: dict[str, dict[str, type]] = {
    "run": {"num_examples": int, "batch_size": int, "noise_multiplier": float},
    "session": {"session": int, "first_step": int},
    "step": {"session": int, "step": int},
}


def refuse_other_lines(lines: list[dict[str, Any]]) -> None:
    """Refuses chained lines that are none of a run: anybody can chain lines.

    Raises:
        InputError: Naming the line.
    """
    if not lines or lines[0].get("kind") != "run":
        raise InputError("the ledger has no first line that states the mechanism, so its epsilon is not known. Restore it from a copy.")
    for number, line in enumerate(lines, start=1):
        numbers = _NUMBERS.get(str(line.get("kind")), {"kind": int})
        of_its_kind = all(type(line.get(key)) in (kind, int) for key, kind in numbers.items())
        if not of_its_kind or (line["kind"] == "run") != (number == 1) or (number == 2 and line["kind"] != "session"):
            raise InputError(f"line {number} of the ledger is no line of a run, so its epsilon is not known. Restore the ledger from a copy.")


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
    refuse_other_lines(lines)
    steps = [line for line in lines if line["kind"] == "step"]
    counted = releases(lines)
    if len(counted) != len(steps):
        raise InputError("the ledger names one update twice, so its epsilon is not known. Restore it from a copy.")
    first = lines[0]
    return Mechanism(first["num_examples"], first["batch_size"], first["noise_multiplier"], len(counted), first["sampling"])
