"""A model of merging large models: bytes, passes and rates, for the table of SCALING.md.

Rates of GPUs and buses are vendors' figures; those of CPUs are this folder's measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

T, PARAMETERS, BYTES = 8, 70e9, 2  # bf16
NVME = 6.5e9  # bytes/s of one drive, reading (vendor: 6 to 7)
WRITE = 4e9  # bytes/s of one drive, writing (assumed)
PCIE = 55e9  # bytes/s of a GPU's PCIe 5 x16, usable
HBM = 3.35e12  # bytes/s of an H100 SXM
FP32 = 67e12  # flop/s of an H100 SXM, float32 without tensor cores
# s on one CPU core, from "Memory over T". To combine an element includes to form it.
FORM, PRODUCT, COMBINE = 1.58e-9, 11.3e-12, 2.14e-9
CORES = 16
THEIRS = 5.51 / 2.25e9  # s a parameter and model of mergekit's task_arithmetic, two cores, net


@dataclass(frozen=True)
class Machine:
    name: str
    count: int  # machines
    gpus: int  # of each
    drives: int  # of each, read in parallel


MACHINES = [
    Machine("CPU, 16 cores, one drive", 1, 0, 1),
    Machine("one GPU, one drive", 1, 1, 1),
    Machine("one GPU, four drives", 1, 1, 4),
    Machine("eight GPUs, eight drives", 1, 8, 8),
    Machine("eight machines of eight GPUs, eight drives each", 8, 8, 8),
]


def read_pass(machine: Machine, gram: bool, combine: bool) -> dict[str, float]:
    """Seconds of each resource in one pass over base and T models, whose reading is shared.

    Processes share the tensors by bytes, and each writes its own shards.
    """
    mine = PARAMETERS / machine.count
    elements = (T + 1) * mine
    stored, output = elements * BYTES, mine * BYTES
    took = {"NVMe read": stored / (machine.drives * NVME)}
    if combine:
        took["NVMe write"] = output / (machine.drives * WRITE)
    if not machine.gpus:
        products = PRODUCT * T * T * mine * gram
        took["CPU"] = ((COMBINE if combine else FORM) * elements + products) / CORES
        return took
    took["PCIe"] = (stored + output * combine) / (machine.gpus * PCIE)
    # Each stored element is read once, written and read twice as float32 rows.
    took["HBM"] = elements * (BYTES + 4 * 4 + 4 * (gram + combine)) / (machine.gpus * HBM)
    flops = (2 * T * T * gram + 2 * T * combine) * mine
    took["GPU"] = flops / (machine.gpus * FP32)
    return took


def row(machine: Machine, passes: list[dict[str, float]]) -> str:
    """Reading, computing and writing overlap: a pass takes its slowest part."""
    slowest = [max(each, key=each.__getitem__) for each in passes]
    seconds = [each[name] for each, name in zip(passes, slowest, strict=True)]
    parts = "; ".join(
        ", ".join(f"{name} {value:.0f}" for name, value in each.items()) for each in passes
    )
    return f"| {machine.name} | {sum(seconds):.0f} | {', '.join(slowest)} | {parts} |"


def main() -> None:
    for title, kinds in (
        ("G decides nothing: one pass", [(True, True)]),
        ("the Gram matrix first: two passes", [(True, False), (False, True)]),
    ):
        print(f"{title}\n\n| machine | s | bottleneck of each pass | s of each part |")
        print("|---|--:|---|---|")
        for machine in MACHINES:
            print(row(machine, [read_pass(machine, *kind) for kind in kinds]))
        print()
    print(f"task_arithmetic, CPU: {THEIRS * (T + 1) * PARAMETERS:.0f} s on two cores")


if __name__ == "__main__":
    main()
