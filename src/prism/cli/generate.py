"""`prism generate`: continue a text with a language model, printed token by token."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
from tyro.conf import Positional, arg

from prism.files import check_state_target
from prism.language.adapted import open_adaptable, with_adapter
from prism.language.export import write_model
from prism.language.generate import Sampling, Session, open_model
from prism.messages import INTERRUPTED, say
from prism.train.export import resolve_model_folder
from prism.train.progress import StopRequest


def generate(
    model: Annotated[Positional[Path], arg(metavar="MODEL")],
    prompt: str | None = None,
    file: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    state: Path | None = None,
    save_state: Path | None = None,
    state_dtype: Literal["float32", "bfloat16"] | None = None,
    adapter: Path | None = None,
    device: str = "auto",
) -> int:
    """Continue a text with a language model.

    The text to continue is --prompt, --file or standard input; with --state none is needed. New text goes to standard
    output, messages go to standard error.

    A text that is interrupted, saved with --save-state and resumed with --state is the same as one written without
    interruption, given the same options.

    Args:
        model: Folder of a saved model, or run folder of `prism train lm`. With --adapter it may be a model of transformers.
        prompt: Text to continue.
        file: File with the text to continue; - is standard input.
        max_new_tokens: Maximum number of new tokens; the end token stops earlier.
        temperature: Sampling temperature. 0: greedy, always the most likely token.
        top_k: Sample from the k most likely tokens. None: from all.
        top_p: Sample from the most likely tokens with this total probability. None: from all.
        seed: Random seed. None: 0, or with --state the saved random state.
        state: Resume from this state file; a prompt is appended to its text.
        save_state: Write the state after the last token to this .safetensors file, also when interrupted.
        state_dtype: dtype of the memories between tokens. bfloat16 halves their size and rounds them after every token. None:
            float32, or with --state that of the file.
        adapter: Folder of a saved adapter of the model, or run folder of `prism adapt`.
        device: cpu, cuda, cuda:1 and so on. auto: cuda if available, else cpu.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if save_state is not None:
        check_state_target(save_state, "save_state")
    text = _prompt(prompt, file, state)
    with resolve_model_folder(model, write_model, say) as folder:
        lm = open_model(folder, device) if adapter is None else with_adapter(open_adaptable(folder, device), adapter)
    if not lm.own and (state, save_state, state_dtype) != (None, None, None):
        raise ValueError(
            "--state, --save-state and --state-dtype need a model of this library, not one of transformers"
        )
    dtype = None if state_dtype is None else getattr(torch, state_dtype)
    fresh = (seed or 0, dtype or torch.float32)
    session = Session(lm, *fresh) if state is None else Session.load(state, lm, seed, dtype)
    session.read(text)
    started, count = time.perf_counter(), 0
    with StopRequest() as stop:  # stops between two tokens, so the state matches the text
        for piece in session.write(max_new_tokens, sampling):
            count += 1
            print(piece, end="", flush=True)
            if stop.name is not None:
                break
        seconds = time.perf_counter() - started
        if save_state is None:
            print(session.text.flush())
        else:  # an incomplete character is completed after resuming
            session.save(save_state)
    interrupted = stop.name is not None and count < max_new_tokens and not session.ended
    stopped = ", end of text" if session.ended else ""
    if interrupted:
        stopped = ", interrupted" if save_state is None else f", interrupted, saved to {save_state}"
    rate = f", {count / seconds:,.0f} tokens/s" if count else ""
    say(f"\n[{count} tokens{rate}, state of {session.nbytes:,} bytes{stopped}]")
    return INTERRUPTED if interrupted else 0


def _prompt(prompt: str | None, file: Path | None, state: Path | None) -> str:
    """The text to continue; empty if there is none."""
    if prompt is not None and file is not None:
        raise ValueError("--prompt and --file were both given: use one of them")
    if prompt is not None:
        return prompt
    if file is not None and str(file) != "-":
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
        data = file.read_bytes()
    elif file is not None or (state is None and not sys.stdin.isatty()):
        data = sys.stdin.buffer.read()
    else:
        return ""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file or 'standard input'} is not UTF-8 text: {error}") from error
