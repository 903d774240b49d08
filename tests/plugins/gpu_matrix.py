"""The conformance matrix on a GPU, through a host of our own: what its scripts share.

With `--device cpu` (and a fake driver) launches go nowhere: shows that a script itself works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvgraph.errors import UnsupportedError
from kvgraph.ops.cuda_native import launcher
from tests.support import conformance
from tests.support.conformance import Case


def main(run_case: Callable[[Case, str, str], None]) -> int:
    """`run_case(case, arch, device)` for every case whose name has one of the arguments in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    arch = "sm_{}{}".format(*launcher().compute_capability())
    wanted = [
        c for c in conformance.cases() if not given.cases or any(p in c.id for p in given.cases)
    ]
    passed = skipped = failed = 0
    for case in wanted:
        try:
            run_case(case, arch, given.device)
            passed += 1
        except UnsupportedError:
            skipped += 1
        except Exception as error:
            failed += 1
            print(f"FAILED {case.id}: {type(error).__name__}: {error}"[:400], flush=True)
    print(f"{passed} cases passed on {arch}, {skipped} have no kernel, {failed} failed")
    return int(failed > 0 or passed == 0)
