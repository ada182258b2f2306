"""The command `flashgen`: one file of this folder per command.

Only click and the tables of `spec` are imported here and at the top of the commands' files; what a command
needs beside them, it imports when it runs.
"""

from __future__ import annotations

import click

from flashgen.cli.bench import bench
from flashgen.cli.db import db
from flashgen.cli.doctor import doctor
from flashgen.cli.explain import explain
from flashgen.cli.export import export
from flashgen.cli.output import Commands
from flashgen.cli.show import show
from flashgen.cli.simulate import simulate
from flashgen.cli.tune import tune
from flashgen.cli.verify import verify
from flashgen.settings import SETTINGS, VERSION

COMMANDS = (tune, show, explain, bench, export, verify, simulate, db, doctor)

EPILOG = """\
\b
Exit codes: 0 done, 1 the work failed, 2 the command line asks for what does not exist, 130 interrupted.
"""


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="flashgen", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Finds, keeps and ships the fastest exact-attention kernels for your GPU.

    \b
    Examples:
      flashgen tune --gpu --suite llama3-8b        find the fastest kernels on this GPU
      flashgen explain --head-dim 128 --seq 4096   which kernel a call would get, and why
      flashgen export --suite llama3-8b --out X    pack tuned kernels for other machines
      flashgen doctor                              is everything in order?
    """
    if ctx.invoked_subcommand != doctor.name:  # which lists it among what else it finds
        SETTINGS.check()


for command in COMMANDS:
    main.add_command(command)
