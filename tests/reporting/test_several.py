"""Several runs on one page: what differs, what each reached, and what nobody may conclude."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import sfumato
from sfumato.errors import InputError
from sfumato.reporting import several
from sfumato.reporting.page import read_run
from tests.cli.test_cli import call, refused
from tests.reporting import folders, made_up
from tests.reporting.test_charts import assert_affine
from tests.reporting.test_page import Page


@pytest.fixture(scope="module")
def thirty(tmp_path_factory):
    """Their folders, and their page."""
    folder = tmp_path_factory.mktemp("thirty")
    runs = made_up.thirty(folder)
    return runs, several.report(runs, folder / "page.html").read_text(encoding="utf-8")


def rows_of(page: str, label: str) -> list[list[str]]:
    table = page[page.index(f'aria-label="{label}"') :].split("</table>")[0]
    rows = re.findall(r"<tr>(<t[hd].*?)</tr>", table)
    return [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in rows]


def test_each_run_stands_there_with_its_claim_and_its_accuracy_as_in_its_files(thirty):
    runs, page = thirty
    head, *rows = rows_of(page, "Runs")
    assert head == ["run", "setting", "accuracy", "epsilon", "delta", "unit"] and len(rows) == 30
    for run, (name, _, accuracy, epsilon, delta, unit) in zip(runs, rows, strict=True):
        claim, path = json.loads((run / "privacy.json").read_text()), run / "result.json"
        assert str(run).endswith(f"/{name}")
        assert accuracy.split(" ")[0] == (
            f"{100 * json.loads(path.read_text())['accuracy']:.2f}" if path.exists() else "unfinished"
        )
        assert " to " in accuracy or not path.exists()
        if claim["private"]:
            assert claim["epsilon"] <= float(epsilon) <= claim["epsilon"] * 1.001
            assert (float(delta), unit) == (claim["delta"], claim["unit"])
        else:
            assert (epsilon, delta, unit) == ("not private", "", "")


def test_runs_that_differ_in_their_seed_alone_are_one_setting_with_median_least_and_greatest(thirty):
    runs, page = thirty
    head, *rows = rows_of(page, "Settings")
    assert head[-2:] == ["privacy.target_epsilon", "optimizer.learning_rate"] and len(rows) == 10
    of_settings = [runs[at : at + 3] for at in range(0, 30, 3)]
    for group, (_, *shown, count, _, target, rate) in zip(of_settings, rows, strict=True):
        found = [read_run(run).result for run in group]
        reached = [result.accuracy for result in found if result is not None]
        assert shown == [f"{100 * of(reached):.2f} %" for of in (np.median, min, max)]
        assert count == ("3" if len(reached) == 3 else "2 of 3")
        recipe = read_run(group[0]).recipe
        assert target == str(recipe["privacy"]["target_epsilon"])
        assert rate == str(recipe["optimizer"]["learning_rate"])


def test_the_page_says_what_no_epsilon_on_it_covers(thirty):
    text = Page(thirty[1]).text
    assert "Each epsilon on this page is that of one run alone." in text
    assert "Together the runs cost more: sfumato epsilon RUN..." in text
    assert "Choosing the best of them by these accuracies is covered by no epsilon on this page." in text
    assert "3 of 30 runs are not private: nothing is guaranteed for them." in text and "from a public seed" in text
    assert "29 of 30 runs finished" in text


def drawn(page: str, name: str) -> ElementTree.Element:
    """The wide drawing of a chart."""
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    return ElementTree.fromstring(next(each for each in drawings if f'id="{name}-title"' in each))


def dots(svg: ElementTree.Element) -> list[tuple[float, float]]:
    """Of the settings, without those of the legend."""
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in svg.iter("circle") if float(dot.get("cy")) > 50]


def test_dots_stand_at_epsilon_or_gradients_and_at_the_median_accuracy(thirty):
    runs, page = thirty
    settings = several.settings_of([read_run(run) for run in runs])
    private = [setting for setting in settings if setting.certificate.holds]
    svg = drawn(page, "epsilon")
    places = np.array(dots(svg))
    assert len(places) == len(private) == 9  # the one that is not private is not there
    assert_affine(places[:, 0], np.log([setting.certificate.epsilon for setting in private]))
    bars = [line.get("points") for line in svg.iter("polyline") if line.get("class") == "curve"]
    ends = np.array([[float(pair.split(",")[1]) for pair in points.split()] for points in bars])
    reached = [(min(each.accuracies), each.median, max(each.accuracies)) for each in private]
    assert_affine(-np.column_stack([ends[:, 0], places[:, 1], ends[:, 1]]).ravel(), np.ravel(reached))
    assert len(dots(drawn(page, "gradients"))) == 10
    assert {setting.num_gradients for setting in settings} == {60 * 512}


def test_gradients_count_the_views_of_an_image(tmp_path):
    recipe = folders.RECIPE.replace("augmult = 0", "augmult = 8")
    run = folders.write_run(tmp_path / "run", folders.private_certificate(), None, [], recipe)
    assert several.settings_of([read_run(run)])[0].num_gradients == 8 * 60 * 512


def test_epsilons_of_another_unit_or_delta_are_other_dots(tmp_path):
    claims = [folders.private_certificate(**change) for change in ({}, {"unit": "one person with at most 3 images"})]
    claims.append(folders.private_certificate(delta=1e-6))
    result = folders.finished(made_up.DIGITS)
    runs = [folders.write_run(tmp_path / str(place), claim, result, []) for place, claim in enumerate(claims)]
    page = several.report(runs, tmp_path / "page.html").read_text()
    legend = [text for text in re.findall(r"<text[^>]*>([^<]*)<", page) if "delta" in text]
    kinds = ("one image, delta 1e-4", "one person with at most 3 images, delta 1e-4", "one image, delta 1e-6")
    assert set(kinds) <= {*legend}
    assert [row[0] for row in rows_of(page, "Settings")[1:]] == ["1", "2", "3"]


def test_runs_of_other_classes_are_no_one_setting(tmp_path):
    claim = folders.private_certificate()
    runs = [folders.write_run(tmp_path / a, claim, folders.finished([a, "z"]), folders.curve(1)) for a in "ab"]
    assert len(several.settings_of([read_run(run) for run in runs])) == 2


def test_only_what_is_public_is_told_and_as_text(tmp_path):
    evil = "<script>alert(1)</script>"
    recipe = folders.RECIPE.replace('"small_cnn"', f'"{evil}"') + '[run]\nissuer = "<b>"\n'
    names = [f"one{evil.replace('/', '')}", "two"]
    texts = (recipe, folders.RECIPE)
    claim, result = folders.private_certificate(unit=evil), folders.finished(["a", "b"])
    runs = [
        folders.write_run(tmp_path / name, claim, result, [], text) for name, text in zip(names, texts, strict=True)
    ]
    before = several.report(runs, tmp_path / "page.html").read_bytes()
    assert b"<script" not in before and b"<b>" not in before and evil in Page(before.decode()).text
    assert str(tmp_path) not in before.decode() and "27.18" not in before.decode()
    for run in runs:
        shutil.rmtree(run / "owner")
        told = json.loads((run / "result.json").read_text())  # how long it took shows what images are
        (run / "result.json").write_text(json.dumps(told | {"seconds": 31.1, "images_per_second": 9.0}))
    assert several.report(runs, tmp_path / "page.html").read_bytes() == before


def test_runs_of_which_none_has_finished_have_a_page_without_charts(tmp_path):
    claim = folders.private_certificate(status="running")
    runs = [folders.write_run(tmp_path / name, claim, None, []) for name in "ab"]
    page = several.report([*runs, runs[0]], tmp_path / "page.html").read_text()
    assert "<svg" not in page and "0 of 2 runs finished" in Page(page).text
    assert "differ in their randomness alone" in page


def test_the_command_writes_one_run_s_page_into_its_folder_and_that_of_several_where_it_is_told(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    runs = made_up.thirty(tmp_path / "runs")[:2]
    assert json.loads(call(capsys, "report", runs[0], "--json")[1]) == {"page": str(runs[0] / "report.html")}
    assert (runs[0] / "report.html").exists()
    assert json.loads(call(capsys, "report", *runs, "--json")[1]) == {"page": "report.html"}
    assert "2 runs" in (tmp_path / "report.html").read_text()
    _, out, _ = call(capsys, "report", *runs, "--output", "b.html")
    assert out == "page        b.html\n"
    assert (tmp_path / "b.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    assert sfumato.report(runs[0], "c.html").read_bytes() == (runs[0] / "report.html").read_bytes()


def test_the_page_of_a_sweep_or_a_search_is_made_anew(tmp_path, capsys):
    for name, found in {"sweep": made_up.sweep(), "search": made_up.search()}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found.as_json()))
        assert json.loads(call(capsys, "report", tmp_path, "--json")[1]) == {"page": str(tmp_path / f"{name}.html")}
        page = Page((tmp_path / f"{name}.html").read_text())
        assert f"Sfumato {name}" in page.text
        (tmp_path / f"{name}.json").unlink()


def test_a_page_that_cannot_be_is_refused_with_what_why_and_remedy(tmp_path, capsys):
    runs = made_up.thirty(tmp_path / "runs")[:2]
    (tmp_path / "photos").mkdir()
    (tmp_path / "runs" / "nothing").mkdir()
    assert "privacy.json cannot be read. Give a whole run folder." in refused(
        capsys, "report", tmp_path / "runs" / "nothing", runs[0]
    )
    assert "Make it" in refused(capsys, "report", *runs, "--output", tmp_path / "none" / "page.html")
    assert ".html" in refused(capsys, "report", *runs, "--output", tmp_path / "page.pdf")
    recipe = folders.RECIPE.replace('name = "digits"', 'name = "folder"')
    run = folders.write_run(tmp_path / "own", folders.private_certificate(), None, [], recipe)
    (run / "owner" / "data_root").write_text(str(tmp_path / "photos"))
    with pytest.raises(InputError, match="lies in the folder of images"):
        several.report([run, runs[0]], tmp_path / "photos" / "page.html")


def test_thirty_runs_weigh_less_than_three_megabytes_and_one_less_than_one(tmp_path, thirty):
    assert len(thirty[1].encode()) < 3e6
    lines, names = folders.curve(1000), [f"class {number}" for number in range(1000)]
    run = folders.write_run(tmp_path / "run", folders.private_certificate(), folders.finished(names), lines)
    assert several.report(run).stat().st_size < 1e6
