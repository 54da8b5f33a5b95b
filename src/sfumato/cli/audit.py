"""`sfumato audit`: what attacks show, beside what a certificate promises."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.auditing.record import AuditResult, OneRunResult


def bounds(
    scores: Path,
    *,
    delta: float,
    epsilon: float | None = None,
    confidence: float = 0.95,
    page: Path | None = None,
    json_: bool = False,
) -> None:
    """Lower bounds on epsilon from scores that anybody's attack gave: a higher score says that the
    example took part.

    Args:
        scores: A CSV file with the columns score and member (1 or 0).
        delta: Delta of the claim.
        epsilon: The claimed epsilon, if there is one.

    Example:
        sfumato audit bounds scores.csv --delta 1e-5 --epsilon 3
    """
    from sfumato.auditing.arguments import read_scores
    from sfumato.auditing.bounds import audit_scores

    def audit(report: Any, keep: Any, **claim: Any) -> "AuditResult":
        games = read_scores(scores)
        keep(*games)
        return audit_scores(*games, **claim)

    _run(audit, page, json_, delta=delta, confidence=confidence, nominal_epsilon=epsilon)


def canary(
    *,
    epsilon: float,
    delta: float,
    num_steps: int = 100,
    sampling_prob: float = 0.1,
    num_games: int = 200_000,
    confidence: float = 0.95,
    page: Path | None = None,
    json_: bool = False,
) -> None:
    """Attacks the product's own private step as one who sees every update and put a worst-case example
    into the data.

    Args:
        epsilon: The claim: noise is calibrated to it as for a run.
        delta: Delta of the claim.
        num_steps: Updates of a run.
        sampling_prob: Probability that an update draws a canary.
        num_games: At least so many are played; thousands in each run.

    Example:
        sfumato audit canary --epsilon 3 --delta 1e-5
    """
    from sfumato.auditing.canary import audit_canary

    numbers: dict[str, Any] = {"num_steps": num_steps, "sampling_prob": sampling_prob, "num_games": num_games}
    _run(audit_canary, page, json_, epsilon=epsilon, delta=delta, confidence=confidence, **numbers)


def membership(
    *,
    epsilon: float,
    num_models: int,
    num_examples: int = 100,
    delta: float | None = None,
    data_root: Path | None = None,
    fixed_batches: bool = False,
    augmult: int = 0,
    num_steps: int | None = None,
    confidence: float = 0.999,
    output_: Path | None = None,
    device: str = "auto",
    page: Path | None = None,
    json_: bool = False,
) -> None:
    """Trains many small models on MNIST with one example and without it, and tells them apart by their
    loss on it (De et al. 2022, Appendix A.2).

    Args:
        epsilon: The claim: noise is calibrated to it as for a run.
        num_models: Trained with the example, and as many without it.
        num_examples: MNIST digits to train on: 100 or 60000 in the paper.
        delta: Of the claim; default: 1 / num_examples.
        fixed_batches: The same batches for all models; judged without sampling.
        augmult: Views of each image; 0: none.
        num_steps: Updates of a model; default: two numbers are tried.
        output_: A folder that keeps what is trained: the same command goes on, or helps where one works.

    Example:
        sfumato audit membership --epsilon 8 --num-models 100
    """
    from sfumato.auditing.membership import audit_membership

    kept = None if output_ is None else "what is trained is kept"
    claim = {"epsilon": epsilon, "delta": delta, "confidence": confidence}
    numbers: dict[str, Any] = {"num_models": num_models, "num_examples": num_examples, "num_steps": num_steps}
    numbers |= {"data_root": data_root, "output": output_, "fixed_batches": fixed_batches, "augmult": augmult}
    numbers["device"] = device
    _run(audit_membership, page, json_, kept, **claim, **numbers)


def one_run(run: Path, *, confidence: float = 0.95, trust: options.Trust = None, json_: bool = False) -> None:
    """Attacks a finished run by the canaries that it was trained with (audit.canaries), and puts what that
    showed into its certificate and its report (Steinke et al. 2023).

    Example:
        sfumato audit one-run runs/with-canaries
    """
    from sfumato.auditing.one_run import audit_one_run

    with output.interruptible(kept="the run is as it was, or has its audit whole"):
        output.answer(audit_one_run(run, confidence=confidence, trust=trust or ()), json_, _show)


def _run(
    audit: Callable[..., "AuditResult"], page: Path | None, json_: bool, kept: str | None = None, **numbers: Any
) -> None:
    """Runs an audit, prints what it found, and draws its page."""
    if page is not None:
        from sfumato.reporting import html
        from sfumato.run_folder.files import refuse_drawing

        refuse_drawing(page, "--page", html.ENDINGS)
    games: list[Any] = []  # scores and members
    with output.interruptible(kept=kept or "nothing is kept, so it begins anew"):
        found = audit(report=output.note, keep=lambda *given: games.extend(given), **numbers)
        output.answer(found, json_, _show)
        if page is not None:
            from sfumato.auditing.page import render
            from sfumato.run_folder.files import write_atomically

            write_atomically(page, render(found, *games).encode())
            output.note(f"page: {page}")


def _show(found: "AuditResult | OneRunResult") -> None:
    from sfumato.accounting.formats import delta_text, epsilon_text, lower_epsilon_text
    from sfumato.auditing.record import GuessBound, Power

    _say_what_ran(found)
    at_most = found.advantage_upper_bound
    claimed = "" if at_most is None else f" (by the claim at most {at_most:.3f})"
    games = f"{found.num_games:,} games at delta {delta_text(found.delta)}"
    output.say(f"{games}; AUC {found.auc:.3f}, advantage {found.advantage:.3f}{claimed}")
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
    half = ", half of them with the example" if isinstance(power, Power) else ""
    with_so_many = f"with {power.games_needed:,} games{half}" if power.games_needed else "with no number of games tried"
    output.say(f"power: an attack that is never wrong shows the claimed epsilon {with_so_many}")
    claim = f"the claim of epsilon {epsilon_text(found.nominal_epsilon)}"
    output.say(f"VIOLATED: {claim} is refuted" if found.violated else f"{claim} is not refuted; that is no proof of it")


def _say_what_ran(found: "AuditResult | OneRunResult") -> None:
    from sfumato.accounting.formats import epsilon_text
    from sfumato.auditing.record import CanaryResult, MembershipResult

    if isinstance(found, CanaryResult):
        output.say(
            f"{found.num_runs} runs of {found.games_per_run:,} canaries: {found.num_steps} updates, q "
            f"{found.sampling_prob:g}, noise multiplier {found.noise_multiplier:g}"
        )
    if isinstance(found, MembershipResult):
        won, rate = found.winner, found.models_per_second
        speed = "kept from before" if rate is None else f"{rate:.2g} in a second"
        output.say(
            f"2 x {found.num_models:,} models, {speed}; z: {won.target}, learning rate {won.learning_rate:g}, C "
            f"{won.clipping_norm:g}, {won.num_steps} updates, noise multiplier {found.noise_multiplier:g}"
        )
        if found.fixed_batches:
            output.say(
                f"the claim is without amplification by sampling: epsilon {epsilon_text(found.nominal_epsilon)} of "
                f"the {found.num_claimed_steps} updates whose batches hold z"
            )
