"""`sfumato simulate` and `sfumato scaling-law`: smaller batches at a constant total amount of noise."""

from pathlib import Path
from typing import Any

from sfumato.cli import options, output
from sfumato.cli.train import asked
from sfumato.run_folder.files import refuse_drawing, write_atomically


def simulate(
    recipe: str,
    *,
    batch_size: int,
    seeds: str = "0",
    epsilon: float | None = None,
    delta: float | None = None,
    set_: options.Set = None,
    output_: Path | None = None,
    data_root: Path | None = None,
    device: str = "auto",
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Trains at a smaller batch with as much less noise: cheap, like the run it stands for, and
    never private.

    Args:
        batch_size: B of the simulation; at most the recipe's own.
        output_: Holds a run folder for each seed; default: runs/<recipe>-<time>.

    Example:
        sfumato simulate cifar10-cnn-eps-8 --batch-size 256 --seeds 0-2 --output runs/cheap
    """
    name, parsed, trusted = asked(recipe, {"target_epsilon": epsilon, "delta": delta}, set_, data_root, trust)
    numbers = options.parse_seeds(seeds)

    from sfumato.run_folder import launch
    from sfumato.scaling.simulate import simulate as run_all

    folder = output_ or launch.new_folder(f"{name}-b{batch_size}")
    with output.interruptible(*([] if output_ else ["--output", str(folder)])):
        result = run_all(parsed, batch_size, numbers, output=folder, data_root=data_root, device=device, trust=trusted)
    output.answer(result, json_, _show_simulation)


def _show_simulation(result: Any) -> None:
    for run in result.runs:
        accuracy, last = output.per_cent(run.accuracy), output.per_cent(run.accuracy_last)
        output.say(f"{run.run}: held-out accuracy {accuracy} (last weights {last})")
    mean, fraction = output.per_cent(result.accuracy), output.per_cent(result.compute_fraction)
    output.say(f"mean {mean} of {len(result.runs)}; each computes {fraction} of the gradients that its run does")
    if result.runs[0].held_out == "test":
        output.warn(
            "these are accuracies on test images: settings that are chosen by them make test accuracy too good. "
            "--set data.split=train holds out validation images."
        )
    output.say("not private: simulations train on the images with a public seed")


def scaling_law(
    runs: list[Path],
    *,
    predict_batch_size: list[int] | None = None,
    plot: Path | None = None,
    page: Path | None = None,
    json_: bool = False,
) -> None:
    """Fits accuracy against batch size, and extrapolates to the batch that nobody has paid for yet.

    Args:
        runs: Folders of runs of one study, or folders of such folders.
        predict_batch_size: Predict the accuracy here; may be given several times.
        plot: Writes the plot here (.svg or .png).
        page: An HTML file to write: the points, both laws, the predictions.

    Example:
        sfumato scaling-law runs/cheap-* --predict-batch-size 4096
    """
    from sfumato.scaling.law import read_study
    from sfumato.scaling.law import scaling_law as fit

    if page is not None:
        from sfumato.reporting import html

        refuse_drawing(page, "--page", html.ENDINGS)
    study = read_study(runs)
    facts = fit(study, predict_batch_size or [])
    if plot is not None:
        from sfumato.scaling.plots import draw_law

        draw_law(study, facts, plot)
    if page is not None:
        from sfumato.scaling.page import render

        write_atomically(page, render(study, facts).encode())
    output.answer(facts, json_, _show_law)


def _show_law(facts: dict[str, Any]) -> None:
    for law in facts["laws"]:
        used = "used" if law["law"] == facts["law"] else "not used"
        error = f"left-out error {100 * law['left_out_error']:.2f} points ({used})"
        output.say(f"{law['law']:<14} a = {law['a']:.4f}, b = {law['b']:+.4g}; {error}")
    output.say(facts["why"])
    if facts["pairing_gain"] > 1:
        gain = f"{facts['pairing_gain']:.1f}" if facts["pairing_gain"] < 100 else "more than 100"
        output.say(f"shared seeds: the slope is known {gain} times as well as from runs that share nothing")
    for batch_size, rho in facts["rho"].items():
        output.say(
            f"rho at B = {batch_size}: {rho:.3f} (sampling noise beside privacy noise; a "
            "statistic of the training images, not private)"
        )
    for found in facts["predictions"]:
        accuracy, low, high = (output.per_cent(found[key]) for key in ("accuracy", "low", "high"))
        output.say(f"B = {found['batch_size']}: {accuracy}, one more run lies between {low} and {high} (95 %)")
    for warning in facts["warnings"]:
        output.warn(warning)
