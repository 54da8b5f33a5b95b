"""Findings of `benchmarks.gpu` as a file of benchmarks/results, and as a part of docs/performance.md."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Finding = dict[str, Any]

INTRODUCTION = """\
`python -m benchmarks.gpu` measured this; LOG.md has what was expected, and what explains the difference. A private step
sums clipped per-image gradients of a microbatch; the ordinary one is forward and backward of the mean loss of the same
images in the same precision, in its faster memory format.
"""


def keep(lines: Path, results: Path) -> Path:
    """Merges findings into the file of their card: what a part found replaces what it found before."""
    found: list[Finding] = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    facts = next(finding["machine"] for finding in found if "machine" in finding)
    card = facts["gpu"].split()[1].lower()
    path = results / f"gpu-{card}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["findings"] if path.exists() else []
    parts = {finding["part"] for finding in found}
    found = [{**finding, "commit": facts["commit"]} for finding in found if "ended" not in finding]
    kept = [finding for finding in before if finding["part"] not in parts] + found
    body = ",\n".join(json.dumps(finding) for finding in kept)
    path.write_text(f'{{"machine": {json.dumps(facts)},\n"findings": [\n{body}\n]}}\n', encoding="utf-8")
    return path


def gpu_part(file: dict[str, Any], table: Any) -> str:
    """One card."""
    facts, found = file["machine"], file["findings"]
    commits = ", ".join(dict.fromkeys(finding["commit"] for finding in found))
    machine = f"{facts['gpu']}, torch {facts['torch']}, CUDA {facts['cuda']}, commits {commits}."
    return "\n".join(
        [
            f"## On a GPU: {facts['gpu']}\n\n{machine}\n\n{INTRODUCTION}",
            f"Ceilings: {_ceilings(_of(found, 'ceilings'))}.\n",
            "### Private sums beside single images in float64\n",
            table(
                ["network", "precision", "engine", "sum off by", "norms by at most"], _agreement(_of(found, "agrees"))
            ),
            "### An update of Table 12 of De et al. (B 4,096, K 16), seconds\n",
            table(["loop", "precision", "whole", "phases"], _updates(_of(found, "update"))),
            "### Private and ordinary steps\n",
            table(
                [
                    "network",
                    "examples x views",
                    "precision",
                    "how",
                    "ordinary, ms",
                    "private, ms",
                    "ratio",
                    "peak, GiB",
                ],
                _steps([*_of(found, "engines"), *_of(found, "compiled"), *_of(found, "func")]),
            ),
            "### One convolution, ratio to its ordinary step by method\n",
            table(
                ["convolution", "examples", "precision", "format", "loop", "grouped", "unfold"],
                _sites(_of(found, "sites")),
            ),
            f"Audit: {_audit(_of(found, 'audit'))}.\n",
        ]
    )


def _of(found: list[Finding], part: str) -> list[Finding]:
    return [finding for finding in found if finding["part"] == part]


def _ceilings(found: list[Finding]) -> str:
    copies = [f"{finding['tb_per_second']:.2g} TB/s copied" for finding in found if "tb_per_second" in finding]
    products = [
        f"{finding['tflop_per_second']:.0f} TFLOP/s in {finding['product']}"
        for finding in found
        if "tflop_per_second" in finding
    ]
    return ", ".join(copies + products)


def _agreement(found: list[Finding]) -> Iterable[list[str]]:
    """With the methods that are chosen, and the farthest of all methods."""
    engines = {_key(finding): finding["engine"] for finding in found if "engine" in finding}
    farthest: dict[tuple[str, str], tuple[float, float]] = {}
    for finding in found:
        if "sum_off" in finding:
            place = finding["network"], finding["precision"]
            before = farthest.get(place, (0.0, 0.0))
            farthest[place] = max(before[0], finding["sum_off"]), max(before[1], finding["norms_off"])
    for (network, precision), off in farthest.items():
        engine = engines.get((network, precision), "")
        yield [network, precision, engine, *(f"{value:.1e}" for value in off)]


def _key(finding: Finding) -> tuple[str, str]:
    return finding["network"], finding.get("precision", "float64")


def _updates(found: list[Finding]) -> Iterable[list[str]]:
    """The median of all updates but the first."""
    for loop, precision in dict.fromkeys(
        (finding["loop"], finding["precision"]) for finding in found if "loop" in finding
    ):
        own = [finding for finding in found if (finding.get("loop"), finding.get("precision")) == (loop, precision)]
        steps = [finding["phases"] for finding in own if "phases" in finding and finding["step"] > 1]
        if steps:
            phases = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in steps[0]}
            whole = statistics.median(sum(step.values()) for step in steps)
            yield [loop, precision, f"{whole:.3f}", ", ".join(f"{name} {value:.3f}" for name, value in phases.items())]


def _steps(found: list[Finding]) -> Iterable[list[str]]:
    ordinary: dict[tuple[Any, ...], float] = {}
    for finding in found:
        place = tuple(finding.get(key) for key in ("part", "network", "views", "examples", "precision"))
        if finding.get("step") == "ordinary" and "seconds" in finding:
            ordinary[place] = min(finding["seconds"], ordinary.get(place, float("inf")))
        if finding.get("step") == "private" and ("seconds" in finding or "why" in finding):
            how = "compiled" if finding.get("compile") else finding.get("engine", "graph")
            work = [finding["network"], f"{finding['examples']} x {finding['views']}", finding["precision"], how]
            plain = f"{1e3 * ordinary[place]:.1f}" if place in ordinary else ""
            if "why" in finding:
                yield [*work, plain, finding["why"], "", ""]
                continue
            ratio = f"{finding['ratio']:.2f}" if "ratio" in finding else ""
            yield [*work, plain, f"{1e3 * finding['seconds']:.1f}", ratio, f"{finding['peak_gib']:.1f}"]


def _sites(found: list[Finding]) -> Iterable[list[str]]:
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for finding in found:
        if finding.get("step") == "private" and "ratio" in finding:
            (method,) = (name for key, name in finding["methods"].items() if key != "memory_format")
            place = (
                finding["network"],
                str(finding["examples"]),
                finding["precision"],
                finding["methods"]["memory_format"],
            )
            rows.setdefault(place, {})[method] = f"{finding['ratio']:.1f}"
    for place, ratios in rows.items():
        yield [*place, *(ratios.get(method, "") for method in ("loop", "grouped", "unfold"))]


def _audit(found: list[Finding]) -> str:
    rates = [finding["models_per_second"] for finding in found if "models_per_second" in finding]
    return f"{rates[0]:.3g} models a second on the processor beside it" if rates else "not measured"
