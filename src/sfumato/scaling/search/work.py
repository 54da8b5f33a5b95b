"""What several workers can do together: all that `Worker` knows of a search or a sweep."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sfumato.scaling.search.space import Range, Settings

# A kind and a name: a group of a space may have any name, so that a name alone does not tell what a task is for.
Key = tuple[str, str]


class Task(Protocol):
    """One place of an agenda: one trial to make."""

    @property
    def kind(self) -> str:
        """What it is for; a "candidate" may be given up."""

    @property
    def name(self) -> str:
        """Unique among those of its kind."""

    @property
    def settings(self) -> Settings | None:
        """What differs from the recipe; None: drawn from the work's choices."""

    @property
    def key(self) -> Key:
        """What it is known by."""

    def facts(self) -> dict[str, Any]:
        """What the storage says of a trial of it; JSON."""


class Found(Protocol):
    """What a finished trial found."""

    @property
    def score(self) -> float:
        """One number for it, in [0, 1]."""

    def facts(self) -> dict[str, Any]:
        """What the storage keeps of it; JSON, without the settings."""


T = TypeVar("T", bound=Task)
F = TypeVar("F", bound=Found)
T_co = TypeVar("T_co", bound=Task, covariant=True)


class Agenda(Protocol[T_co]):
    """Tasks to be finished."""

    @property
    def slots(self) -> Sequence[T_co]:
        """All so far, in order."""

    @property
    def complete(self) -> bool:
        """Whether all are finished and none can be added."""


class Work(Protocol[T, F]):
    """What is worked on, the same for all its workers.

    Attributes:
        noun: What it is called: "search".
        sampler: Who draws what a task leaves open: "random", else by Optuna's TPE.
        prune: Whether trials that fall behind are given up.
    """

    @property
    def noun(self) -> str: ...

    @property
    def sampler(self) -> str: ...

    @property
    def prune(self) -> bool: ...

    @property
    def choices(self) -> Mapping[str, list[Any] | Range]:
        """What may be drawn."""

    def offers(self, settings: Settings) -> bool:
        """Whether all of these may be drawn."""

    def agenda(self, finished: Mapping[Key, F], /) -> Agenda[T]:
        """What is to be done, given what is finished."""

    def as_json(self) -> dict[str, Any]:
        """What all workers must agree on."""

    def read(self, facts: Mapping[str, Any], *, given_up: bool) -> F:
        """What a trial in the storage says it found; others can write there.

        Raises:
            ValueError, KeyError, TypeError: If no trial of this work finds that.
        """

    def fits(self, task: T, found: F) -> bool:
        """Whether that can be of this task."""
