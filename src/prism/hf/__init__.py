"""Models of transformers and peft: `accelerate` computes their memories with the engine, adapters/ adds PRISM's writes.

Start with patch.py (`accelerate` and `restore`) and families.py (which functions of which model are replaced); each other file
is one function's replacement. What enters here stands between another library's model and the engine: nothing of our own
models or training.
"""

from prism.hf.patch import Report, accelerate, restore

__all__ = ["Report", "accelerate", "restore"]
