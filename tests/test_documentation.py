"""The README and the examples do what they say, and docs/performance.md holds measured figures, and nothing else."""

import importlib.util
import re
import shutil
import tomllib
import warnings
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from benchmarks import report
from tests.cli.test_cli import photos

ROOT = Path(__file__).parents[1]


def test_the_python_in_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = photos(tmp_path / "xrays", 60, seed=0, contrast=150, noise=30)
    shutil.copy(folder / "checks" / "1.png", tmp_path / "new-image.png")
    text = (ROOT / "README.md").read_text()
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    digits, optimizer = load_digits(), torch.optim.SGD(model.parameters(), lr=2.0)
    names = {"model": model, "optimizer": optimizer, "labels": torch.tensor(digits.target)}
    names["images"] = torch.tensor(digits.images, dtype=torch.float32) / 16
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    assert names["result"].private and names["result"].epsilon <= 3
    assert [answer.class_name in ("stripes", "checks") for answer in names["answers"]] == [True]
    out, err = capfd.readouterr()
    assert out.startswith(str(names["result"].accuracy)) and "step " in err
    assert (tmp_path / "runs" / "xrays-2" / "report.html").exists()
    assert 2 < names["loop"].certificate.epsilon < 3
    right = (model(names["images"]).argmax(1) == names["labels"]).double().mean()
    assert right > 0.8 and out.endswith(f"{names['loop'].certificate.epsilon}\n")


def test_the_same_training_as_in_opacus_runs_and_its_opacus_too_where_that_is_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "from-opacus.md").read_text(), re.DOTALL):
        if not code.startswith("# opacus"):
            exec(code, names)
        elif importlib.util.find_spec("opacus") is not None:
            with warnings.catch_warnings(action="ignore"):
                exec(code, names)
    assert 2.9 < names["epsilon"] <= 3 and names["accuracy"] > 0.8
    assert 2.9 < names["result"].epsilon <= 3 and names["result"].accuracy > 0.8


def test_whatever_is_to_be_installed_is_a_package_that_the_project_names():
    """An extra of a project that is not on an index could not be typed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [project["dependencies"], *project["optional-dependencies"].values()]
    known = {re.match(r"[\w\-\[\]]+", each)[0] for packages in listed for each in packages}
    texts = [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [
        name
        for path in texts
        for name in re.findall(r"pip install ((?:[\w\-]+|'[^']+')(?: [\w\-]+)*)", path.read_text())
    ]
    assert named and {word for words in named for word in words.replace("'", "").split()} <= known


def test_the_pages_are_what_results_and_code_say():
    assert report.PAGE.read_text(encoding="utf-8") == report.page(), "run: python -m benchmarks.report"
    assert report.KEYS.read_text(encoding="utf-8") == report.keys_page(), "run: python -m benchmarks.report"


def test_no_line_of_the_page_is_wider_than_120_columns():
    assert max(map(len, report.page().splitlines())) <= 120


def test_a_row_that_was_measured_twice_is_taken_from_the_newest_file():
    newest = report.read("clipping-2-cores-epyc-compiled-vit.json")["results"]
    ratio = next(row["ratio"] for row in newest if row["engine"] == "graph")
    lines = report.engine_part(report.ENGINE[0]).splitlines()
    rows = [line for line in lines if "ViT-tiny, 64 px" in line and "compiled" in line]
    assert len(rows) == 1
    assert f"| {report.number(ratio, 2)} |" in rows[0]


def test_figures_are_rounded_as_they_are_read():
    assert [report.number(value, 2) for value in (1.265, 1.2649, 0.075, 9)] == ["1.27", "1.26", "0.08", "9.00"]
