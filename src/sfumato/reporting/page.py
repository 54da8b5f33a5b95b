"""report.html: one self-contained page that says what a run is worth and what it promises."""

import dataclasses
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.accounting import formats
from sfumato.reporting import html, wording
from sfumato.reporting.attack import attack_chart, canaries_chart
from sfumato.reporting.charts import Chart, Curve, Panel, accuracies, chart, linear
from sfumato.reporting.tested import class_table, group_table, in_words, roc_chart
from sfumato.run_folder import record
from sfumato.run_folder.files import refuse_loop, write_atomically
from sfumato.run_folder.record import CalibrationFacts, Certificate, Metrics, Result
from sfumato.run_folder.tested import CHOSE, EVALUATION_FILE, Tested

MOST_ROWS = 25
MOST_MARKERS = 50


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The public files of one run. What is in owner/ is never opened.

    Attributes:
        name: Of the folder.
        result: None while the run is unfinished.
        metrics: By step.
        recipe: recipe.toml as nested dictionaries, without data.path.
        calibration: What its owner fitted by `sfumato calibrate`, if anything.
        tested: What its owner had put into the report by `sfumato evaluate --report`, if anything.
    """

    name: str
    certificate: Certificate
    result: Result | None
    metrics: list[Metrics]
    recipe: dict[str, Any]
    calibration: CalibrationFacts | None = None
    tested: Tested | None = None

    @property
    def classes(self) -> list[str]:
        """Class names in label order."""
        return self.certificate.public_inputs.classes


def read_run(folder: Path) -> Recorded:
    """Reads the public files of a run.

    Raises:
        InputError: If one is missing or damaged.
    """
    refuse_loop(folder)
    certificate = record.read(folder / record.CERTIFICATE_FILE, Certificate)
    recipe = config.read(folder / "recipe.toml")
    config.parse(recipe)  # a file that is no recipe is not shown
    recipe["data"].pop("path", None)  # nor where the images lie, whoever wrote that there

    def read_if_there(name: str, kind: type[record.Kind]) -> record.Kind | None:
        return record.read(folder / name, kind) if (folder / name).exists() else None

    return Recorded(
        name=folder.resolve().name,
        certificate=certificate,
        result=read_if_there(record.RESULT_FILE, Result),
        metrics=sorted(record.read_lines(folder / record.METRICS_FILE, Metrics), key=lambda line: line.step),
        recipe=recipe,
        calibration=read_if_there(record.CALIBRATION_FILE, CalibrationFacts),
        tested=read_if_there(EVALUATION_FILE, Tested),
    )


def write_report(folder: Path | str) -> Path:
    """Writes ``report.html`` into a run folder, finished or not.

    It shows the public files alone: privacy.json, result.json, metrics.jsonl, recipe.toml, calibration.json and
    evaluation.json.
    Running times stand in none of its sections: no guarantee covers them.

    Args:
        folder: Of the run.

    Returns:
        The path of the page.

    Raises:
        InputError: If the certificate or the recipe is missing or damaged.
        MachineError: If the page cannot be written; an older one is then intact.
    """
    folder = Path(folder)
    path = folder / "report.html"
    write_atomically(path, render(read_run(folder)).encode())
    return path


def render(run: Recorded) -> str:
    """The whole page as HTML text."""
    import tomli_w

    certificate, result, tested = run.certificate, run.result, run.tested
    known = [] if result is None else zip(result.per_class, result.classes, strict=True)
    majority_rate = None if result is None else result.majority_rate
    references = {"majority_rate": majority_rate, "target": run.recipe.get("privacy", {}).get("target_epsilon")}
    return html.render(
        "run.html",
        kicker="Sfumato report",
        title=run.name,
        run=run,
        patient=wording.for_a_patient(certificate),
        leads=_leads(run),
        verdict=wording.verdict(certificate),
        terms=wording.terms(certificate),
        attack=attack_chart(certificate),
        canaries=canaries_chart(certificate),
        scores=[] if result is None else _scores(result),
        tested_in_words=[] if tested is None else in_words(tested),
        tested_table=None if tested is None else class_table(tested),
        groups=None if tested is None else group_table(tested),
        chose=CHOSE,
        roc=None if tested is None else roc_chart(tested),
        curves=training_curves(run.metrics, with_epsilon=certificate.holds, **references) if run.metrics else None,
        weakest=min(((value, name) for value, name in known if value is not None), default=None),
        recipe=tomli_w.dumps(run.recipe),
        values=_values(run),
    )


def _leads(run: Recorded) -> list[str]:
    """How good it is, and what it is, of whom, and from when."""
    result, tested, certificate = run.result, run.tested, run.certificate
    reached = "This run is unfinished: there is no final model yet, and accuracies are those so far."
    if result is not None:
        shown = formats.share(result.accuracy, result.accuracy_interval)
        reached = f"Accuracy on held-out images: {shown}. Intervals are at 95 %."
    if tested is not None:
        of_test = formats.share(tested.accuracy, tested.intervals.accuracy)
        reached = f"Accuracy on the test set {tested.test_set!r}: {of_test}. {reached}"
    model = run.recipe.get("model", {}).get("name", "a network")
    classes = f" for {formats.count(len(run.classes))} classes" if run.classes else ""
    how = "with differential privacy" if certificate.holds else "without a privacy guarantee"
    images = f"{formats.count(certificate.public_inputs.num_examples)} images"
    if certificate.public_inputs.num_people is not None and certificate.max_images_per_person is not None:
        # Of how many that is, nobody is told: it depends on how many each person has.
        images += f", of which at most {formats.count(certificate.max_images_per_person)} of each person contribute,"
    facts = [f"An image classifier ({model}){classes}, trained on {images} {how}."]
    made = {"Issued by": run.recipe.get("run", {}).get("issuer"), "Trained with": certificate.software}
    made["Training ended on"] = certificate.finished_on
    facts += [f"{what} {value}." for what, value in made.items() if value]
    return [reached, " ".join(facts)]


def _scores(result: Result) -> list[tuple[str, str]]:
    """What was measured, each with its name."""
    low, high = map(formats.per_cent, result.accuracy_interval or (None, None))
    shown = {
        "accuracy" + (f" ({low} to {high}, 95 %)" if result.accuracy_interval else ""): result.accuracy,
        "balanced accuracy": result.balanced_accuracy,
        "always the most frequent class": result.majority_rate,
        "among the first five guesses": result.accuracy_top5,
        "AUROC (1: perfect, 0.5: guessing)": result.auroc,
        "accuracy of the last weights; kept is their average over updates": result.accuracy_last,
    }
    if result.test_views:
        shown[f"majority of {result.test_views} views"] = result.accuracy_augtest_vote
        shown[f"mean probability of {result.test_views} views"] = result.accuracy_augtest_mean
    known = [(name, value) for name, value in shown.items() if value is not None]
    return [(f"{value:.4f}" if name.startswith("AUROC") else formats.per_cent(value), name) for name, value in known]


def training_curves(
    metrics: list[Metrics], *, with_epsilon: bool, majority_rate: float | None = None, target: float | None = None
) -> Chart:
    """Held-out accuracy over steps and, below it, epsilon over steps.

    Args:
        metrics: Lines of metrics.jsonl by step, at least one.
        with_epsilon: Whether epsilon is a guarantee of this run; otherwise it is not drawn.
        majority_rate: Accuracy of always naming the most frequent class, drawn as a reference.
        target: The epsilon that was asked for, drawn as a reference.

    Returns:
        A chart with a title and a description of what is to be seen.
    """
    last = max(line.step for line in metrics) * 1.02 or 1.0
    x = linear(0, last, 8, lambda value: f"{value:,.0f}", "step", whole=True)
    panels = [_accuracy_panel(metrics, last, majority_rate)]
    spent = [(line.step, line.epsilon) for line in metrics if line.epsilon is not None] if with_epsilon else []
    if spent:
        panels.append(_epsilon_panel(spent, last, target))
    return chart(x, panels, "Training curves", _described(metrics, spent))


def _accuracy_panel(metrics: list[Metrics], last: float, majority_rate: float | None) -> Panel:
    steps, markers = [line.step for line in metrics], len(metrics) <= MOST_MARKERS
    averaged, of_last = ([100 * getattr(line, key) for line in metrics] for key in ("accuracy", "accuracy_last"))
    curves = [
        Curve("averaged weights", steps, averaged, "first", markers=markers),
        Curve("last weights", steps, of_last, "second", markers=markers, width=1.5),
    ]
    if majority_rate is not None:
        curves.append(_reference("always the most frequent class", 100 * majority_rate, last))
    return Panel("Held-out accuracy", curves, accuracies(curves), 220)


def _epsilon_panel(spent: list[tuple[int, float]], last: float, target: float | None) -> Panel:
    steps, values = zip(*spent, strict=True)
    curves = [Curve("", steps, values, "first", markers=len(spent) <= MOST_MARKERS)]
    if target is not None:
        curves.append(_reference(f"asked for: {formats.epsilon_text(target)}", target, last))
    highest = max(value for curve in curves for value in curve.y)
    return Panel("Epsilon spent so far", curves, linear(0, 1.1 * highest or 1, 4, lambda value: f"{value:g}"), 130)


def _reference(name: str, value: float, last: float) -> Curve:
    return Curve(name, [0, last], [value, value], "muted", dashed=True, width=1.5)


def _described(metrics: list[Metrics], spent: list[tuple[int, float]]) -> str:
    """What the curves show, for those who cannot see them."""
    first, last = metrics[0], metrics[-1]
    text = f"Held-out accuracy is {formats.per_cent(first.accuracy)} at step {formats.count(first.step)}"
    if len(metrics) > 1:
        text += f" and {formats.per_cent(last.accuracy)} at step {formats.count(last.step)}"
    if spent:
        text += f". Epsilon has then reached {formats.epsilon_text(spent[-1][1])}"
    return text + "."


def _values(run: Recorded) -> dict[str, Any] | None:
    """The numbers behind the curves; evenly thinned where there are many, the last one kept."""
    if not run.metrics:
        return None
    every = -(-len(run.metrics) // MOST_ROWS)
    columns = {
        "step": lambda line: formats.count(line.step),
        "accuracy": lambda line: formats.per_cent(line.accuracy),
        "accuracy, last weights": lambda line: formats.per_cent(line.accuracy_last),
    }
    if run.certificate.holds:
        columns["epsilon so far"] = lambda line: formats.epsilon_text(line.epsilon)
    rows = [[text(line) for text in columns.values()] for line in run.metrics[::-1][::every][::-1]]
    return {"every": every, "names": list(columns), "rows": rows}
