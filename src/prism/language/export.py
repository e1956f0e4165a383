"""The model card that goes beside every export: what the model is, what it saw, how good it got, how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prism.language.model import Builder, build_model
from prism.language.settings import Settings, command_line
from prism.language.tokenizer import load_tokenizer
from prism.train import tensors
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.run import read_log, stored_config, stored_settings, training_loss


def model_card(
    name: str,
    settings: Settings,
    training_data: dict[str, Any],
    state: dict[str, Any],
    records: list[dict[str, Any]],
    parameters: int,
) -> str:
    model, data = settings.model, settings.data
    source = ", ".join(data.sources) or "the source text of the Python standard library"
    seen = state["step"] * settings.batch.sequences * data.context
    return f"""---
library_name: transformers
license: other
pipeline_tag: text-generation
tags:
- prism
- causal-lm
---

# {name}

A language model of {parameters:,} parameters: {model.num_hidden_layers} layers of `{model.layers}`, width
{model.hidden_size}, {model.num_heads} heads, trained from {"random weights" if model.weights is None else model.weights}.

## Training

| | |
|---|---|
| data | {source}: {training_data["tokens"]:,} tokens, {training_data["text_bytes"]:,} bytes of text |
| tokenizer | {data.tokenizer} |
| seen | {seen:,} tokens in {state["step"]:,} steps of {settings.batch.sequences} × {data.context} |
| optimiser | {settings.optimizer.name}, learning rate {settings.optimizer.lr:g}, {settings.schedule.name} |
| training loss | {training_loss(records)} |
| skipped steps | {state["skipped"]} |
| seed | {settings.seed} |

```sh
{command_line(settings)}
```

## Evaluation

{_validation(records)}

## Use

```python
import prism  # registers the architecture
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
inputs = tokenizer("def main():", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```

## Limits

The model continues text in the manner of its training data. It knows nothing else, was not aligned with anyone's
wishes, and what it writes needs checking.

## Licence

The code that made the model is Apache-2.0. What may be done with the weights depends on the data they were trained on.
"""


def _validation(records: list[dict[str, Any]]) -> str:
    scores = [record for record in records if "validation_nats" in record]
    if not scores:
        return "Not validated."
    last = scores[-1]
    return (
        f"On held-out text after step {last['step']:,}: {last['validation_nats']:.4f} nats per token, perplexity "
        f"{last['validation_perplexity']:.3f}, **{last['validation_bits_per_byte']:.4f} bits per byte**."
    )


# A language model's checkpoint as transformers opens it: config.json, model.safetensors, tokenizer.json, README.md.


def write_model(run: Path, checkpoint: Checkpoint, folder: Path, build: Builder = build_model) -> None:
    from prism.models.loading import without_progress_bars

    settings, stored = stored_settings(run, "lm", Settings()), stored_config(run)
    assert settings is not None and stored is not None
    tokenizer = load_tokenizer(run / "tokenizer.json", settings.data.end_token)
    model = build(settings.model, stored["identity"]["model.vocab_size"], tokenizer.end)
    tensors.load(checkpoint.tensors, model, None, World(torch.device("cpu")))
    with without_progress_bars():
        model.save_pretrained(folder)  # type: ignore[operator]  # transformers models have it
    _save_tokenizer(run / "tokenizer.json", tokenizer.end_token, folder)
    records = [record for record in read_log(run / "log.jsonl") if record["step"] <= checkpoint.state["step"]]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = model_card(run.resolve().name, settings, stored["training_data"], checkpoint.state, records, parameters)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _save_tokenizer(definition: Path, end_token: str, folder: Path) -> None:
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
