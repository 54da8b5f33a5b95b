"""A recipe's [privacy] section as a budget to be solved."""

from sfumato.accounting.selection import Selection
from sfumato.config import FilledRecipe, PrivacyConfig
from sfumato.planning.solve import Budget


def selection_of(privacy: PrivacyConfig | None) -> Selection | None:
    """How a run under this budget is selected from others; None where nothing is selected."""
    if privacy is None or privacy.selected_from is None:
        return None
    return Selection(privacy.selected_from, privacy.selection_shape, privacy.score_noise)


def counted(privacy: PrivacyConfig) -> str:
    """What N counts, in words."""
    return "people" if privacy.person_sampling == "persons" else "training images"


def budget_of(recipe: FilledRecipe, num_examples: int) -> Budget:
    """Of a filled recipe with a [privacy] section, for so many images or people."""
    privacy, training = recipe.privacy, recipe.training
    assert privacy is not None
    return Budget(
        num_examples=num_examples,
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        batch_size=training.batch_size,
        num_steps=training.num_steps,
        noise_multiplier=privacy.noise_multiplier,
        accountant=privacy.accountant,
        selection=selection_of(privacy),
        images_per_unit=privacy.images_per_unit,
        first_release_noise=privacy.first_release_noise,
    )
