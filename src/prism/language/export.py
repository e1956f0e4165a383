"""Export a language model: for transformers, with its tokenizer and a model card, or as an ONNX folder.

The ONNX folder has the decode step, its description and the tokenizer, and is checked before it is there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from prism.files import whole_folder
from prism.language.cards import metadata, validation_text
from prism.language.model import Builder, build_model
from prism.language.settings import Settings, command_line
from prism.language.tokenizer import load_tokenizer
from prism.language.tune_export import write_tuned
from prism.language.tune_settings import BLANK
from prism.messages import say
from prism.train import export
from prism.train.checkpoint import Checkpoint
from prism.train.export import TrainedRun, resolve_model_folder
from prism.train.run import stored_config

_USE = """\
import prism  # registers the architecture
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
inputs = tokenizer("def main():", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"""
_LIMITS = """\
The model continues text in the style of its training data. It knows nothing else, is not aligned or instruction-tuned,
and its output needs checking."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_model(run: Path, checkpoint: Checkpoint, folder: Path, build: Builder = build_model) -> None:
    """Write the model of a run's checkpoint into an empty folder: of `prism train lm`, or of a run that fine-tunes one."""
    from prism.models import PrismForCausalLM
    from prism.models.auto import name_classes
    from prism.models.loading import without_progress_bars

    if (stored_config(run) or {}).get("task") in BLANK:  # fine-tuned: another kind of run, the same kind of model
        write_tuned(run, checkpoint, folder)
        return
    trained = TrainedRun.open(run, checkpoint, "lm", Settings())
    tokenizer = load_tokenizer(run / "tokenizer.json", trained.settings.data.end_token)
    model = build(trained.settings.model, trained.config["identity"]["model.vocab_size"], tokenizer.end)
    parameters = trained.load(model)
    with without_progress_bars():
        model.save_pretrained(folder)  # type: ignore[operator]  # transformers models have it
    if isinstance(model, PrismForCausalLM):
        name_classes(folder)
    _save_tokenizer(run / "tokenizer.json", tokenizer.end_token, folder)
    data = trained.config["training_data"]
    card = model_card(trained.name, trained.settings, data, checkpoint.state, trained.records, parameters)
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_onnx_folder(path: Path, out: Path) -> float:
    """Write the step of a run's newest checkpoint, or of a saved model, to `out`, completely or not at all.

    Returns:
        The largest difference between onnxruntime's and torch's logits, relative to the largest logit.
    """
    from prism.models import PrismForCausalLM
    from prism.models.loading import open_weights
    from prism.models.onnx_step import check_onnx, write_onnx

    with resolve_model_folder(path, write_model, say) as folder:
        model = open_weights(PrismForCausalLM, folder, "cpu").float()
        files = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
        with whole_folder(out, "the ONNX model") as partial:
            step = write_onnx(model, partial, tokenizer=_TOKENIZER[0] if files else None)
            for file in files:
                shutil.copyfile(file, partial / file.name)
            return check_onnx(partial, step)


def model_card(
    name: str,
    settings: Settings,
    training_data: dict[str, Any],
    state: dict[str, Any],
    records: list[dict[str, Any]],
    parameters: int,
) -> str:
    """The README.md: what the model is, its training data, its scores and how to use it."""
    model, data = settings.model, settings.data
    source = ", ".join(data.sources) or "the source text of the Python standard library"
    seen = state["step"] * settings.batch.sequences * data.context
    return export.model_card(
        name,
        metadata("transformers", "causal-lm"),
        f"A language model of {parameters:,} parameters: {model.num_hidden_layers} layers of `{model.layers}`, width\n"
        f"{model.hidden_size}, {model.num_heads} heads, trained from {model.weights or 'random weights'}.",
        {
            "data": f"{source}: {training_data['tokens']:,} tokens, {training_data['text_bytes']:,} bytes of text",
            "tokenizer": data.tokenizer,
            "seen": f"{seen:,} tokens in {state['step']:,} steps of {settings.batch.sequences} × {data.context}",
        },
        settings,
        state,
        records,
        command_line(settings),
        validation_text(records),
        _USE,
        _LIMITS,
    )


def _save_tokenizer(definition: Path, end_token: str, folder: Path) -> None:
    """Write a tokenizer.json with the configuration that transformers needs."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(definition),
        bos_token=end_token,
        eos_token=end_token,
        pad_token=end_token,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
