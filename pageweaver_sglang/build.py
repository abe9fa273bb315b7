"""``python -m pageweaver_sglang.build``: compiles the kernel library ahead of its first use."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from .cuda import loader


def main(argv: Sequence[str] | None = None) -> int:
    """Builds unless the cache has the library; prints its path on stdout. Returns 0, or 1 after an error on stderr."""
    parser = argparse.ArgumentParser(prog="python -m pageweaver_sglang.build", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--force", action="store_true", help="compile even when the cache has the library")
    parser.add_argument(
        "--print-log", action="store_true", help="print nvcc's output (registers, spills, shared memory)"
    )
    parser.add_argument(
        "--architecture",
        default=loader.ARCHITECTURE,
        metavar="sm_XY",
        help="GPU to compile for, by its compute capability X.Y (default: %(default)s, Hopper)",
    )
    arguments = parser.parse_args(argv)
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arguments.architecture):
        parser.error(f"--architecture must be of the form sm_80, got {arguments.architecture!r}")
    try:
        library = loader.build(force=arguments.force, architecture=arguments.architecture)
    except loader.KernelBuildError as error:
        print(f"pageweaver: {error}", file=sys.stderr)
        return 1
    if arguments.print_log:
        print(library.with_name(loader.LOG).read_text(encoding="utf-8"), end="")
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
