"""The recipe: everything that defines a run, as data. Its one schema.

A recipe is a TOML file. An unknown key is an error that names the nearest known
one; a key left out takes its default here or is filled in by a stated rule when
the run starts, and the resolved recipe in the run folder holds every value.
"""

import dataclasses
import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from sfumato.errors import InputError, nearest
from sfumato.pretrained import FROM_PACKAGE, PACKAGED

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
R = TypeVar("R", bound="Recipe")
Spread = Annotated[float, Field(ge=1e-6, le=1e6)]
"""What images may be divided by: float32 holds the result."""
AugmentationKind = Literal["none", "flip", "crop", "crop_flip", "rrc", "tan", "simclr"]


@dataclasses.dataclass(frozen=True)
class MayChange:
    """Marks a key that says where and how fast a run happens, or what it notes for its owner: never
    what it releases.

    A run may go on with another value of it. (Where rounding follows from it, as from
    `training.precision`, updates are then drawn afresh: `sfumato.run_folder.environment`.)
    """


class Section(pydantic.BaseModel):
    """One section of a recipe: immutable, and closed to unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)


class DataConfig(Section):
    """Which images. Every value here is a public input, never computed from private images."""

    name: Literal["digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagenet", "folder"]
    path: Annotated[str | None, MayChange()] = None
    """Folder of images (`folder`), relative to the working directory; `--data-root` overrides it. A
    run keeps it for its owner alone.
    """
    split: Literal["train", "train+valid"] = "train+valid"
    """What is trained on: "train" holds out the validation split, "train+valid" the test split."""
    held_out: Literal["valid", "test"] | None = None
    """Where accuracies are measured: on the split that is held out, unless "test" is asked for with
    split = "train" (De et al. 2022, Table 11: ImageNet and Places).
    """
    num_examples: PositiveInt | None = None
    """Train on this many of a named data set's images: a fixed choice, of which a smaller one is a
    part. As many as "train" has are those of "train".
    """
    classes: Annotated[list[str], Field(min_length=1)] | None = None
    """Class names in label order; without them, the names of the class folders. A table of labels
    needs them stated.
    """
    class_proportions: list[PositiveFloat] | None = None
    """Public share of each class; used in the loss and in the decision."""
    image_size: Annotated[int, Field(ge=8, le=1024)] | None = None
    """Height and width in pixels to which a folder's images are resized."""
    channels: Literal[1, 3] | None = None
    mean: list[Annotated[float, Field(ge=-1e6, le=1e6)]] | None = None
    """Public constant per channel, subtracted from images scaled to [0, 1]."""
    std: list[Spread] | None = None
    """Public constant per channel, by which images are divided."""
    group_by: str | None = None
    """What makes images belong together (a person): "group", the column of labels.csv, or a
    regular expression whose first group is read from each relative path."""

    @pydantic.model_validator(mode="after")
    def _refuse_what_was_trained_on(self) -> "DataConfig":
        if self.held_out == "valid" and self.split == "train+valid":
            raise InputError(
                'data.held_out = "valid" with data.split = "train+valid" would measure accuracies on images that are '
                'trained on. Set data.split = "train", or leave data.held_out out.'
            )
        return self


class ModelConfig(Section):
    """Which network: a registry name, or "package.module:factory" for any module."""

    name: str | None = None
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments of the factory, such as depth and width."""
    init_from: Annotated[str | None, MayChange()] = None
    """Public weights to start from: "package", a .safetensors or .pth file, or a run folder. None:
    from scratch.
    """
    init_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Digest of these weights (names, types, shapes, values): others are refused. A run fills it in."""
    pretrained_on: str | None = None
    """Which images made the weights, in words for the certificate: they are not covered."""
    trainable: Literal["all", "classifier", "norms"] | Annotated[list[str], Field(min_length=1)] | None = None
    """What trains: everything, the final linear layer, that and the normalisation layers' scales and
    shifts, or the parameters whose names match a pattern.
    """
    features: Literal["raw", "unit"] | None = None
    """What the classifier is given: as the network makes it, or scaled to length 1."""

    @pydantic.model_validator(mode="after")
    def _name_what_is_not_covered(self) -> "ModelConfig":
        if self.init_from is not None and self.pretrained_on is None:
            raise InputError(
                "model.init_from names weights that others made, and no budget covers the images behind them: say in "
                'model.pretrained_on which they were, for example --set model.pretrained_on="ImageNet".'
            )
        return self


class AugmentationConfig(Section):
    """Which views of each image a step averages (De et al. 2022, Section 3.1 and C.2; Sander et al.
    2022, Section 4.2).
    """

    kind: AugmentationKind | None = None
    augmult: Annotated[int, Field(ge=0, le=256)] | None = None
    """K views per image, averaged before clipping; 0 means no augmentation."""
    padding: Annotated[int, Field(ge=0, le=64)] | None = None
    """Pixels of mirror padding on each edge before a random crop."""
    test_views: Annotated[int, Field(ge=0, le=256), MayChange()] = 0
    """Views of each held-out image that decide together, reported beside the plain accuracy
    (AugTest); 0: not done.
    """


class PrivacyConfig(Section):
    """The budget, and the mechanism that spends it."""

    target_epsilon: Annotated[float, Field(ge=1e-9, allow_inf_nan=False)] | None = None
    """Below 1e-9, rounding is no longer small beside it."""
    delta: Annotated[float, Field(ge=1e-100, lt=1)] | None = None
    noise_multiplier: Literal[0] | Annotated[float, Field(ge=1e-12, le=1e12)] | None = None
    """0, or what can be computed with."""
    clipping_norm: Annotated[float, Field(ge=1e-12, allow_inf_nan=False)] = 1.0
    """Below 1e-12 the squares of a gradient's entries vanish in float32, and it would not be
    clipped.
    """
    sampling: Literal["poisson", "shuffled"] = "poisson"
    accountant: Literal["pld", "rdp"] = "pld"
    max_images_per_person: PositiveInt | None = None
    search_data: Literal["public", "private"] | None = None
    """On which images the hyper-parameters were searched, if they were: the certificate repeats it.
    """
    selected_from: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """Expected number of private runs, random and secret, of which this one is published because it
    scored best: epsilon covers that.
    """
    selection_shape: Annotated[float, Field(gt=-1, le=100)] = 0.0
    """Shape of that number's distribution, a truncated negative binomial; 0 is logarithmic, 1
    geometric.
    """
    score_noise: Annotated[float, Field(ge=1e-3, le=1e9)] | None = None
    """Standard deviation of the noise on how many images of the validation split a run judges
    right, by which runs are compared.
    """


class OptimizerConfig(Section):
    """What is done with the private gradient: post-processing, which costs no privacy whatever it
    is.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, le=1e30)] | None = None
    """Larger ones, and their products with a weight decay, leave float32."""
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """SGD alone, as is `dampening`."""
    dampening: Annotated[float, Field(ge=0, le=1)] = 0.0
    beta1: Fraction | None = None
    """Adam and AdamW alone (Kingma and Ba 2015), as are `beta2` and `adam_epsilon`: decay of the
    average of gradients.
    """
    beta2: Fraction | None = None
    """Decay of the average of squared gradients."""
    adam_epsilon: PositiveFloat | None = None
    """Added to the root of that average; nothing to do with privacy."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Each update pulls every weight towards 0. SGD and Adam add weight_decay x weight to the
    gradient; AdamW takes off learning_rate x weight_decay x weight, beside Adam's update
    (Loshchilov and Hutter 2019).
    """
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: PositiveFloat | None = None
    """Ordinary training only: bound on the norm of the batch's mean gradient, which is then divided
    by it.
    """

    @pydantic.model_validator(mode="after")
    def _refuse_what_the_optimizer_lacks(self) -> "OptimizerConfig":
        foreign, owner = (
            (("beta1", "beta2", "adam_epsilon"), "adam") if self.name == "sgd" else (("momentum", "dampening"), "sgd")
        )
        for key in foreign:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise InputError(
                    f"optimizer.{key} = {getattr(self, key)} has no meaning for optimizer.name = "
                    f"{self.name!r}. Leave it out, or take {owner!r}."
                )
        return self


class EmaConfig(Section):
    """Parameter averaging (De et al. 2022, C.3): decay min(d, (1 + t) / (10 + t)), once per update."""

    decay: Fraction | Annotated[list[Fraction], Field(min_length=1)] = 0.9999
    """One decay or several; the first is the one that is reported and kept."""

    @property
    def decays(self) -> list[float]:
        return self.decay if isinstance(self.decay, list) else [self.decay]


class TrainingConfig(Section):
    """How long, and how fast."""

    batch_size: PositiveInt | None = None
    num_steps: Annotated[int, Field(ge=0)] | None = None
    microbatch_size: Annotated[PositiveInt | Literal["auto"], MayChange()] = "auto"
    engine: Annotated[Literal["auto", "graph", "func", "reference"], MayChange()] = "auto"
    precision: Annotated[Literal["float32", "bf16"], MayChange()] = "float32"
    compile: Annotated[bool, MayChange()] = False
    evaluate_every: Annotated[PositiveInt | None, MayChange()] = None
    """Steps between two evaluations on held-out images."""
    checkpoint_every: Annotated[PositiveInt | None, MayChange()] = None
    """Steps between two checkpoints."""
    verify_every: Annotated[PositiveInt | None, MayChange()] = None
    """Steps between two checks of the engine on made-up images through the model as it then is; the
    run stops if one fails.
    """
    norm_histogram_every: Annotated[PositiveInt | None, MayChange()] = None
    """Steps between two histograms of gradient norms, step 1 included, in metrics_private.jsonl:
    not private, for the owner alone.
    """


class RunConfig(Section):
    """About the run itself."""

    seed: Annotated[int, Field(ge=0)] | None = None
    """For tests and simulations: all randomness from a public seed, hence not private."""
    keep_key: Annotated[bool, MayChange()] = False
    """Keep the run's secret key after the run completes."""


class Recipe(Section):
    """A whole recipe. No `privacy` section means ordinary, non-private training.

    A network whose weights are packaged implies them, and images as it was trained on.
    """

    data: DataConfig
    model: ModelConfig = ModelConfig()
    augmentation: AugmentationConfig = AugmentationConfig()
    privacy: PrivacyConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    training: TrainingConfig = TrainingConfig()
    run: RunConfig = RunConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_packaged_weights(cls, values: Any) -> Any:
        model = values.get("model") if isinstance(values, dict) else None
        name = model.get("name") if isinstance(model, dict) else getattr(model, "name", None)
        if name not in PACKAGED or not isinstance(model, dict) or not isinstance(values.get("data"), dict):
            return values
        packaged, data = PACKAGED[name], values["data"]
        constants = {
            "image_size": packaged.image_size,
            "channels": packaged.channels,
            "mean": list(packaged.mean),
            "std": list(packaged.std),
        }
        implied = {"trainable": "classifier"}
        if model.get("init_from") in (None, FROM_PACKAGE):
            implied |= {"init_from": FROM_PACKAGE, "pretrained_on": packaged.pretrained_on}
        return {
            **values,
            "data": {**data, **{key: value for key, value in constants.items() if data.get(key) is None}},
            "model": {**model, **{key: value for key, value in implied.items() if model.get(key) is None}},
        }


class ResolvedModel(ModelConfig):
    """`ModelConfig`, resolved."""

    name: str
    trainable: Literal["all", "classifier", "norms"] | Annotated[list[str], Field(min_length=1)]
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


def parse(values: dict[str, Any]) -> Recipe:
    """Validates a recipe given as nested dictionaries.

    Raises:
        InputError: One line that names the key, what is wrong and the remedy; for an
            unknown key, the nearest known one.
    """
    return _validated(Recipe, values)


def parse_resolved(values: dict[str, Any]) -> ResolvedRecipe:
    """Validates what a run wrote: every value is there.

    Raises:
        InputError: Like `parse`; also where a value is left out.
    """
    return _validated(ResolvedRecipe, values)


def _validated(kind: type[R], values: dict[str, Any]) -> R:
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise InputError(_explain(error)) from None


def why_impossible(key: str, value: Any) -> str | None:
    """Why no recipe can have this value of a known "section.key", whatever its other keys say; None
    if one can.
    """
    section, _, name = key.partition(".")
    own = {section: {name: value}}
    try:
        Recipe.model_validate({"data": {"name": "digits"}, **own})
    except pydantic.ValidationError as error:
        reasons = [found["msg"] for found in error.errors(include_url=False) if found["loc"][:2] == (section, name)]
        return ", or ".join(dict.fromkeys(reason[0].lower() + reason[1:] for reason in reasons)) or None
    return None


def read(path: Path) -> dict[str, Any]:
    """The nested dictionaries of a TOML file, not yet validated.

    Raises:
        InputError: If the file cannot be read or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # "-sig": some editors put a mark at the start
    except OSError as error:
        raise InputError(
            f"recipe {path} cannot be read: {error.strerror}. `sfumato recipes list` names the "
            "recipes that are shipped."
        ) from None
    except (ValueError, RecursionError) as error:  # whole numbers of thousands of digits, tables within tables
        raise InputError(f"recipe {path} is not valid TOML: {error}. Correct that line.") from None


def set_value(values: dict[str, Any], assignment: str) -> None:
    """Applies one `section.key=value` of the command line; the value is read as TOML, else as text.

    Raises:
        InputError: If the assignment has no such form.
    """
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise InputError(
            f'--set {assignment!r} is not of the form section.key=value, for example "optimizer.learning_rate=2.0".'
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    put(values, key.strip(), value)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets one "section.key" of nested dictionaries.

    Raises:
        InputError: If a part of the key is a value already.
    """
    section, parts = values, key.split(".")
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise InputError(f"{key}: {part!r} is a value, not a section. Set it without what follows.")
    section[parts[-1]] = value


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML text, every value included that is not None."""
    import tomli_w

    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def shareable(recipe: R) -> R:
    """The recipe without `data.path`, and of `model.init_from` the name alone: where files lie on
    their owner's machine goes into no file that is for sharing.
    """
    source = recipe.model.init_from
    model = recipe.model.model_copy(update={"init_from": source and Path(source).name})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": None}), "model": model})


def flatten(recipe: Recipe) -> dict[str, Any]:
    """The recipe as {"section.key": value}; an absent section is {"section": None}."""
    flat: dict[str, Any] = {}
    for section, values in recipe.model_dump(mode="json").items():
        if isinstance(values, dict):
            flat.update({f"{section}.{key}": value for key, value in values.items()})
        else:
            flat[section] = values
    return flat


_OPTIMIZERS = get_args(OptimizerConfig.model_fields["name"].annotation)


def _explain(error: pydantic.ValidationError) -> str:
    """The first validation error in one line."""
    errors = error.errors(include_url=False)
    first = errors[0]
    path = [
        str(part) for part in first["loc"] if part not in _OPTIMIZERS
    ]  # which tell the kinds of resolved optimizers apart
    if isinstance(first.get("ctx", {}).get("error"), InputError):  # from a check of ours, which says it all
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return _explain_unknown(path)
    name = ".".join(path[:2])  # what follows tells list items and alternatives apart
    if first["type"] == "missing":
        return f"the recipe has no {name}, which is needed. Add it."
    reasons = [other["msg"][0].lower() + other["msg"][1:] for other in errors if other["loc"][:2] == first["loc"][:2]]
    message = ", or ".join(dict.fromkeys(reasons))
    named = re.findall(
        r"'([^']*)'", str(first.get("ctx", {}).get("expected", ""))
    )  # of a key that takes one of some words
    near = difflib.get_close_matches(str(first["input"]), named, n=1, cutoff=0.4)
    question = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"{name} = {first['input']!r} is not possible: {message}.{question} "
        f"Correct it in the recipe or by --set {name}=..."
    )


def _explain_unknown(path: list[str]) -> str:
    known = known_keys()
    if len(path) == 1:
        candidates, kind = [key for key in known if "." not in key], "section"
    else:
        elsewhere = [key for key in known if key.partition(".")[2] == path[1]]  # the right key in a wrong section
        candidates, kind = elsewhere or [key for key in known if key.startswith(path[0] + ".")], "key"
    name = ".".join(path)
    return f"the recipe has an unknown {kind} {name}. {nearest(name, candidates)}"


def known_keys() -> list[str]:
    """Every section, and every "section.key"."""
    return [
        name for section, fields in _sections().items() for name in (section, *(f"{section}.{key}" for key in fields))
    ]


def releasing_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys that change what a run releases, with their values: all but those that are marked
    `MayChange`.
    """
    free = {
        f"{section}.{key}"
        for section, fields in _sections().items()
        for key, field in fields.items()
        if MayChange() in field.metadata
    }
    return {key: value for key, value in flatten(recipe).items() if key not in free}


def _sections() -> dict[str, dict[str, FieldInfo]]:
    """The fields of each section."""
    sections = {}
    for section, field in Recipe.model_fields.items():
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next(option for option in options if isinstance(option, type) and issubclass(option, Section))
        sections[section] = dict(model.model_fields)
    return sections
