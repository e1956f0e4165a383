"""Write what the library computes on a CPU, and compare two such dumps bit for bit, before and after a change of the code.

    python benchmarks/dump.py --out FOLDER                    # all parts; minutes on one core
    python benchmarks/dump.py --out FOLDER --only engine      # engine, models, products
    python benchmarks/dump.py --compare BEFORE AFTER          # a table of what differs; exit code 1 if something does

Parts
- engine: every rule in every form that it supports, in float64 and float32, over 1, 70 and 131 tokens, with padding, with packed
  documents and from a state: outputs, states, gradients of inputs, states and parameters. Tokens one at a time after a prefix.
  PRISM with its main options. The normal form itself (`prism.Update`) with second derivatives. Names and initial weights.
- models: a small language model of every rule, and recommenders: logits, losses, gradients, caches, greedy texts.
- products: the command line on synthetic text, chats, pairs and events: losses and validations of short runs, their weights,
  prepared files, texts, evaluations, lists, user states; converted models.

Design choices
- Only public names and commands, so that it runs on both sides of a redesign. Models are made through transformers' Auto classes.
- Deterministic: one thread, fixed seeds, no times, no paths. Noise of a fixed seed is added to all weights, because some start
  at zero and would hide what follows them; it depends on a parameter's shape alone, not on its name or place.
- index.json has a SHA-256 of the bytes of every tensor, its shape and its largest magnitude. tensors.safetensors has all of a small
  tensor and evenly spaced elements of a larger one: the difference shown for the latter is a lower bound (≥).
- Bits depend on processor and versions: compare dumps of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import prism

KEPT = 64
"""Elements of a tensor that are stored."""
WIDTH, HEADS, BATCH = 32, 2, 2
LENGTHS, LENGTH, PREFIX, TOKENS = (1, 70, 131), 70, 5, 4
PRISM = {
    "steps=1": {"steps": 1},
    "steps=3": {"steps": 3},
    "gelu": {"solver": "gelu", "steps": 3},
    "gain=False": {"gain": False},
    "nonlinearity=False": {"nonlinearity": False},
    "residual=value": {"residual": "value"},
    "shared_key": {"shared_key": True},
    "key_rank=0": {"key_rank": 0},
    "forget=channel": {"forget": "channel"},
    "negative_eigenvalues": {"negative_eigenvalues": True},
    "conv_size=1": {"conv_size": 1},
    "gate_by=silu": {"gate_by": "silu"},
    "timescales=drawn": {"timescales": "drawn"},
}
PAPER = {"default": {}, "closed": {"solver": "closed"}, "gate,qkv_conv": {"gate": True, "qkv_conv": True}}
ONLINE = ("ttt_linear", "ttt_mlp", "titans", "atlas")
"""Rules whose memory is a network, which has one more form: online learning."""


class Dump:
    """What was computed, by name: `group/…/entry`."""

    def __init__(self) -> None:
        self.index: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, x: Tensor) -> None:
        flat = x.detach().cpu().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
        largest = float(flat.abs().max()) if flat.is_floating_point() and flat.numel() else None
        self._add(name, {"shape": list(x.shape), "dtype": str(x.dtype), "sha256": digest, "largest": largest})
        self.tensors[name] = flat[:: max(1, -(-flat.numel() // KEPT))].clone()

    def all(self, group: str, tensors: dict[str, Tensor]) -> None:
        for name, x in tensors.items():
            self.tensor(f"{group}/{name}", x)

    def value(self, name: str, value: Any) -> None:
        """Anything that JSON holds."""
        self._add(name, {"value": json.loads(json.dumps(value))})

    def shapes(self, name: str, module: nn.Module) -> None:
        self.value(name, {key: list(x.shape) for key, x in sorted(module.state_dict().items())})

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file(self.tensors, folder / "tensors.safetensors")
        lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(self.index.items()))
        (folder / "index.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        if name in self.index:
            raise ValueError(f"two entries of the dump are called {name!r}")
        self.index[name] = entry


# What a redesign may rename is looked up here, and nowhere else.


def mixer_of(rule: str, **options: Any) -> prism.Mixer:
    torch.manual_seed(0)
    if rule == "prism_paper" and rule not in prism.rules.names():
        rule, options = "prism", {"preset": "paper", **options}
    return prism.Mixer(rule, WIDTH, HEADS, **options)


def one_token(mixer: prism.Mixer, x: Tensor, state: prism.State) -> tuple[Tensor, prism.State]:
    step = getattr(mixer, "step", None) or mixer.decode
    return step(x, state)


# Inputs.


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@torch.no_grad()
def disturbed(module: nn.Module) -> None:
    """Add noise to all parameters."""
    for parameter in module.parameters():
        parameter += 0.05 * drawn(*parameter.shape, seed=1).to(parameter.dtype)


def backward(
    dump: Dump, group: str, outputs: dict[str, Tensor], leaves: dict[str, Tensor], twice: bool = False
) -> None:
    """Record outputs and the gradients of their sum with fixed random weights; with `twice` second derivatives too."""
    dump.all(group, outputs)
    weighted = [(y * drawn(*y.shape, seed=2, dtype=y.dtype)).sum() for y in outputs.values() if y.requires_grad]
    if not weighted:
        return
    total = torch.stack(weighted).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, create_graph=twice)
    gradients = {name: x for name, x in zip(leaves, found, strict=True) if x is not None}
    dump.all(f"{group}/gradient", gradients)
    if twice:
        backward(dump, f"{group}/second", {name: x.square() for name, x in gradients.items()}, leaves)


def cases() -> Iterator[tuple[str, int, bool, dict[str, Tensor]]]:
    """Name, tokens, whether it continues a state, and arguments."""
    for tokens in LENGTHS:
        yield f"{tokens}", tokens, False, {}
    padding = torch.arange(LENGTH) % 9 != 4
    padding = torch.stack([padding, torch.arange(LENGTH) < LENGTH - 20])
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    starts[0, 30], starts[1, 0], starts[1, 64:66] = True, True, True
    yield "mask", LENGTH, False, {"mask": padding}
    yield "reset", LENGTH, False, {"reset": starts}
    yield "state", LENGTH, True, {}
    yield "state,mask,reset", LENGTH, True, {"mask": padding, "reset": starts}


# Parts.


def engine(dump: Dump) -> None:
    for rule in prism.rules.names():
        run_mixer(dump, f"engine/{rule}", rule, {})
    for kind, variants in {"prism": PRISM, "prism_paper": PAPER}.items():
        for name, options in variants.items():
            run_mixer(dump, f"engine/{kind} {name}", kind, options)
    for dtype in (torch.float64, torch.float32):
        for name, fields in updates(dtype).items():
            for form in ("recurrent", "parallel", "chunkwise", "scan"):
                run_update(dump, f"engine/update {name}/{form}/{str(dtype)[6:]}", fields, form)


def run_mixer(dump: Dump, group: str, rule: str, options: dict[str, Any]) -> None:
    for dtype in (torch.float64, torch.float32):
        mixer = mixer_of(rule, **options)
        if dtype == torch.float32:
            dump.shapes(f"{group}/names", mixer)
            dump.all(f"{group}/initial", dict(mixer.named_parameters()))
        mixer.to(dtype)
        disturbed(mixer)
        with torch.no_grad():
            before = mixer(drawn(BATCH, PREFIX, WIDTH, seed=3, dtype=dtype))[1]
        for form in (*mixer.forms, *(("serial",) if rule in ONLINE else ())):
            for name, tokens, continues, arguments in cases():
                x = drawn(BATCH, tokens, WIDTH, seed=4, dtype=dtype).requires_grad_()
                leaves = {"x": x, **dict(mixer.named_parameters())}
                state = before.map(torch.clone) if continues else None
                if state is not None:
                    parts = {key: part for key, part in state.tensors().items() if part.is_floating_point()}
                    leaves |= {f"state.{key}": part.requires_grad_() for key, part in parts.items()}
                y, after = mixer(x, state, form=form, **arguments)
                outputs = {"output": y, **{f"state.{key}": part for key, part in after.tensors().items()}}
                backward(dump, f"{group}/{form}/{str(dtype)[6:]}/{name}", outputs, leaves)
        with torch.no_grad():
            state = before
            for place in range(TOKENS):
                y, state = one_token(mixer, drawn(BATCH, WIDTH, seed=5 + place, dtype=dtype), state)
                dump.tensor(f"{group}/token/{str(dtype)[6:]}/output.{place}", y)
            dump.all(f"{group}/token/{str(dtype)[6:]}", state.tensors())


def updates(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Fields of `prism.Update`, by name."""
    K, V = 8, 6

    def unit(*shape: int, seed: int) -> Tensor:
        return nn.functional.normalize(drawn(BATCH, *shape, K, seed=seed), dim=-1).to(dtype).requires_grad_()

    def plain(groups: int = HEADS, writes: int = 2, substeps: int = 1) -> dict[str, Tensor]:
        w = drawn(BATCH, LENGTH * substeps, HEADS, writes, V, seed=7, dtype=dtype)
        k = unit(LENGTH * substeps, groups, writes, seed=6)
        return {"q": unit(LENGTH, groups, seed=5), "k": k, "w": w.requires_grad_()}

    head = {"log_decay": (-drawn(BATCH, LENGTH, HEADS, seed=8).abs() / 5).to(dtype).requires_grad_()}
    channel = {"log_decay": (-drawn(BATCH, LENGTH, HEADS, K, seed=9).abs() / 5).to(dtype).requires_grad_()}
    beta = drawn(BATCH, 2 * LENGTH, HEADS, seed=10, dtype=dtype).sigmoid()
    strength = {"erase_strength": beta[:, :LENGTH].clone().requires_grad_()}
    key, write = {"erase_key": unit(LENGTH, HEADS, seed=11)}, {"erase_write": unit(LENGTH, HEADS, seed=12)}
    return {
        "no decay": plain(),
        "head": plain() | head,
        "channel": plain() | channel,
        "head, erase": plain() | head | key | strength,
        "channel, erase": plain() | channel | key | strength,
        "head, erase first": plain() | head | strength | {"erase_first": True},
        "channel, erase first": plain() | channel | strength | {"erase_first": True},
        "channel, erase write": plain() | channel | key | write,
        "channel, erase write first": plain() | channel | key | {"erase_write_first": True},
        "head, undecayed": plain() | head | key | strength | {"erase_on": "undecayed"},
        "channel, read before": plain() | channel | {"read": "before"},
        "groups": plain(groups=1) | head | strength | {"erase_first": True},
        "substeps": plain(writes=1, substeps=2)
        | head
        | {"erase_strength": beta.clone().requires_grad_(), "erase_first": True, "substeps": 2},
    }


def run_update(dump: Dump, group: str, fields: dict[str, Any], form: str) -> None:
    leaves = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
    o, state = prism.memory(prism.Update(**fields), form=form, backend="torch")
    backward(dump, group, {"output": o, "state": state}, leaves, twice=form in ("recurrent", "chunkwise"))


def models(dump: Dump) -> None:
    import prism.models  # noqa: F401 - registers with transformers

    small: dict[str, Any] = {"hidden_size": WIDTH, "num_heads": HEADS, "num_hidden_layers": 2}
    for layers in (*prism.rules.names(), "prism+softmax", "gated_delta+sliding_window", "prism(steps=1)+kda"):
        model = model_of("prism", vocab_size=64, layers=layers, **small)
        run_language_model(dump, f"models/lm {layers}", model)
    for layers in ("prism", "gated_delta", "kda", "mamba2", "softmax", "hstu"):
        model = model_of("prism_rec", num_items=50, layers=layers, time_gaps=layers == "prism", **small)
        run_recommender(dump, f"models/rec {layers}", model)


def model_of(kind: str, **settings: Any) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    build = AutoModelForCausalLM if kind == "prism" else AutoModel
    return build.from_config(AutoConfig.for_model(kind, **settings))


def run_language_model(dump: Dump, group: str, model: Any) -> None:
    dump.shapes(f"{group}/names", model)
    dump.all(f"{group}/initial", dict(model.named_parameters()))
    disturbed(model)
    ids = torch.randint(0, 64, (BATCH, 48), generator=torch.Generator().manual_seed(0))
    real = torch.arange(48) >= torch.tensor([[0], [7]])
    result = model.train()(ids, attention_mask=real, labels=ids.where(real, -100))
    backward(dump, f"{group}/training", {"loss": result.loss}, dict(model.named_parameters()))
    with torch.no_grad():
        result = model.eval()(ids, use_cache=True)
        dump.tensor(f"{group}/reading/logits", result.logits)
        dump.tensor(f"{group}/reading/masked", model(ids, attention_mask=real).logits)
        for place in range(TOKENS):
            result = model(ids[:, place : place + 1], past_key_values=result.past_key_values, use_cache=True)
            dump.tensor(f"{group}/decoding/logits.{place}", result.logits)
        dump.all(f"{group}/decoding/cache", result.past_key_values.tensors())
        for name, row in {"whole": ids[:1], "batch": ids}.items():
            text = model.generate(row, max_new_tokens=12, do_sample=False, pad_token_id=0)
            dump.value(f"{group}/generate/{name}", text[:, ids.shape[1] :].tolist())


def run_recommender(dump: Dump, group: str, model: Any) -> None:
    dump.shapes(f"{group}/names", model)
    dump.all(f"{group}/initial", dict(model.named_parameters()))
    disturbed(model)
    items = torch.randint(1, 51, (BATCH, 40), generator=torch.Generator().manual_seed(0))
    gaps = {"gaps": (torch.arange(80.0) ** 3).reshape(BATCH, 40)} if model.config.time_gaps else {}
    hidden = model.eval()(items, **gaps).hidden
    scores = model.scores(hidden[:, -1])
    dump.tensor(f"{group}/scores", scores)
    backward(dump, group, {"hidden": hidden, "real scores": scores[:, 1:]}, dict(model.named_parameters()))


def products(dump: Dump) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_sources(work)
        lm = ["--data.sources", "text.txt", "--data.tokenizer", "bytes", "--data.context", "96", "--sample.every", "10"]
        lm += ["--model.hidden-size", "32", "--model.num-heads", "2", "--model.num-hidden-layers", "2"]
        train(dump, work, "lm", [*lm, "--optimizer.lr", "0.01"])
        chats = ["lm/model", "--data.sources", "chats.jsonl", "--data.context", "64", "--data.validation", "0.1"]
        train(dump, work, "sft", chats)
        train(dump, work, "dpo", [arg.replace("chats", "pairs") for arg in chats])
        rec = ["--model.hidden-size", "16", "--model.num-heads", "1", "--data.length", "12"]
        events = ["--data.source", "events.csv", "--data.features", "kind", "--model.time-gaps", "--data.min-user", "3"]
        train(dump, work, "rec", [*rec, *events])
        synthetic = [f"--data.synthetic.{name}={count}" for name, count in SYNTHETIC.items()]
        sampled = ["--model.layers", "hstu", "--loss.name", "sampled_softmax", "--loss.count", "16"]
        train(dump, work, "rec", [*rec, *synthetic, *sampled], run="rec-synthetic")
        write_texts(dump, work)
        rank_and_recommend(dump, work)
        convert(dump, work)


SYNTHETIC = {"users": 60, "items": 120, "events": 1500}
COMMON = "--steps 20 --device cpu --validation.every 10 --log.every 1 --checkpoint.every 10 --schedule.warmup 2".split()


def write_sources(work: Path) -> None:
    """Text, chats, pairs of answers, events."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(200)]
    documents = (" ".join(draw.choices(words, k=120)) for _ in range(60))
    (work / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    chats, pairs = [], []
    for i in range(60):
        a, b = i % 7, i % 5
        turns = [("user", f"{a}+{b}"), ("assistant", f"{a + b}"), ("user", "?"), ("assistant", f"{a + b}!")]
        chats.append({"messages": [{"role": role, "content": text} for role, text in turns[: 4 if i % 3 == 0 else 2]]})
        pairs.append({"prompt": f"{a}+{b}", "chosen": f"{a + b}", "rejected": "none" * (i % 2 + 1)})
    for name, rows in {"chats": chats, "pairs": pairs}.items():
        (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    events = []
    for user in range(50):
        place, time = draw.randrange(80), 1_700_000_000
        for _ in range(draw.randint(2, 24)):
            place, time = (place + draw.choice((1, 1, 1, 7, 30))) % 80, time + int(draw.expovariate(1 / 5000))
            events.append(f"u{user},i{place:02},{time},kind{place % 5}")
    draw.shuffle(events)
    (work / "events.csv").write_text("\n".join(["user,item,time,kind", *events]), encoding="utf-8")


def command(work: Path, *arguments: str) -> str:
    """Run `prism …` in the folder; what it printed."""
    source = str(Path(prism.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, "-m", "prism", *arguments], cwd=work, env=environment, capture_output=True, encoding="utf-8"
    )
    if result.returncode:
        raise SystemExit(f"prism {' '.join(arguments)} failed:\n{result.stderr}")
    return result.stdout


def train(dump: Dump, work: Path, kind: str, arguments: Sequence[str], run: str = "") -> None:
    """Run 20 steps; record its log without speeds, its weights, and its prepared files."""
    run = run or kind
    batch = ["--batch.sequences", "4", "--data.cache", f"{run}-cache"]
    command(work, "train", kind, *arguments, *COMMON, *batch, "--out", run)
    columns = defaultdict(list)
    for line in (work / run / "log.jsonl").read_text(encoding="utf-8").splitlines():
        for name, value in json.loads(line).items():
            if "per_second" not in name:
                columns[name].append(value)
    for name, values in columns.items():
        dump.value(f"products/{run}/log/{name}", values)
    dump.all(f"products/{run}/weights", load_file(work / run / "model" / "model.safetensors"))
    prepared = sorted(path for path in (work / f"{run}-cache").rglob("*") if path.is_file() and path.suffix != ".lock")
    for path in prepared:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        dump.value(f"products/{run}/prepared/{path.relative_to(work / f'{run}-cache').as_posix()}", digest)


def write_texts(dump: Dump, work: Path) -> None:
    options = ["--device", "cpu", "--max-new-tokens", "40"]
    variants = {
        "greedy": ["--prompt", "abc", "--temperature", "0", "--save-state", "text.safetensors"],
        "resumed": ["--state", "text.safetensors", "--temperature", "0"],
        "sampled": ["--prompt", "abc", "--seed", "3", "--top-k", "20", "--top-p", "0.9"],
        "prompts": ["--prompts", "pairs.jsonl", "--batch", "4"],
    }
    for name, arguments in variants.items():
        dump.value(f"products/generate/{name}", command(work, "generate", "lm", *arguments, *options))
    dump.all("products/generate/state", load_file(work / "text.safetensors"))
    command(work, "evaluate", "lm", "lm", "text.txt", "--positions", "--device", "cpu", "--output", "lm.json")
    dump.value("products/evaluate lm", without_seconds(json.loads((work / "lm.json").read_text())["results"]))


def rank_and_recommend(dump: Dump, work: Path) -> None:
    options = ["--device", "cpu"]
    baselines = ["--baselines", "popular", "item_knn", "ease"]
    command(work, "evaluate", "rec", "rec", *baselines, "--output", "ranked", *options)
    results = json.loads((work / "ranked" / "results.json").read_text(encoding="utf-8"))["results"]
    for name, value in without_seconds(results).items():
        dump.value(f"products/evaluate rec/{name}", value)
    lists = command(work, "recommend", "rec", "--all-users", "--json", "--save-states", "users.safetensors", *options)
    dump.value("products/recommend/lists", [json.loads(line) for line in lists.splitlines()])
    dump.all("products/recommend/states", load_file(work / "users.safetensors"))
    similar = command(work, "recommend", "rec", "--similar-to", "i01", "i02", "--json", *options)
    dump.value("products/recommend/similar", [json.loads(line) for line in similar.splitlines()])
    recommender = prism.Recommender.load(work / "rec")
    dump.value("products/recommend/history", repr(recommender.recommend([["i01", "i02", "i03"], ["i40"]], k=5)))


def without_seconds(value: Any) -> Any:
    """A JSON value without what a clock measured."""
    if isinstance(value, dict):
        return {name: without_seconds(entry) for name, entry in value.items() if "second" not in name}
    return [without_seconds(entry) for entry in value] if isinstance(value, list) else value


def convert(dump: Dump, work: Path) -> None:
    """Gated DeltaNet of transformers to ours, to PRISM, to flash-linear-attention's format and back."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "layer_types": ["linear_attention"] * 2}
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **heads, **linear)
    AutoModelForCausalLM.from_config(config).save_pretrained(work / "qwen")
    for target, source, options in (
        ("ours", "qwen", []),
        ("prism", "ours", ["--rule", "prism"]),
        ("fla", "ours", ["--to", "fla"]),
        ("back", "fla", []),
    ):
        command(work, "convert", source, "--output", target, *options)
        dump.all(f"products/convert/{target}", load_file(work / target / "model.safetensors"))
        if target != "fla":
            with torch.no_grad():
                model = AutoModelForCausalLM.from_pretrained(work / target).eval()
                dump.tensor(f"products/convert/{target}/logits", model(torch.arange(40)[None]).logits)


# Comparison.


class Difference:
    """What differs in a group of entries."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("equal", "differ", "missing", "new"), 0)
        self.largest, self.bound, self.worst = -1.0, "", ""

    def found(self, name: str, difference: float, bound: str = "") -> None:
        self.counts["differ"] += 1
        if difference > self.largest:
            self.largest, self.bound, self.worst = difference, bound, name


def compare(before: Path, after: Path) -> int:
    """Print a row for every group with a difference; 1 if there is one."""
    indices = [json.loads((folder / "index.json").read_text(encoding="utf-8")) for folder in (before, after)]
    samples = [load_file(folder / "tensors.safetensors") for folder in (before, after)]
    groups: dict[str, Difference] = defaultdict(Difference)
    for name in sorted({*indices[0], *indices[1]}):
        group = groups["/".join(name.split("/")[:3])]
        old, new = (index.get(name) for index in indices)
        if old is None or new is None:
            kind = "new" if old is None else "missing"
            group.counts[kind] += 1
            group.worst = group.worst or name
        elif old == new:
            group.counts["equal"] += 1
        elif "sha256" in old and "sha256" in new and old["shape"] == new["shape"]:
            a, b = (numbers(sample[name]) for sample in samples)
            whole = a.numel() == torch.Size(old["shape"]).numel()
            group.found(name, largest_difference(a, b), "" if whole else "≥ ")
        else:
            a, b = (leaves(entry.get("value", entry)) for entry in (old, new))
            same = len(a) == len(b) and all(
                x == y or isinstance(x, float) and isinstance(y, float) for x, y in zip(a, b)
            )
            pairs = [(x, y) for x, y in zip(a, b) if isinstance(x, float) and isinstance(y, float)]
            columns = torch.tensor(pairs or [(0.0, 0.0)], dtype=torch.float64)
            group.found(name, largest_difference(columns[:, 0], columns[:, 1]) if same else float("inf"))
    different = {name: group for name, group in groups.items() if group.counts["equal"] < sum(group.counts.values())}
    for name, group in different.items():
        counts = ", ".join(f"{count} {kind}" for kind, count in group.counts.items() if count)
        size = "" if group.largest < 0 else f", max abs diff {group.bound}{group.largest:.2e}"
        print(f"{name}: {counts}{size}\n    {group.worst}")
    total = {kind: sum(group.counts[kind] for group in groups.values()) for kind in Difference().counts}
    print(", ".join(f"{count} {kind}" for kind, count in total.items()))
    return 1 if different else 0


def numbers(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Infinite where only one is finite."""
    return float((a - b).where(a != b, 0.0).abs().nan_to_num(nan=torch.inf).max()) if a.numel() else 0.0


def leaves(value: Any) -> list[Any]:
    """Numbers (as floats), texts and names in a JSON value."""
    if isinstance(value, dict):
        return [leaf for name, entry in value.items() for leaf in (name, *leaves(entry))]
    if isinstance(value, list):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value]


PARTS = {"engine": engine, "models": models, "products": products}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="FOLDER", help="write a dump; the folder must not exist yet")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="show what differs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="write these parts")
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    if options.out.exists():
        parser.error(f"--out {options.out} exists: choose another folder")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    dump = Dump()
    for part in options.only:
        PARTS[part](dump)
    dump.save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
