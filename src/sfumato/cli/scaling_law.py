"""`sfumato scaling-law`: accuracy against batch size at a constant total amount of noise."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output


def scaling_law(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs of one study, or folders of such folders.")],
    predict_batch_size: Annotated[
        list[int] | None, typer.Option(help="Predict the accuracy here; may be given several times.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Writes the plot here (.svg or .png).")] = None,
    json_: options.Json = False,
) -> None:
    """Fits accuracy against batch size, and extrapolates to the batch that nobody has paid for yet."""
    from sfumato.scaling.law_runs import read_study, scaling_law

    study = read_study(runs)
    facts = scaling_law(study, predict_batch_size or [])
    if plot is not None:
        from sfumato.scaling.plots import draw_law

        draw_law(study, facts, plot)
    if json_:
        output.print_json(facts)
        return
    for law in facts["laws"]:
        used = "used" if law["law"] == facts["law"] else "not used"
        output.say(
            f"{law['law']:<14} a = {law['a']:.4f}, b = {law['b']:+.4g}; left-out error "
            f"{100 * law['left_out_error']:.2f} points ({used})"
        )
    output.say(facts["why"])
    if facts["pairing_gain"] > 1:
        gain = f"{facts['pairing_gain']:.1f}" if facts["pairing_gain"] < 100 else "more than 100"
        output.say(f"shared seeds: the slope is known {gain} times as well as from runs that share nothing")
    for batch_size, rho in facts["rho"].items():
        output.say(
            f"rho at B = {batch_size}: {rho:.3f} (sampling noise beside privacy noise; a "
            "statistic of the training images, not private)"
        )
    for prediction in facts["predictions"]:
        low, high = output.per_cent(prediction["low"]), output.per_cent(prediction["high"])
        output.say(
            f"B = {prediction['batch_size']}: {output.per_cent(prediction['accuracy'])}, one more "
            f"run lies between {low} and {high} (95 %)"
        )
    for warning in facts["warnings"]:
        output.warn(warning)
