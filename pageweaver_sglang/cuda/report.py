"""What ``ptxas -v`` says about the kernels: registers, spills, shared memory, and wgmma that were serialised."""

from __future__ import annotations

import re
from dataclasses import dataclass

_KERNEL = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SERIALISED = re.compile(r"\bC75(?:1\d|20)\b")


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel as compiled; ``smem`` and the rest in bytes, ``smem`` without dynamic shared memory."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    smem: int
    stack: int


def short_name(symbol: str) -> str:
    """A kernel's name and the integers of its template arguments: ``_ZN2pw14regroup_kernelILi64EEEv..`` ->
    ``regroup_kernel<64>``. A symbol that is not of that form is returned as it is.
    """
    position = 3 if symbol.startswith("_ZN") else 2 if symbol.startswith("_Z") else len(symbol)
    name = ""
    while length := re.match(r"\d+", symbol[position:]):
        start = position + length.end()
        position = start + int(length.group())
        name = symbol[start:position]
    if not name:
        return symbol
    arguments = re.match(r"I(.*?E)(?:E*)v", symbol[position:])
    numbers = re.findall(r"L[a-z](n?\d+)E", arguments.group(1)) if arguments else []
    return f"{name}<{', '.join(number.replace('n', '-') for number in numbers)}>" if numbers else name


def resource_report(log_text: str) -> list[KernelResources]:
    """The kernels of a ``-Xptxas -v`` log in the order of the log. Kernels without a complete entry are left out."""
    kernels = []
    for section in re.split(r"(?=Compiling entry function ')", log_text):
        kernel, stack, used = _KERNEL.match(section), _STACK.search(section), _USED.search(section)
        if kernel and stack and used:
            shared = _SHARED.search(section)
            frame, stores, loads = (int(number) for number in stack.groups())
            smem = int(shared.group(1)) if shared else 0
            kernels.append(
                KernelResources(short_name(kernel.group(1)), int(used.group(1)), stores, loads, smem, stack=frame)
            )
    return kernels


def serialised_wgmma(log_text: str) -> list[str]:
    """The log's lines that report serialised ``wgmma`` instructions (ptxas C7510 to C7520): a large loss of speed."""
    return [line.strip() for line in log_text.splitlines() if _SERIALISED.search(line)]
