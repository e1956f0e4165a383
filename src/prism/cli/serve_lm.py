"""`prism serve lm`: a language model behind OpenAI's API, with states as resources."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from prism.messages import say
from prism.serve.settings import ServerSettings, read_api_key


def serve_lm(
    run: Positional[Path],
    store: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key_file: Path | None = None,
    rows: int = 32,
    queue: int = 256,
    max_prompt: int = 65536,
    max_tokens: int = 4096,
    max_states: int = 1000,
    state_memory: int = 1024,
    prefix_memory: int = 256,
    max_body: int = 4,
    chat_template: Path | None = None,
    exact: bool | None = None,
    grace: float = 20.0,
    device: str = "auto",
    log_level: str = "info",
) -> int:
    """Serve a language model: completions, chats, and states that clients keep, fork and save.

    Args:
        run: run of `prism train lm`, or saved model.
        store: folder for saved states.
        host: address to listen on.
        port: 0: any free port.
        api_key_file: clients' key. None: $PRISM_API_KEY.
        rows: most texts written at a time.
        queue: most requests that wait.
        max_prompt: most tokens that a request brings.
        max_tokens: most tokens of a new text.
        max_states: most states kept, and saved.
        state_memory: MiB of memory for states.
        prefix_memory: MiB for prompts that start alike.
        max_body: largest request, in MiB.
        chat_template: jinja2. None: the tokenizer's.
        exact: same text at any load. None: on a GPU.
        grace: seconds for requests to finish.
        device: cpu, cuda, cuda:1 … or auto.
        log_level: debug, info, warning or error.
    """
    from prism.language.export import write_model
    from prism.serve.logs import check_level
    from prism.serve.run import bind, serve
    from prism.train.export import resolve_model_folder

    check_level(log_level)
    if max_body < 1:
        raise ValueError(f"max_body must be at least 1, got {max_body}")
    settings = ServerSettings(host, port, read_api_key(api_key_file), max_body * 2**20, grace)
    bound = bind(settings)  # before the model is loaded: a port in use is known at once

    from prism.serve.lm.app import lm_app
    from prism.serve.lm.service import open_service
    from prism.serve.lm.settings import LmSettings
    from prism.serve.metrics import Metrics

    choices = LmSettings(
        store,
        rows,
        queue,
        max_prompt,
        max_tokens,
        max_states,
        state_memory * 2**20,
        prefix_memory * 2**20,
        chat_template,
        exact,
        device,
    )
    with resolve_model_folder(run, write_model, say) as folder:
        service = open_service(folder, choices, Metrics("tokens"), run.resolve().name)
    return serve(lm_app(service, settings), settings, bound, f"language model {run}", log_level)
