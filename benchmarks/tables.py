"""Make the tables and pictures of docs/performance.md from the results of `gpu.py` and `throughput.py`.

python benchmarks/tables.py                        # prints Markdown, writes pictures to docs/images
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prism.lab.results import pyplot, save

HERE = Path(__file__).parent


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *[list(row) for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by(rows: list[dict[str, Any]], row: str, column: str, cell: Callable[[dict[str, Any]], str]) -> str:
    """A table with one line per value of `row` and one column per value of `column`, in order of appearance."""
    names = list(dict.fromkeys(str(r[row]) for r in rows))
    columns = list(dict.fromkeys(str(r[column]) for r in rows))
    cells = {(str(r[row]), str(r[column])): cell(r) for r in rows}
    return markdown(["", *columns], ([name, *[cells.get((name, c), "") for c in columns]] for name in names))


def memory(row: dict[str, Any]) -> str:
    """Peak memory, empty for a run on a CPU."""
    return f"{row['peak_bytes'] / 2**30:.0f} GiB" if row["peak_bytes"] else ""


def operators(results: dict[str, Any]) -> None:
    speed = results.get("speed", [])
    times = {(str(r["shape"]), r["what"]): r for r in speed}

    def cell(r: dict[str, Any]) -> str:
        """Milliseconds, and ratios to the same memory of flash-linear-attention, or else to its rank 1."""
        names = (f"fla {r['what']}", r["what"].replace("PRISM L=1,", "fla Gated DeltaNet,"), "fla Gated DeltaNet")
        peer = next((times[place] for name in names if (place := (str(r["shape"]), name)) in times), None)
        ratio = "" if peer is None else f" ({r['forward'] / peer['forward']:.2f}× / {r['both'] / peer['both']:.2f}×)"
        return f"{r['forward']:.2f} / {r['both']:.2f}{ratio}"

    print(by(speed, "what", "shape", cell), end="\n\n")
    for r in speed:
        if r["floors"]:
            shares = [r[name] / floor for name, floor in zip(("forward", "both"), r["floors"], strict=True)]
            print(f"{r['shape']} {r['what']}: {shares[0]:.1f} and {shares[1]:.1f} times the floor")
    decode = results.get("decode", [])
    numbers = ([f"{r[n]:.1f}" for n in ("called", "graph", "floor")] for r in decode)
    lines = ([str(r["batch"]), *cells] for r, cells in zip(decode, numbers, strict=True))
    print("\n" + markdown(["batch", "called µs", "in a graph µs", "floor µs"], lines))
    print("\nfirst call:", results.get("first call"), "ceilings:", results.get("ceilings"))
    accuracy = results.get("accuracy", [])
    print(f"accuracy: {sum(r['good'] for r in accuracy)} of {len(accuracy)} cases within twice torch's own error")


def models(results: dict[str, Any], pictures: Path) -> None:
    training, decoding = results.get("training", []), results.get("decoding", [])
    print(by(training, "model", "context", lambda r: f"{r['tokens_per_second'] / 1e3:.0f} K"), end="\n\n")
    print(by(training, "model", "context", memory), end="\n\n")
    print(
        markdown(
            ["", "parameters"], {r["model"]: [r["model"], f"{r['parameters'] / 1e6:.0f} M"] for r in training}.values()
        ),
        end="\n\n",
    )
    if decoding:
        print(by(decoding, "model", "context", lambda r: f"{r['milliseconds']:.2f} ms"), end="\n\n")
        print(by(decoding, "model", "context", lambda r: f"{r['state_bytes_a_row'] / 2**20:.1f} MiB"), end="\n\n")
    print("failed:", results.get("failed"))
    picture(training, "tokens_per_second", "tokens a second in training", pictures / "throughput.png")
    picture(decoding, "milliseconds", "milliseconds a token, batch 32", pictures / "decoding.png")


def networks(results: dict[str, Any], pictures: Path) -> None:
    """Compare models at one context: tokens per second, and how many times as fast the first one is."""
    rows = results["training"]
    speeds = [r["tokens_per_second"] / 1e3 for r in rows]
    times = [f"{speeds[0] / speed:.1f}×" for speed in speeds]
    cells = ([r["model"], f"{s:.1f} K", t, memory(r)] for r, s, t in zip(rows, speeds, times, strict=True))
    print(markdown(["", "tokens/s", "the first is faster by", "peak memory"], cells), end="\n\n")
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
    bars = axes.barh([r["model"] for r in rows], speeds)
    axes.bar_label(
        bars,
        [f"{s:.0f} K" if t == "1.0×" else f"{s:.0f} K ({t} slower)" for s, t in zip(speeds, times, strict=True)],
        padding=3,
    )
    axes.set(xlabel="thousand tokens a second in training", xlim=(0, 1.15 * max(speeds)))
    axes.invert_yaxis()
    save(figure, pictures / "networks.png")
    plt.close(figure)


def picture(rows: list[dict[str, Any]], what: str, label: str, path: Path) -> None:
    if not rows:
        return
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == name]
        axes.plot([r["context"] for r in own], [r[what] for r in own], marker="o", markersize=3, label=name)
    axes.set(xscale="log", xlabel="context", ylabel=label, ylim=(0, None))
    contexts = sorted({r["context"] for r in rows})
    axes.set_xticks(contexts, [f"{c // 1024}K" for c in contexts], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=7)
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of gpu.json and throughput.json")
    parser.add_argument("--pictures", type=Path, default=HERE.parent / "docs" / "images")
    arguments = parser.parse_args()
    found = [p for p in sorted(arguments.results.glob("*.json")) if p.stem.startswith(("gpu", "throughput"))]
    if not found:
        parser.error(f"{arguments.results} holds no results: run gpu.py and throughput.py on a GPU first")
    for path in found:
        results = json.loads(path.read_text())["results"]
        print(f"## {path.stem}\n")
        if path.stem.startswith("gpu"):
            operators(results)
        elif path.stem == "throughput-networks":
            networks(results, arguments.pictures)
        elif path.stem == "throughput":
            models(results, arguments.pictures)


if __name__ == "__main__":
    main()
