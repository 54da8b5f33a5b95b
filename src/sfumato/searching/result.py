"""What a search found, as types: search.json and what ``--json`` prints are made from them."""

from typing import Any, Literal

from sfumato.json_record import Record


class Best(Record):
    """The settings that won, and their mean accuracy over the seeds in the simulations."""

    settings: dict[str, Any]
    accuracy: float | None


class Gain(Record):
    """The best of some candidates against the settings before.

    Attributes:
        best: Which candidate; None without any.
        gain: Its mean accuracy less that of the settings before.
        needed: What chance alone exceeds in fewer than 5 of 100 searches; None: unknown from one
            seed.
        counts: Whether the gain is more than chance gives, so that the settings are taken over.
    """

    best: int | None
    gain: float
    needed: float | None
    counts: bool


class Stage(Gain):
    """One group of settings that was compared with what stood before.

    Attributes:
        settings: After the stage.
        tried: What was compared, in order.
        accuracies: Of each, the mean over the seeds; None of one that was given up.
        untried: What the group has besides, for which there were too few trials.
    """

    name: str
    settings: dict[str, Any]
    tried: list[dict[str, Any]]
    untried: list[dict[str, Any]]
    accuracies: list[float | None]


class Predicted(Record):
    """Accuracy of the private run on the validation split: value, and 95 times in 100 between low
    and high.
    """

    value: float
    low: float
    high: float


class Cost(Record):
    """Views differentiated: by the search, as a fraction of one run of the recipe it began with,
    and by the final run.

    Attributes:
        search_views: In the mean, where the number of trials is secret.
        final_views: Of the final run; None where that is one of those searched.
    """

    search_views: int | float
    search_fraction: float
    final_views: int | None = None


class SearchResult(Record):
    """What a search by simulations ends with.

    Attributes:
        trials: Settings that were tried, of which `given_up` fell behind or were impossible.
        epsilon_final: Of the one private run; `epsilon_search_inclusive` is None where the search
            looked at private images, since no certificate covers that.
        storage: Where the trials are, without a password.
        search_data: The public data set, or "private".
        recipe: The file of the final recipe; None for a helper.
    """

    best: Best
    stages: list[Stage]
    trials: int
    given_up: int
    epsilon_final: float
    delta: float
    noise_multiplier: float
    epsilon_search_inclusive: float | None
    predicted_accuracy: Predicted
    augtest_gain: float | None
    law: str
    cost: Cost
    warnings: list[str]
    storage: str
    search_data: str
    recipe: str | None


class Selected(Record):
    """The run that was selected, and its accuracy on the images that selected it."""

    run: str
    accuracy: float


class PrivateSearchResult(Record):
    """What a search by private runs ends with: nothing in it depends on how many there were.

    Attributes:
        trials: None: their number is secret. `expected_trials` is public.
        epsilon_final: As `epsilon_search_inclusive`: it covers the search.
        search_data: The public data set that scored the trials, or "private".
    """

    best: Selected
    trials: Literal[None] = None
    expected_trials: float
    recipe: str
    storage: Literal[None] = None
    search_data: str
    private: bool
    epsilon_final: float
    epsilon_search_inclusive: float
    delta: float
    noise_multiplier: float | None
    predicted_accuracy: Literal[None] = None
    held_out: str
    accuracy: float
    test_accuracy: float | None
    cost: Cost
