"""`sfumato recipes`: what is shipped, and what it spends."""

import functools
import os
import textwrap
from pathlib import Path
from typing import Any

from sfumato import config, recipes
from sfumato.accounting import formats
from sfumato.accounting.mechanism import Accountant
from sfumato.cli import output
from sfumato.errors import InputError

_LARGE_NETWORKS = ("wide_resnet", "nf_resnet")
"""Networks whose recipes take days on a CPU."""


def list_(*, data_root: Path | None = None, json_: bool = False) -> None:
    """Names every recipe by paper and table: its nominal epsilon, the paper's accuracy and ours where it was
    measured, and what it needs that is not here.

    Example:
        sfumato recipes list
    """
    rows = [describe(name) | {"needs": _needs(name, data_root)} for name in recipes.names()]
    rows.sort(key=lambda row: recipes.by_place(row["group"]))
    output.answer({"recipes": rows}, json_, _show_list)


def _show_list(facts: dict[str, Any]) -> None:
    group = None
    for row in facts["recipes"]:
        if row["group"] != group:
            group = row["group"]
            output.say(f"{group}:")
        said = {"paper": row["paper"], "ours": row["ours"], "needs": ", ".join(row["needs"])}
        rest = "".join(f"  {what} {text}" for what, text in said.items() if text)
        output.say(f"  {row['name']:<{_width(facts)}}{_nominal(row):<14}{rest}")


def keys(name: str | None = None, *, json_: bool = False) -> None:
    """Names every key of a recipe: its type, its default, and what it means.

    Args:
        name: Of a section alone, such as privacy, or a key, such as optimizer.learning_rate.

    Example:
        sfumato keys privacy
    """
    output.answer({"keys": config.explained(name)}, json_, _show_keys)


def _show_keys(facts: dict[str, Any]) -> None:
    for row in facts["keys"]:
        default = "" if row["default"] in (None, [], {}) else f"; default {row['default']!r}"
        output.say(f"{row['key']} ({row['type']}{default})")
        for line in textwrap.wrap(row["means"], 100):
            output.say(f"    {line}")


def show(name: str, *, calibrate: Accountant | None = None, json_: bool = False) -> None:
    """Prints one recipe.

    Args:
        name: As `sfumato recipes list` has it.
        calibrate: Says which noise multiplier this accountant asks for the nominal epsilon.

    Example:
        sfumato recipes show cifar10-eps-8
    """
    path = recipes.find(name)
    text = path.read_text(encoding="utf-8")
    facts = {"name": name, "recipe": config.read(path), "text": text}
    output.answer(facts if calibrate is None else facts | _calibrated(name, calibrate), json_, _show)


def _show(facts: dict[str, Any]) -> None:
    for line in facts["text"].rstrip("\n").split("\n"):
        output.say(line)
    if (by := facts.get("calibrated_by")) is not None:
        noise = f"{facts['noise_multiplier']:.6g} instead of {facts['printed_noise_multiplier']:g}"
        command = f"sfumato train {facts['name']} --calibrate {by}"
        output.say(
            f"# calibrated by {by}: noise_multiplier = {noise}, for the nominal epsilon; as trained by `{command}`"
        )


def verify(*, json_: bool = False) -> None:
    """Recomputes epsilon for every recipe whose number of images is public.

    Example:
        sfumato recipes verify
    """
    output.answer({"recipes": [verified(name) for name in recipes.names()]}, json_, _show_verified)


def _show_verified(facts: dict[str, Any]) -> None:
    for row in facts["recipes"]:
        rdp, pld = (
            formats.epsilon_text(row[key]) if row[key] is not None else "-" for key in ("epsilon_rdp", "epsilon_pld")
        )
        spent = f"  RDP {rdp}  PLD {pld}  {row['status']}"
        output.say(f"{row['name']:<{_width(facts)}}{_nominal(row):<14}{spent}  {row['source']}")


def describe(name: str) -> dict[str, Any]:
    """Name, source, group, the accuracies that its comment states, and nominal epsilon."""
    privacy = _parsed(name).privacy
    heading = recipes.read_heading(recipes.find(name).read_text(encoding="utf-8"))
    nominal = None if privacy is None else privacy.target_epsilon
    return {"name": name, **heading, "nominal_epsilon": nominal, "private": privacy is not None}


def _needs(name: str, data_root: Path | None) -> list[str]:
    """What a run of a recipe needs that is not here; "a GPU" is needed for its time, whatever is here."""
    from sfumato.data.catalogue import NAMED, missing

    parsed, kept = _parsed(name), os.environ.get("SFUMATO_DATA")
    root = data_root or (Path(kept) if kept else None)
    needs = []
    if parsed.data.name not in NAMED:
        needs.append("your images")
    elif missing(parsed.data.name, root):
        needs.append(f"the images of {parsed.data.name}")
    if parsed.model.missing_weights is not None:
        images = _parsed(str(parsed.model.init_recipe)).data.name
        lacking = f" (which needs the images of {images})" if missing(images, root) else ""
        needs.append(f"weights of {parsed.model.init_recipe}{lacking}")
    return needs + (["a GPU"] if (parsed.model.name or "").startswith(_LARGE_NETWORKS) else [])


def _calibrated(name: str, accountant: Accountant) -> dict[str, Any]:
    """The least noise with which a recipe meets its epsilon by an accountant, beside the printed one.

    Raises:
        InputError: If the recipe prints no noise, or has no target.
    """
    from sfumato.cli.train import calibrate
    from sfumato.data.catalogue import public_facts
    from sfumato.planning.resolve import resolve

    values = config.read(recipes.find(name))
    printed = values.get("privacy", {}).get("noise_multiplier")
    calibrate(values, accountant)
    if printed is None:
        raise InputError(f"recipe {name} prints no noise multiplier: it is solved for as it is. Leave --calibrate out.")
    parsed = config.parse(values)
    facts = public_facts(parsed.data)
    assert facts is not None  # a recipe with printed noise is of a named data set
    found = resolve(parsed, facts).mechanism.noise_multiplier
    return {"noise_multiplier": found, "printed_noise_multiplier": printed, "calibrated_by": accountant}


def verified(name: str) -> dict[str, Any]:
    """What a recipe spends, and whether its printed numbers meet their nominal epsilon by RDP."""
    from sfumato.accounting.accountants import epsilon
    from sfumato.data.catalogue import public_facts
    from sfumato.planning.resolve import resolve

    row = describe(name)
    parsed, nominal = _parsed(name), row["nominal_epsilon"]
    facts = public_facts(parsed.data)
    if parsed.privacy is None or facts is None or nominal is None:
        status = "not fixed: it depends on your data and budget" if row["private"] else "not private"
        return {**row, "epsilon_rdp": None, "epsilon_pld": None, "status": status}
    plan = resolve(parsed, facts, cut_to_target=False)
    spent = epsilon(plan.mechanism, plan.delta, parsed.privacy.accountant)
    # A table's printed noise is judged by RDP, as its authors computed it; noise that we solve for,
    # by the accountant it is solved under.
    is_solved = parsed.privacy.noise_multiplier is None
    judged = spent.epsilon if is_solved or spent.epsilon_rdp is None else spent.epsilon_rdp
    status = "over" if judged > nominal * 1.001 else "under" if judged < nominal * 0.95 else "within"
    return {**row, "epsilon_rdp": spent.epsilon_rdp, "epsilon_pld": spent.epsilon_pld, "status": status}


@functools.cache
def _parsed(name: str) -> config.Recipe:
    return config.parse(config.read(recipes.find(name)))


def _nominal(row: dict[str, Any]) -> str:
    if row["nominal_epsilon"] is not None:
        return f"epsilon {formats.epsilon_text(row['nominal_epsilon'])}"
    return "your epsilon" if row["private"] else "not private"


def _width(facts: dict[str, Any]) -> int:
    """Of the column of names."""
    return max(len(row["name"]) for row in facts["recipes"]) + 2
