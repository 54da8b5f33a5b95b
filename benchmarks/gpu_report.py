"""Findings of `benchmarks.gpu` as a file of benchmarks/results, and as a part of docs/performance.md."""

import json
import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Finding = dict[str, Any]

INTRODUCTION = """\
`python -m benchmarks.gpu` measured this; LOG.md has what was expected, and what explains the difference. A private step
sums clipped per-image gradients of a microbatch; the ordinary one is forward and backward of the mean loss of the same
images in the same precision, in its faster memory format (compiled: channels last).
"""
AGREEMENT = """\
Relative L2 distance of the whole sum, and the largest relative error of a norm. Values that rounding moves across a
kink of ReLU change gradients: ordinary ones are as far off. "smooth" networks have SiLU in its place. Ghost norms are
made longer by what roundings could have hidden ([engine](engine.md)), and the sum is that much shorter.
"""
UPDATES = """\
Medians of all updates but the first. An update has eight microbatches of 512, or nine where more than 4,096 images are
drawn. "own" is a loop of one's own with `sfumato.PrivateLoop`, "product" is `sfumato train`: "torchrun" as one rank
that speaks to itself by NCCL, with microbatches of a size of its own beside one process with the same ("none").
"""
SITES = """\
256 examples of 16 views: multiples of the ordinary step of this one layer, by method. Names: channels in and out, taps,
size of the image, stride.
"""


def keep(lines: Path, results: Path) -> Path:
    """Merges findings into the file of their card: what a part found replaces what it found before."""
    found: list[Finding] = []
    facts: dict[str, Any] = {}
    for line in lines.read_text(encoding="utf-8").splitlines():
        finding = json.loads(line)
        facts = finding.get("machine") or facts
        if not {"machine", "ended"} & finding.keys():
            found.append(finding | {"commit": facts["commit"]})
    path = results / f"gpu-{facts['gpu'].lower().replace(' ', '-')}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["findings"] if path.exists() else []
    parts = {finding["part"] for finding in found}
    kept = [finding for finding in before if finding["part"] not in parts] + found
    body = ",\n".join(json.dumps(finding) for finding in kept)
    path.write_text(f'{{"machine": {json.dumps(facts)},\n"findings": [\n{body}\n]}}\n', encoding="utf-8")
    return path


def gpu_part(file: dict[str, Any], table: Callable[[list[str], Iterable[list[str]]], str]) -> str:
    """One card."""
    facts, found = file["machine"], file["findings"]
    commits = " and ".join(dict.fromkeys(finding["commit"] for finding in found))
    machine = f"{facts['gpu']}, torch {facts['torch']}, commits {commits}. {_ceilings(_of(found, 'ceilings'))}"
    steps = ["network", "examples x views", "precision", "how", "ordinary, ms", "private, ms", "ratio", "peak, GiB"]
    parts = [
        f"## On a GPU: {facts['gpu']}\n\n{textwrap.fill(machine, 120)}\n\n{INTRODUCTION}",
        f"### Private sums beside single images in float64\n\n{AGREEMENT}",
        table(
            ["network", "precision", "engine", "sum", "ordinary gradient", "norms"], _agreement(_of(found, "agrees"))
        ),
        f"### An update of Table 12 of De et al. (B 4,096, K 16), seconds\n\n{UPDATES}",
        table(["loop", "precision", "whole", "phases"], _updates(_of(found, "update") + _of(found, "ranks"))),
        "### Private and ordinary steps\n",
        table(steps, _steps([finding for part in ("engines", "compiled", "func") for finding in _of(found, part)])),
        f"### One convolution\n\n{SITES}",
        table(["convolution", "precision", "format", "grouped", "unfold"], _sites(_of(found, "sites"))),
    ]
    return "\n".join(parts)


def _of(found: list[Finding], part: str) -> list[Finding]:
    return [finding for finding in found if finding["part"] == part]


def _ceilings(found: list[Finding]) -> str:
    copied = [f"It copies {finding['tb_per_second']:.2g} TB/s" for finding in found if "tb_per_second" in finding]
    products = [
        f"{finding['tflop_per_second']:.0f} in {finding['product']}"
        for finding in found
        if "tflop_per_second" in finding
    ]
    return f"{', '.join(copied)}, and multiplies matrices at {', '.join(products)} (TFLOP/s)."


def _agreement(found: list[Finding]) -> Iterable[list[str]]:
    """With the methods that are chosen, then the farthest of each method."""
    chosen, forced, used = {}, {}, {}
    for finding in found:
        used = finding.get("used", used)
        place = finding["network"], finding.get("precision", "float64")
        if finding.get("method") == "chosen":
            chosen.setdefault(place, {}).update(finding)
        elif "sum_off" in finding and finding["method"] in used:
            off = forced.setdefault((*place, finding["method"]), {"sum_off": 0.0, "norms_off": 0.0})
            off |= {key: max(value, finding[key]) for key, value in off.items()}
    for (network, precision), finding in chosen.items():
        yield [network, precision, finding.get("why", finding.get("engine", "")), *_digits(finding)]
    for (network, precision, method), off in forced.items():
        yield [network, precision, f"graph: {method}", *_digits(off)]


def _digits(finding: Finding) -> list[str]:
    return [f"{finding[key]:.1e}" if key in finding else "" for key in ("sum_off", "ordinary_off", "norms_off")]


def _updates(found: list[Finding]) -> Iterable[list[str]]:
    """The median of all updates but the first."""
    of: dict[tuple[str, str], list[dict[str, float]]] = {}
    for finding in found:
        if "phases" in finding and finding["step"] > 1:
            loop = finding["loop"]
            if "launcher" in finding:
                loop += f", {finding['launcher']}, microbatch {finding['microbatch_size']}"
            of.setdefault((loop, finding["precision"]), []).append(_without_extras(finding["phases"]))
    for (loop, precision), steps in of.items():
        phases = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in steps[0]}
        whole = statistics.median(sum(step.values()) for step in steps)
        yield [loop, precision, f"{whole:.3f}", ", ".join(f"{name} {value:.3f}" for name, value in phases.items())]


def _without_extras(phases: dict[str, float]) -> dict[str, float]:
    """What every update of a whole run has: few have a checkpoint, or are evaluated."""
    return {name: seconds for name, seconds in phases.items() if name not in ("checkpoint", "evaluation")}


def _steps(found: list[Finding]) -> Iterable[list[str]]:
    ordinary: dict[tuple[Any, ...], float] = {}
    for finding in found:
        place = tuple(finding.get(key) for key in ("part", "network", "views", "examples", "precision"))
        if finding.get("step") == "ordinary" and "seconds" in finding:
            ordinary[place] = min(finding["seconds"], ordinary.get(place, float("inf")))
        if finding.get("step") == "private" and ("seconds" in finding or "why" in finding):
            how = "compiled" if finding.get("compile") else finding.get("engine", "graph")
            rows = str(finding["examples"]) + (f" x {finding['views']}" if finding["views"] else "")
            work = [finding["network"], rows, finding["precision"], how]
            plain = f"{1e3 * ordinary[place]:.1f}" if place in ordinary else ""
            if "why" in finding:
                yield [*work, plain, "refused" if "InputError" in finding["why"] else finding["why"][:60], "", ""]
                continue
            ratio = f"{finding['ratio']:.2f}" if "ratio" in finding else ""
            yield [*work, plain, f"{1e3 * finding['seconds']:.1f}", ratio, f"{finding['peak_gib']:.1f}"]


def _sites(found: list[Finding]) -> Iterable[list[str]]:
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for finding in found:
        if finding.get("step") == "private" and "ratio" in finding:
            methods = dict(finding["methods"])
            place = finding["network"], finding["precision"], methods.pop("memory_format")
            (method,) = methods.values()
            rows.setdefault(place, {})[method] = f"{finding['ratio']:.1f}"
    for place, ratios in rows.items():
        yield [*place, ratios.get("grouped", ""), ratios.get("unfold", "")]
