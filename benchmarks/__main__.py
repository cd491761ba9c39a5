"""``python -m benchmarks [NAME ...]``: prints figures, writes raw JSON to benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

from benchmarks import memory, orchestration, store, throughput

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the chosen benchmarks on the demo's model and chats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["throughput", "memory"])
    parser.add_argument("--job", default="examples/demo/job.yaml")
    parser.add_argument("--rounds", type=int, default=5, help="of throughput, store and orchestration")
    parser.add_argument("--dir", default=".cache/coresample-demo", help="of the demo's model and chats, for throughput")
    parser.add_argument("--dataset", default=".cache/coresample-demo/dataset", help="of make demo, for store")
    parser.add_argument("--parts", default="local,spool,encoding,upload", help="of the store benchmark")
    throughput.add_options(parser)
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name in options.names:
        with tempfile.TemporaryDirectory(prefix="coresample-bench-") as folder:
            root = Path(folder) / "dataset"
            if name == "throughput":
                suffix = "" if options.target == "disk" and not options.sink else f"-{options.target}"
                suffix += "-sink" if options.sink else ""
                result = throughput.run(options, RESULTS / f"{name}{suffix}.json")
            elif name == "memory":
                result = memory.run(options.job, root, [])
            elif name == "store":
                result = store.run(Path(options.dataset), root, options.rounds, options.parts.split(","))
            elif name == "orchestration":
                result = orchestration.run(options.rounds)
            else:
                parser.error(f"unknown benchmark {name!r}; there are throughput, memory, store and orchestration")
        if name == "throughput":
            print(json.dumps(result.get("summary", {}), indent=1))
            continue  # it has written its file
        result |= {"date": time.strftime("%Y-%m-%d"), "cpu": platform.processor() or platform.machine()}
        file = RESULTS / f"{name}.json"
        if name == "store" and file.exists():  # parts that were not asked for stay as they were measured
            result = json.loads(file.read_text(encoding="utf-8")) | result
        file.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if name == "store":
            continue  # it has told its parts
        print(json.dumps({k: v for k, v in result.items() if k not in ("pairs", "engine")}, indent=1))


if __name__ == "__main__":
    main()
