"""Write what the library computes on a CPU, and compare two such dumps bit for bit: before and after a change of the code.

    python benchmarks/dump.py --out FOLDER                  # everything; minutes on one core
    python benchmarks/dump.py --out FOLDER --only engine    # or models, products: side by side, where there are cores
    python benchmarks/dump.py --compare BEFORE AFTER        # a table of what differs; exit code 1 if something does

Parts
- engine: every rule in every form that it has, in float64 and float32, over 1, 70 and 131 tokens, with padding, with packed
  documents and from a state: outputs, states, and gradients of inputs, states and parameters. Single tokens after a prefix.
  PRISM with its main options. `prism.Update` in every form, with second derivatives. Names and initial weights.
- models: small language models of every rule, and recommenders: logits, losses, gradients, caches, greedy texts.
- products: the command line on synthetic text, chats, pairs and events: losses and validations of short runs, their weights,
  prepared files, texts, evaluations, lists, states of users; converted models.

Design choices
- Only public names and commands, so that it runs on both sides of a redesign. transformers' Auto classes make the models.
- One thread, fixed seeds, no times, no paths. All weights are disturbed, because some start at zero and would hide what follows
  them. The noise depends on a parameter's shape alone, so that names and their order may change.
- PART.json has a SHA-256 of every tensor's bytes. PART.safetensors has small tensors, and evenly spaced elements of others: a
  difference shown for those is a lower bound (≥).
- Bits depend on the processor and on versions of torch: compare dumps of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
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
DTYPES = {"float64": torch.float64, "float32": torch.float32}
FORMS = ("recurrent", "parallel", "chunkwise", "scan")
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "prism": [
        {"steps": 1},
        {"steps": 3, "solver": "gelu"},
        {"gain": False},
        {"nonlinearity": False},
        {"residual": "value"},
        {"shared_key": True},
        {"key_rank": 0},
        {"forget": "channel"},
        {"negative_eigenvalues": True},
        {"conv_size": 1, "gate_by": "silu"},
    ],
    "prism_paper": [{}, {"solver": "closed"}, {"qkv_conv": True, "gate": True}],
    **{rule: [{"mini_batch": 1}] for rule in ("ttt_linear", "ttt_mlp")},  # online learning has a form of its own
}


class Dump:
    """What was computed, by name: `part/group/…`."""

    def __init__(self) -> None:
        self.index: dict[str, Any] = {}
        self.kept: dict[str, Tensor] = {}

    def tensor(self, name: str, x: Tensor) -> None:
        flat = x.detach().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        digest = hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()
        self._add(name, {"shape": list(x.shape), "dtype": str(x.dtype), "sha256": digest})
        self.kept[name] = flat[:: max(1, -(-flat.numel() // KEPT))].clone()

    def tensors(self, group: str, tensors: dict[str, Tensor]) -> None:
        for name, x in tensors.items():
            self.tensor(f"{group}/{name}", x)

    def value(self, name: str, value: Any) -> None:
        """Anything that JSON holds."""
        self._add(name, {"value": value})

    def weights(self, group: str, module: nn.Module) -> None:
        """Names and shapes of the state dict, and initial values."""
        self.value(f"{group}/names", {name: list(x.shape) for name, x in sorted(module.state_dict().items())})
        self.tensors(f"{group}/initial", dict(module.named_parameters()))

    def save(self, file: Path) -> None:
        save_file(self.kept, file.with_suffix(".safetensors"))
        lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(self.index.items()))
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        if name in self.index:
            raise ValueError(f"two entries of the dump are called {name!r}")
        self.index[name] = entry


def mixer_of(rule: str, options: dict[str, Any]) -> Any:
    """The paper's layer is a preset of `prism` or a rule of its own."""
    torch.manual_seed(0)
    if rule == "prism_paper" and rule not in prism.rules.names():
        rule, options = "prism", {"preset": "paper", **options}
    return prism.Mixer(rule, WIDTH, HEADS, **options)


def one_token(mixer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """x `[B, width]` → `[B, width]` and the new state, by whichever name the method has."""
    return (getattr(mixer, "step", None) or mixer.decode)(x, state)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@torch.no_grad()
def disturb(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter += 0.05 * drawn(*parameter.shape, seed=1, dtype=parameter.dtype)


def backward(
    dump: Dump, group: str, outputs: dict[str, Tensor], leaves: dict[str, Tensor], twice: bool = False
) -> None:
    """Record outputs, and the gradients of their sum with fixed random weights; `twice`: second derivatives too."""
    dump.tensors(group, outputs)
    weighted = [(y * drawn(*y.shape, seed=2, dtype=y.dtype)).sum() for y in outputs.values() if y.requires_grad]
    found = torch.autograd.grad(sum(weighted), list(leaves.values()), allow_unused=True, create_graph=twice)
    gradients = {name: x for name, x in zip(leaves, found, strict=True) if x is not None}
    dump.tensors(f"{group}/gradient", gradients)
    if twice:
        backward(dump, f"{group}/second", {name: x.square() for name, x in gradients.items()}, leaves)


def cases() -> Iterator[tuple[str, int, bool, dict[str, Tensor]]]:
    """Name, tokens, whether a state comes in, arguments."""
    padding = torch.stack([torch.arange(LENGTH) % 9 != 4, torch.arange(LENGTH) < LENGTH - 20])
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    starts[0, 30], starts[1, 0], starts[1, 47:49] = True, True, True
    for tokens in LENGTHS:
        yield f"{tokens}", tokens, False, {}
    yield "mask", LENGTH, False, {"mask": padding}
    yield "reset", LENGTH, False, {"reset": starts}
    yield "state", LENGTH, True, {}
    yield "state, mask, reset", LENGTH, True, {"mask": padding, "reset": starts}


def engine(dump: Dump) -> None:
    for rule in prism.rules.names():
        run_mixer(dump, f"engine/{rule}", rule, {})
    for rule, variants in VARIANTS.items():
        for options in variants:
            run_mixer(dump, f"engine/{rule}({', '.join(f'{k}={v}' for k, v in options.items())})", rule, options)
    for dtype in DTYPES:
        for name, fields in updates(DTYPES[dtype]).items():
            leaves = {key: x for key, x in fields.items() if isinstance(x, Tensor)}
            for form in FORMS:
                o, state = prism.memory(prism.Update(**fields), form=form, backend="torch")
                twice = form in ("recurrent", "chunkwise")
                group = f"engine/Update({name})/{form}/{dtype}"
                backward(dump, group, {"output": o, "state": state}, leaves, twice)


def run_mixer(dump: Dump, group: str, rule: str, options: dict[str, Any]) -> None:
    dump.weights(group, mixer_of(rule, options))
    for dtype, kind in DTYPES.items():
        mixer = mixer_of(rule, options).to(kind)
        disturb(mixer)
        with torch.no_grad():
            before = state = mixer(drawn(BATCH, PREFIX, WIDTH, seed=3, dtype=kind))[1]
            for place in range(TOKENS):
                y, state = one_token(mixer, drawn(BATCH, WIDTH, seed=5 + place, dtype=kind), state)
                dump.tensor(f"{group}/token/{dtype}/output {place}", y)
            dump.tensors(f"{group}/token/{dtype}", state.tensors())
        for form in mixer.forms:
            for name, tokens, continues, arguments in cases():
                x = drawn(BATCH, tokens, WIDTH, seed=4, dtype=kind).requires_grad_()
                leaves = {"x": x, **dict(mixer.named_parameters())}
                state = before.map(torch.clone) if continues else None
                for key, part in state.tensors().items() if continues else ():
                    if part.is_floating_point():
                        leaves[f"state {key}"] = part.requires_grad_()
                y, after = mixer(x, state, form=form, **arguments)
                outputs = {"output": y, **{f"state {key}": part for key, part in after.tensors().items()}}
                backward(dump, f"{group}/{form}/{dtype}/{name}", outputs, leaves)


def updates(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Fields of `prism.Update`, by name."""
    K, V = 8, 6

    def leaf(x: Tensor) -> Tensor:
        return x.to(dtype).requires_grad_()

    def unit(*shape: int, seed: int) -> Tensor:
        return leaf(nn.functional.normalize(drawn(BATCH, *shape, K, seed=seed), dim=-1))

    def writes(groups: int = HEADS, count: int = 2, substeps: int = 1) -> dict[str, Any]:
        w = leaf(drawn(BATCH, LENGTH * substeps, HEADS, count, V, seed=7))
        return {"q": unit(LENGTH, groups, seed=5), "k": unit(LENGTH * substeps, groups, count, seed=6), "w": w}

    def strength(substeps: int = 1) -> dict[str, Any]:
        return {"erase_strength": leaf(drawn(BATCH, LENGTH * substeps, HEADS, seed=10).sigmoid())}

    head = {"log_decay": leaf(-drawn(BATCH, LENGTH, HEADS, seed=8).abs() / 5)}
    channel = {"log_decay": leaf(-drawn(BATCH, LENGTH, HEADS, K, seed=9).abs() / 5)}
    key, write = {"erase_key": unit(LENGTH, HEADS, seed=11)}, {"erase_write": unit(LENGTH, HEADS, seed=12)}
    first: dict[str, Any] = {"erase_first": True}
    return {
        "no decay": writes(),
        "head": writes() | head,
        "channel": writes() | channel,
        "head, erase": writes() | head | key | strength(),
        "channel, erase": writes() | channel | key | strength(),
        "head, erase first": writes() | head | strength() | first,
        "channel, erase first": writes() | channel | strength() | first,
        "channel, erase write": writes() | channel | key | write,
        "channel, erase write first": writes() | channel | key | {"erase_write_first": True},
        "head, undecayed": writes() | head | key | strength() | {"erase_on": "undecayed"},
        "channel, read before": writes() | channel | {"read": "before"},
        "grouped": writes(groups=1) | head | strength() | first,
        "substeps": writes(count=1, substeps=2) | head | strength(substeps=2) | first | {"substeps": 2},
    }


def models(dump: Dump) -> None:
    small: dict[str, Any] = {"hidden_size": WIDTH, "num_heads": HEADS, "num_hidden_layers": 2}
    for layers in (*prism.rules.names(), "prism+softmax", "gated_delta+sliding_window", "prism(steps=1)+kda"):
        run_language_model(dump, f"models/lm {layers}", model_of("prism", vocab_size=64, layers=layers, **small))
    for layers in ("prism", "gated_delta", "kda", "mamba2", "softmax", "hstu"):
        model = model_of("prism_rec", num_items=50, layers=layers, time_gaps=layers == "prism", **small)
        run_recommender(dump, f"models/rec {layers}", model)


def model_of(kind: str, **settings: Any) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    build = AutoModel if kind == "prism_rec" else AutoModelForCausalLM
    return build.from_config(AutoConfig.for_model(kind, **settings))


def run_language_model(dump: Dump, group: str, model: Any) -> None:
    dump.weights(group, model)
    disturb(model)
    ids = torch.randint(1, 64, (BATCH, 48), generator=torch.Generator().manual_seed(0))
    real = torch.arange(48) >= torch.tensor([[0], [7]])
    loss = model.train()(ids, attention_mask=real, labels=ids.where(real, -100)).loss
    backward(dump, f"{group}/training", {"loss": loss}, dict(model.named_parameters()))
    model.eval()
    with torch.no_grad():
        dump.tensor(f"{group}/reading/padded", model(ids, attention_mask=real).logits)
        result = model(ids, use_cache=True)
        dump.tensor(f"{group}/reading/logits", result.logits)
        for place in range(TOKENS):
            result = model(ids[:, place : place + 1], past_key_values=result.past_key_values, use_cache=True)
            dump.tensor(f"{group}/decoding/logits {place}", result.logits)
        dump.tensors(f"{group}/decoding", result.past_key_values.tensors())
        for rows in (1, BATCH):
            texts = model.generate(ids[:rows], max_new_tokens=12, do_sample=False, pad_token_id=0)
            dump.value(f"{group}/generate/{rows}", texts[:, ids.shape[1] :].tolist())


def run_recommender(dump: Dump, group: str, model: Any) -> None:
    dump.weights(group, model)
    disturb(model.eval())
    items = torch.randint(1, 51, (BATCH, 40), generator=torch.Generator().manual_seed(0))
    gaps = {"gaps": (torch.arange(40.0) ** 3).expand(BATCH, 40)} if model.config.time_gaps else {}
    hidden = model(items, **gaps).hidden
    outputs = {"hidden": hidden, "scores": model.scores(hidden[:, -1])[:, 1:]}
    backward(dump, f"{group}/training", outputs, dict(model.named_parameters()))


def products(dump: Dump) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_sources(work)
        size = "--model.hidden-size 32 --model.num-heads 2 --model.num-hidden-layers 2"
        text = "--data.sources text.txt --data.tokenizer bytes --data.context 96 --sample.every 10"
        train(dump, work, "lm", f"lm {size} {text} --optimizer.lr 0.01")
        for kind, rows in {"sft": "chats", "dpo": "pairs"}.items():
            data = f"--data.sources {rows}.jsonl --data.context 64 --data.validation 0.1"
            train(dump, work, kind, f"{kind} lm/model {data}")
        size = "--model.hidden-size 16 --model.num-heads 1 --data.length 12"
        events = "--data.source events.csv --data.features kind --data.min-user 3 --model.time-gaps"
        train(dump, work, "rec", f"rec {size} {events}")
        drawn_events = "--data.synthetic.users 60 --data.synthetic.items 120 --data.synthetic.events 1500"
        sampled = "--model.layers hstu --loss.name sampled_softmax --loss.count 16"
        train(dump, work, "rec sampled", f"rec {size} {drawn_events} {sampled}")
        write_texts(dump, work)
        rank_and_recommend(dump, work)
        convert(dump, work)


def write_sources(work: Path) -> None:
    """Text, chats, pairs of answers, events."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(200)]
    text = "\n\n".join(" ".join(draw.choices(words, k=120)) for _ in range(60))
    (work / "text.txt").write_text(text, encoding="utf-8")
    chats, pairs, events = [], [], ["user,item,time,kind"]
    for a, b in [(i % 7, i % 5) for i in range(60)]:
        turns = [("user", f"{a}+{b}"), ("assistant", f"{a + b}"), ("user", "?"), ("assistant", f"{a + b}!")]
        chats.append({"messages": [{"role": role, "content": words} for role, words in turns[: 4 if a < 3 else 2]]})
        pairs.append({"prompt": f"{a}+{b}", "chosen": f"{a + b}", "rejected": "none" * (a % 2 + 1)})
    for name, rows in {"chats": chats, "pairs": pairs}.items():
        (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for user in range(50):
        item, time = draw.randrange(80), 1_700_000_000
        for _ in range(draw.randint(2, 24)):
            item, time = (item + draw.choice((1, 1, 1, 7, 30))) % 80, time + int(draw.expovariate(1 / 5000))
            events.append(f"u{user},i{item:02},{time},kind{item % 5}")
    (work / "events.csv").write_text("\n".join(events), encoding="utf-8")


def command(work: Path, arguments: str) -> str:
    """Run `prism …` in the folder, on the code that this process has imported; what it printed."""
    path = os.pathsep.join([str(Path(prism.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "prism", *arguments.split()]
    result = subprocess.run(words, cwd=work, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"prism {arguments} failed:\n{result.stderr}")
    return result.stdout


def train(dump: Dump, work: Path, name: str, arguments: str) -> None:
    """Run 20 steps; record the log without speeds, the weights, and the prepared files."""
    run = name.replace(" ", "-")
    schedule = "--steps 20 --schedule.warmup 2 --validation.every 10 --checkpoint.every 10 --batch.sequences 4"
    command(work, f"train {arguments} {schedule} --log.every 1 --device cpu --data.cache {run}-cache --out {run}")
    columns = defaultdict(list)
    for line in (work / run / "log.jsonl").read_text(encoding="utf-8").splitlines():
        for key, value in json.loads(line).items():
            columns[key].append(value)
    for key, values in columns.items():
        if not key.endswith("_per_second"):
            dump.value(f"products/{name}/log/{key}", values)
    dump.tensors(f"products/{name}/weights", load_file(work / run / "model" / "model.safetensors"))
    prepared = defaultdict(list)
    for path in sorted((work / f"{run}-cache").rglob("*.*")):
        if path.is_file() and path.suffix != ".lock":
            place = path.relative_to(work / f"{run}-cache").as_posix()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            prepared[re.sub("[0-9a-f]{16,}", "KEY", place)].append(digest)  # a key may depend on where the sources are
    for place, digests in prepared.items():
        dump.value(f"products/{name}/prepared/{place}", sorted(digests))


def write_texts(dump: Dump, work: Path) -> None:
    for name, arguments in {
        "greedy": "--prompt abc --temperature 0 --save-state text.safetensors",
        "resumed": "--state text.safetensors",
        "sampled": "--prompt abc --seed 3 --top-k 20 --top-p 0.9",
        "prompts": "--prompts pairs.jsonl --batch 4",
    }.items():
        texts = command(work, f"generate lm {arguments} --max-new-tokens 40 --device cpu")
        dump.value(f"products/generate/{name}", texts.splitlines())
    dump.tensors("products/generate/state", load_file(work / "text.safetensors"))
    command(work, "evaluate lm lm text.txt --positions --device cpu --output lm.json")
    record_results(dump, "products/evaluate lm", work / "lm.json")


def rank_and_recommend(dump: Dump, work: Path) -> None:
    command(work, "evaluate rec rec --baselines popular item_knn ease --output ranked --device cpu")
    record_results(dump, "products/evaluate rec", work / "ranked" / "results.json")
    for name, arguments in {
        "users": "--all-users --save-states users.safetensors",
        "states": "--states users.safetensors --k 3",
        "similar": "--similar-to i01 i02",
    }.items():
        lists = command(work, f"recommend rec {arguments} --json --device cpu").splitlines()
        dump.value(f"products/recommend/{name}", [json.loads(line) for line in lists])
    dump.tensors("products/recommend/state", load_file(work / "users.safetensors"))


def record_results(dump: Dump, group: str, file: Path) -> None:
    """Results of an evaluation, without what a clock measured."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: timeless(entry) for name, entry in value.items() if "second" not in name}
        return [timeless(entry) for entry in value] if isinstance(value, list) else value

    for name, value in json.loads(file.read_text(encoding="utf-8"))["results"].items():
        dump.value(f"{group}/{name}", timeless(value))


def convert(dump: Dump, work: Path) -> None:
    """Qwen3.5 of transformers to ours, to PRISM, to flash-linear-attention's format and back; what the models compute."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "layer_types": ["linear_attention"] * 2}
    model_of("qwen3_5_text", **sizes, **heads, **linear).save_pretrained(work / "qwen")
    for target, arguments in {
        "ours": "qwen",
        "prism": "ours --rule prism",
        "fla": "ours --to fla",
        "back": "fla",
    }.items():
        command(work, f"convert {arguments} --output {target}")
        dump.tensors(f"products/convert/{target}", load_file(work / target / "model.safetensors"))
        if target != "fla":
            model = AutoModelForCausalLM.from_pretrained(work / target).eval()
            dump.tensor(f"products/convert/{target}/logits", model(torch.arange(40)[None]).logits)


def compare(before: Path, after: Path) -> int:
    """Print a row for every group with a difference; 1 if there is one. Parts that only one dump has are left out."""
    parts = sorted({file.stem for file in before.glob("*.json")} & {file.stem for file in after.glob("*.json")})
    if not parts:
        raise SystemExit(f"{before} and {after} have no part of a dump in common")
    old, new, old_kept, new_kept = (loaded(folder, parts, kept) for kept in (False, True) for folder in (before, after))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    worst: dict[str, tuple[float, str]] = {}
    for name in sorted({*old, *new}):
        places = name.split("/")
        group = "/".join(places[:3])
        if name not in old or name not in new:
            kind, size, shown = "missing" if name in old else "new", -1.0, ""
        elif old[name] == new[name]:
            counts[group]["equal"] += 1
            continue
        elif name in old_kept and name in new_kept and old[name]["shape"] == new[name]["shape"]:
            kind, size = "differ", difference(old_kept[name].tolist(), new_kept[name].tolist())
            whole = old_kept[name].numel() == torch.Size(old[name]["shape"]).numel()
            shown = f"max abs diff {'' if whole else '≥ '}{size:.2g} in "
        else:
            kind, size = "differ", difference(old[name], new[name])
            shown = f"max abs diff {size:.2g} in "
        counts[group][kind] += 1
        if group not in worst or size > worst[group][0]:
            worst[group] = size, shown + "/".join(places[3:])
    for group, (_, shown) in worst.items():
        print(f"{group}: {', '.join(f'{count} {kind}' for kind, count in counts[group].items())}; {shown}")
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"{', '.join(parts)}: {', '.join(f'{count} {kind}' for kind, count in total.items())}")
    return 1 if worst else 0


def loaded(folder: Path, parts: list[str], kept: bool) -> dict[str, Any]:
    """The entries of these parts, or the tensors that are kept of them."""
    entries: dict[str, Any] = {}
    for part in parts:
        file = folder / f"{part}.json"
        entries |= load_file(file.with_suffix(".safetensors")) if kept else json.loads(file.read_text(encoding="utf-8"))
    return entries


def difference(a: Any, b: Any) -> float:
    """The largest between two numbers in the same place; infinite if anything else differs."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((difference(a[name], b[name]) for name in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a != b:
        return abs(a - b) if abs(a - b) >= 0 else float("inf")
    return 0.0 if a == b else float("inf")


PARTS = {"engine": engine, "models": models, "products": products}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="FOLDER", help="write a dump to this folder")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="show what differs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to write")
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    for part in options.only:
        if (options.out / f"{part}.json").exists():
            parser.error(f"--out {options.out} has the part {part} already: choose another folder")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    for part in options.only:
        dump = Dump()
        PARTS[part](dump)
        dump.save(options.out / f"{part}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
