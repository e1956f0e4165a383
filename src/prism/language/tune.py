"""What `prism train sft` and `prism train dpo` share: a saved model that is trained further, as a whole or with LoRA.

The base comes from its folder, also when a run resumes. Everything that an export needs besides the trained weights is in the
run folder: the base's configuration or that of the adapter, the tokenizer and the chat template.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from prism.engine.sequence_parallel import Context
from prism.files import read_json
from prism.language.adapted import Base, attach, open_base
from prism.language.adapter_files import CONFIG
from prism.language.chat import TEMPLATE, ChatFormat, load_chat_format, stop_tokens
from prism.language.chat_rows import ChatCorpus, prepare_chats
from prism.language.tune_export import MODEL_CONFIG, write_tuned
from prism.language.tune_settings import LoraSettings, TuneSettings
from prism.messages import say
from prism.models import PrismForCausalLM
from prism.overrides import to_plain
from prism.train.checkpoint import Checkpoint
from prism.train.model import initialize
from prism.train.run import check_folder

S = TypeVar("S", bound=TuneSettings)


@contextmanager
def opened(settings: S) -> Iterator[tuple[S, Base, ChatFormat]]:
    """The model to start from and its chat format; the settings with a way of parallelism that it allows.

    Bad input is refused before anything is written. The base's files may be temporary: they exist until the end.
    """
    settings.check()
    check_folder(settings.out, settings.resume)
    start, lora = settings.init, settings.lora.rank > 0
    assert start is not None  # `check` has seen it
    if lora:
        import prism.hf.adapters  # noqa: F401  (reports a missing peft before a large model is read)
    if lora and settings.parallel.mode == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        settings = replace(settings, parallel=replace(settings.parallel, mode="ddp"))  # the base is not sharded
    with open_base(start, settings.device if lora else "cpu") as base:
        if not lora and not base.lm.own:
            raise ValueError(
                f"{start} holds a {type(base.lm.model).__name__} of transformers, of which an adapter can be trained, "
                "not all weights: give --lora RANK"
            )
        yield settings, base, load_chat_format(base.folder, settings.chat_template, default=True)


def prepared(settings: TuneSettings, chat: ChatFormat, packing: bool, pairs: bool) -> ChatCorpus:
    """The data of a run, encoded; the main process says how many chats there are, and how many are too long."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    recipe, data = settings.data.recipe(), settings.data
    corpus = prepare_chats(recipe, chat, packing, pairs, data.cache, data.verify and first, say)
    if first:
        say(corpus.summary("pairs" if pairs else "chats", recipe.context))
        if chat.end_of_answer() is None:
            say(f"{chat.name} ends no answer with a special token: generation will not know where an answer ends")
    return corpus


class TunedTask:
    """A saved model that is trained further. `Task` documents the methods."""

    unit = "tokens"

    def __init__(self, given: TuneSettings, base: Base, chat: ChatFormat, corpus: ChatCorpus, samples: int) -> None:
        """
        Args:
            given: settings, in which epochs stand for steps.
            samples: number of samples in the training data.
        """
        self.given, self.settings = given, given.for_samples(samples)
        self.base, self.chat, self.corpus = base, chat, corpus
        self._files = {**_chat_files(base.folder, chat)}
        if given.lora.rank:
            config = lora_config(given.lora, base)
            self._files[CONFIG], self.model = attach(base, config, given.seed, given.gradient_checkpointing)
        else:
            self.config_of_model = base.lm.model.config
            self._files[MODEL_CONFIG] = self.config_of_model.to_json_string().encode()
            self.weights = {name: weight.detach() for name, weight in base.lm.model.named_parameters()}

    @property
    def name(self) -> str:
        return self.given.task

    def build(self) -> nn.Module:
        if self.given.lora.rank:
            return self.model
        model = PrismForCausalLM(self.config_of_model)
        if self.given.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def initialize(self, model: nn.Module) -> None:
        if not self.given.lora.rank:
            initialize(model, self.given.seed, self.weights)

    def identity(self) -> dict[str, Any]:
        settings = self.given
        return {
            **{f"lora.{name}": value for name, value in to_plain(settings.lora).items()},
            "seed": settings.seed,
            "data.context": settings.data.context,
            "batch.sequences": settings.batch.sequences,
            "optimizer.name": settings.optimizer.name,
            "base": self.base.digest,
            "tokenizer": self.corpus.corpus.manifest.tokenizer_sha256,
            "chat_template": hashlib.sha256(self.chat.template.encode()).hexdigest(),
            "tokens": self.corpus.corpus.manifest.digest,
        }

    def config(self) -> dict[str, Any]:
        data = {name: vars(facts) for name, facts in self.corpus.facts.items()}
        return {"settings": to_plain(self.given), "training_data": {**data, "filled": self.corpus.filled}}

    def files(self) -> dict[str, bytes]:
        return self._files

    def share_sequences(self, context: Context) -> None:
        raise ValueError(f"prism train {self.name} trains on whole sequences: omit --parallel.context")

    def write_model(self, run: Path, checkpoint: Checkpoint, folder: Path) -> None:
        write_tuned(run, checkpoint, folder)


def lora_config(lora: LoraSettings, base: Base) -> Any:
    """peft's configuration of a LoRA adapter; an error if there is no default for a base of this kind."""
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    kind = base.lm.model.config.model_type
    if not lora.targets and kind not in DEFAULTS:
        raise ValueError(
            f"peft has no default targets of LoRA for models of type {kind}: give --lora.targets all-linear"
        )
    targets: Any = list(lora.targets) or None
    return LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,  # type: ignore[arg-type]  # may be a float
        lora_dropout=lora.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def _chat_files(folder: Path, chat: ChatFormat) -> dict[str, bytes]:
    """The files of a tokenizer with a chat template, as transformers reads them, and what ends an answer."""
    path = folder / "tokenizer_config.json"
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", **chat.special}
    config = {
        name: value for name, value in (read_json(path) if path.is_file() else plain).items() if name != "chat_template"
    }
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    end = chat.end_of_answer()
    ends = dict.fromkeys([*stop_tokens(folder, chat.tokenizer), *(() if end is None else (end,))])
    generation["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends))
    return {
        "tokenizer.json": chat.tokenizer.definition.encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
        TEMPLATE: chat.template.encode(),
    }
