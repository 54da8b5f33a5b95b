"""What the papers' private ImageNet recipes cost on many devices: the table of docs/scaling.md and docs/scaling.svg.

    python -m benchmarks.scaling

Asks `sfumato plan` for each recipe. Nothing is trained; the noise alone is timed, on this machine.
"""

import contextlib
import dataclasses
import io
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.machine import machine
from benchmarks.report import ROOT, table
from sfumato import cli, recipes
from sfumato.accounting.mechanism import Mechanism
from sfumato.scaling.cost import Price

PAGE = ROOT / "docs" / "scaling.md"
DRAWING = ROOT / "docs" / "scaling.svg"
PAPERS = {"de2022/": "De et al. (2022)", "sander2022/": "Sander et al. (2022)"}
MACHINES = Price(throughput=9_000.0, devices=32, bandwidth=200.0)
_DEVICES = [2**power for power in range(9)]
_BETWEEN = re.compile(r"(?<=<!-- table: python -m benchmarks.scaling -->\n).*?(?=<!-- end of table -->)", re.DOTALL)


def imagenet() -> list[str]:
    """Private recipes of ImageNet."""
    values = {name: recipes.read(name)[1] for name in recipes.names()}
    return [name for name, each in values.items() if each["data"]["name"] == "imagenet" and "privacy" in each]


def plan(name: str) -> dict[str, Any]:
    """What the command says."""
    given = {"--throughput": MACHINES.throughput, "--devices": MACHINES.devices, "--bandwidth": MACHINES.bandwidth}
    words = [str(word) for option in given.items() for word in option]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(["plan", "--recipe", name, *words, "--json"])
    if status:
        raise SystemExit(f"{name}: {err.getvalue()}")
    return json.loads(out.getvalue())


def priced(facts: dict[str, Any], noise: float) -> tuple[Price, Mechanism]:
    """What the command computed with, but for the noise of a million coordinates in seconds."""
    run = Mechanism(**{key: facts[key] for key in ("num_examples", "batch_size", "noise_multiplier", "num_steps")})
    views = facts["views_processed"] // (run.batch_size * run.num_steps)
    known = {"num_parameters": facts["num_parameters"], "noise_seconds_per_million": facts["noise_seconds_per_million"]}
    price = dataclasses.replace(MACHINES, views=views, **known)
    assert price.of(run)["seconds"] == facts["seconds"]
    return dataclasses.replace(price, noise_seconds_per_million=noise), run


def rows(plans: dict[str, dict[str, Any]], noise: float) -> str:
    """The table, and where the noise was timed."""
    header = ["recipe", "millions that train", "arithmetic, reduction, noise of an update, s", "hours", "device-hours"]
    cells = []
    for name, facts in plans.items():
        price, run = priced(facts, noise)
        found = price.of(run)
        parts = ", ".join(f"{found['update_seconds'][part]:.2g}" for part in ("arithmetic", "reduction", "noise"))
        times = [f"{found['hours']:.2f}", f"{found['device_hours']:.0f}", found["bound_by"]]
        cells.append([f"`{name}`", f"{facts['num_parameters'] / 1e6:.1f}", parts, *times])
    where, slowest = machine(), max(facts["noise_seconds_per_million"] for facts in plans.values())
    said = (
        f"Noise of a million coordinates took {noise:.3f} s to {slowest:.3f} s, as other work left the machine free: "
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}. Every row has the first."
    )
    return f"\n{table([*header, 'bound by'], cells)}\n{textwrap.fill(said, 120)}\n\n"


def draw(plans: dict[str, dict[str, Any]], noise: float, path: Path) -> None:
    """Hours and device-hours against devices, a row for each paper."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    for (prefix, paper), panels in zip(PAPERS.items(), figure.subplots(2, 2), strict=True):
        names = [name for name in plans if name.startswith(prefix)]
        for place, name in enumerate(names):
            price, run = priced(plans[name], noise)
            found = [dataclasses.replace(price, devices=devices).of(run) for devices in _DEVICES]
            label = name.removeprefix(prefix).removeprefix("imagenet-")
            for panel, key in zip(panels, ("hours", "device_hours"), strict=True):
                colour = matplotlib.colormaps["tab20"](place)
                panel.plot(_DEVICES, [each[key] for each in found], color=colour, label=label)
        for panel, what in zip(panels, ("hours", "device-hours"), strict=True):
            panel.set(xscale="log", yscale="log", xlabel="devices", ylabel=what, title=paper)
            panel.set_xticks(_DEVICES, [str(devices) for devices in _DEVICES])
            panel.set_xticks([], minor=True)
        panels[1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    with matplotlib.rc_context({"svg.hashsalt": "sfumato", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    plans = {name: plan(name) for name in imagenet()}
    noise = min(facts["noise_seconds_per_million"] for facts in plans.values())
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BETWEEN.sub(lambda _: rows(plans, noise), text), encoding="utf-8")
    draw(plans, noise, DRAWING)


if __name__ == "__main__":
    main()
