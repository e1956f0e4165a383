"""Measure language models of 110 to 126 M parameters on one GPU: tokens/s and peak memory, in training and in decoding.

    python benchmarks/throughput.py                                    # the table of docs/performance.md
    python benchmarks/throughput.py --models prism-2 transformer --contexts 2048 131072
    python benchmarks/throughput.py --models prism-2 ttt_linear ttt_mlp-serial --contexts 2048 --tokens 32768 --graph \\
        --decode --output benchmarks/results/throughput-networks.json
    python benchmarks/throughput.py --tiny                             # a smoke test that also runs on a CPU

What is timed is the step of `prism train lm`: settings go in, and its own code (`prism.train.step`) computes forward, backward,
gradient norm and update, in bfloat16 autocast; only the tokens are random. Every batch holds the same number of tokens for
every context, so that a column shows the cost of the context itself. Models run one after the other in one process. The
contexts of a model take turns, because a GPU that has worked for some seconds is slower by two per cent; figures are the
median over all turns. A turn starts with an empty queue, as only the first step of a run does, so it has several steps.
`gated_delta-fla` is our model with flash-linear-attention's kernel for the memory, `gated_delta-fla-layer` with that library's
whole layer in place of ours, and `fla-gated_delta` is its own whole model, all at the same sizes and in the same steps. With
`--graph`, forward and backward are a CUDA graph: otherwise memories that process mini-batch after mini-batch wait for Python.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer_model import fla_kernels, fla_model, with_fla_layers
from prism.lab.results import write_results
from prism.language.model import build_model
from prism.language.settings import DataSettings, ModelSettings, Settings
from prism.language.task import LanguageTask
from prism.language.tokens import Batch
from prism.models import PrismCache, PrismForCausalLM
from prism.models.decode import PATIENCE, Patience
from prism.train.distributed import World, spread
from prism.train.loop import HostCopy
from prism.train.settings import BatchSettings
from prism.train.step import Step, Stepper

MODELS: dict[str, dict[str, Any]] = {
    "prism-1": {"layers": "prism", "options": ("prism.steps=1",)},
    "prism-2": {"layers": "prism", "options": ("prism.steps=2",)},
    "prism-2-channel": {"layers": "prism", "options": ("prism.steps=2", "prism.forget=channel")},
    "prism-4": {"layers": "prism", "options": ("prism.steps=4",)},
    "gated_delta": {"layers": "gated_delta"},
    "gated_delta-fla": {"layers": "gated_delta"},
    "gated_delta-fla-layer": {"layers": "gated_delta"},
    "fla-gated_delta": {"layers": "gated_delta"},
    "mamba2": {"layers": "mamba2", "num_heads": 12, "head_dim": None},
    "transformer": {"layers": "softmax", "num_heads": 12, "head_dim": None},
}
OTHERS = ("ttt_linear", "ttt_mlp", "ttt_mlp-serial", "titans", "slstm")
"""Much slower rules: timed only on request, with fewer tokens."""
CONTEXTS = (2048, 8192, 16384, 32768, 131072)


def settings(name: str, context: int, sequences: int, arguments: argparse.Namespace) -> Settings:
    """The settings of `prism train lm` for a model by name."""
    rule = name.removesuffix("-serial")
    chosen = MODELS.get(name, {"layers": rule, "num_heads": 12, "head_dim": None})
    sizes = {"vocab_size": 32000, "hidden_size": 768, "num_heads": 6, "num_hidden_layers": 12, "head_dim": 128}
    if arguments.tiny:
        sizes = {"vocab_size": 256, "hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "head_dim": None}
        chosen = {key: value for key, value in chosen.items() if key in ("layers", "options")}
    if rule != name:  # every token updates the weights that the token before it left
        chosen = {**chosen, "options": (f"{rule}.mini_batch=1",)}
    return Settings(
        model=ModelSettings(**{**sizes, **chosen}, gradient_checkpointing=arguments.checkpointing),
        data=DataSettings(context=context),
        batch=BatchSettings(sequences),
        device=arguments.device,
        compile=arguments.compile,
        recompute=arguments.recompute,
        graph=arguments.graph,
    )


class RandomTokens(LanguageTask):
    """The task of `prism train lm` with random tokens instead of a corpus."""

    def __init__(self, chosen: Settings, form: str | None) -> None:
        self.settings, self.weights, self.form = chosen, None, form

    def build(self) -> nn.Module:
        model = build_model(self.settings.model, self.settings.model.vocab_size, 0)
        if self.form is not None:
            model.config.form = self.form
        return model

    def samples(self, numbers: Any, device: torch.device) -> Batch:
        shape = self.settings.batch.sequences, self.settings.data.context + 1
        tokens = torch.randint(0, self.settings.model.vocab_size, shape)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)


class PeerLayerTokens(RandomTokens):
    """The same steps with flash-linear-attention's layers in our model."""

    def initialize(self, model: nn.Module) -> None:
        super().initialize(model)
        with_fla_layers(model, self.settings.model.head_dim)


class PeerModelTokens(RandomTokens):
    """The same steps with that library's own model, which shifts the labels itself: the last token has none."""

    def build(self) -> nn.Module:
        return fla_model(super().build(), self.settings.model.head_dim)

    def loss(self, model: nn.Module, samples: Batch) -> torch.Tensor:
        return model(samples.inputs, labels=samples.inputs, use_cache=False).loss * samples.targets.numel()


def task_of(name: str) -> type[RandomTokens]:
    if name.startswith("fla-"):
        return PeerModelTokens
    return PeerLayerTokens if name.endswith("-fla-layer") else RandomTokens


class Trainer:
    """A model, and the steps of `prism train lm` at each of several contexts."""

    def __init__(self, name: str, contexts: tuple[int, ...], tokens: int, arguments: argparse.Namespace) -> None:
        world = World(torch.device(arguments.device))
        form = "serial" if name.endswith("-serial") else None
        self.model, self.steps, self.made = None, {}, 0
        for context in contexts:
            chosen = settings(name, context, max(1, tokens // context), arguments)
            task = task_of(name)(chosen, form)
            if self.model is None:
                self.model = spread(task.build, task.initialize, world).train()
                stepper = Stepper(task, world, self.model)
                stepper.prepare()
            else:  # the same model and optimizer with other samples
                stepper = copy.copy(stepper)
                stepper.task, stepper.share, stepper.at_once = task, *[task.settings.batch.sequences] * 2
            self.steps[context] = stepper, task.samples(None, world.device)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def batch(self, context: int) -> int:
        return len(self.steps[context][1].inputs)

    def make(self, context: int, steps: int = 1) -> float:
        """Make steps as the loop does, which reads a step's numbers after it has queued the next; returns the last loss."""
        stepper, samples = self.steps[context]
        queued = None
        for _ in range(steps):
            self.made += 1
            step = Step(self.made, samples, samples.targets.numel(), 0.0)
            numbers = HostCopy(stepper.compute(step, 1.0, stopping=False, update=True))
            if queued is not None:
                queued.read()
            queued = numbers
        return queued.read()[0]


def train(name: str, contexts: tuple[int, ...], tokens: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per context. A model that runs out of memory recomputes whole layers, and its rows say so."""
    try:
        yield from _train(name, contexts, tokens, arguments)
        return
    except torch.OutOfMemoryError:
        print(f"{name:16} out of memory: layers are recomputed", flush=True)
    torch.cuda.empty_cache()  # outside the handler, which still holds the tensors
    arguments = argparse.Namespace(**{**vars(arguments), "checkpointing": True})
    yield from _train(name, contexts, tokens, arguments)


def _train(
    name: str, contexts: tuple[int, ...], tokens: int, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    # A graph keeps its memory: one context after the other, each with a new model.
    for group in [(context,) for context in contexts] if arguments.graph else [contexts]:
        yield from _turns(name, Trainer(name, group, tokens, arguments), arguments)


def _turns(name: str, trainer: Trainer, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per context: a first step of each context, then `turns` times `steps` timed steps of each."""
    first: dict[int, float] = {}
    peaks: dict[int, int | None] = {}
    losses: dict[int, float] = {}
    seconds: dict[int, list[float]] = {context: [] for context in trainer.steps}
    for context in trainer.steps:
        _reset_peak(arguments.device)
        started = time.perf_counter()
        trainer.make(context)
        first[context] = time.perf_counter() - started
    for _ in range(arguments.turns):
        for context in trainer.steps:
            if first[context] < 10 or arguments.graph:  # start-up costs do not matter for slower ones
                trainer.make(context)
            if not arguments.graph:  # a replay allocates nothing: its memory is that of the steps before it
                _reset_peak(arguments.device)
            started = time.perf_counter()
            losses[context] = trainer.make(context, arguments.steps)
            seconds[context].append((time.perf_counter() - started) / arguments.steps)
            peaks[context] = _peak(arguments.device)
    for context in trainer.steps:
        yield {
            "model": name,
            "parameters": trainer.parameters,
            "context": context,
            "batch": trainer.batch(context),
            "tokens_per_second": trainer.batch(context) * context / statistics.median(seconds[context]),
            "peak_bytes": peaks[context],
            "recomputed": arguments.checkpointing,
            "recompute": arguments.recompute,
            "graph": arguments.graph,
            "first_step_seconds": first[context],
            "loss": losses[context],
        }


@torch.inference_mode()
def decode(name: str, contexts: tuple[int, ...], batch: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds of one more token for every row after each context, and the bytes of state per row.

    Decoding is replayed as a CUDA graph if the states have a fixed size (models/decode.py), with memories in
    float32 and in bfloat16. The model is also called from Python.
    """
    torch.manual_seed(0)
    model = build_model(settings(name, 1, 1, arguments).model, 256 if arguments.tiny else 32000, 0)
    model = model.to(arguments.device).eval()
    if arguments.device == "cuda":
        model = model.to(torch.bfloat16)
    for context in contexts:
        tokens = torch.randint(0, model.config.vocab_size, (batch, context), device=arguments.device)
        cache = ordinary(PrismCache())
        # In parts where that changes nothing: a million tokens in one call exceed the memory.
        for part in tokens.split(8192 if model.config.constant_state else context, 1):
            logits = model(part, past_key_values=cache, logits_to_keep=1).logits
        states = cache.states if model.config.constant_state else []  # a growing cache would be in memory twice
        called, after = _token_by_token(model, cache, logits)
        row = {"model": name, "context": context, "batch": batch, "called_milliseconds": called}
        row["milliseconds"] = called
        if states:
            replayed = PrismCache()
            replayed.update(states, context)
            row["milliseconds"], again = _token_by_token(model, replayed, logits)
            if not torch.equal(after, again):
                raise AssertionError(f"{name}: replayed steps differ by {(after - again).abs().max().item():.1e}")
            cache = replayed
            row |= _with_half_states(model, states, context, logits)
        if arguments.device == "cuda":
            row["kernels_a_layer"] = _kernels(model, cache, logits) / model.config.num_hidden_layers
        yield {**row, "state_bytes_a_row": cache.nbytes // batch}


def ordinary(cache: PrismCache) -> PrismCache:
    """The cache, whose steps are never captured."""
    cache.graph = Patience(limit=-1)
    return cache


def _with_half_states(
    model: PrismForCausalLM, states: list[Any], context: int, logits: torch.Tensor
) -> dict[str, float]:
    """Milliseconds with memories kept in bfloat16, and how far the logits of the same tokens are from those with float32."""
    replayed, answers = PrismCache(torch.bfloat16), {}
    replayed.update(states, context)
    taken, _ = _token_by_token(model, replayed, logits)
    for dtype in (torch.float32, torch.bfloat16):
        cache = ordinary(PrismCache(dtype))
        cache.update(states, context)
        given = logits[:, -1:].argmax(-1)
        for _ in range(20):  # the same tokens for both
            answers[dtype] = model(given, past_key_values=cache, logits_to_keep=1).logits
    single, half = answers[torch.float32].float(), answers[torch.bfloat16].float()
    error = (half - single).norm() / single.norm()
    return {"bfloat16_states_milliseconds": taken, "bfloat16_states_error": error.item()}


def _kernels(model: PrismForCausalLM, cache: PrismCache, logits: torch.Tensor) -> int:
    """Kernels of one more step, copies included; the embedding and the logits count too."""
    following = logits[:, -1:].argmax(-1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model(following, past_key_values=cache, logits_to_keep=1)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def _token_by_token(
    model: PrismForCausalLM, cache: PrismCache, logits: torch.Tensor, count: int = 20, skip: int = PATIENCE + 3
) -> tuple[float, torch.Tensor]:
    """Decode greedily: the median milliseconds per token after the first `skip`, and the logits of the last token."""
    seconds = []
    for _ in range(count):
        following = logits[:, -1:].argmax(-1)
        following[0, 0].item()
        started = time.perf_counter()
        logits = model(following, past_key_values=cache, logits_to_keep=1).logits
        logits[0, 0, 0].item()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[skip:]), logits


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", help=f"any of {', '.join([*MODELS, *OTHERS])}, or any rule; no name: only decode"
    )
    parser.add_argument("--contexts", nargs="+", type=int, help=f"default: {' '.join(map(str, CONTEXTS))}")
    parser.add_argument("--tokens", type=int, help="tokens per batch (default: 131072)")
    parser.add_argument("--steps", type=int, default=6, help="steps per turn, timed together")
    parser.add_argument("--turns", type=int, default=3, help="turns per context")
    parser.add_argument(
        "--decode", nargs="*", default=["prism-2", "gated_delta", "mamba2", "transformer"],
        help="models whose decoding is timed after each context",
    )  # fmt: skip
    parser.add_argument("--decode-batch", type=int, default=32, help="batch size of decoding")
    parser.add_argument("--tiny", action="store_true", help="use small models, for a machine without a GPU")
    parser.add_argument("--graph", action="store_true", help="replay forward and backward as a CUDA graph")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument(
        "--recompute", choices=["auto", "none", "cheap"], default="auto", help="activations that are not kept"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no further model is started"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "throughput.json")
    arguments = parser.parse_args()
    arguments.device, arguments.checkpointing = "cuda" if torch.cuda.is_available() else "cpu", False
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("torch finds no GPU: use --tiny, which runs small models on the CPU")
    if arguments.device == "cpu" and arguments.graph:
        parser.error("--graph needs a GPU")
    served = [name for name in MODELS if arguments.device == "cuda" or "fla" not in name]
    arguments.models = served if arguments.models is None else arguments.models
    arguments.contexts = arguments.contexts or (list(CONTEXTS) if not arguments.tiny else [64, 256])
    arguments.tokens = arguments.tokens or (131072 if not arguments.tiny else 512)
    if arguments.steps < 1 or arguments.turns < 1:
        parser.error("--steps and --turns must be at least 1")

    begun = time.perf_counter()

    def spent() -> bool:
        return time.perf_counter() - begun > arguments.budget

    training, decoding, failed = [], [], []
    results = {"training": training, "decoding": decoding, "failed": failed}

    def keep() -> None:
        command = shlex.join(["python", "benchmarks/throughput.py", *sys.argv[1:]])
        write_results(arguments.output, results, command=command)

    for name in arguments.models:
        if spent():
            break
        try:
            with fla_kernels(name.endswith("-fla")):
                for row in train(name, tuple(arguments.contexts), arguments.tokens, arguments):
                    training.append(row)
                    memory = f"{row['peak_bytes'] / 2**30:6.1f} GiB" if row["peak_bytes"] else ""
                    print(
                        f"{name:16} {row['parameters'] / 1e6:6.1f} M  context {row['context']:>7}  batch {row['batch']:>3}  "
                        f"{row['tokens_per_second'] / 1e3:9.1f} K tokens/s  {memory}  first {row['first_step_seconds']:.1f} s",
                        flush=True,
                    )
        except Exception as error:  # one model that runs out of memory or does not compile must not stop the others
            failed.append({"model": name, "error": (str(error).splitlines() or [type(error).__name__])[0]})
            print(f"{name:16} failed: {failed[-1]['error']}", flush=True)
        keep()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    for name in arguments.decode:
        if spent():
            break
        try:
            for row in decode(
                name, tuple(c for c in arguments.contexts if c <= 32768), arguments.decode_batch, arguments
            ):
                decoding.append(row)
                more = ""
                if "bfloat16_states_milliseconds" in row:
                    more += f", {row['bfloat16_states_milliseconds']:.2f} with bfloat16 states"
                if "kernels_a_layer" in row:
                    more += f", {row['kernels_a_layer']:.1f} kernels a layer"
                print(
                    f"decode {name:14} context {row['context']:>6} batch {row['batch']}  "
                    f"{row['milliseconds']:.2f} ms per token, {row['called_milliseconds']:.2f} called from Python{more}, "
                    f"{row['state_bytes_a_row'] / 2**20:.2f} MiB per row",
                    flush=True,
                )
                keep()
        except (torch.OutOfMemoryError, AssertionError) as error:
            failed.append({"model": f"{name}, decoding", "error": str(error).splitlines()[0]})
            print(f"decode {name:14} failed: {failed[-1]['error']}", flush=True)
            keep()
    print("written to", arguments.output)


if __name__ == "__main__":
    main()
