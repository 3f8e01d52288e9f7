"""`python -m fuzz`: cases of one seed in a worker of their own, whose death, silence or growth is a finding."""

from __future__ import annotations

import argparse
import sys

from .watch import watch
from .worker import work


def main() -> int:
    """0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="CASE", help="where to start (default 0)")
    parser.add_argument("--cases", type=int, help="how many cases (default: as many as the seconds allow)")
    parser.add_argument("--seconds", type=float, help="end after this long (default: when all cases were run)")
    parser.add_argument("--worker", action="store_true", help="run the cases in this process: to debug one")
    parser.add_argument("--no-limit", action="store_true", help="with --worker: any address space (sanitizers)")
    args = parser.parse_args()
    if args.cases is None and args.seconds is None:
        parser.error("--cases or --seconds")
    if args.worker:
        work(args.seed, args.first, args.cases, not args.no_limit)
        return 0
    finding = watch(args.seed, args.first, args.cases, args.seconds)
    if finding:
        print(f"FOUND {finding}", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
