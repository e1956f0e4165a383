"""Export a fine-tuned model, or its LoRA adapter: weights, tokenizer, chat template and a model card."""

from __future__ import annotations

from pathlib import Path

from prism.files import read_json
from prism.language.adapter_files import CONFIG, write_adapter_files
from prism.language.cards import adapter_use, metadata, validation_text
from prism.language.chat import TEMPLATE
from prism.language.tune_settings import BLANK, TuneSettings, command_line
from prism.train.checkpoint import Checkpoint
from prism.train.export import TrainedRun, model_card
from prism.train.run import stored_config

MODEL_CONFIG = "model_config.json"
"""The configuration of the model in a run folder, whose own config.json is that of the run."""
CHAT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", TEMPLATE)


def write_tuned(run: Path, checkpoint: Checkpoint, folder: Path) -> None:
    """Write what a run of `prism train sft` or `prism train dpo` has trained into an empty folder: a model, or an adapter."""
    stored = stored_config(run)
    assert stored is not None
    trained = TrainedRun.open(run, checkpoint, stored["task"], BLANK[stored["task"]])
    if trained.settings.lora.rank:
        parameters = write_adapter_files(run, checkpoint, trained.config["identity"]["base"], folder)
        use = adapter_use(
            read_json(run / CONFIG)["base_model_name_or_path"], "import prism  # registers the architecture"
        )
    else:
        parameters, use = _write_whole(run, trained, folder), USE
    for name in CHAT_FILES:
        (folder / name).write_bytes((run / name).read_bytes())
    (folder / "README.md").write_text(_card(trained, parameters, use), encoding="utf-8")


def _write_whole(run: Path, trained: TrainedRun[TuneSettings], folder: Path) -> int:
    """Write a model whose weights were all trained; returns its number of parameters."""
    from prism.models import PrismConfig, PrismForCausalLM
    from prism.models.auto import name_classes
    from prism.models.loading import without_progress_bars

    model = PrismForCausalLM(PrismConfig.from_dict(read_json(run / MODEL_CONFIG)))
    parameters = trained.load(model)
    with without_progress_bars():
        model.save_pretrained(folder)
    name_classes(folder)
    return parameters


USE = """\
import prism  # registers the architecture
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
chat = [{"role": "user", "content": "Hello."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"""
_LEARNED = {
    "sft": "fine-tuned on chats; only the answers were learned",
    "dpo": "trained to prefer the better of two answers (direct preference optimization)",
}
_LIMITS = "The model answers in the style of its training data. Its output needs checking."


def _card(trained: TrainedRun[TuneSettings], parameters: int, use: str) -> str:
    """The README.md: what was trained, on which data, scores and use."""
    settings, state, facts = trained.settings, trained.checkpoint.state, trained.config["training_data"]["train"]
    what, units = ("LoRA adapter", "peft") if settings.lora.rank else ("language model", "transformers")
    rank = f", rank {settings.lora.rank}" if settings.lora.rank else ""
    samples = "pairs" if settings.task == "dpo" else "chats"
    longer = f"; {facts['longer']:,} were longer than {settings.data.context} tokens: {facts['left_out']:,} left out"
    return model_card(
        trained.name,
        metadata(units, "adapter" if settings.lora.rank else "causal-lm", settings.task),
        f"A {what} of {parameters:,} parameters{rank}, for the model `{settings.init}`:\n{_LEARNED[settings.task]}."
        if settings.lora.rank
        else f"A {what} of {parameters:,} parameters, started from `{settings.init}`:\n{_LEARNED[settings.task]}.",
        {
            "data": f"{', '.join(settings.data.sources)}: {facts['kept']:,} {samples}{longer if facts['longer'] else ''}",
            "steps": f"{state['step']:,} of {settings.batch.sequences} samples",
        },
        settings,
        state,
        trained.records,
        command_line(settings),
        _evaluation(settings.task, trained),
        use,
        _LIMITS,
    )


def _evaluation(task: str, trained: TrainedRun[TuneSettings]) -> str:
    """The last validation, as a sentence."""
    if task == "sft":
        return validation_text(trained.records, "answers")
    scores = [record for record in trained.records if "validation_accuracy" in record]
    if not scores:
        return "Not validated."
    last = scores[-1]
    return (
        f"On held-out pairs after step {last['step']:,}: loss {last['validation_loss']:.4f}; the better answer is preferred in "
        f"{100 * last['validation_accuracy']:.1f} % of them."
    )
