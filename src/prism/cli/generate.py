"""`prism generate`: text from a model, as it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tyro.conf import Positional

from prism.files import check_state_target
from prism.language.export import write_model
from prism.language.generate import Sampling, Session, open_model
from prism.messages import INTERRUPTED, say
from prism.train.export import model_folder
from prism.train.progress import StopRequest


def generate(
    model: Positional[Path],
    prompt: str | None = None,
    file: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    state: Path | None = None,
    save_state: Path | None = None,
    device: str = "auto",
) -> int:
    """Continue a text. The new text goes to the output as it is written, everything else to the error stream.

    The text to continue is --prompt, --file, or else the standard input (not with --state, which needs none). A run that
    stops, saves its state and is continued writes the same text as one that does not stop, given the same options.

    Args:
        model: a folder with a saved model, or a run folder of `prism train lm`.
        prompt: the text to continue.
        file: a file with the text to continue; `-` is the standard input.
        max_new_tokens: at most this many; the end token ends the text before.
        temperature: low is likely, high is varied, 0 always takes the most likely token.
        top_k: choose among this many tokens only.
        top_p: choose among the most likely tokens that have this probability together.
        seed: of the random choices; None is 0, or with --state where the random numbers were.
        state: go on from this file; a prompt, if there is one, follows what was read and written then.
        save_state: write the state after the last token to this file (.safetensors), also if the writing is interrupted.
        device: cpu, cuda …; auto is cuda where there is one.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if save_state is not None:
        check_state_target(save_state, "save_state")
    text = _prompt(prompt, file, state)
    with model_folder(model, write_model, say) as folder:
        lm = open_model(folder, device)
    session = Session(lm, seed or 0) if state is None else Session.load(state, lm, seed)
    session.read(text)
    started, count = time.perf_counter(), 0
    with StopRequest() as stop:  # between two tokens, so that the state is that of what was written
        for piece in session.write(max_new_tokens, sampling):
            count += 1
            print(piece, end="", flush=True)
            if stop.name is not None:
                break
        seconds = time.perf_counter() - started
        if save_state is None:
            print(session.text.flush())
        else:  # an unfinished character is finished by whoever goes on
            session.save(save_state)
    interrupted = stop.name is not None and count < max_new_tokens and not session.ended
    stopped = ", end of text" if session.ended else ""
    if interrupted:
        stopped = ", interrupted" if save_state is None else f", interrupted, saved to {save_state}"
    rate = f", {count / seconds:,.0f} tokens/s" if count else ""
    say(f"\n[{count} tokens{rate}, state of {session.nbytes:,} bytes{stopped}]")
    return INTERRUPTED if interrupted else 0


def _prompt(prompt: str | None, file: Path | None, state: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("--prompt and --file both give a text to continue: use one")
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
        raise ValueError(f"{file or 'the standard input'} is not UTF-8 text: {error}") from error
