"""What an audit found, as types: what ``--json`` prints is made from them."""

from typing import Literal

from sfumato.json_record import Record

BoundName = Literal["clopper-pearson", "gaussian", "trade-off"]


class Bound(Record):
    """One lower bound on epsilon.

    Attributes:
        epsilon: At least 0; None where the rates leave every epsilon possible (no rate above delta).
        assumption: What must hold besides that the games are independent; "none" for the first.
        threshold: From which score on the attacker says "took part"; chosen on other games.
        false_positives: Of `num_non_members` games that the bound used.
        true_positives: Of `num_members` games that the bound used.
        false_positive_rate: Upper end of its interval.
        true_positive_rate: Lower end of its interval; both together hold with the confidence stated.
    """

    name: BoundName
    epsilon: float | None
    assumption: str
    threshold: float
    false_positives: int
    true_positives: int
    num_non_members: int
    num_members: int
    false_positive_rate: float
    true_positive_rate: float


class Power(Record):
    """What so many games could have shown, known before any of them was played.

    Attributes:
        perfect: The Clopper-Pearson bound of an attack that is never wrong.
        tight: The Clopper-Pearson bound of the best attack on a Gaussian mechanism that spends exactly
            the claimed epsilon; None without a claim. 0 where even that attack shows nothing.
        tight_gaussian: The Gaussian bound of the same attack.
        games_needed: Games, both sides and those for the threshold included, from which on an attack
            that is never wrong shows the claimed epsilon; with fewer, no attack can. None without a
            claim, or where no number of games is enough or there are more than 10^15.
    """

    perfect: float
    tight: float | None
    tight_gaussian: float | None
    games_needed: int | None


class AuditResult(Record):
    """What an audit ends with.

    Attributes:
        audit: Which one.
        epsilon_lower_bound: Clopper-Pearson's, 0 where it says nothing: it assumes nothing of the
            mechanism.
        bounds: Each holds with `confidence` by itself.
        nominal_epsilon: What is claimed; None where nothing is.
        violated: Whether the games refute the claim: the Clopper-Pearson bound is above the claimed
            epsilon, or the rates break the claimed mechanism's own trade-off. None without a claim.
        num_games: All of them, those for the threshold included.
        auc: Area under the curve, over all games.
        advantage: True positives less false ones, at a threshold chosen on other games.
        advantage_upper_bound: Of the claimed (epsilon, delta).
    """

    audit: Literal["bounds", "canary", "membership"]
    epsilon_lower_bound: float
    bounds: list[Bound]
    confidence: float
    nominal_epsilon: float | None
    delta: float
    violated: bool | None
    num_games: int
    auc: float
    advantage: float
    advantage_upper_bound: float | None
    power: Power


class CanaryResult(AuditResult):
    """What a canary audit ends with: the claim is that of the mechanism that was run.

    Attributes:
        target_epsilon: What the noise was calibrated to.
        num_runs: Each with fresh randomness.
        games_per_run: Canaries of a run: each is one game.
    """

    target_epsilon: float
    noise_multiplier: float
    sampling_prob: float
    num_steps: int
    num_runs: int
    games_per_run: int
    seconds: float


class Winner(Record):
    """What phase I of a membership audit chose.

    Attributes:
        target: z: a blank image, noise, or a digit with the label of another.
        distance: Total variation between the Gaussians that fit the losses on z; None where models were
            too few for a choice.
    """

    target: Literal["blank", "noise", "7 as 8", "6 as 7", "0 as 1"]
    learning_rate: float
    clipping_norm: float
    num_steps: int
    distance: float | None


class MembershipResult(AuditResult):
    """What a membership audit ends with: the claim is that of the mechanism that was run.

    Attributes:
        target_epsilon: What the noise was calibrated to.
        num_examples: Without z.
        fixed_batches: Whether all models had the same batches. The claim is then without sampling.
        augmult: K, views of each image; 0: none.
        num_claimed_steps: Updates that the claim composes: all, or with fixed batches those with z.
        num_models: On each side, in phase II.
        num_choosing_models: On both sides together, in phase I.
        seconds: Of this call; what an earlier one trained is not in it.
        models_per_second: In phase II.
    """

    target_epsilon: float
    num_examples: int
    fixed_batches: bool
    augmult: int
    batch_size: int
    noise_multiplier: float
    num_claimed_steps: int
    winner: Winner
    num_models: int
    num_choosing_models: int
    seconds: float
    models_per_second: float
