"""Who may import whom: the house as a table. Nothing imports upward, and there is no circle."""

import ast
import subprocess
import sys
from pathlib import Path

import sfumato

PACKAGE = Path(sfumato.__file__).parent

# Each part may import itself, what stands in its own row, and `EVERYBODY`.
EVERYBODY = {"config", "errors", "randomness", "json_record"}
TABLE = {
    "errors": "",
    "randomness": "",
    "json_record": "",
    "torch_internals": "",
    "config": "",
    "recipes": "",
    "accounting": "",
    "models": "",
    "clipping": "models torch_internals",
    "data": "accounting models",
    "planning": "accounting data",
    "run_folder": "planning accounting data models",
    "evaluation": "run_folder planning clipping data models torch_internals",
    "training": "reporting evaluation run_folder planning accounting clipping data models torch_internals",
    "reporting": "run_folder planning accounting",
    "scaling": "reporting training evaluation run_folder planning accounting clipping data models",
    "searching": "scaling reporting training evaluation run_folder planning accounting data",
    "auditing": "reporting training evaluation run_folder accounting clipping data models torch_internals",
    "studies": "models scaling reporting training run_folder planning accounting data",
    "exporting": "reporting evaluation run_folder accounting models",
    "cli": "auditing torch_internals recipes accounting models clipping data planning run_folder evaluation training "
    "reporting scaling searching studies exporting",
}
MAY_IMPORT = {part: set(others.split()) for part, others in TABLE.items()}
LIGHT = ("accounting", "planning", "reporting", "recipes", "config", "json_record", "errors")
"""Parts that `sfumato --help`, `plan` and `recipes` need: they import no torch."""


def part_of(module: str) -> str:
    """The part of the house that a module of the package lies in."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, *, at_once: bool = False) -> set[str]:
    """The package's modules that a file imports, in functions and for types too unless only what is imported `at_once`
    counts.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sfumato":
            inside = [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__"]
            found |= {name if is_module(name) else node.module for name in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sfumato"}
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def files(part: str) -> list[Path]:
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def modules(*parts: str) -> dict[str, Path]:
    """The modules of parts, by name."""
    known = {
        f"sfumato.{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}": path
        for part in parts
        for path in files(part)
    }
    return {name.removesuffix(".__init__"): path for name, path in known.items()}


def test_every_part_stands_in_the_table():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == MAY_IMPORT.keys()


def without_circle(left: dict[str, set[str]]) -> None:
    """Fails where what each imports leads back to it."""
    while left:
        free = {name for name, others in left.items() if not others & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in free}


def test_the_table_has_no_circle():
    """So nothing imports the command line, which imports everything."""
    without_circle(MAY_IMPORT)


def test_a_part_imports_only_what_the_table_allows():
    wrong = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for part, others in MAY_IMPORT.items()
        for path in files(part)
        for name in imports(path)
        if part_of(name) not in others | EVERYBODY | {part, "recipes"}
    }
    assert not wrong


def test_modules_do_not_import_each_other_in_a_circle():
    known = modules(*MAY_IMPORT)
    without_circle({name: imports(path, at_once=True) & known.keys() - {name} for name, path in known.items()})


def test_the_light_parts_import_no_torch():
    program = (
        f"import importlib, sys\nfor name in {[*modules(*LIGHT)]!r}:\n    importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_benchmarks_import_only_what_there_is():
    root = PACKAGE.parents[1]
    names = {name for path in (root / "benchmarks").rglob("*.py") for name in imports(path)}
    assert not {name for name in names if not is_module(name)}
