"""The ``pageweaver`` command; every subcommand is a module of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The command line of ``pageweaver``."""
    import pageweaver_sglang

    from . import ab, bench, capture, demo, doctor, fuzz, inspect, make_workload, switch

    top = argparse.ArgumentParser(prog="pageweaver", description=pageweaver_sglang.__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"pageweaver {pageweaver_sglang.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, demo, bench, ab, switch, capture, inspect, make_workload, fuzz):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        summary, _, rest = module.HELP.partition("\n")
        command = commands.add_parser(
            name, help=summary, description=summary + "\n" + rest, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (see each command's ``--help``)."""
    top = parser()
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        hint = "; arguments for the servers come after --" if arguments.command == "ab" else ""
        top.error(f"pageweaver {arguments.command}: unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
