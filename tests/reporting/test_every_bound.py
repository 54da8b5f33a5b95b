"""Wherever an epsilon or a delta is printed: never below what it is."""

import ast
import json
import re
from pathlib import Path

import pytest

import sfumato
from sfumato import cli, config
from sfumato.accounting import accountants, calibration, formats, gaussian
from sfumato.accounting.accountants import Spent
from sfumato.accounting.mechanism import Mechanism
from sfumato.cli import search
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.searching import search as final
from sfumato.searching.result import Best, Cost, Predicted, PrivateSearchResult, SearchResult, Selected
from tests.searching.made_up_search import made_up_search

EPSILON = 5.01234001  # no other number near it is printed
DELTA = 1.23456789e-05


@pytest.fixture
def spent(monkeypatch):
    """Every accountant says this epsilon, whatever is asked."""
    said = Spent(EPSILON, EPSILON, EPSILON, "pld")
    monkeypatch.setattr(accountants, "_epsilon", lambda *numbers: said)
    monkeypatch.setattr(accountants, "epsilon_of_best", lambda *numbers: EPSILON)
    monkeypatch.setattr(gaussian, "epsilon_tan", lambda *numbers: EPSILON)
    return EPSILON


def assert_bounds(text, value, at_least=1):
    """Every number of a text near an epsilon or near DELTA is that one, and no smaller; returns the deltas."""
    # "17" is no epsilon in a hash, nor in the path of a folder for tests.
    text = re.sub(r"\b[0-9a-f]{16,}\b|\S*/pytest-\d+/\S*", "", text)
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?(?![\d.]* %)", text)]
    found = [number for number in numbers if abs(number - value) < 0.002 * value]
    deltas = [number for number in numbers if abs(number - DELTA) < 0.002 * DELTA]
    assert len(found) >= at_least and all(number >= value for number in found), (value, found, text)
    assert all(number >= DELTA for number in deltas), text
    return deltas


def output_of(capsys, *words, status=0):
    capsys.readouterr()
    assert cli.run([str(word) for word in words]) == status
    out, err = capsys.readouterr()
    return out + err


PLAN = f"plan --num-examples 50000 --delta {DELTA} --batch-size 4096 --noise-multiplier 3 --num-steps 100".split()


def test_what_plan_prints(spent, capsys):
    text = output_of(capsys, *PLAN, "--table", "--more-data", 2)
    deltas = assert_bounds(text, spent, at_least=6)
    assert DELTA in deltas


def test_what_recipes_print(spent, capsys, monkeypatch, tmp_path):
    from sfumato import recipes

    (tmp_path / "mine.toml").write_text(
        f'# Mine.\n[data]\nname = "mnist"\n[privacy]\ntarget_epsilon = {spent}\ndelta = {DELTA}\nnoise_multiplier = '
        "3.0\n"
        "[training]\nbatch_size = 512\nnum_steps = 10\n"
    )
    monkeypatch.setattr(recipes, "names", lambda: ["mine"])
    monkeypatch.setattr(recipes, "find", lambda name: tmp_path / "mine.toml")
    assert_bounds(output_of(capsys, "recipes", "list"), spent)
    assert_bounds(output_of(capsys, "recipes", "verify"), spent, at_least=3)


SHORT = (
    "--set training.num_steps=2 --set training.batch_size=32 --set training.engine=func "
    "--set privacy.noise_multiplier=9.0"
).split()


def test_what_train_and_the_report_print(spent, capsys, tmp_path):
    words = ["train", "demo/digits", *SHORT, "--delta", DELTA, "--epsilon", spent * 1.00001]
    assert DELTA in assert_bounds(output_of(capsys, *words, "--dry-run"), spent, at_least=2)
    person_limit = ["--set", "privacy.max_images_per_person=2"]
    text = output_of(capsys, *words, *person_limit, "--output", tmp_path / "run")
    assert DELTA in assert_bounds(text, spent, at_least=4)  # at each evaluation, and at the end twice
    page = (tmp_path / "run" / "report.html").read_text()
    page = " ".join(re.sub(r"<(style|svg)\b.*?</(style|svg)>|<[^>]*>", " ", page, flags=re.DOTALL).split())
    assert DELTA in assert_bounds(page, spent, at_least=4)
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert claim["epsilon"] == spent and claim["delta"] == DELTA


def test_what_searches_print(spent, capsys):
    search.show(search_result(spent), [])
    assert DELTA in assert_bounds(capsys.readouterr().out, spent)
    of_run = {"held_out": "test", "accuracy": 0.5, "test_accuracy": 0.5}
    best = {"best": Selected(run="a", accuracy=0.5), "trials": None, "expected_trials": 3.0, "storage": None}
    paid = {**of_search(spent), **of_run, **best, "private": True, "predicted_accuracy": None}
    search.show_paid(PrivateSearchResult(**paid))
    assert DELTA in assert_bounds(capsys.readouterr().out, spent)


def of_search(spent):
    told = {"epsilon_final": spent, "epsilon_search_inclusive": spent, "delta": DELTA, "noise_multiplier": 1.0}
    cost = Cost(search_views=1.0, search_fraction=0.5)
    return {**told, "cost": cost, "search_data": "mnist", "recipe": "recipe.toml"}


def search_result(spent):
    best, predicted = Best(settings={}, accuracy=0.5), Predicted(value=0.5, low=0.4, high=0.6)
    found = {"best": best, "stages": [], "trials": 3, "given_up": 0, "predicted_accuracy": predicted, "law": "log"}
    return SearchResult(**of_search(spent), **found, augtest_gain=None, warnings=[], storage="sqlite:///study.db")


def test_what_the_final_recipe_of_a_search_says(spent):
    searched = made_up_search()
    data = {"name": "folder", "path": "home-of-alice"}
    recipe = config.parse_resolved({**searched.recipe.model_dump(), "data": data})
    text = final.as_toml(searched, recipe, search_result(spent), "mine")
    assert DELTA in assert_bounds(text, spent)
    assert "alice" not in text  # a recipe is for sharing


def test_what_refusals_say_that_is_spent(spent):
    for unknown in ("noise_multiplier", "num_steps", "batch_size"):
        with pytest.raises(InputError) as caught:
            calibration.solve(Mechanism(1000, 10, 1.0, 10), unknown, spent / 2, DELTA)
        assert_bounds(str(caught.value), spent, at_least=2)
    privacy = {"target_epsilon": spent / 2, "delta": DELTA, "noise_multiplier": 1.0, "selected_from": 3.0}
    values = {"data": {"name": "folder"}, "training": {"batch_size": 10, "num_steps": 10}, "privacy": privacy}
    with pytest.raises(InputError) as caught:
        resolve(config.parse(values), Facts(1000, 2, 32, 3))
    assert_bounds(str(caught.value), spent)


def test_a_smaller_number_than_delta_is_never_named_in_its_place():
    assert float(formats.delta_text(DELTA)) == DELTA
    for delta in (DELTA, 1e-5, 7.777e-7, 3.14159e-3, 0.1, 1 / 3):
        times = int(formats.one_in(delta).removeprefix("1 in ").replace(",", ""))
        assert delta <= 1 / times <= delta * 1.011
    assert formats.per_cent_at_most(0.5) == "50.00 %" and formats.per_cent_at_most(0.50000000000004) == "50.01 %"


NAMES = re.compile(r"(epsilon|delta|spent|least|target|nominal)", re.IGNORECASE)


def test_no_text_formats_an_epsilon_or_a_delta_in_its_own_way():
    """A format such as {epsilon:.4f} rounds to nearest: all go through `sfumato.accounting.formats`."""
    for path in sorted(Path(sfumato.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                parts = (part for part in node.format_spec.values if isinstance(part, ast.Constant))
                what, how = ast.unparse(node.value), "".join(str(part.value) for part in parts)
                rounds = re.search(r"[eEfFgG%]|\.\d", how)
                assert not (rounds and NAMES.search(what)), f"{path.name}:{node.lineno} prints {what} as {how}"
