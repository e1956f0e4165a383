"""What the model cards of language models and their adapters have in common."""

from __future__ import annotations

import json
from typing import Any


def metadata(library: str, *tags: str) -> str:
    """The YAML at the top of a card, for the model hub."""
    lines = [f"library_name: {library}", "license: other", "pipeline_tag: text-generation", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in ("prism", *tags))])


def adapter_use(base: str, register: str) -> str:
    """Python code that loads a base and an adapter.

    Args:
        register: the import that registers what peft or transformers need.
    """
    return f"""\
{register}
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({json.dumps(base)})
model = PeftModel.from_pretrained(base, "path/to/this/folder")"""


def validation_text(records: list[dict[str, Any]], what: str = "text") -> str:
    """The last validation in a log, as a sentence."""
    scores = [record for record in records if "validation_nats" in record]
    if not scores:
        return "Not validated."
    last = scores[-1]
    return (
        f"On held-out {what} after step {last['step']:,}: {last['validation_nats']:.4f} nats per token, perplexity "
        f"{last['validation_perplexity']:.3f}, **{last['validation_bits_per_byte']:.4f} bits per byte**."
    )


def merged_card(name: str, base: str, trained: str, use: str) -> str:
    """The README.md of a model into which a LoRA adapter was merged.

    Args:
        trained: the adapter's own card, of which the parts about training are kept; may be empty.
        use: Python code.
    """
    _, found, rest = trained.partition("## Training\n")
    about = found + rest.partition("## Use\n")[0] if found else ""
    return f"""---
{metadata("transformers", "causal-lm")}
---

# {name}

The model `{base}` with a LoRA adapter merged into its weights (`prism export --merge`).

{about}## Use

```python
{use}
```
"""
