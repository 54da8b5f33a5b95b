"""report.html: one self-contained page that says what a run is worth and what it promises."""

from pathlib import Path

from sfumato.reporting import formats, wording
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
from sfumato.run_folder.files import write_atomically
from sfumato.run_folder.record import Metrics, Recorded, read_run

MOST_ROWS = 25
MANY_CLASSES = 12
MOST_MARKERS = 50


def write_report(folder: Path | str) -> Path:
    """Writes ``report.html`` into a run folder, finished or not.

    It shows the public files alone: privacy.json, result.json, metrics.jsonl, recipe.toml.
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
        _certificate(run),
        *attack_section(run),
        *audit_section(run),
        _not_covered(run),
        _accuracy(run),
        *_decision(run),
        _curves(run),
        _per_class(run),
        _recipe(run),
        _values(run),
    ]
    return whole_page(f"{run.name} · Sfumato report", _header(run), *sections)


def _header(run: Recorded) -> Html:
    model = run.recipe.get("model", {}).get("name", "a network")
    classes = f" for {formats.count(len(run.classes))} classes" if run.classes else ""
    how = "with differential privacy" if run.certificate.holds else "without a privacy guarantee"
    lead = (
        f"An image classifier ({model}){classes}, "
        f"trained on {formats.count(run.certificate.public_inputs.num_examples)} images {how}."
    )
    unfinished = "This run is unfinished: there is no final model yet, and accuracies are those so far."
    more = [paragraph(unfinished, "unfinished")] if run.result is None else []
    return header("Sfumato report", run.name, lead, *more)


def _certificate(run: Recorded) -> Html:
    rows = [
        element(
            "div",
            element("dt", name),
            element("dd", element("span", value, class_="value"), " ", meaning) if value else element("dd", meaning),
        )
        for name, value, meaning in wording.terms(run.certificate)
    ]
    return section("What is guaranteed", wording.verdict(run.certificate), element("dl", *rows, class_="terms"))


def _not_covered(run: Recorded) -> Html:
    points = element("ul", *(element("li", point) for point in run.certificate.not_covered))
    intro = (
        "The guarantee says nothing about:" if run.certificate.holds else "Even a private run would say nothing about:"
    )
    return section("What is not covered", paragraph(intro), points)


def _interval(ends: list[float] | None) -> str:
    return "" if ends is None else f" ({formats.per_cent(ends[0])} to {formats.per_cent(ends[1])}, 95 %)"


def _accuracy(run: Recorded) -> Html:
    title = "How good it is"
    if run.result is None:
        if not run.metrics:
            return section(title, paragraph("Nothing has been evaluated yet."))
        last = run.metrics[-1]
        return section(
            title, tiles((formats.per_cent(last.accuracy), "accuracy so far"), (formats.count(last.step), "at step"))
        )
    result = run.result
    shown = {
        "accuracy" + _interval(result.accuracy_interval): result.accuracy,
        "balanced accuracy": result.balanced_accuracy,
        "always the most frequent class": result.majority_rate,
        "among the first five": result.accuracy_top5,
        "AUROC": result.auroc,
        "accuracy of the last weights": result.accuracy_last,
    }
    if result.test_views:
        shown[f"majority of {result.test_views} views"] = result.accuracy_augtest_vote
        shown[f"mean probability of {result.test_views} views"] = result.accuracy_augtest_mean
    text = (
        f"Measured on the held-out images ({result.held_out}) that could be read, with the averaged weights, which "
        "are the ones kept. Balanced accuracy is the mean over the classes, each counting the "
        "same. These numbers are not private with respect to the held-out images."
    )
    if result.test_views:
        text += (
            " The last two let several random views of each image decide together; "
            "results are compared by the plain accuracy."
        )
    each = [
        (f"{value:.4f}" if name == "AUROC" else formats.per_cent(value), name)
        for name, value in shown.items()
        if value is not None
    ]
    parts = [tiles(*each), paragraph(text)]
    if result.accuracy <= result.majority_rate:
        parts.append(paragraph("The classifier is no better than always naming the most frequent class.", "remark"))
    return section(title, *parts)


def _decision(run: Recorded) -> list[Html]:
    """What was fitted after training; nothing where nothing was."""
    fitted = run.calibration
    if fitted is None:
        return []
    where = "held-out images of this run" if fitted.fitted_on == "held-out" else "other images with labels"
    shifted = "" if fitted.shifts is None else ", and shifted for each class"
    parts = [
        paragraph(
            f"After training, probabilities were calibrated on {formats.count(fitted.num_images)} {where}: outputs are "
            f"divided by {formats.quantity(fitted.temperature)}{shifted}. This is not private with respect to those "
            "images. Accuracies on this page are of decisions before it; `sfumato evaluate` tells of those after it.",
        )
    ]
    if (threshold := fitted.threshold) is not None:
        aim = "find" if threshold.aim == "sensitivity" else "leave alone"
        of = f"images of {threshold.positive}" if threshold.aim == "sensitivity" else "other images"
        parts.append(
            paragraph(
                f"{threshold.positive} is named from a probability of {formats.per_cent(threshold.probability)} on, "
                f"chosen to {aim} at least {formats.per_cent(threshold.at)} of the {of} among them.",
            )
        )
    return [section("How it decides", *parts)]


def _curves(run: Recorded) -> Html:
    title = "How it was reached"
    if not run.metrics:
        return section(title, paragraph("No step has been evaluated yet, so there is no curve."))
    majority_rate = run.result.majority_rate if run.result else None
    target = run.recipe.get("privacy", {}).get("target_epsilon")
    drawing = training_curves(
        run.metrics, with_epsilon=run.certificate.holds, majority_rate=majority_rate, target=target
    )
    caption = "Accuracy on held-out images after each evaluated step"
    caption += (
        ", and the epsilon spent until then."
        if run.certificate.holds
        else ". No epsilon is drawn: this run is not private."
    )
    return section(title, figure(drawing, caption))


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
    title = "Accuracy per class"
    if run.result is None:
        return section(title, paragraph("Known once the run has finished."))
    majority_rate = run.result.majority_rate
    pairs = list(zip(run.result.classes, run.result.per_class, strict=True))
    rows = (
        bar(element("bdi", name), value, formats.per_cent(value), majority_rate, "no held-out image")
        for name, value in pairs
    )
    bars = element("dl", *rows, class_="bars many" if len(pairs) > MANY_CLASSES else "bars")
    text = (
        f"The line across the bars marks {formats.per_cent(majority_rate)}, "
        "the accuracy of always naming the most frequent class."
    )
    known = [(value, name) for name, value in pairs if value is not None]
    parts: list[str] = [text]
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


def _values(run: Recorded) -> Html:
    """The numbers behind the curves; evenly thinned where there are many, the last one kept."""
    if not run.metrics:
        return Html("")
    every = -(-len(run.metrics) // MOST_ROWS)
    names = ["step", "accuracy", "accuracy, last weights"] + (["epsilon so far"] if run.certificate.holds else [])
    rows = []
    for line in run.metrics[::-1][::every][::-1]:
        cells = [formats.count(line.step), formats.per_cent(line.accuracy), formats.per_cent(line.accuracy_last)]
        rows.append(cells + ([formats.epsilon_text(line.epsilon)] if run.certificate.holds else []))
    note = [paragraph(f"One of every {every} lines of metrics.jsonl.")] if every > 1 else []
    return section("Numbers of the curves", *note, numbers_table(names, rows))
