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
