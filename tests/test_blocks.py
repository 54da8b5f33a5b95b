"""Every command that a page shows runs as it stands; placeholders mean what `MEANT` says, and long ones are shorter."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sfumato
from sfumato import cli
from tests.cli.test_cli import photos

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = ("README.md", "budget.md", "scaling.md")
MEANT = {"RECIPE": "demo/digits", "RUN": "runs/canaries", "8": "2"}
# What is added, so that the words are tried and not the machine: a later option counts.
SHORT = {
    "audit canary": ["--num-games", "2000"],
    "train RECIPE --set audit": ["--set", "audit.canaries=70"],
    "audit membership": ["--num-models", "28", "--num-steps", "2"],
    "sweep": ["--set", "training.num_steps=2"],
    "simulate": ["--set", "training.num_steps=16", "--seeds", "0,1"],
    "search": ["--trials", "2", "--set", "training.num_steps=32"],
}
# Other data, other devices, or days: what would be done is planned.
PLANNED = ("de2022/pretrain-cifar100-wrn-40-4", "de2022/cifar10-wrn-40-4-cifar100-eps-1")
LEFT_OUT = ("make ", ". .venv", "pip install", "export ", "torchrun --nnodes", "sfumato figures run")
LEFT_OUT += ("sfumato simulate sander2022",)


def commands(page):
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """What the pages speak of: folders of X-rays, of persons too, new images, a run, scores of somebody's attack."""
    place = tmp_path_factory.mktemp("workspace")
    for name, seed in (("xrays", 0), ("some-images", 1), ("other-images", 2)):
        root = photos(place / name, 90, seed=seed, contrast=150, noise=30)
        for old, new in (("checks", "NORMAL"), ("stripes", "PNEUMONIA")):
            (root / old).rename(root / new)
    (place / "inbox").mkdir()
    for name in ("new-image.png", "new.png", "inbox/1.png"):
        shutil.copy(place / "other-images" / "NORMAL" / "1.png", place / name)
    scores = np.random.default_rng(0).normal(size=400)
    rows = [f"{score + place % 2},{place % 2}" for place, score in enumerate(scores)]
    (place / "scores.csv").write_text("\n".join(["score,member", *rows]))
    (place / "space.toml").write_text('[rate]\n"optimizer.learning_rate" = [1.0, 2.0]\n')
    return place


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name in QUICK else pytest.mark.slow, id=page.name)
        for page in PAGES
        if commands(page)
    ],
)
def test_every_command_of_a_page_runs_in_its_order(page, workspace, tmp_path, monkeypatch, capfd):
    shutil.copytree(workspace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    shown = [line for line in commands(page) if not line.startswith(LEFT_OUT)]
    if "runs/xrays" in "".join(shown) and page.name != "README.md":
        shown.insert(0, "sfumato train image-folder --data-root xrays --epsilon 3 --output runs/xrays")
    if page.name == "audit.md":
        shown = list(dict.fromkeys([shown[-2], *shown]))  # the run that is attacked
    if page.name == "tan.md":
        simulated = next(line for line in shown if "study/64" in line)
        more = [simulated.replace("64", size) for size in ("32", "128", "256")]  # "at three batch sizes or more"
        shown[shown.index(simulated) : shown.index(simulated)] = more
    for line in shown:
        words = [MEANT.get(word, word) for word in shlex.split(line, comments=True)]
        given = words[: words.index(">")] if ">" in words else words
        for start, more in SHORT.items():
            given += more if line.startswith(f"sfumato {start}") else []
        if "data.group_by=group" in line:
            names = sorted(path.relative_to("xrays") for path in Path("xrays").rglob("*.png"))
            rows = [f"{name},{name.parent},P{int(name.stem) // 3}-{name.parent}" for name in names]
            Path("xrays", "labels.csv").write_text("\n".join(["file,label,group", *rows]))
        given += ["--dry-run"] if any(name in line for name in PLANNED) else []
        if given[0] == "torchrun":
            done = subprocess.run(given, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            assert done.returncode == 0, line
        else:
            assert cli.run(given[1:]) == 0, (line, capfd.readouterr().err)


class Pets(torch.utils.data.Dataset):
    """Names its classes, as torchvision's do."""

    classes = ["cat", "dog"]

    def __init__(self, seed):
        self.images = np.random.default_rng(seed).integers(0, 255, (40, 32, 32, 3), dtype=np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 2


def told(page):
    """What the page's lines of Python take as given."""
    model, pets = torch.nn.Linear(4, 3), Pets(0)
    inputs, targets = torch.randn(8, 4), torch.randint(3, (8,))
    return {
        "engine.md": {
            "sfumato": sfumato,
            "nn": torch.nn,
            "model": model,
            "inputs": inputs,
            "targets": targets,
            "load": lambda rows: (inputs[rows], targets[rows]),
            "indices": torch.arange(8),
        },
        "own-images.md": {
            "sfumato": sfumato,
            "images": pets.images,
            "labels": [place % 2 for place in range(40)],
            "owners": [f"P{place // 2}" for place in range(40)],
            "train_set": pets,
            "test_set": Pets(1),
        },
        "studies.md": {"sfumato": sfumato, "pandas": pytest.importorskip("pandas")},
    }[page]


@pytest.mark.parametrize("page", ["engine.md", "own-images.md", pytest.param("studies.md", marks=pytest.mark.slow)])
def test_the_python_of_a_page_runs_as_it_stands(page, workspace, tmp_path, monkeypatch, capfd):
    """Of README.md and from-opacus.md: `test_documentation`."""
    shutil.copytree(workspace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = told(page)
    for code in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE):
        if "runs/xrays" in code:
            assert cli.run("train image-folder --data-root xrays --epsilon 3 --output runs/xrays".split()) == 0
            assert cli.run("calibrate runs/xrays some-images".split()) == 0
        exec(code, names)
