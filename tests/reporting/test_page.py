"""report.html: what it must say, must never say, and how it must stand alone."""

import html
import html.parser
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from sfumato.accounting import attacker as attacking
from sfumato.accounting import formats
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.reporting.charts import WIDTHS
from sfumato.reporting.page import write_report
from tests.reporting import folders

DIGITS = [str(i) for i in range(10)]
NASTY = ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a & b", "$x_1$", "日本語", "e\u202etxt"]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(html.parser.HTMLParser):
    """Elements, attributes and visible text of a page; fails on an element that is closed wrongly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "svg", "head"} & set(self.open):
            self.pieces.append(data)

    def attributes(self, name: str) -> list[str | None]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def report(tmp_path: Path, privacy, result, metrics, recipe=folders.RECIPE) -> str:
    folder = folders.write_run(tmp_path / "a-run", privacy, result, metrics, recipe)
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def private(tmp_path: Path, classes=DIGITS, lines=10, **changes) -> str:
    return report(tmp_path, folders.private_certificate(**changes), folders.finished(classes), folders.curve(lines))


WITH_VIEWS = {"test_views": 8, "accuracy_augtest_vote": 0.9712345, "accuracy_augtest_mean": 0.9754321}
RUNS = {
    "private": (folders.private_certificate(), folders.finished(DIGITS), folders.curve(10)),
    "ordinary": (folders.ordinary_certificate(), folders.finished(["a", "b"]), folders.curve(3, private=False)),
    "just begun": (folders.private_certificate(status="running", ledger_lines=0), None, []),
    "nasty": (folders.private_certificate(), folders.finished(NASTY), folders.curve(1)),
    "hundred": (folders.private_certificate(), folders.finished([f"c {i}" for i in range(100)]), folders.curve(200)),
}


@pytest.fixture(scope="module", params=RUNS)
def any_page(request, tmp_path_factory) -> str:
    return report(tmp_path_factory.mktemp("any"), *RUNS[request.param])


def test_the_page_stands_alone_and_holds_nothing_private(any_page):
    page = Page(any_page)
    assert not re.search(r"https?://|@import|url\(", any_page)
    from_elsewhere = {"script", "link", "img", "iframe", "object", "embed", "image", "base", "form"}
    assert not {tag for tag, _ in page.elements} & from_elsewhere
    assert page.attributes("src") == page.attributes("href") == []
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
    names = page.attributes("id")
    assert len(names) == len(set(names))
    assert {part for value in page.attributes("aria-labelledby") for part in value.split()} == set(names)
    assert "default-src 'none'" in any_page
    for secret in ("1.23456", "0.777", "clipped_fraction", "54321", "27.18", "/somewhere/else"):
        assert secret not in any_page


def test_private_files_are_not_even_opened(tmp_path):
    folder = folders.write_run(tmp_path / "run", *RUNS["private"])
    before = write_report(folder).read_bytes()
    shutil.rmtree(folder / "owner")
    assert write_report(folder).read_bytes() == before


def test_a_test_with_views_stands_beside_the_plain_accuracy_and_never_in_its_place(tmp_path):
    result = folders.finished(DIGITS, **WITH_VIEWS)
    text = Page(report(tmp_path / "a", folders.private_certificate(), result, folders.curve(10))).text
    plain, vote, mean = (text.index(number) for number in ("96.39 %", "97.12 %", "97.54 %"))
    assert plain < vote < mean and "majority of 8 views" in text and "mean probability of 8 views" in text
    assert "views" not in Page(report(tmp_path / "b", *RUNS["private"])).text


def test_recipe_and_certificate_text_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    recipe = folders.RECIPE.replace('"small_cnn"', f'"{evil}"').replace("options]", f'options]\n"{evil}" = 3')
    stated = dict.fromkeys(("relation", "unit", "accountant_note", "ledger_sha256"), evil)
    certificate = folders.private_certificate(**stated, not_covered=[evil])
    text = report(tmp_path, certificate, folders.finished(DIGITS), folders.curve(2), recipe)
    assert "<script" not in text
    assert Page(text).text.count(evil) == 8  # the model twice, its option, five of the certificate


SEVERAL = {"max_images_per_person": 3, "epsilon_person": 10.7012, "person_groups": "declared, not checked"}
WHOLE = (
    *("Epsilon 2.997", "by RDP 3.211", "Delta 1e-4", "1 in 10,000", "Unit one image", "Sampling poisson", "0.3563"),
    *("ε ≤ 2.997 at δ = 1e-4", folders.RELATION, "1,437", "at most 65.50 % of the time"),
    *(
        "Attacker right at most 65.50 %",
        "recognises at most 6.84 % of those",
        "0.1 %, at most 1.27 %",
        "e^epsilon = 20.01.",
    ),
)
OF_A_PERSON = (
    "images of one given person were used for training is right at most 80.00 % of the time",
    "Epsilon of a person 10.71",
    "3 images",
    "not checked",
)
UNBOUNDED = dict.fromkeys(("epsilon", "epsilon_pld", "epsilon_rdp"))
BY_RDP = {"epsilon_pld": None, "accountant": "rdp", "accountant_note": "PLD's grid would need 3 GB."}


@pytest.mark.parametrize(
    ("stated", "said", "unsaid"),
    [
        # by (epsilon, delta) alone an attacker would be right 95.26 % of the time
        ({}, WHOLE, ("Not private", "no privacy guarantee", "95.26")),
        ({"attacker": folders.attacker(0.95)}, ("95.00 % of the time",), ("little protection",)),
        ({"attacker": folders.attacker(0.995)}, ("little protection",), ()),
        ({**SEVERAL, "attacker_person": folders.attacker(0.8)}, OF_A_PERSON, ()),
        (UNBOUNDED, ("Not private", "no finite epsilon"), ("ε", "with differential privacy")),
        (BY_RDP, ("By PLD not computed, by RDP 3.211", BY_RDP["accountant_note"]), ()),
    ],
)
def test_a_certificate_s_guarantee_is_told_whole_and_only_where_it_holds(tmp_path, stated, said, unsaid):
    text = Page(private(tmp_path, **stated)).text
    assert [fact for fact in said if fact not in text] == [fact for fact in unsaid if fact in text] == []


@pytest.mark.parametrize(
    "people, says", [(30, "1,437 images, of which at most 3 of each person"), (None, "1,437 images with")]
)
def test_the_opening_tells_of_images_that_do_not_contribute(tmp_path, people, says):
    public = {**folders.PUBLIC, "num_people": people, "classes": DIGITS}
    assert f"trained on {says}" in Page(private(tmp_path, **SEVERAL, public_inputs=public)).text


def first_words(page: str) -> str:
    return re.search(r'</h1>\s*<p class="patient">([^<]*)</p>', page).group(1).replace("\xa0", " ")


OF_AN_IMAGE = [
    "yours was used can hardly be told from this model.",
    "right at most 65.50 % of the time, where a coin toss is right 50 %.",
    "If several of the images show you, it is easier to tell.",
]
GUESSED, UNSURE = {"attacker": folders.attacker(0.995)}, {"attacker": folders.attacker(0.75001)}
OF_PERSON = {**SEVERAL, "unit": "one person with at most 3 images"}


@pytest.mark.parametrize(
    ("stated", "said", "unsaid"),
    [
        ({}, OF_AN_IMAGE, ["little", "If up to", "no guarantee"]),
        (UNSURE, ["cannot be told for certain from this model."], ["hardly"]),
        (GUESSED, ["may well be told from this model.", "at most 99.50 %", "That is little protection."], ["hardly"]),
        ({"attacker": None}, ["right at most 100.00 % of the time"], ["hardly"]),
        (
            {**SEVERAL, "attacker_person": folders.attacker(0.8)},
            ["If up to 3 images show you: at most 80.00 %."],
            ["several"],
        ),
        (OF_PERSON, ["images of yours were used can hardly"], ["If several"]),
        ({"status": "running"}, ["can hardly be told from what this unfinished run gives away."], ["this model"]),
        (UNBOUNDED, ["this run gives you no guarantee.", "whether your image was used, and even"], ["%", "hardly"]),
    ],
)
def test_the_first_words_tell_a_patient_what_the_certificate_says_and_no_more(tmp_path, stated, said, unsaid):
    words = first_words(private(tmp_path, **stated))
    assert words.startswith("If you are in one of the training images:")
    assert [fact for fact in said if fact not in words] == [fact for fact in unsaid if fact in words] == []


@pytest.mark.parametrize(
    "stated, beside",
    [
        ({}, {}),
        (OF_PERSON, {"images_per_unit": 3}),
        ({**OF_PERSON, "drawn": "people"}, {}),  # each is one of N
    ],
)
def test_the_curve_of_what_an_attacker_gains_is_that_of_the_certificate_s_mechanism(tmp_path, stated, beside):
    """Computed here from its numbers; the text that describes the figure tells four points of it."""
    numbers = (folders.NUMBERS[key] for key in ("num_examples", "batch_size", "noise_multiplier", "num_steps"))
    bound = attacking.true_positive_rates(Mechanism(*numbers, **beside), [1e-4, 1e-3, 0.01, 0.1])
    described = re.search(r'<desc id="attack-description">([^<]*)<', private(tmp_path, **stated)).group(1)
    told = [float(share) / 100 for share in re.findall(r"alarms: ([\d.]+) %", described)]
    assert len(told) == 4
    for share, exact in zip(told, bound, strict=True):
        assert exact <= share + 1e-12 and share <= exact * 1.001 + 1e-4  # rounded up


def test_where_a_run_was_chosen_or_is_not_private_no_curve_is_drawn(tmp_path):
    selected = {"selected_from": 10.0, "selection_shape": 0.0}
    assert "attack-title" not in private(tmp_path, **selected)
    seeded = report(tmp_path / "seeded", folders.public_certificate(), folders.finished(DIGITS), [])
    assert "attack-title" not in seeded


def test_a_run_that_is_not_private_says_so_first_and_shows_no_epsilon_as_a_guarantee(tmp_path):
    text = report(tmp_path, folders.public_certificate(), folders.finished(DIGITS), folders.curve(10))
    page = Page(text)
    body = page.text
    assert "without a privacy guarantee" in body[: body.index("Not private")]
    assert "This run gives no privacy guarantee: its randomness comes from a public seed." in body
    assert "psilon" not in body[: body.index("Not private")] and "ε" not in body[: body.index("Not private")]
    assert body.count("2.997") == 1
    assert "would have meant epsilon 2.997 at delta 1e-4. That is no guarantee for this run." in body
    promises = "ε", "Epsilon 2", "Delta 1e-4", "of the time", "epsilon so far", "Epsilon spent", "stays secret"
    assert not [promise for promise in (*promises, "with differential privacy") if promise in text]


def test_ordinary_training_mentions_no_epsilon_at_all(tmp_path):
    recipe = re.sub(r"\[privacy\].*?(?=\[optimizer\])", "", folders.RECIPE, flags=re.DOTALL)
    body = Page(report(tmp_path, *RUNS["ordinary"], recipe)).text
    assert "Not private" in body and "this is ordinary training, without a budget" in body
    assert "epsilon" not in body.replace("No epsilon", "").replace("their epsilons", "").lower()


@pytest.mark.parametrize("lines", [0, 2])
def test_an_unfinished_run_says_so_and_shows_what_is_known(tmp_path, lines):
    body = Page(report(tmp_path, folders.private_certificate(status="running"), None, folders.curve(lines))).text
    assert "This run is unfinished" in body and "already count every step that is planned" in body
    assert ("Nothing has been evaluated yet." in body) == (lines == 0)
    if lines:
        assert f"{formats.per_cent(folders.curve(lines)[-1]['accuracy'])} accuracy so far" in body


@pytest.mark.parametrize("num_classes", [2, 10])
def test_scores_on_the_page_are_those_of_the_files(tmp_path, num_classes):
    classes = [f"class-{i:03d}" for i in range(num_classes)]
    page = Page(private(tmp_path, classes=classes))
    result = json.loads((tmp_path / "a-run" / "result.json").read_text())
    assert f"{100 * result['accuracy']:.2f} % accuracy" in page.text
    assert f"{100 * result['balanced_accuracy']:.2f} % balanced accuracy" in page.text
    assert f"{100 * result['majority_rate']:.2f} % always the most frequent class" in page.text
    assert f"{100 * result['accuracy_last']:.2f} % accuracy of the last weights" in page.text
    assert ("0.8765 AUROC" in page.text) == (num_classes == 2)
    assert ("99.72 % among the first five" in page.text) == (num_classes >= 6)
    for name, value in zip(classes, result["per_class"], strict=True):
        assert f"{name} {100 * value:.2f} %" in page.text
    widths = [float(re.fullmatch(r"width: ([\d.]+)%", style)[1]) for tag, style in styles(page, "fill")]
    assert widths == pytest.approx([100 * value for value in result["per_class"]], abs=0.005)
    references = [float(re.fullmatch(r"left: ([\d.]+)%", style)[1]) for tag, style in styles(page, "reference")]
    assert references == pytest.approx([100 * result["majority_rate"]] * num_classes, abs=0.005)


def styles(page: Page, class_name: str) -> list[tuple[str, str]]:
    return [(tag, attributes["style"]) for tag, attributes in page.elements if attributes.get("class") == class_name]


def test_a_class_without_held_out_images_has_no_accuracy(tmp_path):
    result = folders.finished(["a", "b", "c"], per_class=[0.9, None, 0.5])
    body = Page(report(tmp_path, folders.private_certificate(), result, folders.curve(2))).text
    assert "b no held-out image" in body and "weakest class is c with 50.00 %" in body


@pytest.mark.parametrize("accuracy, said", [(0.75, True), (0.76, False)])
def test_a_classifier_no_better_than_the_majority_is_called_so(tmp_path, accuracy, said):
    result = folders.finished(["a", "b"], accuracy=accuracy, majority_rate=0.75)
    body = Page(report(tmp_path, folders.private_certificate(), result, folders.curve(2))).text
    assert ("no better than always naming the most frequent class" in body) == said


def test_the_recipe_on_the_page_is_the_run_s(tmp_path):
    (block,) = re.findall(r"<pre>(.*?)</pre>", private(tmp_path), re.DOTALL)
    assert tomllib.loads(html.unescape(block)) == tomllib.loads(folders.RECIPE)


@pytest.mark.parametrize("lines", [25, 1001])
def test_the_table_of_the_curve_is_short_true_and_ends_with_the_last_line(tmp_path, lines):
    text = private(tmp_path, lines=lines)
    table = text[text.index('<table class="numbers">') :]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", table)]
    assert len(rows) <= 25
    expected = {f"{line['step']:,}": line for line in folders.curve(lines)}
    for step, accuracy, last, epsilon in rows:
        line = expected[step]
        assert (accuracy, last) == (f"{100 * line['accuracy']:.2f} %", f"{100 * line['accuracy_last']:.2f} %")
        assert line["epsilon"] <= float(epsilon) <= line["epsilon"] * 1.001
    assert rows[-1][0] == f"{6 * lines:,}"


def test_the_same_files_give_the_same_page_and_a_new_one_replaces_the_old(tmp_path):
    folder = folders.write_run(tmp_path / "run", *RUNS["just begun"])
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    (folder / "result.json").write_text(json.dumps(folders.finished(DIGITS)))
    claim = {**json.loads((folder / "privacy.json").read_text()), "status": "complete"}
    (folder / "privacy.json").write_text(json.dumps(claim))
    assert b"unfinished" not in write_report(folder).read_bytes().split(b"</style>")[1]
    assert not list(folder.glob("*.part")) and not list(folder.glob(".*.part"))


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path):
    missing = "privacy.json"
    folder = folders.write_run(tmp_path / "run", *RUNS["private"])
    (folder / missing).unlink()
    with pytest.raises(InputError, match=missing):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_headings_go_down_one_level_at_a_time_and_figures_are_named(tmp_path):
    page = Page(private(tmp_path))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1 and set(levels) == {1, 2}
    figures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert [figure["role"] for figure in figures] == ["img"] * 2 * len(WIDTHS)
    named = [f"{name}-title {name}-description" for name in ("attack", "curves") for _ in WIDTHS]
    assert [figure["aria-labelledby"] for figure in figures] == named


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_and_curves_have_the_contrast_that_wcag_asks_in_light_dark_and_print(tmp_path):
    style = private(tmp_path).split("<style>")[1].split("</style>")[0]
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    palettes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    assert len(palettes) == 3 and len({tuple(palette) for palette in palettes}) == 1
    for palette in palettes:
        pairs = [(text, sheet) for text in ("ink", "muted", "first") for sheet in ("paper", "sheet")]
        pairs += [("second", "paper"), ("warning", "warning-sheet"), ("ink", "warning-sheet")]
        for text, sheet in pairs:
            light, dark = sorted((luminance(palette[text]), luminance(palette[sheet])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= (3.0 if text == "second" else 4.5), (text, sheet, palette)
