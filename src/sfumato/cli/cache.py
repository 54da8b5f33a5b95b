"""`sfumato cache`: decoded images, features and unpacked archives that are kept on disk."""

from typing import TYPE_CHECKING

import typer

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.data.store import Entry

app = typer.Typer(
    help="What is kept of your images, in plain numbers and for you alone: list, clear.", no_args_is_help=True
)


@app.command("list")
def list_(json_: options.Json = False) -> None:
    """Names what is kept, of which folder, and how large it is."""
    from sfumato.data import store

    found = store.entries()
    _print(found, json_)
    if not json_ and not found:
        output.say(f"nothing is kept in {store.cache_folder()}")


@app.command()
def clear(json_: options.Json = False) -> None:
    """Removes all of it. It is made anew when it is needed."""
    from sfumato.data import store

    removed = store.clear(output.note)
    _print(removed, json_)
    if not json_:
        output.say(f"removed {len(removed)}, {sum(entry.num_bytes for entry in removed) / 1e6:.1f} MB")


def _print(found: list["Entry"], json_: bool) -> None:
    if json_:
        rows = [{**vars(entry), "folder": str(entry.folder)} for entry in found]
        output.print_json({"entries": rows})
        return
    for entry in found:
        output.say(f"{entry.kind:<9}{entry.num_bytes / 1e6:>10.1f} MB  {entry.root or '-'}  ({entry.folder})")
