"""The audit of a finished run by the canaries that took part in it, or did not."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from sfumato.auditing.arguments import require_levels
from sfumato.auditing.one_run import audit_guesses
from sfumato.auditing.record import OneRunResult
from sfumato.data.canaries import canary_images
from sfumato.errors import InputError
from sfumato.evaluation import trained
from sfumato.evaluation.scores import predict_logits
from sfumato.evaluation.trained import Trained
from sfumato.json_record import pick
from sfumato.reporting.page import write_report
from sfumato.run_folder import launch, record
from sfumato.run_folder.record import Certificate, OneRunClaim
from sfumato.run_folder.verification import verify_run


def audit_one_run(run: Path | str, *, confidence: float = 0.95, trust: Collection[str] = ()) -> OneRunResult:
    """Attacks a finished private run by the canaries that it was trained with (`audit.canaries`), and puts what
    that showed into its certificate and its report.

    The attacker sees the released weights alone. What is published then depends on them, on canaries that everybody
    can make, and on their coins: on no training image but through what the certificate covers.

    Guarantee: if the run is as private as its certificate states, the bound is above the certificate's epsilon with
    probability at most 1 - ``confidence``.

    Args:
        run: Its folder, with the coins that it keeps for its owner.
        confidence: Of the bound, in (0.5, 1).
        trust: Modules that may be imported for the run's model, each by its full name.

    Raises:
        InputError: If the run is unfinished, makes no claim, had no canaries or too few, its coins are not there, or a
            file is another run's.
    """
    folder = Path(run)
    claim = _claim(folder)
    assert claim.epsilon is not None and claim.delta is not None
    require_levels(claim.delta, confidence, claim.epsilon)
    count = claim.public_inputs.num_canaries
    took_part = launch.read_coins(folder, claim.run_id, count)
    levels = {"delta": claim.delta, "confidence": confidence, "nominal_epsilon": claim.epsilon}
    found = audit_guesses(scores(trained.load(folder, trust), count), took_part, **levels)
    record.write(folder / record.CERTIFICATE_FILE, claim.model_copy(update={"audit": _as_claimed(found)}))
    write_report(folder)
    return found


def scores(model: Trained, count: int) -> np.ndarray:
    """(m,): minus the loss of each canary; of a model that diverged, which has none, minus infinity."""
    how = {key: model.decoding[key] for key in ("mean", "std", "image_size")}
    stored_size = model.recipe.data.stored_size(how["image_size"])
    images = canary_images(count, len(model.classes), stored_size=stored_size, **how)
    log_probabilities = torch.log_softmax(predict_logits(model.model, images).double(), 1)
    found = log_probabilities.gather(1, images.labels[:, None])[:, 0].numpy()
    return np.nan_to_num(found, nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def _claim(folder: Path) -> Certificate:
    """The certificate of a run that can be audited, held to its recipe, ledger and weights."""
    claim = record.read(folder / record.CERTIFICATE_FILE, Certificate)
    if not claim.holds:
        raise InputError(f"{folder} claims no privacy, so there is nothing to try: {claim.why_not_private}.")
    if not claim.public_inputs.num_canaries:
        raise InputError(
            f"{folder} was trained without canaries. Train with them: sfumato train RECIPE --set audit.canaries=1000."
        )
    if claim.status != "complete":
        raise InputError(f"{folder} is unfinished, and an audit attacks what a run releases. Go on: sfumato resume.")
    return verify_run(folder)[0]


def _as_claimed(found: OneRunResult) -> OneRunClaim:
    (bound,) = found.bounds
    return OneRunClaim(
        bound="guesses of coins (Steinke, Nasr, Jagielski 2023, Theorem 5.2)",
        num_canaries=found.num_games,
        perfect=found.power.perfect,
        violated=bool(found.violated),
        **pick(found, "epsilon_lower_bound", "confidence", "delta", "scores"),
        **pick(bound, "num_guesses", "num_right"),
    )
