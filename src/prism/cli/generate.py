"""`prism generate`: continue a text with a language model, printed token by token."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.progress import MofNCompleteColumn, TextColumn
from tyro.conf import Positional, arg

from prism.files import check_state_target, check_target
from prism.language.adapted import open_adaptable, with_adapter
from prism.language.batch import Continuation, Journal, Prompt, continue_all, prompts_sha256, read_prompts
from prism.language.export import write_model
from prism.language.generate import LanguageModel, Sampling, Session, open_model
from prism.language.tokenizer import check_unicode
from prism.messages import INTERRUPTED, progress_bars, say
from prism.models.loading import stable_fingerprint
from prism.train.export import resolve_model_folder
from prism.train.signals import StopRequest


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
    prompts: Path | None = None,
    field: str = "prompt",
    batch: int = 8,
    output: Path | None = None,
    device: str = "auto",
) -> int:
    """Continue a text with a language model.

    The text to continue is --prompt, --file or standard input; with --state none is needed. New text goes to standard
    output, messages go to standard error.

    A text that is interrupted, saved with --save-state and resumed with --state is the same as one written without
    interruption, given the same options.

    With --prompts a file of prompts is continued, several at a time, each as if it were alone. The output is one JSON object
    per prompt: index, prompt, text, tokens, and whether the model ended the text. An interrupted --output is resumed.

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
        prompts: File of prompts: one per line, or .jsonl with one per row.
        field: Field of a .jsonl file that holds the prompt.
        batch: Number of prompts that are continued at the same time.
        output: Write the results of --prompts to this .jsonl file. None: standard output.
        device: cpu, cuda, cuda:1 and so on. auto: cuda if available, else cpu.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if save_state is not None:
        check_state_target(save_state, "save_state")
    if prompts is not None:
        _refuse_with_prompts(prompt=prompt, file=file, state=state, save_state=save_state)
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        if output is not None:
            check_target(output, folder=False)
        given = read_prompts(prompts, field)
    elif output is not None:
        raise ValueError("--output is for --prompts: a single text goes to standard output")
    text = "" if prompts is not None else _prompt(prompt, file, state)
    with resolve_model_folder(model, write_model, say) as folder:
        lm = open_model(folder, device) if adapter is None else with_adapter(open_adaptable(folder, device), adapter)
    if not lm.own and (state, save_state, state_dtype) != (None, None, None):
        raise ValueError(
            "--state, --save-state and --state-dtype need a model of this library, not one of transformers"
        )
    dtype = None if state_dtype is None else getattr(torch, state_dtype)
    if prompts is not None:
        settings = {
            "model": lm.name,
            **stable_fingerprint(lm.model),
            "prompts": prompts_sha256(given),
            "seed": seed or 0,
        }
        settings |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        settings |= {"state_dtype": state_dtype, "adapter": None if adapter is None else str(adapter)}
        journal = None if output is None else Journal(output, settings)
        how = {"limit": max_new_tokens, "sampling": sampling, "seed": seed or 0, "batch": batch}
        return _continue_prompts(lm, given, {**how, "state_dtype": dtype or torch.float32}, journal)
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


def _refuse_with_prompts(**others: object) -> None:
    """Raise ValueError for a flag that is for a single text."""
    name = next((name for name, value in others.items() if value is not None), None)
    if name is not None:
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"--prompts and {flag} were both given: {flag} is for a single text")


def _continue_prompts(lm: LanguageModel, prompts: list[Prompt], how: dict[str, Any], journal: Journal | None) -> int:
    """Continue prompts, with a progress bar; returns the exit code."""
    known = set() if journal is None else set(journal.rows)
    if known:
        say(f"resumed: {len(known)} of {len(prompts)} prompts are done")
    started, count, done, shown = time.perf_counter(), 0, len(known), 0
    finished: dict[int, Continuation] = {}
    columns = (MofNCompleteColumn(), TextColumn("{task.fields[rate]} tokens/s"))
    with StopRequest() as stop, progress_bars(*columns) as progress:
        bar = progress.add_task("prompts", total=len(prompts), completed=done, rate="–")

        def stepped(rows: int) -> bool:
            nonlocal count
            count += rows
            progress.update(bar, rate=f"{count / (time.perf_counter() - started):,.0f}")
            return stop.name is not None

        left = [prompt for prompt in prompts if prompt.index not in known]
        for continuation in continue_all(lm, left, **how, stepped=stepped):
            done += 1
            progress.update(bar, completed=done)
            if journal is not None:
                journal.add(continuation.row())
                continue
            finished[continuation.prompt.index] = continuation
            while shown in finished:  # in the order of the file
                print(json.dumps(finished.pop(shown).row(), ensure_ascii=False), flush=True)
                shown += 1
    for _, continuation in sorted(finished.items()):
        print(json.dumps(continuation.row(), ensure_ascii=False), flush=True)
    complete, resumed = done == len(prompts), ""
    if journal is not None and complete:
        journal.finish()
        resumed = f", written to {journal.path}"
    elif journal is not None:
        journal.close()
        resumed = ", the same command resumes"
    rate = f", {count / (time.perf_counter() - started):,.0f} tokens/s" if count else ""
    stopped = "" if complete else ", interrupted"
    say(f"[{done} of {len(prompts)} prompts, {count:,} tokens{rate}{stopped}{resumed}]")
    return 0 if complete else INTERRUPTED


def _prompt(prompt: str | None, file: Path | None, state: Path | None) -> str:
    """The text to continue; empty if there is none."""
    if prompt is not None and file is not None:
        raise ValueError("--prompt and --file were both given: use one of them")
    if prompt is not None:
        check_unicode(prompt, "prompt")
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
