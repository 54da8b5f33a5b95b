"""`sfumato recipes`: what is shipped, and what it spends."""

from typing import Any

import typer

from sfumato.cli import options, output
from sfumato.reporting import formats

app = typer.Typer(help="The recipes that are shipped: list, show NAME, verify.", no_args_is_help=True)


@app.command("list")
def list_(json_: options.Json = False) -> None:
    """Names every recipe, with its source and nominal epsilon."""
    rows = [row for name in _names() if (row := describe(name))]
    _print(rows, json_)


@app.command()
def show(name: str, json_: options.Json = False) -> None:
    """Prints one recipe."""
    from sfumato import config, recipes

    path = recipes.find(name)
    if json_:
        output.print_json({"name": name, "recipe": config.read(path), "text": path.read_text(encoding="utf-8")})
    else:
        for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
            output.say(line)


@app.command()
def verify(json_: options.Json = False) -> None:
    """Recomputes epsilon for every recipe whose number of images is public."""
    _print([verified(name) for name in _names()], json_)


def describe(name: str) -> dict[str, Any]:
    """Name, source (the recipe's first comment) and nominal epsilon."""
    from sfumato import config, recipes

    path = recipes.find(name)
    parsed = config.parse(config.read(path))
    first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").strip()
    budget = parsed.privacy
    nominal = None if budget is None else budget.target_epsilon
    return {"name": name, "source": first, "nominal_epsilon": nominal, "private": budget is not None}


def verified(name: str) -> dict[str, Any]:
    """What a recipe spends, and whether its printed numbers meet their nominal epsilon by RDP."""
    from sfumato import config, recipes
    from sfumato.accounting.accountants import epsilon
    from sfumato.data.catalogue import public_facts
    from sfumato.planning.resolve import resolve

    row = describe(name)
    parsed = config.parse(config.read(recipes.find(name)))
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


def _names() -> list[str]:
    from sfumato import recipes

    return recipes.names()


def _print(rows: list[dict[str, Any]], json_: bool) -> None:
    if json_:
        output.print_json({"recipes": rows})
        return
    width = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        spent = ""
        if "status" in row:
            rdp, pld = (
                formats.epsilon_text(row[key]) if row[key] is not None else "-"
                for key in ("epsilon_rdp", "epsilon_pld")
            )
            spent = f"  RDP {rdp}  PLD {pld}  {row['status']}"
        nominal = "your epsilon" if row["private"] else "not private"
        if row["nominal_epsilon"] is not None:
            nominal = f"epsilon {formats.epsilon_text(row['nominal_epsilon'])}"
        output.say(f"{row['name']:<{width}}{nominal:<14}{spent}  {row['source']}")
