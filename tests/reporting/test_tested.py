"""What the report decides on: accuracy first, the test set that its owner chose, who answers for it."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from decimal import Decimal

import pytest

from sfumato import config
from sfumato.accounting import formats
from sfumato.planning import claims
from sfumato.reporting.page import write_report
from sfumato.run_folder import certificate as wording
from sfumato.run_folder.record import Certificate
from tests.reporting import folders
from tests.reporting.test_page import RUNS, Page, private, report

SHARE, ENDS = 0.8765, [0.8012, 0.9123]
THREE = {"classes": ["a", "b", "c"], "confusion": [[8, 2, 0], [1, 9, 0], [0, 5, 15]], "num_images": 40}
TWO = {"classes": ["ill", "well"], "confusion": [[9, 1], [4, 26]], "num_images": 40}
DECISION = {
    "positive": "ill",
    "threshold": 0.3141,
    "counts": {"found": 9, "missed": 1, "false_alarms": 4, "left_alone": 26},
    **{"sensitivity": 0.9, "sensitivity_interval": [0.6, 0.98]},
    **{"specificity": 26 / 30, "specificity_interval": [0.7, 0.95]},
    **{"prevalence": 0.02, "positive_predictive_value": 0.1212, "negative_predictive_value": 0.9977},
}
OF_TWO = {**TWO, "decision": DECISION, "roc": [[0.0, 0.0], [4 / 30, 0.9], [1.0, 1.0]], "auroc": 0.95432}


def evaluation(of, **changes):
    per_class = [row[place] / sum(row) for place, row in enumerate(of["confusion"])]
    intervals = {"accuracy": ENDS, "per_class": [ENDS] * len(per_class), "auroc": None}
    facts = {"test_set": "ward-7", "evaluated_on": "2027-03-14", "num_people": None, "num_fitted_on": 0}
    facts |= {"accuracy": SHARE, "auroc": None}
    facts |= {"balanced_accuracy": 0.8, "majority_rate": 0.5, "calibration": None}
    return {**facts, "per_class": per_class, "intervals": intervals, **of, **changes}


def page_of(tmp_path, of, **changes):
    folder = folders.write_run(tmp_path / "run", folders.private_certificate(), *RUNS["private"][1:])
    (folder / "evaluation.json").write_text(json.dumps(evaluation(of, **changes)))
    return write_report(folder).read_text()


def test_groups_stand_in_the_report_where_they_were_asked_for(tmp_path):
    group = {"value": "ward <7>", "num_images": 12, "accuracy": 0.75, "interval": [0.47, 0.91], "per_class": [0.5, 1.0]}
    page = page_of(tmp_path, TWO, by="ward", groups=[group])
    row = "<td>ward &lt;7&gt;</td><td>12</td><td>75.00 % (47.00 % to 91.00 %)</td>"
    assert row in page and '<th scope="col">ward</th>' in page
    (tmp_path / "run" / "evaluation.json").unlink()
    assert "ward" not in write_report(tmp_path / "run").read_text()


def test_images_that_chose_the_threshold_are_told_in_the_report(tmp_path):
    assert "chose the probabilities" not in page_of(tmp_path, TWO)
    page = page_of(tmp_path / "b", TWO, num_fitted_on=17)
    assert "17 of these images chose the probabilities and the threshold" in page


def test_accuracy_stands_below_what_a_patient_asks_that_on_the_test_set_first(tmp_path):
    def under_title(text):
        patient, accuracy = re.findall(r"<p class=\"(?:patient|lead)\">([^<]*)<", text.split("</h1>")[1])[:2]
        assert patient.startswith("If you are in one")
        return accuracy.replace("\xa0", " ")

    assert "96.39 % (93.99 % to 97.89 %)" in under_title(private(tmp_path))
    told = under_title(page_of(tmp_path / "b", TWO))
    assert told.index("ward-7") < told.index("87.65 % (80.12 % to 91.23 %)") < told.index("96.39 %")


def test_each_class_is_told_against_all_others_beside_the_confusion_matrix(tmp_path):
    text = Page(page_of(tmp_path, THREE)).text
    assert "a 10 80.00 % (80.12 % to 91.23 %) 96.67 % 8 2 0" in text
    assert "b 10 90.00 % (80.12 % to 91.23 %) 76.67 % 1 9 0" in text
    assert "c 20 75.00 % (80.12 % to 91.23 %) 100.00 % 0 5 15" in text
    wide = {"classes": [f"n{place}" for place in range(13)], "num_images": 13}
    wide["confusion"] = [[int(row == column) for column in range(13)] for row in range(13)]
    assert "taken for n0" in text.replace("taken for a", "taken for n0")
    assert "taken for" not in Page(page_of(tmp_path / "wide", wide)).text


def test_of_two_classes_threshold_sensitivity_specificity_and_the_roc_are_told(tmp_path):
    page = page_of(tmp_path, OF_TWO)
    text = Page(page).text
    for said in ("probability of 31.41 % on: 9 found, 1 missed, 4 false alarms, 26 left alone", "AUROC 0.9543"):
        assert said in text
    assert "Sensitivity 90.00 % (60.00 % to 98.00 %), specificity 86.67 % (70.00 % to 95.00 %)" in text
    assert "2.00 % of images are ill: of those named ill 12.12 % are" in text
    drawing = next(each for each in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if 'id="roc-title"' in each)
    svg = ElementTree.fromstring(drawing)
    (curve,) = (
        line for line in svg.iter("polyline") if "var(--first)" in line.get("style") and line.get("class") == "curve"
    )
    (left, bottom), (x, y), (right, top) = (tuple(map(float, pair.split(","))) for pair in curve.get("points").split())
    assert (x - left) / (right - left) == pytest.approx(4 / 30, abs=1e-3)
    assert (y - bottom) / (top - bottom) == pytest.approx(0.9, abs=1e-3)
    (here,) = svg.iter("circle")
    assert (float(here.get("cx")), float(here.get("cy"))) == pytest.approx((x, y), abs=0.02)
    assert 'id="roc-title"' not in page_of(tmp_path / "one class", {**OF_TWO, "roc": None})


def test_size_day_people_and_that_nothing_there_is_private_are_told(tmp_path):
    text = Page(page_of(tmp_path, TWO, num_people=17)).text
    assert "40 images of 17 people" in text and "for independent people" in text and "2027-03-14 (UTC)" in text
    assert "not private with respect to these images" in text
    assert "for independent images" in Page(page_of(tmp_path / "same", TWO)).text


def test_who_answers_for_the_model_what_made_it_and_when_are_told_and_never_as_markup(tmp_path):
    recipe = folders.RECIPE + '[run]\nissuer = "<b>St. Anna</b>"\n'
    claim = folders.private_certificate(software="Sfumato 7.8", finished_on="2027-02-03")
    page = report(tmp_path, claim, *RUNS["private"][1:], recipe)
    assert "Issued by <b>St. Anna</b>. Trained with Sfumato 7.8. Training ended on 2027-02-03." in Page(page).text
    assert "<b>St." not in page
    assert "Issued by" not in private(tmp_path / "b") and "Trained with" not in private(tmp_path / "c")


def test_no_sentence_names_a_key_of_a_recipe_or_of_a_file(tmp_path):
    """Every text that a certificate may hold, as it stands on the page; the recipe itself is shown as it is."""
    texts = [value for value in vars(wording).values() if isinstance(value, str) and " " in value and "\n" not in value]
    assert wording.SEVERAL_IMAGES in texts and wording.COINS in texts
    listed = [*texts, *wording.NOT_COVERED, *wording.SEARCH.values(), *wording.SELECTION]
    of_person = {"max_images_per_person": 3, "epsilon_person": 9.0, "attacker_person": folders.attacker(0.8)}
    claim = folders.private_certificate(not_covered=listed, person_groups=claims._ENFORCED, **of_person)
    page = report(tmp_path, claim, *RUNS["private"][1:])
    text = Page(re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)).text
    keys = {key for key in config.known_keys() if "." in key}
    keys |= {key for key in Certificate.model_fields if "_" in key}
    assert [key for key in keys if re.search(rf"\b{re.escape(key)}\b", text)] == []


def test_e_to_the_epsilon_is_never_told_too_small_and_infinite_beyond_all_numbers():
    for epsilon in (0.0, 0.1, 0.9999, 1.0, 3.0, 7.77, 13.7, 13.9, 50.0, 699.0):
        told, exact = Decimal(formats.factor_text(epsilon)), Decimal(epsilon).exp()
        assert exact <= told <= exact * Decimal("1.0011"), epsilon
    assert {formats.factor_text(epsilon) for epsilon in (None, math.inf, 701.0)} == {"infinite"}
