"""`sfumato audit`: what attacks show, beside what a certificate promises."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.auditing.record import AuditResult, OneRunResult

app = typer.Typer(
    help="Lower bounds on epsilon from attacks: bounds (from your own scores), canary (on the product's own step), "
    "membership (on many models), one-run (on a run that was trained with canaries).",
    no_args_is_help=True,
)
Confidence = Annotated[float, typer.Option(help="Of each bound.")]
Page = Annotated[
    Path | None, typer.Option("--page", help="An HTML file to write: the attack's curve, its scores, its bounds.")
]


@app.command()
def bounds(
    scores: Annotated[Path, typer.Argument(help="A CSV file with the columns score and member (1 or 0).")],
    delta: Annotated[float, typer.Option(help="Delta of the claim.")],
    epsilon: Annotated[float | None, typer.Option(help="The claimed epsilon, if there is one.")] = None,
    confidence: Confidence = 0.95,
    page: Page = None,
    json_: options.Json = False,
) -> None:
    """Lower bounds on epsilon from scores that anybody's attack gave: a higher score says that the
    example took part.
    """
    kept = _Kept(page)
    with _interruptible("nothing is kept of an audit of scores. Give the same command again."):
        from sfumato.auditing.bounds import audit_scores
        from sfumato.auditing.scores_file import read_scores

        given, members = read_scores(scores)
        kept(given, members)
        found = audit_scores(given, members, delta=delta, confidence=confidence, nominal_epsilon=epsilon)
        _print(found, json_)
        kept.write(found)


@app.command()
def canary(
    epsilon: Annotated[float, typer.Option(help="The claim: noise is calibrated to it as for a run.")],
    delta: Annotated[float, typer.Option(help="Delta of the claim.")],
    num_steps: Annotated[int, typer.Option(help="Updates of a run.")] = 100,
    sampling_prob: Annotated[float, typer.Option(help="Probability that an update draws a canary.")] = 0.1,
    num_games: Annotated[int, typer.Option(help="At least so many are played; thousands in each run.")] = 200_000,
    confidence: Confidence = 0.95,
    page: Page = None,
    json_: options.Json = False,
) -> None:
    """Attacks the product's own private step as one who sees every update and put a worst-case example
    into the data.
    """
    kept = _Kept(page)
    with _interruptible("nothing is kept of an audit by canaries. Give the same command again."):
        from sfumato.auditing.canary import audit_canary

        found = audit_canary(
            epsilon=epsilon,
            delta=delta,
            num_steps=num_steps,
            sampling_prob=sampling_prob,
            num_games=num_games,
            confidence=confidence,
            report=output.note,
            keep=kept,
        )
        if not json_:
            output.say(
                f"{found.num_runs} runs of {found.games_per_run:,} canaries: {found.num_steps} updates, q "
                f"{found.sampling_prob:g}, noise multiplier {found.noise_multiplier:g}"
            )
        _print(found, json_)
        kept.write(found)


@app.command()
def membership(
    epsilon: Annotated[float, typer.Option(help="The claim: noise is calibrated to it as for a run.")],
    num_models: Annotated[int, typer.Option(help="Trained with the example, and as many without it.")],
    num_examples: Annotated[int, typer.Option(help="MNIST digits to train on: 100 or 60000 in the paper.")] = 100,
    delta: Annotated[float | None, typer.Option(help="Of the claim; default: 1 / num_examples.")] = None,
    data_root: options.DataRoot = None,
    fixed_batches: Annotated[
        bool, typer.Option("--fixed-batches", help="The same batches for all models; judged without sampling.")
    ] = False,
    augmult: Annotated[int, typer.Option(help="Views of each image; 0: none.")] = 0,
    num_steps: Annotated[int | None, typer.Option(help="Updates of a model; default: two numbers are tried.")] = None,
    confidence: Confidence = 0.999,
    output_: Annotated[
        Path | None,
        typer.Option(
            "--output", help="A folder that keeps what is trained: the same command goes on, or helps where one works."
        ),
    ] = None,
    page: Page = None,
    json_: options.Json = False,
) -> None:
    """Trains many small models on MNIST with one example and without it, and tells them apart by their
    loss on it (De et al. 2022, Appendix A.2).
    """
    kept = _Kept(page)
    with _interruptible(
        "nothing is kept of an audit without --output. Give it, to go on after the next interrupt."
        if output_ is None
        else f"what is trained is kept. Go on with the same command: {shlex.join(['sfumato', *sys.argv[1:]])}"
    ):
        from sfumato.auditing.membership import audit_membership

        found = audit_membership(
            epsilon=epsilon,
            num_models=num_models,
            num_examples=num_examples,
            delta=delta,
            data_root=data_root,
            fixed_batches=fixed_batches,
            augmult=augmult,
            num_steps=num_steps,
            confidence=confidence,
            output=output_,
            report=output.note,
            keep=kept,
        )
        if not json_:
            won, rate = found.winner, found.models_per_second
            speed = "kept from before" if rate is None else f"{rate:.2g} in a second"
            output.say(
                f"2 x {found.num_models:,} models, {speed}; z: {won.target}, learning "
                f"rate {won.learning_rate:g}, C {won.clipping_norm:g}, {won.num_steps} updates, noise multiplier "
                f"{found.noise_multiplier:g}"
            )
            if found.fixed_batches:
                from sfumato.accounting.rounding import epsilon_text

                output.say(
                    f"the claim is without amplification by sampling: epsilon {epsilon_text(found.nominal_epsilon)} of "
                    f"the {found.num_claimed_steps} updates whose batches hold z"
                )
        _print(found, json_)
        kept.write(found)


@contextlib.contextmanager
def _interruptible(what_is_kept: str) -> Iterator[None]:
    """Ends the command with one line on Ctrl-C and on SIGTERM."""
    from sfumato.training.interrupt import stop_on_sigterm

    try:
        with stop_on_sigterm():
            yield
    except KeyboardInterrupt:
        output.note(f"interrupted; {what_is_kept}")
        raise typer.Exit(1) from None


class _Kept:
    """What a page is drawn from, kept only where one is asked for."""

    def __init__(self, page: Path | None) -> None:
        if page is not None:
            from sfumato.auditing.page import require_page

            require_page(page)
        self._page = page

    def __call__(self, scores: Any, members: Any) -> None:
        if self._page is not None:
            self._games = scores, members

    def write(self, found: "AuditResult") -> None:
        if self._page is not None:
            from sfumato.auditing.page import write_page

            write_page(self._page, found, *self._games)
            output.note(f"page: {self._page}")


@app.command("one-run")
def one_run(
    run: options.Run,
    confidence: Confidence = 0.95,
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Attacks a finished run by the canaries that it was trained with (--set audit.canaries=1000), and puts what that
    showed into its certificate and its report (Steinke et al. 2023).
    """
    with _interruptible("the run is as it was, or has its audit whole. Give the same command again."):
        from sfumato.auditing.run import audit_one_run

        _print(audit_one_run(run, confidence=confidence, trust=trust or ()), json_)


def _print(found: "AuditResult | OneRunResult", json_: bool) -> None:
    from sfumato.accounting.rounding import delta_text, epsilon_text, lower_epsilon_text
    from sfumato.auditing.record import GuessBound, Power

    if json_:
        output.print_json(found.as_json())
        return
    claimed = found.advantage_upper_bound
    output.say(
        f"{found.num_games:,} games at delta {delta_text(found.delta)}; AUC {found.auc:.3f}, advantage "
        f"{found.advantage:.3f}" + ("" if claimed is None else f" (by the claim at most {claimed:.3f})")
    )
    for bound in found.bounds:
        value = f"epsilon is at least {lower_epsilon_text(bound.epsilon)}" if bound.epsilon else "shows nothing"
        assumes = "assumes nothing of the mechanism" if bound.assumption == "none" else f"assumes: {bound.assumption}"
        output.say(f"{bound.name:<16}{value} (confidence {100 * found.confidence:.12g} %); {assumes}")
        if isinstance(bound, GuessBound):
            output.say(f"{bound.num_right} of {bound.num_guesses} guesses are right, the surest of {found.num_games}")
    power = found.power
    output.say(f"power: from so many games, an attack that is never wrong shows {lower_epsilon_text(power.perfect)}")
    if found.nominal_epsilon is None:
        output.say("no epsilon is claimed, so there is nothing to refute. Give --epsilon")
        return
    if power.tight is not None:
        by_gaussian = power.tight_gaussian if isinstance(power, Power) else None
        beside = "" if by_gaussian is None else f" (by the gaussian bound {lower_epsilon_text(by_gaussian)})"
        output.say(
            "power: the best attack on a Gaussian mechanism that spends all that is claimed shows about "
            f"{lower_epsilon_text(power.tight)}{beside}"
        )
    half = ", half of them with the example," if isinstance(power, Power) else ""
    with_so_many = f"with {power.games_needed:,} games{half}" if power.games_needed else "with no number of games tried"
    output.say(f"power: an attack that is never wrong shows the claimed epsilon {with_so_many}")
    claim = f"the claim of epsilon {epsilon_text(found.nominal_epsilon)}"
    output.say(f"VIOLATED: {claim} is refuted" if found.violated else f"{claim} is not refuted; that is no proof of it")
