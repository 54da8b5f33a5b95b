"""`sfumato recipes`: what is shipped, and what it spends."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from sfumato import config, recipes
from sfumato.accounting.mechanism import Accountant
from sfumato.cli import options, output
from sfumato.errors import InputError
from sfumato.reporting import formats

app = typer.Typer(help="The recipes that are shipped: list, show NAME, verify.", no_args_is_help=True)

_LARGE_NETWORKS = ("wide_resnet", "nf_resnet")
"""Networks whose recipes take days on a CPU."""


@app.command("list")
def list_(data_root: options.DataRoot = None, json_: options.Json = False) -> None:
    """Names every recipe by paper and table: its nominal epsilon, the paper's accuracy and ours where it was
    measured, and what it needs that is not here.
    """
    from sfumato.recipes.heading import by_place

    rows = [listed(name, data_root) for name in recipes.names()]
    rows.sort(key=lambda row: by_place(row["group"]))
    if json_:
        output.print_json({"recipes": rows})
        return
    width = max(len(row["name"]) for row in rows) + 2
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            output.say(f"{group}:")
        paper = "" if row["paper"] is None else f"  paper {row['paper']}"
        ours = "" if row["ours"] is None else f"  ours {row['ours']}"
        needs = "" if not row["needs"] else f"  needs {', '.join(row['needs'])}"
        output.say(f"  {row['name']:<{width}}{_nominal(row):<14}{paper}{ours}{needs}")


@app.command()
def show(
    name: str,
    calibrate: Annotated[
        Accountant | None, typer.Option(help="Says which noise multiplier this accountant asks for the same epsilon.")
    ] = None,
    json_: options.Json = False,
) -> None:
    """Prints one recipe."""
    path = recipes.find(name)
    values, text = config.read(path), path.read_text(encoding="utf-8")
    found = None if calibrate is None else calibrated(name, calibrate)
    if json_:
        output.print_json({"name": name, "recipe": values, "text": text} | (found or {}))
        return
    for line in text.rstrip("\n").split("\n"):
        output.say(line)
    if found is not None:
        output.say(
            f"# calibrated by {calibrate}: noise_multiplier = {found['noise_multiplier']:.6g} instead of "
            f"{found['printed_noise_multiplier']:g}, the same epsilon; as trained by `sfumato train {name} --calibrate "
            f"{calibrate}`"
        )


@app.command()
def verify(json_: options.Json = False) -> None:
    """Recomputes epsilon for every recipe whose number of images is public."""
    rows = [verified(name) for name in recipes.names()]
    if json_:
        output.print_json({"recipes": rows})
        return
    width = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        rdp, pld = (
            formats.epsilon_text(row[key]) if row[key] is not None else "-" for key in ("epsilon_rdp", "epsilon_pld")
        )
        spent = f"  RDP {rdp}  PLD {pld}  {row['status']}"
        output.say(f"{row['name']:<{width}}{_nominal(row):<14}{spent}  {row['source']}")


def describe(name: str) -> dict[str, Any]:
    """Name, source, group, the accuracies that its comment states, and nominal epsilon."""
    from sfumato.recipes.heading import read_heading

    parsed = _parsed(name)
    nominal = None if parsed.privacy is None else parsed.privacy.target_epsilon
    heading = dataclasses.asdict(read_heading(recipes.find(name).read_text(encoding="utf-8")))
    return {"name": name, **heading, "nominal_epsilon": nominal, "private": parsed.privacy is not None}


def listed(name: str, data_root: Path | None = None) -> dict[str, Any]:
    """The same, and what a run of it needs that is not here; "a GPU" is needed for its time, whatever is here."""
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
    if (parsed.model.name or "").startswith(_LARGE_NETWORKS):
        needs.append("a GPU")
    return {**describe(name), "needs": needs}


def calibrated(name: str, accountant: Accountant) -> dict[str, Any]:
    """The least noise with which a recipe meets its epsilon by an accountant, beside the printed one.

    Raises:
        InputError: If the recipe prints no noise, or has no target.
    """
    from sfumato.cli.train import calibrate
    from sfumato.data.catalogue import public_facts
    from sfumato.planning.resolve import resolve

    values = config.read(recipes.find(name))
    printed = values.get("privacy", {}).get("noise_multiplier")
    if values.get("privacy", {}).get("target_epsilon") is None:
        raise InputError(f"recipe {name} has no target epsilon to solve its noise for. Leave --calibrate out.")
    if printed is None:
        raise InputError(f"recipe {name} prints no noise multiplier: it is solved for as it is. Leave --calibrate out.")
    calibrate(values, accountant)
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
    parsed = _parsed(name)
    facts = public_facts(parsed.data)
    if parsed.privacy is None or facts is None or row["nominal_epsilon"] is None:
        return {
            **row,
            "epsilon_rdp": None,
            "epsilon_pld": None,
            "status": "not fixed: it depends on your data and budget" if row["private"] else "not private",
        }
    plan = resolve(parsed, facts, cut_to_target=False)
    spent = epsilon(plan.mechanism, plan.delta, parsed.privacy.accountant)
    # A table's printed noise is judged by RDP, as its authors computed it; noise that we solve for,
    # by the accountant it is solved under.
    is_solved = parsed.privacy.noise_multiplier is None
    judged = spent.epsilon if is_solved or spent.epsilon_rdp is None else spent.epsilon_rdp
    nominal = row["nominal_epsilon"]
    status = "over" if judged > nominal * 1.001 else "under" if judged < nominal * 0.95 else "within"
    return {**row, "epsilon_rdp": spent.epsilon_rdp, "epsilon_pld": spent.epsilon_pld, "status": status}


def _parsed(name: str) -> config.Recipe:
    return config.parse(config.read(recipes.find(name)))


def _nominal(row: dict[str, Any]) -> str:
    if row["nominal_epsilon"] is not None:
        return f"epsilon {formats.epsilon_text(row['nominal_epsilon'])}"
    return "your epsilon" if row["private"] else "not private"
