"""`sfumato norms`: how long the gradients were before clipping, for the owner of the run alone."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output


def norms(
    run: options.Run,
    plot: Annotated[
        Path | None, typer.Option(help="Draws the histograms here (.svg or .png), readable by you alone.")
    ] = None,
    json_: options.Json = False,
) -> None:
    """Shows the norms of per-image gradients before clipping, of a run that was trained with
    training.norm_histogram_every. Not private: for the owner of the run alone.
    """
    from sfumato.reporting.norms import draw_norms, read_norms

    facts = read_norms(run)
    if plot is not None:
        draw_norms(facts, plot)
    if json_:
        output.print_json(facts)
        return
    output.say(facts["warning"])
    output.say(f"{'step':>8}{'clipped':>12}{'median norm / C':>18}{'signal / noise':>17}{'not finite':>13}")
    for row in facts["histograms"]:
        median, ratio = (
            f"{value:.3g}" if value is not None else "-" for value in (row["median"], row["signal_to_noise"])
        )
        clipped = output.per_cent(row["clipped_fraction"])
        output.say(f"{row['step']:>8}{clipped:>12}{median:>18}{ratio:>17}{row['not_finite']:>13}")
    output.say(
        "signal / noise: norm of the sum of clipped gradients over the root mean square norm of "
        "the noise, sigma C sqrt(number of weights)"
    )
