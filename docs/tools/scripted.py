"""What the scripts of experiments/ that are no comparisons say of claims: rank, parameters, forgetting, anchor."""

from __future__ import annotations

from criteria import FAILS, HOLDS, NOT_RUN, NOTHING, PART, Finding
from evidence import Evidence
from wording import brief, joined, number, paragraph, shown, table

from prism.lab.statistics import Estimate, estimate


def rank(evidence: Evidence) -> Finding:
    rows = evidence.single("write_rank")
    if rows is None:
        return Finding(NOT_RUN, "", NOTHING)
    own = [row for row in rows if not row["shared_key"]]
    exact = all(row["rank"] == [row["L"]] * 2 for row in own)
    one = all(row["rank"] == [1, 1] for row in rows if row["shared_key"])

    def effective(weights: str, preset: str, L: int) -> Estimate:
        chosen = [r for r in own if (r["weights"], r["preset"], r["L"]) == (weights, preset, L)]
        return estimate(row["effective"] for row in chosen)

    kinds = [("`lm`, random weights", "random", "lm"), ("`paper`, random weights", "random", "paper")]
    kinds += [("`lm`, trained on text", "trained", "lm")] if any(r["weights"] == "trained" for r in own) else []
    cells = [[name, *[shown(effective(*kind, L), 2) for L in (2, 3, 4)]] for name, *kind in kinds]
    seeds = len({row["seed"] for row in rows})
    last = next(found for kind in ("trained", "random") if (found := effective(kind, "lm", 4)).count)
    small = effective("trained", "lm", 4).count > 0 and last.mean < 1.2
    text = [
        f"The rank is {'exactly L at every token' if exact else 'not L at every token'}, for L = 1 to 4, both presets and",
        f"{seeds} seeds. With a shared key it is {'1' if one else 'not 1'}. But the parts are not equal: the effective",
        "rank (Σσ²)² / Σσ⁴ is smaller than L.",
        "In trained models it is near 1: the extra writes are small next to the first." if small else "",
    ]
    figure = f"rank L; effective rank {shown(last, 2)} of 4"
    verdict = HOLDS if exact else FAILS
    return Finding(verdict, figure, joined(paragraph(*text), table(["effective rank", "L = 2", "3", "4"], cells)))


def parameters(evidence: Evidence) -> Finding:
    rows = evidence.single("parameters")
    if rows is None:
        return Finding(NOT_RUN, "", NOTHING)
    added: dict[str, list[float]] = {
        preset: [r["mixer_over_gated_delta"] for r in rows if r.get("preset") == preset and r["steps"] > 1]
        for preset in ("lm", "paper")
    }
    below = [max(values) < 0.1 for values in added.values()]
    verdict = HOLDS if all(below) else PART if any(below) else FAILS
    cells = []
    for preset in ("lm", "paper"):
        for L in (2, 3, 4):
            chosen = [row for row in rows if row.get("preset") == preset and row["steps"] == L]
            columns = [[row[f"{what}_over_gated_delta"] for row in chosen] for what in ("mixer", "model")]
            cells.append([f"`{preset}`, L = {L}", *[f"{min(c):.1%} to {max(c):.1%}" for c in columns]])
    sizes = [row["size"] for row in rows if row["rule"] == "gated_delta"]
    text = paragraph(
        f"Parameters that PRISM has more than Gated DeltaNet, over the sizes {', '.join(sizes)} of `prism train lm`. With",
        "low-rank maps (`lm`) the claim holds up to L = 4; with the full maps of the paper's equations (`paper`) it does not.",
    )
    figure = f"+{min(added['lm']):.0%} to +{max(added['lm']):.0%}; with full maps +{max(added['paper']):.0%}"
    return Finding(verdict, figure, joined(text, table(["", "of the layer", "of the whole model"], cells)))


def forgetting(evidence: Evidence) -> Finding:
    results = evidence.single("forgetting")
    if results is None:
        return Finding(NOT_RUN, "", NOTHING)
    cells, stable, free, ratios = [], [], [], []
    for row in results["cases"]:
        last = estimate([seed[-1] for seed in row["norm"] if seed[-1] is not None])
        growth = None if row["diverges"] else estimate(row["growth"])
        bounded = growth is not None and growth.mean < 0.1
        ratios += [last.mean / row["bound"]] if row["bound"] else []
        within = row["bound"] is None or last.mean <= 1.1 * row["bound"]
        if row["decay"] < 1 and row["erase"] == "sigmoid":
            stable.append(bounded and within)
        if row["erase"] == "none":
            free.append(growth is not None and growth.mean > 0.4)
        size = f"{last.mean:.0e}" if growth is None else f"{last.mean:,.0f}" if last.mean > 100 else f"{last.mean:.1f}"
        bound = "" if row["bound"] is None else f"{row['bound']:.1f}"
        cells.append([row["case"], "diverges" if growth is None else shown(growth, 2), size, bound])
    tokens, seeds = results["tokens"][-1], results["seeds"]
    over = max([0.0, *(ratio - 1 for ratio in ratios)])
    verdict = HOLDS if all(stable) and all(free) else PART if all(stable) or all(free) else FAILS
    text = paragraph(
        f"Growth is the exponent of the error in the length (0: bounded, ½: random walk, 1: proportional); {seeds} seeds,",
        f"{tokens:,} tokens, float64. The decay bounds the error, at most {over:.0%} above the theorem's bound (for",
        "independent errors that is a bound on the mean square). The erase alone bounds it only for",
        "keys that are erased sometimes. And β must be bounded: linear as in the paper's Eq. 11 the memory diverges.",
    )
    header = ["memory", "growth", f"‖error‖ after {tokens:,}", "bound"]
    pick = {row["case"]: cell for row, cell in zip(results["cases"], cells, strict=True)}
    figure = f"growth {pick['PRISM, α = .99'][1]}; without decay {pick['no forgetting'][1]}"
    return Finding(verdict, figure, joined(text, table(header, cells)))


def anchor(evidence: Evidence) -> Finding:
    rows = evidence.single("anchor_error")
    if rows is None:
        return Finding(NOT_RUN, "", NOTHING)
    widths = sorted({row["conv_size"] for row in rows})
    wide = [row for row in rows if any(name.startswith("window_") for name in row)]

    def of(name: str, width: int) -> Estimate:
        return estimate(row[name] for row in rows if row["conv_size"] == width)

    window = {w: estimate(row[f"window_{w}"] for row in wide) for w in widths if wide and f"window_{w}" in wide[0]}
    cells = [
        [str(w), shown(of("own", w), 2), shown(of("fitted", w), 2), shown(window[w], 2) if w in window else ""]
        for w in widths
    ]
    grows = bool(window) and window[widths[-1]].mean > window[widths[0]].mean
    predicts = max(of("own", w).mean for w in widths) > 0
    verdict = NOT_RUN if not window else HOLDS if grows and predicts else PART if grows else FAILS
    first, last = widths[0], widths[-1]
    seeds = len({row["seed"] for row in rows})
    said = [
        "Share of the variance of the memory's answer Sᵀk that is explained on held-out text (1: all; 0: its mean; negative:",
        f"worse than its mean); small byte-level models, {seeds} seed{'s' * (seeds > 1)}.",
    ]
    if grows:
        peak = max(window, key=lambda w: window[w].mean)
        said.append(
            f"A wider window can predict more: the best linear map of the last w inputs gains up to w = {peak}."
        )
    if not predicts:
        said.append(
            "But what the model subtracts, W_u u, is worse than the mean at every width: training does not make"
        )
        said.append("the anchor an estimate of Sᵀk.")
    header = ["width w", "the model's own, W_u u", "best linear map of u", "best linear map of w inputs"]
    own = number(max(of("own", w).mean for w in widths), 2)
    ends = " → ".join(number(window[w].mean, 2) for w in (first, last)) if window else ""
    figure = brief(f"window {first} → {last}: {ends}" if ends else "", f"own anchor ≤ {own}")
    return Finding(verdict, figure, joined(paragraph(*said), table(header, cells)))
