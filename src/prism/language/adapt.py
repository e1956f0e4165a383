"""The task of `prism adapt`: train a PRISM adapter of a saved model on text. Only the adapter is trained, and saved.

The base comes from its folder, also when a run resumes: checkpoints and the exported adapter hold the adapter's weights alone.
What the run needs from the base besides its weights, the adapter's configuration, is in the run folder, so that a checkpoint is
exported without the base.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from prism.engine.sequence_parallel import Context
from prism.language.adapt_export import write_adapter
from prism.language.adapt_settings import AdaptSettings
from prism.language.adapted import Base, attach, open_base
from prism.language.adapter_files import CONFIG
from prism.language.corpus import Corpus, Recipe, prepare
from prism.language.task import TextTask, loss_sum
from prism.language.tokens import Batch
from prism.messages import say
from prism.overrides import to_plain
from prism.train.callbacks import Report
from prism.train.checkpoint import Checkpoint
from prism.train.run import check_folder
from prism.train.train import RunResult, train


def adapt(settings: AdaptSettings, report: Report | None = None) -> RunResult:
    """Train an adapter, or resume its run. Bad input is refused before anything is written.

    Args:
        report: called with (step, loss) after every step; replaces the progress bar.
    """
    import prism.hf.adapters  # noqa: F401  (reports a missing peft before a large model is read)

    settings.check()
    check_folder(settings.out, settings.resume)
    if settings.parallel.mode == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        settings = replace(settings, parallel=replace(settings.parallel, mode="ddp"))  # the base is not sharded
    assert settings.base.folder is not None  # `check` has seen it
    recipe = settings.data.recipe()
    with open_base(settings.base.folder, settings.device) as base:
        if settings.data.separate_documents and not base.lm.own:
            say(f"the memories of {type(base.lm.model).__name__} are not reset where a document starts inside a sample")
            settings = replace(settings, data=replace(settings.data, separate_documents=False))
        recipe = replace(recipe, tokenizer=str(base.folder / "tokenizer.json"), end_token=base.lm.tokenizer.end_token)
        task = AdaptTask(settings, _prepare(settings, recipe), base)
    return train(task, report)


def _prepare(settings: AdaptSettings, recipe: Recipe) -> Corpus:
    verify = settings.data.verify and os.environ.get("LOCAL_RANK", "0") == "0"
    return prepare(recipe, settings.data.cache, verify, say)


class AdaptTask(TextTask):
    """A saved model with a new adapter; `Task` documents the methods."""

    name = "adapt"
    settings: AdaptSettings

    def __init__(self, settings: AdaptSettings, corpus: Corpus, base: Base) -> None:
        super().__init__(settings, corpus)
        self.base = base
        self.adapter_config, self.model = self._adapted()

    def _adapted(self) -> tuple[bytes, nn.Module]:
        """The adapter's configuration, and the base with a new adapter. The base's layers are replaced in place."""
        from prism.hf.adapters import PrismAdapterConfig

        chosen, settings = self.settings.adapter, self.settings
        config = PrismAdapterConfig(
            steps=chosen.steps, rank=chosen.rank, layers=list(chosen.layers) if chosen.layers else None
        )
        return attach(self.base, config, settings.seed, settings.base.gradient_checkpointing)

    def build(self) -> nn.Module:
        return self.model

    def initialize(self, model: nn.Module) -> None:
        """Nothing is left to initialise."""

    def identity(self) -> dict[str, Any]:
        settings = self.settings
        return {
            **{f"adapter.{name}": value for name, value in to_plain(settings.adapter).items()},
            "seed": settings.seed,
            "data.context": settings.data.context,
            "data.separate_documents": settings.data.separate_documents,
            "batch.sequences": settings.batch.sequences,
            "optimizer.name": settings.optimizer.name,
            "base": self.base.digest,
            "tokenizer": self.corpus.manifest.tokenizer_sha256,
            "tokens": self.corpus.manifest.digest,
        }

    def files(self) -> dict[str, bytes]:
        return {CONFIG: self.adapter_config}

    def share_sequences(self, context: Context) -> None:
        raise ValueError("an adapter is trained on whole sequences: omit --parallel.context")

    def loss(self, model: nn.Module, samples: Batch) -> Tensor:
        return loss_sum(model, samples)

    def write_model(self, run: Path, checkpoint: Checkpoint, folder: Path) -> None:
        write_adapter(run, checkpoint, folder)
