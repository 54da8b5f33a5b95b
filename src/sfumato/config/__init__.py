"""The recipe: everything that defines a run, as data. Its one schema (`sections`, `resolved`), and how it is read and
written.

A recipe is a TOML file. An unknown key is an error that names the nearest known
one; a key left out takes its default here or is filled in by a stated rule when
the run starts, and the resolved recipe in the run folder holds every value.
"""

import ast
import difflib
import functools
import itertools
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import pydantic

from sfumato.config.resolved import FilledPrivacy as FilledPrivacy
from sfumato.config.resolved import FilledRecipe as FilledRecipe
from sfumato.config.resolved import ResolvedAugmentation as ResolvedAugmentation
from sfumato.config.resolved import ResolvedOptimizer as ResolvedOptimizer
from sfumato.config.resolved import ResolvedRecipe as ResolvedRecipe
from sfumato.config.resolved import ResolvedSgd as ResolvedSgd
from sfumato.config.sections import AugmentationKind as AugmentationKind
from sfumato.config.sections import DataConfig as DataConfig
from sfumato.config.sections import MayChange, OptimizerConfig, Section
from sfumato.config.sections import ModelConfig as ModelConfig
from sfumato.config.sections import PrivacyConfig as PrivacyConfig
from sfumato.config.sections import Recipe as Recipe
from sfumato.config.sections import Resize as Resize
from sfumato.config.sections import RunConfig as RunConfig
from sfumato.config.sections import Spread as Spread
from sfumato.errors import InputError, nearest, refusing

R = TypeVar("R", bound="Recipe")


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
    try:
        Recipe.model_validate({"data": {"name": "digits"}, section: {name: value}})
    except pydantic.ValidationError as error:
        return _reasons(error, (section, name)) or None
    return None


_MOST_PARTS = 1000
"""Of a key, a.b.c: reading takes as much memory as their square."""


def read(path: Path, what: str = "recipe") -> dict[str, Any]:
    """The nested dictionaries of a TOML file, not yet validated.

    Args:
        path: The file.
        what: It is meant to be.

    Raises:
        InputError: If the file cannot be read or is no TOML.
    """
    remedy = "`sfumato recipes list` names those that are shipped." if what == "recipe" else "Correct the name."
    with refusing(f"{what} {path} cannot be read", remedy, OSError):
        content = path.read_bytes()
    # Whole numbers of thousands of digits, tables within tables.
    with refusing(f"{what} {path} is not valid TOML", "Correct that line.", ValueError, RecursionError):
        return loads(content.decode("utf-8-sig"))  # "-sig": some editors put a mark at the start


def loads(text: str) -> dict[str, Any]:
    """The same of a text, which may be a stranger's.

    Raises:
        ValueError: If it is no TOML, or has a key of so many parts that reading it would take all memory.
    """
    keys = (part for line in text.splitlines() for part in line.split("=")[:-1] or [line])
    if any(key.count(".") > _MOST_PARTS for key in keys):
        raise ValueError(f"a key of more than {_MOST_PARTS} parts")
    return tomllib.loads(text)


def set_value(values: dict[str, Any], assignment: str) -> None:
    """Applies one `section.key=value` of the command line; the value is read as TOML, else as text. An empty one takes
    the key out.

    Raises:
        InputError: If the assignment has no such form.
    """
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise InputError(
            f'--set {assignment!r} is not of the form section.key=value, for example "optimizer.learning_rate=2.0".'
        )
    put(values, key.strip(), value_of(text) if text.strip() else None)


def value_of(text: str) -> Any:
    """A value as the command line gives it: TOML, else text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets one "section.key" of nested dictionaries; None takes it out, so that its default or a rule gives it.

    Raises:
        InputError: If a part of the key is a value already, or what is taken out is no key of a recipe.
    """
    if value is None and key not in known_keys() and not key.startswith("model.options."):
        raise InputError(f"{key} cannot be taken out: it is no key of a recipe. {nearest(key, known_keys())}")
    section, parts = values, key.split(".")
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise InputError(f"{key}: {part!r} is a value, not a section. Set it without what follows.")
    if value is None:
        section.pop(parts[-1], None)
    else:
        section[parts[-1]] = value


def dotted(table: Mapping[str, Any], above: str = "", *, but: Collection[str] = ()) -> dict[str, Any]:
    """Nested dictionaries as one, by section.key; one that has a key of ``but`` is a value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        is_table = isinstance(value, dict) and value.keys().isdisjoint(but)
        found |= dotted(value, f"{above}{key}.", but=but) if is_table else {above + key: value}
    return found


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
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if isinstance(context.get("error"), InputError):  # from a check of ours, which says it all
        return str(context["error"])
    # Without what tells the kinds of resolved optimizers apart.
    path = [str(part) for part in first["loc"] if part not in _OPTIMIZERS]
    if first["type"] == "extra_forbidden":
        return _explain_unknown(path)
    name = ".".join(path[:2])  # what follows tells list items and alternatives apart
    if first["type"] == "missing":
        return f"the recipe has no {name}, which is needed. Add it."
    words = re.findall(r"'([^']*)'", str(context.get("expected", "")))  # of a key that takes one of some
    near = difflib.get_close_matches(str(first["input"]), words, n=1, cutoff=0.4)
    question = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"{name} = {first['input']!r} is not possible: {_reasons(error, first['loc'][:2])}.{question} "
        f"Correct it in the recipe, by its option or by --set {name}=..."
    )


def _reasons(error: pydantic.ValidationError, place: tuple[int | str, ...]) -> str:
    """All that is said of one key, which may have alternatives."""
    said = [each["msg"] for each in error.errors(include_url=False) if each["loc"][:2] == place]
    return ", or ".join(dict.fromkeys(reason[0].lower() + reason[1:] for reason in said))


def _explain_unknown(path: list[str]) -> str:
    known, name, last = known_keys(), ".".join(path), path[-1]
    what = f"the recipe has an unknown {'key' if path[1:] else 'section'} {name}"
    elsewhere = [key for key in known if key.partition(".")[2] == last]  # the right key in a wrong section
    if last in _MEANT and not elsewhere:
        return f"{what}. {_MEANT[last]} is meant, it seems; `sfumato keys` names all."
    beside = [key for key in known if key.startswith(f"{path[0]}.")] if path[1:] else list(_kinds())
    return f"{what}. {nearest(name, elsewhere or beside)}"


# What other tools call some keys.
_MEANT = {
    **dict.fromkeys(("lr", "step_size", "rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("iterations", "steps"), "training.num_steps"),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs"), "training.num_steps = epochs x N / training.batch_size"),
    **dict.fromkeys(("bs", "batch", "lot_size", "train_batch_size"), "training.batch_size"),
    **dict.fromkeys(("sigma", "noise", "noise_scale"), "privacy.noise_multiplier"),
    **dict.fromkeys(
        ("max_norm", "l2_norm_clip", "clip", "clip_norm", "max_per_sample_grad_norm"), "privacy.clipping_norm"
    ),
    **dict.fromkeys(("epsilon", "eps"), "privacy.target_epsilon"),
    **dict.fromkeys(("size", "resolution", "img_size"), "data.image_size"),
    **dict.fromkeys(("views", "augmentations", "k"), "augmentation.augmult"),
    **dict.fromkeys(("pretrained", "weights", "checkpoint"), "model.init_from"),
    **dict.fromkeys(("arch", "architecture", "network"), "model.name"),
}


def explained(asked: str | None = None) -> list[dict[str, Any]]:
    """Every key of a recipe, of one section, or one "section.key": its type, its default, and what it means.

    Raises:
        InputError: If there is no such section or key; as for one in a recipe.
    """
    if asked is not None and asked not in known_keys():
        raise InputError(_explain_unknown(asked.split(".")))
    rows, told = [], _told_below_fields()
    for name, kind in _kinds().items():
        for key, field in kind.model_fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
            means = " ".join(told.get((kind.__name__, key), "").split())
            row = {"key": f"{name}.{key}", "type": _in_words(field.annotation), "default": default, "means": means}
            rows.append(row)
    return [row for row in rows if asked in (None, row["key"], str(row["key"]).partition(".")[0])]


def _told_below_fields() -> dict[tuple[str, str], str]:
    """What stands below each field of each section's class. pydantic would read it whenever a command starts."""
    tree = ast.parse(Path(__file__).with_name("sections.py").read_text(encoding="utf-8"))
    return {
        (node.name, ast.unparse(field.target)): ast.literal_eval(below.value)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for field, below in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def _in_words(kind: Any) -> str:
    """A type, as one who writes a recipe knows it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _in_words(inner[0])
    if origin is Literal:
        return ", ".join(map(repr, inner))
    if origin is list:
        return f"list of {_in_words(inner[0])}"
    if origin is dict:
        return "table"
    if inner:
        return " or ".join(dict.fromkeys(_in_words(each) for each in inner if each is not type(None)))
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        kind.__name__, "table"
    )


def known_keys() -> list[str]:
    """Every section, and every "section.key"."""
    keys = ((section, *(f"{section}.{key}" for key in kind.model_fields)) for section, kind in _kinds().items())
    return list(itertools.chain.from_iterable(keys))


def releasing_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys that change what a run releases, with their values: all but those that are marked
    `MayChange`.
    """
    return {key: value for key, value in flatten(recipe).items() if not changes_no_result(key)}


def changes_no_result(key: str) -> bool:
    """Whether a "section.key" is marked `MayChange`."""
    section, _, name = key.partition(".")
    kind = _kinds().get(section)
    return kind is not None and name in kind.model_fields and MayChange() in kind.model_fields[name].metadata


@functools.cache
def _kinds() -> dict[str, type[Section]]:
    """The class of each section."""
    kinds = {name: get_args(field.annotation) or (field.annotation,) for name, field in Recipe.model_fields.items()}
    return {name: next(kind for kind in options if issubclass(kind, Section)) for name, options in kinds.items()}
