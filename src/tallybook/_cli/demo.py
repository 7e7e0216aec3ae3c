"""tallybook demo: the main job, for real, on an embedded PostgreSQL."""

import sys
from pathlib import Path

import click

from tallybook._cli.errors import Problem


@click.command()
@click.option(
    "--input", "input_", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.csv",
    help="CSV file with your own rows.",
)  # fmt: skip
@click.option("--plain", is_flag=True, help="Print plain lines, even on a terminal.")
def demo(input_: Path | None, plain: bool) -> None:
    """Send webhooks with failures, on a temporary PostgreSQL.

    It sends form submissions as webhooks, some of which fail, kills a worker in the middle, and counts the deliveries.
    """
    try:
        from tallybook.extra.demo import run
    except ImportError as error:
        raise Problem(f"the demo needs {error.name}", hint="pip install 'tallybook[demo]'") from error
    sys.exit(run(input_, plain=plain or None))
