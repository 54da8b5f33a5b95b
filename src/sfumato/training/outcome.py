"""What a run that is complete leaves: its weights and its result."""

import dataclasses
from pathlib import Path

from sfumato import config
from sfumato.data.examples import Dataset
from sfumato.evaluation.augtest import WithViews
from sfumato.evaluation.calibration import Calibration
from sfumato.models.weights import Weights
from sfumato.planning.resolve import Plan
from sfumato.run_folder import files, weights_file
from sfumato.run_folder.certificate import result_claims, weights_facts
from sfumato.run_folder.record import Certificate, Result
from sfumato.training.held_out import HeldOutScores
from sfumato.training.learner import Learner


def save_weights(path: Path, plan: Plan, learner: Learner, claim: Certificate, temperature: float | None) -> str:
    """The averaged weights, with what is needed to use and to judge them.

    Returns:
        The digest of their tensors.
    """
    from safetensors.torch import save as to_bytes

    averaged = learner.state.averaged_state_dict()
    tensors = {name: value.detach().cpu().contiguous() for name, value in averaged.items()}
    metadata = {
        "sfumato": weights_facts(claim).model_dump_json(),
        "recipe": config.to_toml(config.shareable(plan.recipe)),
    }
    if temperature is not None:
        fitted = Calibration(
            temperature=temperature,
            offsets=learner.objective.offsets,
            fitted_on="held-out",
            num_images=len(learner.source.held_out.labels),
        )
        metadata["calibration"] = fitted.model_dump_json()
    files.write_atomically(path, weights_file.with_metadata(to_bytes(tensors), metadata))
    return Weights(tensors).digest


def result(
    claim: Certificate,
    folder: Path,
    dataset: Dataset,
    scores: HeldOutScores,
    with_views: WithViews,
    *,
    num_parameters: int,
    images_per_second: float | None,
    seconds: float | None,
) -> Result:
    """What result.json holds."""
    averaged, held_out = scores.averaged, dataset.held_out_name
    on_test = held_out == "test"
    return Result(
        **dict(result_claims(claim)),
        run=str(folder),
        held_out=held_out,
        **dataclasses.asdict(averaged),
        accuracy_interval=scores.interval,
        accuracy_last=scores.accuracy_last,
        test_accuracy=averaged.accuracy if on_test else None,
        test_accuracy_last=scores.accuracy_last if on_test else None,
        test_accuracy_top5=averaged.accuracy_top5 if on_test else None,
        test_views=with_views.views,
        accuracy_augtest_vote=with_views.vote,
        accuracy_augtest_mean=with_views.mean,
        num_parameters=num_parameters,
        images_per_second=images_per_second,
        seconds=seconds,
    )
