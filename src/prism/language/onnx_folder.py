"""Write a language model as an ONNX folder: the decode step, its description and the tokenizer, checked before it is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from prism.files import whole_folder
from prism.language.export import write_model
from prism.messages import say
from prism.train.export import resolve_model_folder

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


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
        files = [folder / name for name in TOKENIZER if (folder / name).is_file()]
        with whole_folder(out, "the ONNX model") as partial:
            step = write_onnx(model, partial, tokenizer=TOKENIZER[0] if files else None)
            for file in files:
                shutil.copyfile(file, partial / file.name)
            return check_onnx(partial, step)
