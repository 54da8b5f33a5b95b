"""How good a model was on a test set that its owner chose (`sfumato evaluate --report`): a section of its report."""

from sfumato.accounting.formats import count, per_cent, share
from sfumato.reporting.charts import Chart, Curve, Panel, chart, linear
from sfumato.run_folder.tested import Decision, Tested

MOST_COLUMNS = 12
_LABELS = ["label", "known of", "AUROC, 95 %", "named from", "sensitivity", "specificity", "of those named, right"]
ROC = "Receiver operating characteristic (ROC): what other thresholds would give."


def in_words(tested: Tested) -> list[str]:
    """How good the model is, and of two classes what decides and how often that is right."""
    of, decision = "" if tested.num_people is None else f" of {count(tested.num_people)} people", tested.decision
    always = "the more frequent answer to each label" if tested.is_multilabel else "the most frequent answer"
    lines = [
        f"{count(tested.num_images)} images{of} ({tested.test_set}): accuracy "
        f"{share(tested.accuracy, tested.intervals.accuracy)}, balanced {per_cent(tested.balanced_accuracy)}; always "
        f"{always}: {per_cent(tested.majority_rate)}."
    ]
    if tested.auroc is not None:
        low, high = tested.intervals.auroc or (tested.auroc, tested.auroc)
        lines.append(f"AUROC {tested.auroc:.4f} ({low:.4f} to {high:.4f}); 1 is perfect, 0.5 is guessing.")
    if decision is not None:
        name, counts = decision.positive, {key: count(value) for key, value in decision.counts.items()}
        right, of_others = map(per_cent, (decision.positive_predictive_value, decision.negative_predictive_value))
        lines += [
            f"{name} is named from a probability of {per_cent(decision.threshold)} on: {counts['found']} found, "
            f"{counts['missed']} missed, {counts['false_alarms']} false alarms, {counts['left_alone']} left alone.",
            f"Sensitivity {share(decision.sensitivity, decision.sensitivity_interval)}, "
            f"specificity {share(decision.specificity, decision.specificity_interval)}.",
            f"Where {per_cent(decision.prevalence)} of images are {name}: of those named {name} {right} are; of the "
            f"others {of_others} are not.",
        ]
    return lines


def class_table(tested: Tested) -> tuple[list[str], list[list[str]]]:
    """Each class against the rest, and the confusion matrix where it is not too wide; or each of several labels: names
    of columns, and rows.
    """
    if tested.decisions is not None:
        areas = tested.intervals.auroc_per_class or []
        return _LABELS, [_of_label(each, ends) for each, ends in zip(tested.decisions, areas, strict=True)]
    rows, shown = [], tested.classes if len(tested.classes) <= MOST_COLUMNS else []
    for place, (name, counts) in enumerate(zip(tested.classes, tested.confusion, strict=True)):
        own, named = sum(counts), sum(row[place] for row in tested.confusion)
        others = tested.num_images - own
        specificity = per_cent(1 - (named - counts[place]) / others if others else None)
        found = share(tested.per_class[place], tested.intervals.per_class[place])
        rows.append([name, count(own), found, specificity, *map(count, counts[: len(shown)])])
    return ["class", "images", "sensitivity", "specificity", *(f"taken for {name}" for name in shown)], rows


def _of_label(decision: Decision, area: list[float] | None) -> list[str]:
    counts = decision.counts
    positive, negative = counts["found"] + counts["missed"], counts["false_alarms"] + counts["left_alone"]
    return [
        decision.positive,
        f"{count(positive)} of {count(positive + negative)}",
        "-" if area is None else f"{area[0]:.3f} to {area[1]:.3f}",
        per_cent(decision.threshold),
        share(decision.sensitivity, decision.sensitivity_interval),
        share(decision.specificity, decision.specificity_interval),
        per_cent(decision.positive_predictive_value),
    ]


def group_table(tested: Tested) -> tuple[list[str], list[list[str]]] | None:
    """Each value of a column, likewise; None where nobody asked for them."""
    if tested.groups is None or tested.by is None:
        return None
    each = [(group.value or "(not stated)", group) for group in tested.groups]
    rows = [[name, count(group.num_images), share(group.accuracy, group.interval)] for name, group in each]
    if not tested.is_multilabel:
        return [tested.by, "images", "accuracy"], rows
    areas = ["-" if group.auroc is None else f"{group.auroc:.4f}" for group in tested.groups]
    return [tested.by, "images", "accuracy", "AUROC"], [[*row, area] for row, area in zip(rows, areas, strict=True)]


def roc_chart(tested: Tested) -> Chart | None:
    """What other thresholds would give; None where none decides, or only one class occurs."""
    decision = tested.decision
    if decision is None or tested.roc is None:
        return None
    alarms, found = zip(*tested.roc, strict=True)
    here = [1 - (decision.specificity or 0.0)], [decision.sensitivity or 0.0]
    curves = [
        Curve("guessing", [0, 1], [0, 1], "muted", dashed=True, width=1.5),
        Curve("any threshold", alarms, found, "first"),
        Curve("this threshold", *here, "second", markers=True, width=5),
    ]
    x, y = (linear(0, 1, 5, lambda value: f"{100 * value:g} %", label) for label in ("1 - specificity", ""))
    return chart(x, [Panel(f"Sensitivity for {decision.positive}", curves, y, 260)], "ROC", ROC, "roc")
