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

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def always_a_group() -> None:
    """Training over slow links."""


app.command("predict")(predict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the code to exit with."""
    try:
        app(sys.argv[1:] if arguments is None else list(arguments), prog_name="flexdemo")
    except PredictError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
