"""`make bench`: keelbench against what a user would write instead, and against the limit.

Contenders take turns within one run, and only their ratios are reported: bare times say
more about the machine and its other work than about the code. Writes
benchmarks/results/cpu.json and the tables of docs/performance.md.
"""

import argparse
import json
import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Shape
from benchmarks.duel import ROUNDS, Side, duel
from benchmarks.limit import limit
from benchmarks.scaling import scaling
from benchmarks.tables import write_tables
from keelbench.native.library import describe
from keelbench.ramp import cpu_name

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "cpu.json"

SHAPES = (
    Shape(64, 64, 8, 64, 1),
    Shape(64, 64, 8, 64, 4),
    Shape(64, 32, 2, 64, 8),
    Shape(512, 32, 2, 64, 8),
    Shape(512, 64, 8, 64, 2),
)


def sides(shape: Shape, cores: int, with_compiled: bool, by_cpu_time: bool) -> list[Side]:
    """Ours first: as many single-threaded processes as cores, the lanes shared out.

    By CPU time each contender is one thread that does its share of that.
    """
    processes = min(cores, shape.lanes)
    share = Shape(shape.depth, shape.width, shape.batch, shape.seq, shape.lanes // processes)
    one = Shape(shape.depth, shape.width, shape.batch, shape.seq, 1)
    threads = cores if processes == cores and not by_cpu_time else 1
    if by_cpu_time:
        processes = 1
    found = [
        Side("keelbench", "keelbench", share, processes, 1),
        Side("(b) eager, one seed after another", "eager", one, 1, threads),
        Side("(b) in one process per core", "eager", one, processes, 1),
    ]
    if processes == 1:
        del found[2]
    if find_spec("torch_lr_finder") and find_spec("x_transformers") and shape.depth <= 64:
        found.append(Side("(a) x-transformers in LRFinder", "lr_finder", one, 1, threads))
    if with_compiled and shape.depth <= 64:
        found.append(Side("(c) eager, blocks compiled", "compiled", one, 1, threads))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compiled", action="store_true", help="time (c) too: takes minutes")
    parser.add_argument("--only", type=int, nargs="*", help="indices of shapes")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="single threads by CPU time: for a machine that is busy with other work",
    )
    parser.add_argument("--no-scaling", action="store_true")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    chosen = [
        shape
        for i, shape in enumerate(SHAPES)
        if arguments.only in (None, []) or i in arguments.only
    ]
    results: dict[str, Any] = {
        "environment": {
            "cpu": cpu_name(),
            "cores": cores,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "kernels": describe("cpu", "float32"),
            "load": os.getloadavg()[0],
            "rounds": arguments.rounds,
            "clock": "CPU time of single threads" if arguments.cpu_time else "wall time",
        },
        "limit": limit(SHAPES[0]),
    }
    print(json.dumps(results["limit"]))
    before = _before(results["environment"])
    again = {shape.name for shape in chosen}
    results["duels"] = [one for one in before.get("duels", []) if one["shape"] not in again]
    if not arguments.no_scaling:
        results["scaling"] = scaling()
    elif "scaling" in before:
        results["scaling"] = before["scaling"]
    for shape in chosen:
        contenders = sides(shape, cores, arguments.compiled, arguments.cpu_time)
        rows = duel(contenders, arguments.rounds, by_cpu_time=arguments.cpu_time)
        results["duels"].append({"shape": shape.name, "rows": rows})
        for row in rows:
            print(shape.name, row["label"], row["median"], "x", row["advantage"], flush=True)
        _write(results)


def _before(environment: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run on the same machine and clock left; empty if there is none."""
    if not FILE.exists():
        return {}
    before: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    same = all(
        before["environment"].get(key) == environment[key] for key in ("cpu", "torch", "clock")
    )
    return before if same else {}


def _write(results: dict[str, Any]) -> None:
    """After every duel, so that a run that is cut short keeps what it has."""
    order = [shape.name for shape in SHAPES]
    results["duels"].sort(key=lambda one: order.index(one["shape"]))
    RESULTS.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_tables(results)


if __name__ == "__main__":
    main()
