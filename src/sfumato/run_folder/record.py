"""The public files of a run as types: what is written is what is read, by everybody."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

from sfumato import config
from sfumato.errors import InputError
from sfumato.json_record import Record
from sfumato.planning.claims import Guarantee
from sfumato.run_folder.files import OWNER, machine_faults, require_folder, write_atomically, write_json

CERTIFICATE_FILE, RESULT_FILE, METRICS_FILE = "privacy.json", "result.json", "metrics.jsonl"
PRIVATE_METRICS_FILE = f"{OWNER}/metrics_private.jsonl"
CALIBRATION_FILE, WEIGHTS_FILE = "calibration.json", "model.safetensors"
FORMAT_VERSION = 1
"""Of privacy.json, result.json, model.safetensors and the ledger."""

Kind = TypeVar("Kind", bound=Record)


# Files may be a stranger's, and what is read here decides how large a model is built.
Classes = Annotated[list[str], Field(min_length=2)]
ImageSize = Annotated[int, Field(ge=8, le=1024)]
Channels = Literal[1, 3]
Spread = Annotated[list[config.Spread], Field(min_length=1)]


class PublicInputs(Record):
    """What the guarantee takes to be known to everybody: weights, result and report show it without noise.

    Attributes:
        num_people: Of whom the images are; None where nobody says.
        num_canaries: Made-up examples beside the images (`audit.canaries`), in or out.
        num_held_out: Images that accuracies are measured on: they get no guarantee.
        init_sha256: Digest of the weights that training started from; None: from scratch.
        pretrained_on: Which images made these.
        decoding_rules: How files became pixels (`data.pixels.RULES_VERSION`); None: before that was noted.
        init_adapted: Tensors of theirs that were adapted to the images' channels or size.
    """

    num_examples: int
    num_people: int | None
    num_canaries: int
    num_held_out: int
    classes: Classes
    classes_from: str
    class_proportions: list[float] | None
    image_size: ImageSize
    channels: Channels
    mean: list[float]
    std: Spread
    split: str
    group_by: str | None
    init_sha256: str | None
    pretrained_on: str | None
    decoding_rules: int | None = None
    init_adapted: list[str] = []


class Counted(Guarantee):
    """A guarantee, and of what run: what a certificate and a result both state.

    Attributes:
        num_steps: The plan; `epsilon` is that of the whole plan, whenever the run ends.
        num_lost: Updates that were released and that a crash cost the model: they count.
        num_applied: Updates that the model has.
        epsilon_so_far: Of what was released, if an end right then had been planned; None where nothing is claimed, and
            in a run selected from several.
    """

    format_version: Literal[1]
    run_id: str
    noise_multiplier: float
    batch_size: int
    num_examples: int
    num_steps: int
    num_lost: int
    num_applied: int
    epsilon_so_far: float | None


class BudgetClaim(Record):
    """What a certificate says of the budget that its run was made under.

    Attributes:
        epsilon, delta: What all runs of the budget may spend together.
        epsilon_reserved: What they may have spent when this run began, it included: an upper bound at ``delta``.
    """

    budget_id: str
    epsilon: float
    delta: float
    epsilon_reserved: float


class LoopCertificate(Counted):
    """privacy.json of a loop of one's own (`sfumato.PrivateLoop`): what it claims, and what it does not.

    Attributes:
        status: "running", or "complete": nothing more is released.
        ledger_sha256: Of the ledger's lines, as `sha256sum` prints it.
        budget: That the run's plan is reserved in, with others on the same images; None: in none.
    """

    status: Literal["running", "complete"]
    sampling: str
    sampling_prob: float
    clipping_norm: float | None
    ledger_lines: int
    ledger_sha256: str
    budget: BudgetClaim | None = None
    not_covered: list[str]


class Histogram(Record):
    """How many canaries have which score.

    Attributes:
        edges: Between bins, ascending: one more than there are bins.
        members: Of the canaries that took part, in each bin.
        non_members: Of those that took none.
    """

    edges: Annotated[list[float], Field(min_length=2)]
    members: list[int]
    non_members: list[int]


class OneRunClaim(Record):
    """What `sfumato audit one-run` showed: it depends on the released model, on canaries that everybody can make
    and on their coins, hence on no training image but through what the certificate covers.

    Attributes:
        epsilon_lower_bound: Epsilon is at least that, with this confidence; 0: nothing was shown.
        bound: By whom.
        confidence: Of the bound.
        delta: At which epsilon is bounded.
        num_canaries: m.
        num_guesses: Canaries that the attacker was sure enough of.
        num_right: Guesses that were right.
        perfect: What an attacker who is never wrong would have shown.
        violated: Whether the claimed epsilon is refuted.
        scores: Of all canaries.
    """

    epsilon_lower_bound: float
    bound: str
    confidence: float
    delta: float
    num_canaries: int
    num_guesses: int
    num_right: int
    perfect: float
    violated: bool
    scores: Histogram


class Certificate(LoopCertificate):
    """privacy.json of a run.

    Attributes:
        precision: What updates were computed in (`training.precision`).
        weights_sha256: Of the tensors of model.safetensors (names, types, shapes, values); None while it runs.
        finished_on, software: The day (UTC) and the version; None while it runs, the day also after a paid search.
        audit: What `sfumato audit one-run` showed; None: it was not run.
    """

    public_inputs: PublicInputs
    precision: str
    weights_sha256: str | None = None
    finished_on: str | None = None
    software: str | None = None
    audit: OneRunClaim | None = None


class ResultClaims(Counted):
    """What of a certificate result.json repeats."""

    classes: Classes


class Result(ResultClaims):
    """result.json: what a finished run reached. Accuracies are fractions, of the averaged weights,
    and not private.

    Attributes:
        run: The folder.
        held_out: The split that accuracies were measured on.
        accuracy_interval: 95 % (Wilson), for held-out images, or people (`data.group_by`), that are independent of each
            other; None without any.
        accuracy_last: Of the last weights, not averaged.
        accuracy_top5: None below six classes.
        test_accuracy: `accuracy` again, where `held_out` is "test"; like the two after it, absent
            from the file elsewhere.
        test_views: K of the test with views (`accuracy_augtest_vote`, `accuracy_augtest_mean`); 0
            where none was made.
        per_class: None for a class that has no held-out image.
        images_per_second, seconds: None in what a private search publishes.
        score: By which a private search selected this run, noise included.
    """

    run: str
    held_out: Literal["test", "valid"]
    accuracy: float
    accuracy_interval: Annotated[list[float], pydantic.Field(min_length=2, max_length=2)] | None
    accuracy_last: float
    accuracy_top5: float | None
    test_accuracy: float | None = None
    test_accuracy_last: float | None = None
    test_accuracy_top5: float | None = None
    test_views: int
    accuracy_augtest_vote: float | None
    accuracy_augtest_mean: float | None
    balanced_accuracy: float
    per_class: list[float | None]
    auroc: float | None
    majority_rate: float
    num_parameters: int
    images_per_second: float | None
    seconds: float | None
    score: int | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_what_disagrees(self) -> "Result":
        if len(self.per_class) != len(self.classes):
            raise ValueError("per_class has one number for each class")
        return self

    def as_json(self) -> dict[str, Any]:
        absent = set() if self.held_out == "test" else {"test_accuracy", "test_accuracy_last", "test_accuracy_top5"}
        return self.model_dump(mode="json", exclude=absent)


class Threshold(Record):
    """From which probability on an image is taken for the positive of two classes, or has one of several labels.

    Attributes:
        aim, at: What it was chosen for: at least this share on the images it was fitted on.
    """

    positive: str
    probability: Annotated[float, Field(ge=0, lt=1.01)]
    aim: Literal["sensitivity", "specificity"]
    at: Annotated[float, Field(ge=0, le=1)]


class CalibrationFacts(Record):
    """How a run's outputs become probabilities and decisions.

    Attributes:
        temperature: By which outputs are divided.
        offsets: Added to them before, where class proportions are public (`Objective.offsets`): the
            decision is for balanced classes, the probabilities are for classes as often as they are.
        shifts: Added to each class's then; None: nothing.
        fitted_on: "held-out": the run's own; "folder": others.
        num_images: That it was fitted on; not private with respect to them.
        is_multilabel: Of several labels an image: each has a probability of its own.
        threshold: None: the most probable class is named; with offsets the one that balanced classes
            ask for, which may be less probable than another.
        thresholds: Of several labels an image, in label order; None, of one or of all: it is named from 0.5 on.
    """

    temperature: Annotated[float, Field(ge=1e-3, le=1e3)]
    offsets: list[Annotated[float, Field(ge=-100, le=100)]] | None = None
    shifts: list[Annotated[float, Field(ge=-50, le=50)]] | None = None
    fitted_on: Literal["held-out", "folder"]
    num_images: int
    is_multilabel: bool = False
    threshold: Threshold | None = None
    thresholds: list[Threshold | None] | None = None


class WeightsFacts(Record):
    """What the metadata of model.safetensors says: enough to use the weights, and to find the run
    that made them.
    """

    format_version: Literal[1]
    classes: Classes
    mean: list[float]
    std: Spread
    image_size: ImageSize
    channels: Channels
    decoding_rules: int | None = None
    run_id: str
    private: bool
    epsilon: float | None
    delta: float | None


class Metrics(Record):
    """A line of metrics.jsonl: what an evaluated step reached, and epsilon until then (None where a
    run is not private).
    """

    step: int
    epsilon: float | None
    accuracy: float
    accuracy_last: float


class NormHistogram(Record):
    """Norms of per-example gradients, averaged over views and before clipping, in units of the
    clipping norm C.

    Not private: exact statistics of the training images, the realised batch among them.

    Attributes:
        edges: Between bins, ascending; 1 is among them.
        counts: len(edges) + 1 numbers: norms up to the first edge, above each edge up to the next,
            above the last. They sum to the examples of the batch that have a finite norm and loss.
        not_finite: The examples that have not; they contribute nothing to the update.
        median: Of the finite norms; None without any.
        signal_to_noise: Norm of the sum of clipped gradients over the root mean square norm of the
            noise, ||sum_i clip(g_i) / C|| / (sigma sqrt(d)) for d parameters; None without noise.
    """

    edges: list[float]
    counts: list[int]
    not_finite: int
    median: float | None
    signal_to_noise: float | None


class PrivateMetrics(Record):
    """A line of owner/metrics_private.jsonl, for the owner alone: aggregates over the training images of
    one update, and times.

    Attributes:
        clipped_square: Mean square of the clipped gradients' norms, in units of the clipping norm.
        norms: At the steps where it was asked for.
        train_accuracy: Of the averaged weights on training images, where a sweep asked for it; not private.
        seconds: Since the run began.
        phases: Seconds of each phase until then.
    """

    step: int
    loss: float | None
    clipped_fraction: float | None
    grad_norm: float | None
    clipped_square: float | None
    norms: NormHistogram | None = None
    train_accuracy: float | None = None
    seconds: float
    phases: dict[str, float]


def write(path: Path, record: Record) -> None:
    """Writes a record as strict JSON, atomically.

    Raises:
        MachineError: If the disk fails.
    """
    write_json(path, record.as_json())


def read(path: Path, kind: type[Kind]) -> Kind:
    """Reads what `write` wrote.

    Raises:
        InputError: If the file is missing, damaged, or says something else than this kind of record
            does.
    """
    require_folder(path.parent)
    if not path.is_file():
        raise InputError(f"{path} cannot be read. Give a whole run folder.")
    return _parsed(path.read_bytes(), path, kind)


def _parsed(content: bytes, path: Path, kind: type[Kind]) -> Kind:
    try:
        return kind.model_validate_json(content)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise InputError(f"{path} is damaged: {where}: {first['msg']}. Restore it from a copy.") from None


class RecordLines:
    """An append-only file with a record about a step in each line; lines may be cut back to a step."""

    def __init__(self, path: Path, kind: type[Metrics | PrivateMetrics], mode: int = 0o644) -> None:
        self.path, self.kind, self.mode = path, kind, mode

    def append(self, line: Metrics | PrivateMetrics) -> None:
        """Adds a line; what has its default is left out."""
        with machine_faults(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_line(line))

    def keep_up_to(self, step: int) -> None:
        """Drops the lines of later steps, which are about to be made again."""
        if self.path.exists():
            kept = [_line(line) for line in read_lines(self.path, self.kind) if line.step <= step]
            write_atomically(self.path, b"".join(kept), self.mode)


def _line(line: Record) -> bytes:
    return (json.dumps(line.model_dump(mode="json", exclude_defaults=True), allow_nan=False) + "\n").encode()


def read_lines(path: Path, kind: type[Kind]) -> list[Kind]:
    """The lines of a file about steps, in the order in which they were written; none where there is no file, and a torn
    last one is passed over.

    Raises:
        InputError: If a line is not of this kind.
    """
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [_parsed(line, path, kind) for line in whole]
