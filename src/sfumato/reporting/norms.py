"""Gradient norms of a run, for its owner alone: no report and no export opens what this reads.

Statistics of the training images, exact and without noise: an epsilon says nothing about them.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from sfumato import config
from sfumato.errors import InputError
from sfumato.run_folder import record
from sfumato.run_folder.files import refuse_drawing, write_atomically
from sfumato.run_folder.record import NormHistogram, PrivateMetrics

FORMATS = (".svg", ".png")
WARNING = "not private: exact statistics of the training images, for the owner alone"
_MOST_CURVES = 6


def read_norms(folder: Path) -> dict[str, Any]:
    """The norm histograms of metrics_private.jsonl by step, JSON-ready.

    Raises:
        InputError: If there is no such run, or it recorded none.
    """
    needs = "a run that was trained under a [privacy] section with --set training.norm_histogram_every=10"
    if not (folder / "recipe.toml").exists():
        raise InputError(f"{folder} holds no run. Give the folder of {needs}.")
    privacy = config.parse(config.read(folder / "recipe.toml")).privacy
    lines = record.read_lines(folder / record.PRIVATE_METRICS_FILE, PrivateMetrics)
    seen = [(line.step, line.norms) for line in lines if line.norms is not None]
    if privacy is None or not seen:
        raise InputError(
            f"{folder} recorded no gradient norms. Give the folder of {needs} (or that --resume adds it to)."
        )
    histograms = [{"step": step, "clipped_fraction": _above_one(norms), **norms.as_json()} for step, norms in seen]
    facts = {"run": str(folder), "private": False, "warning": WARNING, "clipping_norm": privacy.clipping_norm}
    return {**facts, "histograms": histograms}


def _above_one(norms: NormHistogram) -> float | None:
    """The share of norms above C, which are those that clipping shortened."""
    total = sum(norms.counts)
    return sum(norms.counts[norms.edges.index(1.0) + 1 :]) / total if total else None


def draw_norms(facts: dict[str, Any], path: Path) -> None:
    """Histograms of at most six steps, as Figure 7 of Sander et al. (2022) draws them, in a file
    for the owner alone (mode 0600).

    Args:
        facts: From `read_norms`.

    Raises:
        InputError: If the file's ending is unknown, or it would lie among files made for sharing: a
            run without its private part.
    """
    refuse_drawing(path, "--plot", FORMATS)
    for folder in path.resolve().parents:
        if (folder / record.CERTIFICATE_FILE).exists() and not (folder / record.PRIVATE_METRICS_FILE).exists():
            raise InputError(f"{folder} was made for sharing, but a plot of norms is not private. Put it elsewhere.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    every = facts["histograms"]
    chosen = np.linspace(0, len(every) - 1, min(len(every), _MOST_CURVES)).round().astype(int)
    occupied = [1.0]
    for histogram in (every[number] for number in chosen):
        edges, counts = histogram["edges"], histogram["counts"]
        # The outermost bins take what lies beyond.
        inner = np.array([counts[0] + counts[1], *counts[2:-2], counts[-2] + counts[-1]])
        shares = 100 * inner / max(sum(counts), 1)
        occupied += [edge for share, *ends in zip(shares, edges, edges[1:], strict=False) if share for edge in ends]
        axes.stairs(shares, edges, label=f"step {histogram['step']:,}")
    axes.set_xlim(min(occupied) / 2, max(occupied) * 2)
    axes.axvline(1.0, color="tab:gray", linestyle=":", label="clipping norm C")
    axes.set(xscale="log", xlabel="norm of an image's gradient before clipping, over C", ylabel="% of the batch")
    axes.set_title(f"Gradient norms ({WARNING})", fontsize="small")
    axes.legend(frameon=False, fontsize="small")
    written = io.BytesIO()
    figure.savefig(written, format=path.suffix[1:])
    write_atomically(path, written.getvalue(), 0o600)
