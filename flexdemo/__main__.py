"""The command line: ``python -m flexdemo SUBCOMMAND``, or ``flexdemo SUBCOMMAND``."""

from __future__ import annotations

import sys

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit("error: the command line needs typer and rich: `pip install 'flexcomm[cli]'`.") from error

from collections.abc import Sequence

from flexdemo.predict import PredictError
from flexdemo.predict.command import predict


def build_app() -> typer.Typer:
    """Return the command line, a group even while there is one subcommand."""
    app = typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Training over slow links."
    )
    app.callback()(_always_a_group)
    app.command("predict")(predict)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the code to exit with."""
    try:
        build_app()(sys.argv[1:] if arguments is None else list(arguments), prog_name="flexdemo")
    except PredictError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    return 0


def _always_a_group() -> None:
    """Make subcommands the only way in."""


if __name__ == "__main__":
    sys.exit(main())
