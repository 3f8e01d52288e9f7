"""What a GPU compiler reports about each kernel, read from its logs: one summary line per file and architecture.

Usage: resources.py [--spills FILE --at ARCH] [--no-kernels NAME]... LOG...

Understands `nvcc -Xptxas -v` and `clang -Rpass-analysis=kernel-resource-usage`. Fails when a log lists no kernel
(unless the file is named by --no-kernels), and when a kernel for ARCH spills that no line of FILE, a regular
expression, allows.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PTXAS_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
PTXAS_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")
CLANG_KERNEL = re.compile(r"remark: Function Name: (\w+) ")
CLANG_VALUE = re.compile(r"remark: +(VGPRs|VGPRs Spill|SGPRs Spill|ScratchSize \[bytes/lane\]): (\d+) ")


@dataclass
class Kernel:
    """One kernel for one architecture; spilled in bytes (CUDA) or registers (HIP)."""

    name: str
    arch: str
    registers: int = 0
    spilled: int = 0
    scratch: int = 0


def read_log(path: Path) -> list[Kernel]:
    """The kernels of a log in its order; clang's architecture is the name of the log's folder."""
    kernels: list[Kernel] = []
    for line in path.read_text().splitlines():
        if match := PTXAS_KERNEL.search(line):
            kernels.append(Kernel(match[1], match[2]))
        elif match := CLANG_KERNEL.search(line):
            kernels.append(Kernel(match[1], path.parent.name))
        elif not kernels:
            continue
        elif match := PTXAS_SPILL.search(line):
            kernels[-1].spilled += int(match[1]) + int(match[2])
        elif match := PTXAS_REGISTERS.search(line):
            kernels[-1].registers = int(match[1])
        elif match := CLANG_VALUE.search(line):
            if match[1] == "VGPRs":
                kernels[-1].registers = int(match[2])
            elif match[1].startswith("Scratch"):
                kernels[-1].scratch = int(match[2])
            else:
                kernels[-1].spilled += int(match[2])
    return kernels


def summary(name: str, arch: str, kernels: list[Kernel]) -> str:
    """One line for the log of CI."""
    text = f"  {name} {arch}: {len(kernels)} kernels, at most {max(k.registers for k in kernels)} registers"
    spilling = [k for k in kernels if k.spilled]
    if spilling:
        text += f", {len(spilling)} spill (at most {max(k.spilled for k in spilling)})"
    scratch = max(k.scratch for k in kernels)
    return text + (f", at most {scratch} bytes of scratch a lane" if scratch else "")


def main() -> int:
    """Command line; 0 when every file has kernels and none spills that must not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--spills", type=Path, help="regular expressions of kernels that may spill")
    parser.add_argument("--at", default="", help="the architecture where no other kernel may spill")
    parser.add_argument("--no-kernels", action="append", default=[], help="a file without kernels of its own")
    parser.add_argument("logs", type=Path, nargs="+")
    args = parser.parse_args()
    lines = args.spills.read_text().splitlines() if args.spills else []
    allowed = [re.compile(line) for line in lines if line.strip() and not line.startswith("#")]
    complaints = []
    for log in args.logs:
        by_arch: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in read_log(log):
            by_arch[kernel.arch].append(kernel)
        if not by_arch and log.stem not in args.no_kernels:
            complaints.append(f"{log.stem}: no kernel was compiled")
        for arch, kernels in by_arch.items():
            print(summary(log.stem, arch, kernels))
            for kernel in kernels:
                if arch == args.at and kernel.spilled and not any(x.search(kernel.name) for x in allowed):
                    complaints.append(f"{log.stem}: {kernel.name} spills {kernel.spilled} bytes on {arch}")
    for complaint in complaints:
        print(f"resources: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
