"""Conversion as a whole: shards, tokenizers, PRISM's new weights, training that continues, and refusals that lose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism.cli import main
from prism.files import check_weights
from prism.language.tokenizer import ByteTokenizer
from prism.models import PrismConfig, PrismForCausalLM, convert_model
from prism.models.convert.shards import INDEX, Weights, write_shards
from prism.models.loading import open_weights
from tests.helpers import assert_close
from tests.models.convert import foreign
from tests.tiny_lm import save_lm, save_tokenizer

IDS = torch.arange(8)[None]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return foreign.save(tmp_path / "theirs")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def sharded(folder: Path, files: int) -> None:
    """The same weights in several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: x for name, x in tensors.items() if names[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_several_files_are_read_and_written(theirs: Path, tmp_path: Path) -> None:
    convert_model(theirs, tmp_path / "one")
    sharded(theirs, 3)
    seen: list[tuple[int, int]] = []
    convert_model(theirs, tmp_path / "many", shard_bytes=3000, report=lambda *numbers: seen.append(numbers))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert max((tmp_path / "many" / name).stat().st_size for name in files) < 3000 + 4000
    one, many = (open_weights(PrismForCausalLM, tmp_path / name, "cpu").state_dict() for name in ("one", "many"))
    assert all(torch.equal(one[name], many[name]) for name in one)
    back = convert_model(tmp_path / "many", tmp_path / "back", to="fla", shard_bytes=3000)
    assert set(Weights(back)) == set(foreign.shapes(foreign.SMALL))


def test_no_more_than_one_file_is_in_memory(tmp_path: Path) -> None:
    """Tensors are asked for one at a time: the next only after the files before it are written."""
    written: list[int] = []

    def tensors() -> Any:
        for number in range(6):
            written.append(len(list(tmp_path.glob("*.part"))))
            yield f"{number}", torch.ones(100)

    write_shards(tmp_path, tensors(), 800)
    assert written == [0, 0, 0, 1, 1, 2]


def test_tokenizer_files_come_along_and_the_weights_are_sealed(theirs: Path, tmp_path: Path) -> None:
    save_tokenizer(theirs, ByteTokenizer())
    (theirs / "generation_config.json").write_text("{}")
    (theirs / "README.md").write_text("their card")
    convert_model(theirs, tmp_path / "ours")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "manifest.json"} <= names
    assert "README.md" not in names
    check_weights(tmp_path / "ours")
    assert contents(tmp_path / "ours")["tokenizer.json"] == contents(theirs)["tokenizer.json"]


def test_the_same_seed_gives_the_same_new_weights_and_their_dtypes(tmp_path: Path) -> None:
    source = foreign.save(tmp_path / "theirs", dtype=torch.bfloat16)
    options: Any = {"rule": "prism", "options": {"steps": 3, "rank": 5}}
    first, same, other = (
        load_file(convert_model(source, tmp_path / f"{i}", seed=seed, **options) / "model.safetensors")
        for i, seed in enumerate([1, 1, 2])
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    differing = {name for name in first if not torch.equal(first[name], other[name])}
    assert differing and all(".writes." in name for name in differing)
    place = "model.layers.1.mixer.rule.writes."
    assert first[place + "scale"].dtype == torch.float32 and not first[place + "scale"].any()
    assert first[place + "gain.down.weight"].dtype == torch.bfloat16 and first[place + "gain.down.weight"].shape[0] == 5
    maps = torch.cat([x.flatten().float() for name, x in first.items() if ".writes." in name and ".weight" in name])
    assert 0 < maps.std() < 0.5


def test_training_continues_as_prism(theirs: Path, tmp_path: Path) -> None:
    """γ has a gradient from the first step on, the maps behind it from the second."""
    folder = convert_model(theirs, tmp_path / "ours", rule="prism", options={"steps": 2})
    model = PrismForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writes = {name: p for name, p in model.named_parameters() if ".writes." in name}
    for step in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        moving = {name for name, p in writes.items() if p.grad is not None and p.grad.abs().max() > 0}
        gammas = {name for name in writes if name.endswith("scale")}
        assert moving == gammas if step == 0 else moving == writes.keys()
        optimizer.step()


def test_a_model_of_ours_becomes_prism(tmp_path: Path) -> None:
    source = save_lm(tmp_path / "before", "gated_delta+softmax+prism(steps=1, conv_size=1)+gated_delta(forget=channel)")
    folder = convert_model(source, tmp_path / "after", rule="prism", options={"steps": 3})
    before, after = (open_weights(PrismForCausalLM, path, "cpu") for path in (source, folder))
    assert [layer.mixer.write_rank for layer in after.model.layers] == [3, 1, 3, 3]  # type: ignore[union-attr]
    with torch.no_grad():
        assert_close("logits", after(IDS).logits, before(IDS).logits, 1e-6)


def test_prism_train_continues_from_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prism.train.run import stored_config

    tokenizer = ByteTokenizer()
    changes: Any = {"vocab_size": tokenizer.size + 3, "attn": {"layers": [1], "num_heads": 2}, "num_hidden_layers": 3}
    save_tokenizer(foreign.save(tmp_path / "theirs", **changes), tokenizer)
    ours, run = tmp_path / "ours", tmp_path / "run"
    assert main(["convert", str(tmp_path / "theirs"), "--output", str(ours), "--rule", "prism", "--steps", "2"]) == 0
    assert capsys.readouterr().out == f"converted {tmp_path / 'theirs'} to {ours}\n"
    (tmp_path / "text.txt").write_text("ninety-nine bottles of beer on the wall\n" * 200)
    words = (
        f"train lm --init {ours} --data.sources {tmp_path / 'text.txt'} --data.cache {tmp_path / 'cache'} --out {run}"
    )
    words += " --data.context 16 --batch.sequences 2 --validation.sequences 2 --device cpu --optimizer.lr 1e-3"
    assert main([*words.split(), "--steps", "1", "--schedule.warmup", "0"]) == 0
    before, after = (open_weights(PrismForCausalLM, path, "cpu") for path in (ours, run / "model"))
    assert after.config.layer_plan == before.config.layer_plan and after.config.norm_eps == before.config.norm_eps
    old, new = before.state_dict(), after.state_dict()
    assert new.keys() == old.keys()
    for name, x in new.items():
        assert (x - old[name]).abs().max() < 0.01, name  # one step from the weights that were given
    assert new["model.layers.2.mixer.rule.writes.scale"].abs().max() > 0
    stored = stored_config(run)
    assert stored is not None and stored["settings"]["data"]["tokenizer"] == str(ours / "tokenizer.json")
    assert main([*words.split(), "--steps", "2"]) == 0  # resumes


def test_model_settings_that_disagree_with_init_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if they are those of the preset: the model would not be what was asked for."""
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2}
    layers = {"layers": "gated_delta", "rule_options": {"gated_delta": {"key_dim": 16, "value_dim": 16}}}
    PrismForCausalLM(PrismConfig(**sizes, **layers)).save_pretrained(tmp_path / "ours")
    command = ["train", "lm", "--init", str(tmp_path / "ours"), "--out", str(tmp_path / "run")]
    command += ["--data.sources", str(tmp_path / "nothing")]
    (tmp_path / "settings.toml").write_text('[model]\nlayers = "prism"\n')
    for words, named in {
        "--model.layers mamba2": "model.layers is mamba2",
        "--model.layers prism": "model.layers is prism",
        f"--config {tmp_path / 'settings.toml'}": "model.layers is prism",
        "--model.layers=gated_delta(gate=false)": "model.layers is gated_delta(gate=false)",
        "--model.hidden-size 64": "model.hidden_size is 64",
        "--model.head-dim 64": "model.head_dim is 64",
        "--model.options gated_delta.conv_size=3": "model.options is gated_delta.conv_size=3",
        "--model.no-tie-word-embeddings": "model.tie_word_embeddings is False",
        "--model.weights elsewhere": "model.weights is elsewhere",
    }.items():
        assert main([*command, *words.split()]) == 2
        error = capsys.readouterr().err
        assert named in error and f"but the model in {tmp_path / 'ours'} has" in error and "leave out --model." in error
    agreeing = "--model.layers gated_delta --model.hidden-size 32 --model.head-dim 16 --preset 30m"
    assert main([*command, *agreeing.split(), "--model.options", "gated_delta.conv_size=4"]) == 2
    assert "there is no file or folder" in capsys.readouterr().err  # the data: nothing else is wrong
    assert not (tmp_path / "run").exists()


def test_training_refuses_a_folder_of_another_library(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "lm", "--init", str(theirs), "--out", str(tmp_path / "run")]) == 2
    assert "model_type in its config.json is 'gated_deltanet', not 'prism'; `prism convert`" in capsys.readouterr().err
    assert main(["train", "lm", "--init", str(tmp_path / "none"), "--out", str(tmp_path / "run")]) == 2
    assert "none, but there is no such model folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "no folder":
        (folder / "config.json").unlink()
        weights.unlink()
        folder.rmdir()
    elif how == "broken config":
        (folder / "config.json").write_text("{")
    elif how == "unknown":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif how == "run":
        (folder / "config.json").write_text('{"settings": {}}')
    elif how == "incomplete":
        (folder / "config.json").write_text('{"model_type": "qwen3_next", "num_hidden_layers": 1}')
    elif how == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "no weights":
        weights.unlink()
    elif how == "garbage":
        weights.write_bytes(b"\x05" * 64)
    elif how == "missing":
        save_file({name: x for name, x in tensors.items() if "1.attn.v_proj" not in name}, weights)
    elif how == "further":
        save_file({**tensors, "model.layers.0.attn.D": torch.ones(2)}, weights)
    elif how == "shape":
        save_file({**tensors, "model.layers.0.attn.q_proj.weight": torch.ones(3, 16)}, weights)
    elif how == "index":
        sharded(folder, 2)
        next(iter(folder.glob("model-00002*"))).unlink()
    elif how == "outside":
        (folder / INDEX).write_text('{"weight_map": {"x": "../x.safetensors"}}')
    elif how == "untied":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("no config", "theirs is no model folder: it has no config.json"),
        ("no folder", "there is no model folder"),
        ("broken config", "config.json is damaged"),
        ("unknown", "model_type is 'llama'"),
        ("run", "theirs is a training run: convert the model in"),
        ("incomplete", "config.json is not complete: KeyError"),
        ("pickle", "only pickled weights (pytorch_model.bin), which can run code"),
        ("no weights", "theirs has no weights"),
        ("garbage", "model.safetensors is not a safetensors file"),
        ("missing", "has no tensor 'model.layers.1.attn.v_proj.weight', which its config.json needs"),
        ("further", "has a tensor 'model.layers.0.attn.D', for which there is no place"),
        ("shape", "do not fit its config.json: model.layers.0.attn.q_proj.weight [3, 16], "),
        ("index", "lacks model-00002-of-00002.safetensors"),
        ("outside", "names files outside of the folder"),
        ("untied", "tie_word_embeddings is true in"),
    ],
)
def test_bad_input_is_one_sentence(
    how: str, complaint: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(theirs, how)
    old = save_lm(tmp_path / "old")
    before = contents(old)
    capsys.readouterr()
    assert main(["convert", str(theirs), "--output", str(old), "--force"]) == 2
    said = capsys.readouterr().err.strip()
    assert complaint in said and said.startswith("prism convert: ") and "\n" not in said
    assert contents(old) == before and {path.name for path in tmp_path.iterdir()} <= {"theirs", "old"}


def test_what_exists_is_replaced_only_when_asked(theirs: Path, tmp_path: Path) -> None:
    old = save_lm(tmp_path / "old")
    before = contents(old)
    with pytest.raises(ValueError, match="exists already: give another folder, or --force to replace it"):
        convert_model(theirs, old)
    assert contents(old) == before
    convert_model(theirs, old, force=True)
    assert json.loads((old / "config.json").read_text())["converted_from"]["model_type"] == "gated_deltanet"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="is not replaced, because it is no model folder"):
        convert_model(theirs, other, force=True)
    for place in (theirs, tmp_path):
        with pytest.raises(ValueError, match=r"is the source .* or contains it"):
            convert_model(theirs, place, force=True)
    assert (other / "thesis.txt").exists() and (theirs / "model.safetensors").exists()


def test_a_failure_while_writing_leaves_the_old_folder(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save_lm(tmp_path / "old")
    before = contents(old)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prism.models.convert.shards.save_file", full)
    with pytest.raises(OSError, match=r"the model could not be written to .*free some space"):
        convert_model(theirs, old, force=True)
    assert contents(old) == before and {path.name for path in tmp_path.iterdir()} == {"theirs", "old"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"to": "jax"}, "to must be one of prism, fla"),
        ({"rule": "mamba2"}, "rule must be one of gated_delta, prism"),
        ({"to": "fla", "rule": "prism"}, "rule is 'prism', but a model of flash-linear-attention has its own"),
        ({"options": {"steps": 2}}, "steps is an option of PRISM's further writes: it needs rule 'prism'"),
        ({"rule": "prism", "options": {"step_scale": 1}}, "option 'step_scale' cannot be chosen"),
        ({"rule": "prism", "options": {"erase": "head"}}, "option 'erase' cannot be chosen"),
        ({"rule": "prism", "options": {"scaling": "fixed"}}, "γ starts at 0 and must be trained"),
        ({"rule": "prism", "options": {"steps": 0}}, "steps must be an integer ≥ 1"),
        ({"to": "fla"}, "holds no model of ours: model_type is 'gated_deltanet'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    arguments: dict[str, Any], complaint: str, theirs: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        convert_model(theirs, tmp_path / "ours", **arguments)
    assert not (tmp_path / "ours").exists()


def test_models_of_ours_that_cannot_become_prism(tmp_path: Path) -> None:
    source = save_lm(tmp_path / "prism", "prism")
    with pytest.raises(ValueError, match=r"layer 0 of .* is PRISM with 2 writes already"):
        convert_model(source, tmp_path / "x", rule="prism")
    with pytest.raises(ValueError, match="holds a model of ours already"):
        convert_model(source, tmp_path / "x")
    PrismForCausalLM(PrismConfig(40, 16, 2, "softmax")).save_pretrained(tmp_path / "softmax")
    with pytest.raises(ValueError, match="has no gated_delta layer"):
        convert_model(tmp_path / "softmax", tmp_path / "x", rule="prism")
