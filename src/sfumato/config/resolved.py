"""What will run: the same sections with nothing left to be filled in (`sfumato.planning.resolve`)."""

from typing import Annotated, Literal

from pydantic import Field

from sfumato.config.sections import (
    AugmentationConfig,
    AugmentationKind,
    Fraction,
    ModelConfig,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    PrivacyConfig,
    Recipe,
    TrainingConfig,
)
from sfumato.errors import InputError


class ResolvedModel(ModelConfig):
    """`ModelConfig`, resolved."""

    name: str
    trainable: Literal["all", "classifier", "norms", "lora"] | Annotated[list[str], Field(min_length=1)]
    features: Literal["raw", "unit"]


class ResolvedAugmentation(AugmentationConfig):
    """`AugmentationConfig`, resolved."""

    kind: AugmentationKind
    augmult: Annotated[int, Field(ge=0, le=256)]
    padding: Annotated[int, Field(ge=0, le=64)]


class FilledPrivacy(PrivacyConfig):
    """`PrivacyConfig`, where the noise may be left to be solved for."""

    delta: Annotated[float, Field(ge=1e-100, lt=1)]


class ResolvedPrivacy(FilledPrivacy):
    """`PrivacyConfig`, resolved."""

    noise_multiplier: Literal[0] | Annotated[float, Field(ge=1e-12, le=1e12)]


class ResolvedSgd(OptimizerConfig):
    """`OptimizerConfig` of SGD, resolved."""

    name: Literal["sgd"]
    learning_rate: PositiveFloat


class ResolvedAdam(OptimizerConfig):
    """`OptimizerConfig` of Adam or AdamW, resolved."""

    name: Literal["adam", "adamw"]
    learning_rate: PositiveFloat
    beta1: Fraction
    beta2: Fraction
    adam_epsilon: PositiveFloat


class ResolvedTraining(TrainingConfig):
    """`TrainingConfig`, resolved."""

    batch_size: PositiveInt
    num_steps: Annotated[int, Field(ge=0)]


ResolvedOptimizer = ResolvedSgd | ResolvedAdam


class FilledRecipe(Recipe):
    """A recipe that leaves out nothing but what its budget decides."""

    model: ResolvedModel
    augmentation: ResolvedAugmentation
    privacy: FilledPrivacy | None = None
    optimizer: Annotated[ResolvedOptimizer, Field(discriminator="name")]


class ResolvedRecipe(FilledRecipe):
    """What will run: a recipe in which nothing is left to be filled in
    (`sfumato.planning.resolve`).
    """

    privacy: ResolvedPrivacy | None = None
    training: ResolvedTraining

    @property
    def budget(self) -> ResolvedPrivacy:
        """The privacy section of a recipe that has one.

        Raises:
            InputError: If this is ordinary training.
        """
        if self.privacy is None:
            raise InputError(
                "this recipe has no budget: it is ordinary training. Give it a [privacy] section, or --epsilon E."
            )
        return self.privacy
