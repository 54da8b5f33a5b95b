"""Writes docs/performance.md from the files in benchmarks/results, and docs/keys.md from the configuration's code.

    python -m benchmarks.report [RESULTS.jsonl ...]

New figures come to the page by replacing a file there, or by naming a new one below; those of a GPU (what
`benchmarks.gpu` left) by naming its files on the command line. No figure is typed by hand.
"""

import json
import sys
import textwrap
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from benchmarks import gpu_report
from sfumato import config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
KEYS = ROOT / "docs" / "keys.md"

# Files of one processor, newest first: a row that stands in two of them is taken from the first.
ENGINE = [
    [
        "clipping-2-cores-epyc.json",
        "clipping-2-cores-epyc-compiled-vit.json",
        "clipping-2-cores-epyc-compiled.json",
    ],
    ["clipping-2-cores-epyc-avx2.json"],
]
PEERS = "clipping-2-cores-epyc.json"
FOUNDATION = "foundation-2-cores.json"

MODELS = {
    "wrn-16-4": "WRN-16-4",
    "wrn-16-4-no-ws": "WRN-16-4, no weight standardisation",
    "wrn-16-4-last-layer": "WRN-16-4, last layer alone",
    "vit-tiny-224": "ViT-tiny, 224 px",
    "vit-tiny-224-lora": "ViT-tiny, 224 px, LoRA of rank 4",
    "vit-tiny-64": "ViT-tiny, 64 px",
    "small-cnn": "small CNN, 28 px",
    "nf-resnet-50": "NF-ResNet-50, 224 px",
    "vit-b-16": "ViT-B/16, 224 px",
}

KEYS_INTRODUCTION = """\
`python -m benchmarks.report` writes this page; `sfumato keys [NAME]` prints it. A key that a recipe leaves out and
that has no default here is filled in by rules of public numbers: [defaults.md](defaults.md) has them and their reasons,
and `sfumato train RECIPE --dry-run` says what was chosen."""

INTRODUCTION = """\
# Performance

`python -m benchmarks.report` writes this page from `benchmarks/results`. [LOG.md](../LOG.md) tells how the figures vary
from run to run, what was tried, and what is not measured yet.

The ordinary step is forward and backward of the mean loss of the same network on the same images, in its faster memory
format, and compiled where the private step is. The private step computes the sum of clipped per-image gradients. Both
take turns in one process. A ratio is the median of the rounds' ratios, so it may differ from the ratio of the median
seconds; 1.00 means that privacy costs no time. It can be less: here each thread computes images of its own, where the
ordinary step divides each operation, and on AMD's processors products go to oneDNN, which uses AVX-512, not to MKL,
which does not. Memory is the growth of peak memory between steps. The first call traces the model, checks it and tries
methods, once before training. A commit with "+" had changed files.
"""

OPACUS = """\
## Price of privacy, beside Opacus

Time and memory over the ordinary step; all took turns in one process. Of Opacus 1.6 this is its mode "hooks", the
faster one in nearly every row ("functorch" and "ghost" are in the file).
"""

REST = """\
## What is not the gradient

Sampling, noise, ledger and checkpoint of the MNIST recipe (`mnist-cnn-eps-2.93`), start-up, decoding and memory, by
`python -m benchmarks.foundation startup overhead memory decoding`.
"""


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def work(row: dict[str, Any]) -> str:
    """The network and the microbatch, in words."""
    views = f", {row['augmult']} views each" if row["augmult"] > 1 else ""
    return f"{MODELS[row['model']]}: {row['examples']} images{views}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def number(value: float, digits: int) -> str:
    """Rounded as a reader would round the printed figure: 1.265 is 1.27."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def machine(*files: dict[str, Any]) -> str:
    """What files of results from one machine say about hardware and versions, in a sentence."""
    facts = files[0]["machine"]
    names = {"x86_64": "x86-64 processor"}
    python = f"Python {facts['python']}, " if "python" in facts else ""
    commits = dict.fromkeys(file["machine"]["commit"] for file in files if "commit" in file["machine"])
    commit = f", commit{'s' if len(commits) > 1 else ''} {' and '.join(commits)}" if commits else ""
    processor = names.get(facts["processor"], facts["processor"])
    torch = " and ".join(dict.fromkeys(file["machine"]["torch"] for file in files))
    return f"{processor}, {facts['cores']} cores, {python}torch {torch}{commit}."


def steps(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    """Rows by network and microbatch, then by engine."""
    found: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["examples"], row["augmult"]), {})[row["engine"]] = row
    return found


def engine_part(names: list[str]) -> str:
    """One processor: cost of private gradients beside ordinary ones."""
    files = [read(name) for name in names]
    rows, seen = [], set()
    for file in files:
        compiled = file["machine"]["mode"]["compile"]
        for key, engines in steps(file["results"]).items():
            if (compiled, key) in seen:
                continue
            seen.add((compiled, key))
            own, ordinary = engines["graph"], engines["ordinary"]
            rows.append(
                [
                    work(own) + (", compiled" if compiled else ""),
                    number(own["ratio"], 2),
                    f"{number(ordinary['seconds'], 3)}, {number(own['seconds'], 3)}",
                    number(own["peak_memory_ratio"], 2),
                    number(own["first_call_seconds"], 1),
                ]
            )
    header = ["work", "time over ordinary", "seconds: ordinary, private", "memory over ordinary", "first call, s"]
    return f"## Private gradients on {files[0]['machine']['processor']}\n\n{machine(*files)}\n\n{table(header, rows)}"


def peers_part() -> str:
    """Every network that Opacus could compute, and those that it could not."""
    file = read(PEERS)
    rows, refused = [], []
    for engines in steps(file["results"]).values():
        own, peer = engines["graph"], engines["opacus-hooks"]
        if not peer["agrees"]:
            refused.append(f"- {work(peer)}: {peer['why']}.\n")
            continue
        figures = [number(row[key], 2) for key in ("ratio", "peak_memory_ratio") for row in (own, peer)]
        rows.append([work(own), *figures])
    header = ["work", "Sfumato: time", "Opacus: time", "Sfumato: memory", "Opacus: memory"]
    return f"{OPACUS}\n{machine(file)}\n\n{table(header, rows)}\nNot computed by Opacus:\n\n{''.join(refused)}"


def foundation_part() -> str:
    file = read(FOUNDATION)
    overhead, memory, startup = file["overhead"], file["memory"], file["startup"]
    share = f"{number(overhead['ms_a_step']['all'], 1)} ms, {number(100 * overhead['share'], 2)} % of it"
    peaks = " and ".join(f"{number(peak, 2)} GB" for peak in memory["batch_peaks_gb"].values())
    rows = [
        ["sampling, noise, ledger and checkpoint, a step", share],
        ["peak memory of the MNIST recipe", f"{number(memory['recipe_peak_gb'], 2)} GB"],
        ["the same, batch of 512 and of 8,192", peaks],
        ["`sfumato --help`", f"{number(startup['help']['seconds'], 2)} s"],
        ["`sfumato plan` on Table 12 of De et al.", f"{number(startup['plan_table_12']['seconds'], 2)} s"],
    ]
    rows += [
        [f"512 x 512 JPEG files decoded to {size.removeprefix('to_')} px, a second", str(rate)]
        for size, rate in file["decoding"]["images_a_second"].items()
    ]
    return f"{REST}\n{machine(file)}\n\n{table(['what', 'measured'], rows)}"


def page() -> str:
    """The whole of docs/performance.md."""
    cards = [gpu_report.gpu_part(read(path.name), table) for path in sorted(RESULTS.glob("gpu-*.json"))]
    parts = [INTRODUCTION, *(engine_part(names) for names in ENGINE), *cards, peers_part(), foundation_part()]
    return "\n".join(parts)


def keys_page() -> str:
    """Every key of a recipe, as `sfumato keys` has it."""
    lines, section = ["# Every key of a recipe", "", KEYS_INTRODUCTION], None
    for row in config.explained():
        name = row["key"].partition(".")[0]
        if name != section:
            section = name
            lines += ["", f"## {section}", ""]
        default = "" if row["default"] in (None, [], {}) else f"; default {row['default']!r}"
        text = f"- `{row['key']}` ({row['type']}{default}): {row['means']}"
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        gpu_report.keep(Path(name), RESULTS)
    PAGE.write_text(page(), encoding="utf-8")
    KEYS.write_text(keys_page(), encoding="utf-8")
