"""From the ledger's lines to the mechanism that really ran."""

import math
import secrets
from typing import Annotated, Any, Literal

import pydantic

from sfumato.accounting.mechanism import Mechanism, Sampling
from sfumato.errors import InputError
from sfumato.json_record import Record

OWN_LOOP = "own loop"
"""In place of a recipe's digest: the ledger of a loop of somebody's own."""


class Chained(Record):
    """What makes a line of an entry: the hash of the line before, and its own."""

    prev: str
    hash: str


class RunEntry(Record):
    """The first one: which run and recipe the ledger belongs to, and everything public but the
    number of steps.

    Attributes:
        first_release_noise: Of the release that comes before update 1, as step 0; None: there is
            none.
        images_per_unit: How many images one unit of privacy owns, at most.
    """

    kind: Literal["run"] = "run"
    run_id: str
    num_examples: int
    batch_size: int
    noise_multiplier: float
    sampling: Sampling
    clipping_norm: float | None
    recipe_digest: str
    first_release_noise: float | None
    images_per_unit: int


class SessionEntry(Record):
    """A session begins: updates after update ``first_step`` - 1 of session ``from_session`` are
    drawn afresh.

    Attributes:
        from_session: None in the first session, and where none of its updates is kept.
        salt: Random, so that two copies of a run that both begin a session have nothing in common
            from then on; None in the first.
        environment: What decides the last bits of an update (`sfumato.run_folder.environment`);
            empty in what a search publishes.
    """

    kind: Literal["session"] = "session"
    session: int
    first_step: int
    from_session: int | None
    salt: str | None
    environment: dict[str, Any]


class StepEntry(Record):
    """One release: an update that is about to be applied.

    Attributes:
        step: From 1; 0 is the first release, of all examples, where the run has one.
        sum_mac: Authenticates the clipped sum under the run's key; None where nothing is kept
            secret.
    """

    kind: Literal["step"] = "step"
    session: int
    step: int
    sum_mac: str | None


class RunLine(RunEntry, Chained):
    """`RunEntry` as it stands in the ledger."""


class SessionLine(SessionEntry, Chained):
    """`SessionEntry` as it stands in the ledger."""


class StepLine(StepEntry, Chained):
    """`StepEntry` as it stands in the ledger."""


Line = Annotated[RunLine | SessionLine | StepLine, pydantic.Field(discriminator="kind")]
_LINE: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Line)


def run_line(run_id: str, mechanism: Mechanism, clipping_norm: float | None, recipe_digest: str) -> dict[str, Any]:
    """The first entry of a ledger."""
    return RunEntry(
        run_id=run_id,
        num_examples=mechanism.num_examples,
        batch_size=mechanism.batch_size,
        noise_multiplier=mechanism.noise_multiplier,
        sampling=mechanism.sampling,
        clipping_norm=clipping_norm,
        recipe_digest=recipe_digest,
        first_release_noise=mechanism.first_release_noise,
        images_per_unit=mechanism.images_per_unit,
    ).as_json()


def first_session_line(environment: dict[str, Any]) -> dict[str, Any]:
    """The session in which a run begins."""
    return SessionEntry(session=0, first_step=1, from_session=None, salt=None, environment=environment).as_json()


def next_session_line(
    last: dict[str, Any], step: int, of_session: int | None, environment: dict[str, Any]
) -> dict[str, Any]:
    """Another session begins: updates after update ``step`` of session ``of_session`` are drawn
    afresh.
    """
    return SessionEntry(
        session=last["session"] + 1,
        first_step=step + 1,
        from_session=of_session,
        salt=secrets.token_hex(16),
        environment=environment,
    ).as_json()


def step_line(session: int, step: int, sum_mac: str | None) -> dict[str, Any]:
    """One release."""
    return StepEntry(session=session, step=step, sum_mac=sum_mac).as_json()


def refuse_other_lines(lines: list[dict[str, Any]]) -> None:
    """Refuses chained lines that are none of a run: anybody can chain lines.

    Raises:
        InputError: Naming the line.
    """
    if not lines or lines[0].get("kind") != "run":
        raise InputError(
            "the ledger has no first line that states the mechanism, so its epsilon is not "
            "known. Restore it from a copy."
        )
    for number, line in enumerate(lines, start=1):
        try:
            kind = _LINE.validate_python(line).kind
        except pydantic.ValidationError:
            kind = None
        if kind is None or (kind == "run") != (number == 1) or (number == 2 and kind != "session"):
            raise InputError(
                f"line {number} of the ledger is no line of a run, so its epsilon is not known. "
                "Restore the ledger from a copy."
            )


def releases(lines: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """The (session, step) of every release, the first one of each session (step 0) included."""
    return {(line["session"], line["step"]) for line in lines if line["kind"] == "step"}


def num_updates(lines: list[dict[str, Any]]) -> int:
    """How many updates were released."""
    return sum(step > 0 for _, step in releases(lines))


def num_first_releases(lines: list[dict[str, Any]]) -> int:
    """How often the release before all updates was made: once, unless a crash had it drawn afresh."""
    return sum(step == 0 for _, step in releases(lines))


def together(first_release_noise: float | None, count: int) -> float | None:
    """The noise of one release that costs what so many cost together: Gaussians compose exactly."""
    return None if first_release_noise is None or count == 0 else first_release_noise / math.sqrt(count)


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
    first, count = lines[0], num_first_releases(lines)
    if any(step < 0 for _, step in counted) or count and first["first_release_noise"] is None:
        raise InputError("the ledger names a release that its run has not, so its epsilon is not known. Restore it.")
    return Mechanism(
        first["num_examples"],
        first["batch_size"],
        first["noise_multiplier"],
        num_updates(lines),
        first["sampling"],
        images_per_unit=first["images_per_unit"],
        first_release_noise=together(first["first_release_noise"], count),
    )
