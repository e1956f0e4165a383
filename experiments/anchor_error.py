"""Measure how well PRISM's anchor predicts the memory's own answer, by the width of its convolution.

    python experiments/anchor_error.py novels.txt                 # experiments/results/anchor_error.json, docs/images/…

PRISM takes a short convolution u of the input for Sᵀk, which an explicit solver would read from the memory (Eq. 9). No loss
ties the two together. Small byte-level language models with an anchor of width 1, 2, 4, 8 and 16 are trained on one part of
a text. Then, on held-out parts, three predictions of S_{t-1}ᵀ k₁ are scored by the share of its variance that they explain
(1 is perfect, 0 is its mean, negative is worse than the mean):

    own       W_u u, what the model itself subtracts from v
    fitted    the best linear map of u (ridge regression on other held-out text)
    window    the best linear map of the last w inputs of the layer, of any convolution of that width

and `memory`, the variance of the answer itself, relative to that of v. Figures are means over layers and heads.
"""

from __future__ import annotations

import argparse
import lzma
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine import memory
from prism.lab.results import COLORS, pyplot, save, write_results
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn.mixer import Span
from prism.rules.parts import split_heads

ROOT = Path(__file__).parents[1]
WIDTHS = (1, 2, 4, 8, 16)
SHORTEST = 32
"""Tokens at the start of a sequence that are not scored: the memory is still empty."""


def read_bytes(path: Path) -> Tensor:
    """The bytes of a text, also of an .xz file."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sequences(text: Tensor, count: int, length: int, random: torch.Generator) -> Tensor:
    """`count` random sequences of a text, `[count, length]`."""
    start = torch.randint(len(text) - length, (count, 1), generator=random)
    return text[start + torch.arange(length)].long()


def train(
    text: Tensor, conv_size: int, seed: int, settings: argparse.Namespace, rank: int = 2
) -> tuple[PrismForCausalLM, float]:
    """A model with writes of `rank` whose anchors (no other convolution) are `conv_size` wide, and its last training loss."""
    torch.manual_seed(seed)
    config = PrismConfig(
        hidden_size=settings.width,
        num_heads=2,
        layers="prism",
        num_hidden_layers=settings.layers,
        rule_options={"prism": {"steps": rank, "key_dim": 32, "value_dim": settings.width // 2, "gate_by": "silu"}},
    )
    model = PrismForCausalLM(config)
    for layer in model.modules():
        if hasattr(layer, "writes") and layer.writes is not None:
            layer.writes.conv = type(layer.writes.conv)(settings.width, conv_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)
    random = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / 50, (settings.steps - step) / (0.3 * settings.steps))
        tokens = sequences(text, settings.batch, settings.context, random)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def answers(model: PrismForCausalLM, tokens: Tensor) -> list[dict[str, Tensor]]:
    """For every layer: its input x, the anchor u, W_u u, S_{t-1}ᵀk₁ and v, each `[N, T, …]`."""
    inputs: list[tuple[Any, Tensor]] = []
    mixers = [module for name, module in model.named_modules() if name.endswith(".mixer")]
    hooks = [m.register_forward_pre_hook(lambda m, args: inputs.append((m, args[0]))) for m in mixers]
    model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    found = []
    for mixer, x in inputs:
        rule = mixer.rule
        update, _, _ = rule.update(x, {}, Span())
        answer, _ = memory(replace(update, q=update.k[..., 0, :], read="before"))
        u, _ = rule.writes.conv(x, None, Span())
        own = split_heads(rule.writes.expected(u), rule.heads)
        found.append({"x": x, "u": u, "own": own, "answer": answer, "w": update.w[..., 0, :]})
    return found


def explained(target: Tensor, prediction: Tensor) -> Tensor:
    """Share of the variance of target `[N, V]` that a prediction explains."""
    return 1 - (target - prediction).square().sum() / (target - target.mean(0)).square().sum()


def fit(inputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor], ridge: float = 1e-3) -> float:
    """Explained share of the second target by the best linear map (with a constant) found on the first pair."""
    (a, b), (y, z) = inputs, targets
    scale = a.std(0).clamp_min(1e-6)
    a, b = (F.pad((part - inputs[0].mean(0)) / scale, (0, 1), value=1.0) for part in (a, b))
    gram = a.T @ a + ridge * len(a) * torch.eye(a.shape[1], dtype=a.dtype)
    return explained(z, b @ torch.linalg.solve(gram, a.T @ y)).item()


def window(x: Tensor, width: int) -> Tensor:
    """The last `width` inputs of every token, `[N, T, width · D]`."""
    padded = F.pad(x, (0, 0, width - 1, 0))
    return torch.cat([padded[:, i : i + x.shape[1]] for i in range(width)], -1)


def flat(x: Tensor) -> Tensor:
    """Tokens after the start of each sequence as rows in float64."""
    return x[:, SHORTEST:].flatten(0, 1).double()


def score(model: PrismForCausalLM, fitting: Tensor, scoring: Tensor, widths: tuple[int, ...]) -> dict[str, Any]:
    """Explained shares of one model, means over layers and heads."""
    shares: dict[str, list[float]] = {"own": [], "fitted": [], "memory": [], **{f"window_{w}": [] for w in widths}}
    for first, second in zip(answers(model, fitting), answers(model, scoring), strict=True):
        for head in range(first["answer"].shape[2]):
            y, z = flat(first["answer"][:, :, head]), flat(second["answer"][:, :, head])
            shares["own"].append(explained(z, flat(second["own"][:, :, head])).item())
            shares["memory"].append((z.var(0).sum() / flat(second["w"][:, :, head]).var(0).sum()).item())
            shares["fitted"].append(fit((flat(first["u"]), flat(second["u"])), (y, z)))
            for w in widths:
                pair = (flat(window(first["x"], w)), flat(window(second["x"], w)))
                shares[f"window_{w}"].append(fit(pair, (y, z)))
    return {name: sum(values) / len(values) for name, values in shares.items() if values}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Explained variance against width: a dot per seed, a line through the means."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    widths = sorted({row["conv_size"] for row in rows})
    lines = {
        "best linear map of the last w inputs": lambda w: [r[f"window_{w}"] for r in rows if f"window_{w}" in r],
        "best linear map of the trained anchor": lambda w: [r["fitted"] for r in rows if r["conv_size"] == w],
        "what the model subtracts, W_u u": lambda w: [r["own"] for r in rows if r["conv_size"] == w],
    }
    for (name, values), color in zip(lines.items(), COLORS, strict=False):
        found = [values(w) for w in widths]
        axes.plot(widths, [sum(v) / len(v) for v in found], color=color, marker="o", ms=3, label=name)
        for w, dots in zip(widths, found, strict=True):
            axes.plot([w] * len(dots), dots, ".", color=color, alpha=0.5)
    axes.axhline(0, color="#555", lw=0.8, ls=":")
    axes.set(xscale="log", xlabel="width of the window, tokens", ylabel="explained variance of Sᵀk", ylim=(None, 1))
    axes.set_xticks(widths, [str(w) for w in widths], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, perhaps compressed with xz; its last tenth is held out")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--held-out", type=int, default=48, help="sequences to fit on, and as many to score on")
    parser.add_argument("--output", type=Path, default=ROOT / "experiments" / "results" / "anchor_error.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "anchor-error.png")
    arguments = parser.parse_args()
    text = read_bytes(arguments.text)
    cut, half = int(0.9 * len(text)), int(0.95 * len(text))
    random = torch.Generator().manual_seed(10_000)
    fitting = sequences(text[cut:half], arguments.held_out, arguments.context, random)
    scoring = sequences(text[half:], arguments.held_out, arguments.context, random)
    shown = shlex.join([arguments.text.name if word == str(arguments.text) else word for word in sys.argv[1:]])
    about = {"command": f"python experiments/anchor_error.py {shown}", "text": arguments.text.name, "bytes": len(text)}
    rows = []
    for seed in arguments.seeds:
        for conv_size in arguments.widths:
            model, loss = train(text[:cut], conv_size, seed, arguments)
            widths = tuple(arguments.widths) if conv_size == 4 else ()
            with torch.no_grad():
                held_out = model(input_ids=scoring, labels=scoring).loss.item()
                found = score(model, fitting, scoring, widths)
            rows.append({"conv_size": conv_size, "seed": seed, "train_loss": loss, "held_out_loss": held_out, **found})
            write_results(arguments.output, rows, **about)
            print({name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
    draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
