"""evaluation.json: how good a run was on a test set, where its owner had that put into the report."""

from sfumato.json_record import Record
from sfumato.run_folder.record import CalibrationFacts, Classes

EVALUATION_FILE = "evaluation.json"
FITTED_ON_FILE = "fitted_on.json"
"""In owner/: digests of the images that probabilities and threshold were fitted on."""
TRAINED_ON_FILE = "trained_on.json"
"""In owner/, of a run on images in Python: their digests."""
CHOSE = "chose the probabilities and the threshold: expect less of new ones"


class Intervals(Record):
    """95 % intervals (lower, upper), for independent images; where `data.group_by` says whose each is, for independent
    people. None of a class that does not occur.
    """

    accuracy: list[float]
    per_class: list[list[float] | None]
    auroc: list[float] | None
    """Of two classes; of several labels an image, of the mean."""
    auroc_per_class: list[list[float] | None] | None = None
    """Of several labels an image."""


class Decision(Record):
    """Of two classes, or of one of several labels: what decides, and how often it is right."""

    positive: str
    threshold: float
    counts: dict[str, int]
    sensitivity: float | None
    sensitivity_interval: list[float] | None
    specificity: float | None
    specificity_interval: list[float] | None
    prevalence: float | None
    positive_predictive_value: float | None
    negative_predictive_value: float | None


class Group(Record):
    """Images that share a value of a column; "" where nothing is stated. With its 95 % interval."""

    value: str
    num_images: int
    accuracy: float
    interval: list[float]
    per_class: list[float | None]
    auroc: float | None = None
    """Of several labels an image."""


class Tested(Record):
    """What a report tells of a test set. Exact numbers: not private with respect to its images.

    Attributes:
        test_set: The name of its folder, without where that lies; or of the held-out images.
        evaluated_on: The day (UTC).
        num_people: Of whom the images are; None: nobody says, and intervals take images for independent.
        num_fitted_on: How many of the images chose probabilities or threshold, too.
        per_class: None for a class that does not occur.
        is_multilabel: Whether an image may have several labels: then `accuracy` is the share that is right of those
            that are known, balanced accuracy and `auroc` are means over labels.
        confusion: Images of each class (row) that were taken for each class (column); or for each of several labels the
            images left alone, false alarms, missed and found.
        calibration: How probabilities and decisions came of the outputs; None: as they are, not calibrated.
        decision: Of two classes.
        decisions: Of each of several labels, among the images of which it is known.
        roc: Of two classes: pairs of the rate of false alarms and the share that is found of the class that is looked
            for, as the threshold falls; None where only one class occurs.
        by: The column of the folder's table that `groups` are told by.
    """

    test_set: str
    evaluated_on: str
    num_images: int
    num_people: int | None
    num_fitted_on: int
    classes: Classes
    is_multilabel: bool = False
    accuracy: float
    balanced_accuracy: float
    per_class: list[float | None]
    majority_rate: float
    auroc: float | None
    confusion: list[list[int]]
    intervals: Intervals
    calibration: CalibrationFacts | None
    decision: Decision | None = None
    decisions: list[Decision] | None = None
    roc: list[list[float]] | None = None
    by: str | None = None
    groups: list[Group] | None = None
