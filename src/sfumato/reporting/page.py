"""report.html: one self-contained page that says what a run is worth and what it promises."""

import dataclasses
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.accounting import formats
from sfumato.reporting import wording
from sfumato.reporting.attack import attack_section, audit_section
from sfumato.reporting.charts import Curve, Panel, chart, linear
from sfumato.reporting.html import (
    Html,
    bar,
    element,
    figure,
    header,
    numbers_table,
    paragraph,
    section,
    tiles,
    whole_page,
)
from sfumato.reporting.tested import tested_section
from sfumato.run_folder import record
from sfumato.run_folder.files import write_atomically
from sfumato.run_folder.record import CalibrationFacts, Certificate, Metrics, Result
from sfumato.run_folder.tested import EVALUATION_FILE, Tested

MOST_ROWS = 25
MANY_CLASSES = 12
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
    recipe = config.read(folder / "recipe.toml")
    config.parse(recipe)  # a file that is no recipe is not shown
    recipe["data"].pop("path", None)  # nor where the images lie, whoever wrote that there

    def read_if_there(name: str, kind: type[record.Kind]) -> record.Kind | None:
        return record.read(folder / name, kind) if (folder / name).exists() else None

    return Recorded(
        name=folder.resolve().name,
        certificate=record.read(folder / record.CERTIFICATE_FILE, Certificate),
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
    sections = [
        _certificate(run.certificate),
        *attack_section(run.certificate),
        *audit_section(run.certificate),
        _not_covered(run.certificate),
        _accuracy(run),
        *_decision(run),
        *([] if run.tested is None else [tested_section(run.tested)]),
        _curves(run),
        _per_class(run),
        _recipe(run),
        *_values(run),
    ]
    return whole_page(f"{run.name} · Sfumato report", _header(run), *sections)


def _header(run: Recorded) -> Html:
    model = run.recipe.get("model", {}).get("name", "a network")
    classes = f" for {formats.count(len(run.classes))} classes" if run.classes else ""
    how = "with differential privacy" if run.certificate.holds else "without a privacy guarantee"
    result, tested, certificate = run.result, run.tested, run.certificate
    images = f"{formats.count(certificate.public_inputs.num_examples)} images"
    if certificate.public_inputs.num_people is not None and certificate.max_images_per_person is not None:
        # Of how many that is, nobody is told: it depends on how many each person has.
        images += f", of which at most {formats.count(certificate.max_images_per_person)} of each person contribute,"
    lead = f"An image classifier ({model}){classes}, trained on {images} {how}."
    reached = "This run is unfinished: there is no final model yet, and accuracies are those so far."
    if result is not None:
        shown = formats.share(result.accuracy, result.accuracy_interval)
        reached = f"Accuracy on held-out images: {shown}. Intervals are at 95 %."
    if tested is not None:
        of_test = formats.share(tested.accuracy, tested.intervals.accuracy)
        reached = f"Accuracy on the test set {tested.test_set!r}: {of_test}. {reached}"
    made = {"Issued by": run.recipe.get("run", {}).get("issuer"), "Trained with": certificate.software}
    made["Training ended on"] = certificate.finished_on
    facts = [lead, *(f"{what} {value}." for what, value in made.items() if value)]
    return header("Sfumato report", run.name, reached, paragraph(" ".join(facts), "lead"))


def _certificate(certificate: Certificate) -> Html:
    rows = []
    for name, value, meaning in wording.terms(certificate):
        shown = [element("span", value, class_="value"), " "] if value else []
        rows.append(element("div", element("dt", name), element("dd", *shown, meaning)))
    return section("What is guaranteed", wording.verdict(certificate), element("dl", *rows, class_="terms"))


def _not_covered(certificate: Certificate) -> Html:
    points = element("ul", *(element("li", point) for point in certificate.not_covered))
    intro = "The guarantee says nothing about:" if certificate.holds else "Even a private run would say nothing about:"
    return section("What is not covered", paragraph(intro), points)


def _accuracy(run: Recorded) -> Html:
    title, result = "How good it is", run.result
    if result is None:
        if not run.metrics:
            return section(title, paragraph("Nothing has been evaluated yet."))
        step, reached = formats.count(run.metrics[-1].step), formats.per_cent(run.metrics[-1].accuracy)
        return section(title, tiles((reached, "accuracy so far"), (step, "at step")))
    low, high = map(formats.per_cent, result.accuracy_interval or (None, None))
    shown = {
        "accuracy" + (f" ({low} to {high}, 95 %)" if result.accuracy_interval else ""): result.accuracy,
        "balanced accuracy": result.balanced_accuracy,
        "always the most frequent class": result.majority_rate,
        "among the first five guesses": result.accuracy_top5,
        "AUROC (1: perfect, 0.5: guessing)": result.auroc,
        "accuracy of the last weights; kept is their average over updates": result.accuracy_last,
    }
    text = (
        f"Measured on the held-out images ({result.held_out}) that could be read, with the averaged weights, which are "
        "kept. Balanced accuracy is the mean over the classes. None of it is private for the held-out images."
    )
    if result.test_views:
        shown[f"majority of {result.test_views} views"] = result.accuracy_augtest_vote
        shown[f"mean probability of {result.test_views} views"] = result.accuracy_augtest_mean
        text += (
            " The last two let several random views of each image decide together; "
            "results are compared by the plain accuracy."
        )
    known = [(name, value) for name, value in shown.items() if value is not None]
    each = ((f"{value:.4f}" if name.startswith("AUROC") else formats.per_cent(value), name) for name, value in known)
    parts = [tiles(*each), paragraph(text)]
    if result.accuracy <= result.majority_rate:
        parts.append(paragraph("The classifier is no better than always naming the most frequent class.", "remark"))
    return section(title, *parts)


def _decision(run: Recorded) -> list[Html]:
    """What was fitted after training; nothing where nothing was."""
    fitted = run.calibration
    if fitted is None:
        return []
    where = (
        "held-out images of this run" if fitted.fitted_on == "held-out" else "images with labels that its owner chose"
    )
    shifted = "" if fitted.shifts is None else ", and shifted for each class"
    texts = [
        f"After training, probabilities were calibrated on {formats.count(fitted.num_images)} {where}: outputs are "
        f"divided by {formats.quantity(fitted.temperature)}{shifted}. This is not private for those images. "
        "Accuracies on held-out images are of decisions without it, those on a test set of decisions with it."
    ]
    if (threshold := fitted.threshold) is not None:
        texts.append(
            f"{threshold.positive} is named from a probability of {formats.per_cent(threshold.probability)} on, "
            f"chosen for a {threshold.aim} of at least {formats.per_cent(threshold.at)} on these images."
        )
    return [section("How it decides", *map(paragraph, texts))]


def _curves(run: Recorded) -> Html:
    title, holds = "How it was reached", run.certificate.holds
    if not run.metrics:
        return section(title, paragraph("No step has been evaluated yet, so there is no curve."))
    majority_rate = run.result.majority_rate if run.result else None
    target = run.recipe.get("privacy", {}).get("target_epsilon")
    drawing = training_curves(run.metrics, with_epsilon=holds, majority_rate=majority_rate, target=target)
    beside = ", and the epsilon spent until then." if holds else ". No epsilon is drawn: this run is not private."
    return section(title, figure(drawing, f"Accuracy on held-out images after each evaluated step{beside}"))


def training_curves(
    metrics: list[Metrics], *, with_epsilon: bool, majority_rate: float | None = None, target: float | None = None
) -> Html:
    """Held-out accuracy over steps and, below it, epsilon over steps.

    Args:
        metrics: Lines of metrics.jsonl by step, at least one.
        with_epsilon: Whether epsilon is a guarantee of this run; otherwise it is not drawn.
        majority_rate: Accuracy of always naming the most frequent class, drawn as a reference.
        target: The epsilon that was asked for, drawn as a reference.

    Returns:
        One ``<svg>`` element with a title and a description of what is to be seen.
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
    shown = [value for curve in curves for value in curve.y]
    margin = max(0.08 * (max(shown) - min(shown)), 1.0)
    low, high = max(min(shown) - margin, 0), min(max(shown) + margin, 101)
    return Panel("Held-out accuracy", curves, linear(low, high, 6, lambda value: f"{value:g} %", below=100), 220)


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


def _per_class(run: Recorded) -> Html:
    title, result = "Accuracy per class, on held-out images", run.result
    if result is None:
        return section(title, paragraph("Known once the run has finished."))
    pairs, usual = list(zip(result.classes, result.per_class, strict=True)), result.majority_rate
    rows = (
        bar(element("bdi", name), value, formats.per_cent(value), usual, "no held-out image") for name, value in pairs
    )
    bars = element("dl", *rows, class_="bars many" if len(pairs) > MANY_CLASSES else "bars")
    parts: list[str] = [
        f"The line across the bars marks {formats.per_cent(usual)}, the accuracy of always naming the most frequent "
        "class."
    ]
    known = [(value, name) for name, value in pairs if value is not None]
    if known:
        value, name = min(known)
        parts += [" The weakest class is ", element("bdi", name, class_="name"), f" with {formats.per_cent(value)}."]
    return section(title, element("p", *parts), bars)


def _recipe(run: Recorded) -> Html:
    import tomli_w

    parts = [paragraph("The resolved recipe, every filled-in value included: enough to run again.")]
    if "privacy" in run.recipe and not run.certificate.holds:
        asked = "Its privacy section says what was asked for; for this run it is no guarantee."
        parts.append(paragraph(asked, "remark"))
    return section("Hyper-parameters", *parts, element("pre", tomli_w.dumps(run.recipe)))


def _values(run: Recorded) -> list[Html]:
    """The numbers behind the curves; evenly thinned where there are many, the last one kept."""
    if not run.metrics:
        return []
    every = -(-len(run.metrics) // MOST_ROWS)
    columns = {
        "step": lambda line: formats.count(line.step),
        "accuracy": lambda line: formats.per_cent(line.accuracy),
        "accuracy, last weights": lambda line: formats.per_cent(line.accuracy_last),
    }
    if run.certificate.holds:
        columns["epsilon so far"] = lambda line: formats.epsilon_text(line.epsilon)
    rows = ([text(line) for text in columns.values()] for line in run.metrics[::-1][::every][::-1])
    note = [paragraph(f"One of every {every} lines of metrics.jsonl.")] if every > 1 else []
    return [section("Numbers of the curves", *note, numbers_table(columns, rows))]
