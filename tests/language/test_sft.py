"""`prism train sft`: what is learned, saved, resumed and exported, as a whole model and as a LoRA adapter."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prism.cli import main
from prism.files import MANIFEST, check_weights
from prism.language.adapted import write_merged
from prism.language.chat import DEFAULT_TEMPLATE, TEMPLATE, load_chat_format, stop_tokens
from prism.language.chat_rows import ChatRows, prepare_chats
from prism.language.dpo import train_dpo
from prism.language.sft import SftTask, train_sft
from prism.language.tokenizer import ByteTokenizer
from prism.language.tune import opened, prepared
from prism.models import PrismForCausalLM
from tests.children import final_tensors, same_tensors
from tests.hf.adapters.bases import base as small_base
from tests.hf.adapters.bases import without_fla
from tests.language.tuning import Killed, at, quiet, small_dpo, small_sft, write_chats
from tests.tiny_lm import save_lm, save_tokenizer
from tests.train.runs import losses

Captured = pytest.CaptureFixture[str]
LORA = {"rank": 2, "dropout": 0.1}
CHANGES: dict[str, dict[str, Any]] = {"whole": {}, "lora": {"lora": LORA}}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a finished run of each kind."""
    found = {}
    for kind, changes in CHANGES.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        settings = small_sft(found[kind], **changes)
        before = {path.name: path.read_bytes() for path in (found[kind] / "base").iterdir()}
        train_sft(settings, quiet)
        assert {path.name: path.read_bytes() for path in (found[kind] / "base").iterdir()} == before
    return found


@pytest.mark.parametrize("kind", CHANGES)
def test_the_loss_falls(roots: dict[str, Path], kind: str) -> None:
    found = losses(roots[kind] / "run")
    scores = [nats for *_, nats in found if nats is not None]
    assert found[0][1] > found[-2][1] + 0.5 and len(scores) == 2 and scores[1] < scores[0], found


def test_the_loss_is_the_mean_over_the_tokens_of_answers(roots: dict[str, Path]) -> None:
    """The definition: every chat alone, its logits, the tokens that `apply_chat_template` marks as the assistant's."""
    with opened(small_sft(roots["whole"])) as (settings, base, chat):
        task = SftTask(settings, base, chat, prepared(settings, chat, True, pairs=False))
    epoch, model = np.arange(len(task.rows)), base.lm.model
    tokenizer = AutoTokenizer.from_pretrained(roots["whole"] / "run" / "model")
    total, count = 0.0, 0
    with torch.no_grad():
        mean = task.loss(model, task.samples(epoch, torch.device("cpu"))) / task.weight(epoch)
        for number, line in enumerate((roots["whole"] / "chats.jsonl").read_text().splitlines(), 1):
            messages = json.loads(line)["messages"]
            found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = torch.tensor([found["input_ids"]]), torch.tensor(found["assistant_masks"])[1:].bool()
            nats = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            if number % 10:  # the others are held out
                total, count = total + float(nats[mask].sum()), count + int(mask.sum())
    assert count == task.weight(epoch) and float(mean) == pytest.approx(total / count, rel=1e-5)


def test_micro_batches_change_no_loss(roots: dict[str, Path], tmp_path: Path) -> None:
    settings = replace(small_sft(roots["whole"], batch={"micro": 1}), out=tmp_path / "run", steps=2)
    train_sft(settings, quiet)
    ours, theirs = ([loss for _, loss, *_ in losses(run)[:2]] for run in (tmp_path / "run", roots["whole"] / "run"))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("kind", CHANGES)
def test_killed_and_resumed_is_bit_identical(roots: dict[str, Path], kind: str, tmp_path: Path) -> None:
    hunted, calm = replace(small_sft(roots[kind], **CHANGES[kind]), out=tmp_path / "run"), roots[kind] / "run"
    with pytest.raises(Killed):
        train_sft(hunted, at(8))  # after the checkpoint of step 5
    torch.manual_seed(123)
    steps: list[int] = []
    train_sft(hunted, lambda step, loss: steps.append(step))
    assert steps == list(range(6, 13))
    assert losses(hunted.out) == losses(calm)
    assert same_tensors(final_tensors(hunted.out), final_tensors(calm))


def test_the_exported_model_is_one_of_transformers_with_a_chat_template(roots: dict[str, Path]) -> None:
    folder = roots["whole"] / "run" / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.chat_template == DEFAULT_TEMPLATE == load_chat_format(folder).template
    chat = [{"role": "user", "content": "2+2"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == load_chat_format(folder).tokens(chat, add_generation_prompt=True).tolist()
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] <= inputs["input_ids"].shape[1] + 3
    assert model.generation_config.eos_token_id == 256
    stored = {name.removeprefix("model."): x[0] for name, x in final_tensors(roots["whole"] / "run").items()}
    assert any(torch.equal(value, model.model.norm.weight) for value in stored.values())
    card = (folder / "README.md").read_text()
    assert "prism train sft" in card and "54 chats" in card and "held-out answers" in card


def test_the_adapter_is_what_peft_would_save(roots: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    folder, base = roots["lora"] / "run" / "model", roots["lora"] / "base"
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    model.save_pretrained(tmp_path)
    ours, theirs = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(".lora_" in name for name in ours)
    size = sum(value.numel() for value in ours.values())
    kept = {name: x[0].numel() for name, x in final_tensors(roots["lora"] / "run").items() if "/model." in name}
    assert sum(kept.values()) == size < sum(p.numel() for p in model.get_base_model().parameters()) / 4
    assert AutoTokenizer.from_pretrained(folder).chat_template == DEFAULT_TEMPLATE
    options = [
        "generate",
        str(base),
        "--prompt",
        "2+2",
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
        "--device",
        "cpu",
    ]
    written = []
    for adapter in (roots["lora"] / "run", folder):
        assert main([*options, "--adapter", str(adapter)]) == 0
        written.append(capsys.readouterr().out)
    ids = torch.tensor([list(b"2+2")])
    model.eval()
    found = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=256, pad_token_id=256)
    text = bytes(token for token in found[0, 3:].tolist() if token < 256).decode(errors="replace")
    assert written[0] == written[1] == text + "\n"
    assert main(options) == 0
    assert capsys.readouterr().out != written[0]


def test_a_merged_adapter_is_a_model_for_every_command(
    roots: dict[str, Path], tmp_path: Path, capsys: Captured
) -> None:
    run, base = roots["lora"] / "run", roots["lora"] / "base"
    assert main(["export", str(run), "--merge"]) == 0
    assert f"merged the adapter and its base into {run / 'merged'}" in capsys.readouterr().out
    assert main(["export", str(run / "model"), "--merge", "--out", str(tmp_path / "whole")]) == 0
    whole = tmp_path / "whole"
    check_weights(whole)
    assert (whole / MANIFEST).is_file() and "## Training" in (whole / "README.md").read_text()
    assert (whole / TEMPLATE).read_text() == DEFAULT_TEMPLATE
    adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "model").eval()
    ids = torch.tensor([list(b"2+2")])
    with torch.no_grad():
        wanted = adapted(ids).logits
        for place in (whole, run / "merged"):
            found = AutoModelForCausalLM.from_pretrained(place).eval()(ids).logits
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    (tmp_path / "text.txt").write_text("2+2 is 4\n" * 5)
    scores = []
    for given in ([str(whole)], [str(base), "--adapter", str(run)], [str(base)]):
        out = tmp_path / f"{len(scores)}.json"
        command = ["evaluate", "lm", given[0], str(tmp_path / "text.txt"), *given[1:], "--output", str(out)]
        assert main([*command, "--device", "cpu"]) == 0
        (found,) = json.loads(out.read_text())["results"]["files"].values()
        scores.append(found["nats_per_token"])
    assert scores[0] == pytest.approx(scores[1], abs=1e-4) and abs(scores[1] - scores[2]) > 1e-3
    train_dpo(small_dpo(tmp_path, init=str(whole), steps=1), quiet)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_what_cannot_be_merged_says_why(roots: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    lora = roots["lora"] / "run" / "model"
    moved = shutil.copytree(lora, tmp_path / "moved")
    config = json.loads((lora / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "gone"}))
    prism_adapter = shutil.copytree(lora, tmp_path / "prism")
    (prism_adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "PRISM"}))
    merge = "`prism export RUN --merge` writes that model and a LoRA adapter as one"
    for arguments, message in (
        (["export", str(roots["whole"] / "run"), "--merge"], "so there is nothing to merge"),
        (["export", str(tmp_path / "none"), "--merge"], "there is no folder"),
        (["export", str(prism_adapter), "--merge"], "a PRISM adapter cannot be merged"),
        (["export", str(moved), "--merge"], "there is no gone, the base of the adapter"),
        (["export", str(lora), "--merge", "--format", "onnx"], "are two steps"),
        (["evaluate", "lm", str(lora), str(tmp_path / "moved" / "README.md")], merge),
        (["serve", "lm", str(lora), "--port", "0"], merge),
        (["train", "dpo", str(lora), "--data", str(lora / "README.md"), "--out", str(tmp_path / "dpo")], merge),
    ):
        assert main(arguments) == 2, arguments
        assert message in " ".join(capsys.readouterr().err.split()), arguments
    assert not (tmp_path / "dpo").exists() and not (moved / "merged").exists()


def test_a_template_is_trained_with_and_exported_with_its_end_of_turn(tmp_path: Path) -> None:
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|turn|>{% endfor %}"
    template = turns + "{% if add_generation_prompt %}assistant:{% endif %}"
    (tmp_path / "mine.jinja").write_text(template)
    settings = small_sft(tmp_path, steps=1, chat_template=str(tmp_path / "mine.jinja"))
    definition = json.loads((tmp_path / "base" / "tokenizer.json").read_text())
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 257, "content": "<|turn|>"})
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(definition))
    folder = train_sft(settings, quiet).model
    assert folder is not None
    chat = load_chat_format(folder)
    assert chat.template == template and stop_tokens(folder, chat.tokenizer) == (256, 257)
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [256, 257]
    (tmp_path / "mine.jinja").write_text(template.replace(":", "="))
    with pytest.raises(ValueError, match="was started with different chat_template"):
        train_sft(settings, quiet)


def test_a_model_of_transformers_gets_an_adapter_on_chats_one_by_one(tmp_path: Path, capsys: Captured) -> None:
    without_fla("qwen3_next")
    small_base("qwen3_next", vocab_size=257).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base", ByteTokenizer())
    with pytest.raises(ValueError, match="not all weights: give --lora RANK"):
        train_sft(small_sft(tmp_path), quiet)
    settings = small_sft(tmp_path, steps=2, lora={"rank": 2, "targets": ["all-linear"]})
    result = train_sft(settings, quiet)
    assert "are not reset where a chat starts: one chat per row" in capsys.readouterr().err
    assert (result.model / "adapter_model.safetensors").is_file()
    merged = AutoModelForCausalLM.from_pretrained(write_merged(result.model, tmp_path / "merged")).eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(merged) is type(base) and merged.dtype == base.dtype
    adapted: Any = PeftModel.from_pretrained(base, result.model).eval()
    ids = torch.tensor([list(b"2+2")])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    chat = load_chat_format(tmp_path / "base", default=True)
    corpus = prepare_chats(settings.data.recipe(), chat, False, cache=tmp_path / "cache")
    assert len(ChatRows(corpus.stream("train"), 48, packing=False)) == 54


def test_a_run_is_resumed_and_exported_by_its_folder(tmp_path: Path, capsys: Captured) -> None:
    write_chats(tmp_path / "chats.jsonl")
    base = save_lm(tmp_path / "base", "prism*1")
    run = tmp_path / "run"
    command = ["train", "sft", str(base), "--data", str(tmp_path / "chats.jsonl"), "--data.cache", str(tmp_path / "c")]
    command += ["--out", str(run), "--device", "cpu", "--data.context", "64"]
    command += ["--batch.sequences", "4", "--epochs", "0.5"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "trained 4 steps at" in captured.out and "the model is in" in captured.out
    assert "57 chats to train on and 3 to validate" in captured.err
    assert main(["train", "sft", "--out", str(run), "--epochs", "1"]) == 0
    assert "trained 7 steps" in capsys.readouterr().out
    assert main(["export", str(run), "--out", str(tmp_path / "copy")]) == 0
    shutil.rmtree(run / "model")  # from here on a run without an export
    assert main(["generate", str(run), "--prompt", "1", "--max-new-tokens", "2"]) == 0
    again = ["train", "sft", str(run), "--data", str(tmp_path / "chats.jsonl"), "--data.cache", str(tmp_path / "c")]
    assert main([*again, "--out", str(tmp_path / "second"), "--steps", "1", "--data.context", "64"]) == 0
    assert (tmp_path / "second" / "model" / "chat_template.jinja").read_text() == DEFAULT_TEMPLATE
    copy = PrismForCausalLM.from_pretrained(tmp_path / "copy")
    assert sum(p.numel() for p in copy.parameters()) > 0


def test_bad_input_is_one_sentence(roots: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    base, chats = str(roots["whole"] / "base"), str(roots["whole"] / "chats.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"messages": []}')
    (tmp_path / "bad.jinja").write_text("{% for %}")
    options = ["--data.cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    data = ["--data", chats]
    cases: dict[str, list[str]] = {
        "the model to start from is missing: give its folder, as in `prism train sft MODEL": data,
        "the data to train on are missing": [base],
        "there is no file or folder": [base, "--data", str(tmp_path / "nowhere")],
        "there is no model folder": [str(tmp_path / "nowhere"), *data],
        "bad.jsonl, line 1: messages must be a list of at least one message": [
            base,
            "--data",
            str(tmp_path / "bad.jsonl"),
        ],
        "bad.jinja, line 1 is not a chat template": [base, *data, "--chat-template", str(tmp_path / "bad.jinja")],
        "there is no chat template": [base, *data, "--chat-template", str(tmp_path / "none.jinja")],
        "data.validation must be above 0 and at most 0.5, got 0.7": [base, *data, "--data.validation", "0.7"],
        "data.context must be at least 2, got 1": [base, *data, "--data.context", "1"],
        "leaves no chats to train on": [base, *data, "--data.context", "6"],
        "lora.rank must be at least 0, got -1": [base, *data, "--lora", "-1"],
        "lora.dropout must be at least 0 and below 1, got 1.0": [base, *data, "--lora", "2", "--lora.dropout", "1"],
        "steps and epochs are both 0": [base, *data, "--steps", "0", "--epochs", "0"],
        "LoRA is trained with --parallel none or ddp": [base, *data, "--lora", "2", "--parallel", "fsdp"],
        "omit --parallel.context": [base, *data, "--parallel.context", "2"],
        "has no presets": [base, *data, "--preset", "tiny"],
        "Target modules": [base, *data, "--lora", "2", "--lora.targets", "nothing"],
    }
    capsys.readouterr()
    for sentence, arguments in cases.items():
        assert main(["train", "sft", *arguments, *options]) == 2, sentence
        lines = capsys.readouterr().err.splitlines()
        said = "\n".join(line for line in lines if not line.startswith("encoding ") and " to train on and " not in line)
        assert sentence in said and "\n" not in said, f"expected {sentence!r}, got: {said}"
    assert not (tmp_path / "run").exists()
