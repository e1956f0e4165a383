"""The official `openai` client against a real server: texts of `prism generate`, streamed, concurrent, from states."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from prism.cli import main
from prism.language.chat import DEFAULT_TEMPLATE, TEMPLATE
from prism.language.generate import Sampling, Session
from prism.language.tokenizer import ByteTokenizer
from prism.serve.lm.service import LmService
from tests.serve.lm.models import NAME, folder, generated, serving

Served = tuple[httpx.Client, LmService]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("chat") / NAME
    shutil.copytree(folder(), where)
    (where / TEMPLATE).write_text(DEFAULT_TEMPLATE)
    with serving(where, store=tmp_path_factory.mktemp("store"), max_prompt=3000, max_tokens=2000, rows=8) as found:
        yield found


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served[0].base_url}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model=NAME, prompt=prompt, **{"max_tokens": 20, "seed": 0, **options})


def streamed(client: openai.OpenAI, prompt: Any, **options: Any) -> str:
    chunks = complete(client, prompt, stream=True, **options)
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_streamed_text_is_that_of_prism_generate(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9}
    found = streamed(client, "Once upon a time", seed=7, max_tokens=24, **sampling)
    flags = "--max-new-tokens 24 --temperature .7 --top-p .9 --seed 7 --device cpu"
    assert main(["generate", str(folder()), "--prompt", "Once upon a time", *flags.split()]) == 0
    assert capsys.readouterr().out == found + "\n"
    whole = complete(client, "Once upon a time", seed=7, max_tokens=24, **sampling)
    assert whole.choices[0].text == found and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (16, 24, 40)


def test_32_streams_at_once_equal_each_alone(served: Served, client: openai.OpenAI) -> None:
    lm = served[1].lm
    asked = [(f"{i} " + "Tell me. " * (i % 5), i, [0.0, 0.8, 1.1][i % 3]) for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        texts = list(
            pool.map(lambda a: streamed(client, a[0], seed=a[1], temperature=a[2], max_tokens=6 + a[1] % 9), asked)
        )
    assert texts == [generated(lm, p, 6 + seed % 9, Sampling(t), seed) for p, seed, t in asked]


def test_fork_and_continue_equal_reading_the_text_again(served: Served, client: openai.OpenAI) -> None:
    http, _ = served
    first, second, third = "Once upon a time. " * 20, "There was a king", " and a queen. " * 25
    state = http.post("/v1/states", json={"input": first, "name": "start"}).json()
    fork = http.post(f"/v1/states/{state['id']}/fork", json={}).json()
    more = http.post(f"/v1/states/{fork['id']}/continue", json={"input": second}).json()
    assert more["tokens"] == len(first + second) and more["parent"] == state["id"] and more["bytes"] == state["bytes"]
    whole = complete(client, first + second + third, temperature=0.9)
    after = complete(client, third, temperature=0.9, extra_body={"state": fork["id"]})
    assert after.choices[0].text == whole.choices[0].text
    assert after.usage.prompt_tokens == whole.usage.prompt_tokens
    assert after.usage.prompt_tokens_details.cached_tokens >= 256
    # The state that was forked and the one that was continued from are as they were.
    assert http.get(f"/v1/states/{state['id']}").json() == state
    assert http.get(f"/v1/states/{fork['id']}").json() == more


def test_a_stored_state_continues_after_the_text_that_was_written(served: Served, client: openai.OpenAI) -> None:
    lm, sampling = served[1].lm, Sampling(1.0)
    seed = next(seed for seed in range(99) if generated(lm, "Once", 10, sampling, seed).isascii())
    options: Any = {"model": NAME, "prompt": "Once", "max_tokens": 10, "seed": seed, "stream": True}
    extra = {"store_state": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**options, extra_body=extra))
    text, state = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-2].state
    assert text == generated(lm, "Once", 10, sampling, seed)
    assert chunks[-1].usage.completion_tokens == 10 and chunks[-1].choices == []
    info = served[0].get(f"/v1/states/{state}").json()
    assert info["tokens"] == 14
    again = complete(client, f"Once{text}", seed=3).choices[0].text
    assert complete(client, "", seed=3, extra_body={"state": state}).choices[0].text == again
    further = complete(client, "!", extra_body={"state": state, "store_state": True})
    assert served[0].get(f"/v1/states/{further.state}").json()["parent"] == state
    assert served[0].get(f"/v1/states/{state}").json() == info


def test_prompts_that_start_alike_are_read_once(client: openai.OpenAI) -> None:
    prompt = "A long beginning. " * 40
    one, two = complete(client, prompt + "One"), complete(client, prompt + "Two")
    assert [r.usage.prompt_tokens_details.cached_tokens for r in (one, two)] == [0, 512]


def test_stop_strings_across_tokens(client: openai.OpenAI) -> None:
    text = complete(client, "Stop", max_tokens=60, seed=2).choices[0].text
    stop = text[10:13]  # bytes are tokens: three characters are at least three tokens
    cut = text[: text.index(stop)]
    found = complete(client, "Stop", max_tokens=60, seed=2, stop=["never there", stop])
    assert (found.choices[0].text, found.choices[0].finish_reason) == (cut, "stop")
    assert streamed(client, "Stop", max_tokens=60, seed=2, stop=stop) == cut


def test_characters_are_not_cut(served: Served, client: openai.OpenAI) -> None:
    """A chunk ends with whole characters; what is incomplete at the end is as `prism generate` prints it."""
    chunks = [c.choices[0].text for c in complete(client, "é", max_tokens=80, temperature=3.0, stream=True)]
    assert "".join(chunks) == generated(served[1].lm, "é", 80, Sampling(3.0))
    assert any(ord(c) > 127 for chunk in chunks for c in chunk)


def test_several_prompts_and_texts(served: Served, client: openai.OpenAI) -> None:
    lm = served[1].lm
    found = complete(client, ["a", "b"], n=2, seed=4, temperature=1.0, max_tokens=5)
    expected = [generated(lm, p, 5, Sampling(1.0), 4 + i) for p in "ab" for i in (0, 1)]
    assert [choice.text for choice in found.choices] == expected
    tokens = [int(token) for token in lm.tokenizer.encode(["a"])[0]]
    assert (
        complete(client, tokens, temperature=0).choices[0].text == complete(client, "a", temperature=0).choices[0].text
    )
    empty = complete(client, "", temperature=0.0, top_p=0.5)
    assert empty.choices[0].text == generated(lm, "", 20, Sampling(0)) and empty.usage.prompt_tokens == 1


def test_logprobs(client: openai.OpenAI) -> None:
    found = complete(client, "a", max_tokens=4, temperature=0, logprobs=3).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 4
    assert all(p == max(top.values()) for p, top in zip(found.token_logprobs, found.top_logprobs, strict=True))
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "a"}], max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert [len(token.top_logprobs) for token in chat.choices[0].logprobs.content] == [2] * chat.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_tokens_are_the_content(client: openai.OpenAI, stream: bool) -> None:
    """Also of tokens that are a part of a character, as most are of this model's above 127."""
    options: Any = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 120, "temperature": 2}
    found = client.chat.completions.create(**options, seed=1, logprobs=True, top_logprobs=20, stream=stream)
    choices = [one.choices[0] for one in found] if stream else [found.choices[0]]
    content = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    tokens = [token for choice in choices for token in (choice.logprobs.content if choice.logprobs else [])]
    joined = b"".join(bytes(token.bytes) for token in tokens)
    assert joined.decode(errors="replace") == content and max(joined) > 127
    assert {len(one.bytes) for token in tokens for one in (token, *token.top_logprobs) if "\ufffd" in one.token} == {1}


def test_chats_use_the_template(served: Served, client: openai.OpenAI) -> None:
    lm = served[1].lm
    messages = [{"role": "system", "content": "Be <|end|> short."}, {"role": "user", "content": "Hello"}]
    options: Any = {"model": NAME, "messages": messages, "seed": 5, "temperature": 0.8, "max_completion_tokens": 15}
    session = Session(lm, 5)
    session.reader.documents = False
    assert served[1].chat is not None
    session.logits = session.reader.read_all(torch.tensor(served[1].chat.tokens(messages, True)))
    expected = "".join(session.write(15, Sampling(0.8))) + session.text.flush()
    found = client.chat.completions.create(**options)
    assert found.choices[0].message.content == expected and found.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == ("stop" if session.ended else "length")


def test_a_chat_continues_from_a_state(served: Served, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    first = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=3, seed=0, extra_body={"store_state": True}
    )
    again = client.chat.completions.create(model=NAME, messages=[], max_tokens=3, extra_body={"state": first.state})
    assert again.usage.prompt_tokens == first.usage.total_tokens


def test_without_a_template_chats_are_refused_with_the_way_out(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    with serving(folder()) as (http, _):
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "--chat-template" in answer.json()["error"]["message"]
        assert http.get("/api/stats").json()["Model"]["chat"] is False
        refused = http.post("/v1/states/load", json={"name": "a"})
        assert refused.status_code == 400 and "--store" in refused.json()["error"]["message"]
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with serving(folder(), chat_template=template) as (http, _):
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    template.write_text("{% for %}")
    with pytest.raises(ValueError, match="line 1 is not a chat template"), serving(folder(), chat_template=template):
        pass


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(served: Served, stream: bool) -> None:
    http, service = served
    body = {"prompt": "a", "max_tokens": 2000, "stream": stream, "temperature": 0}
    with httpx.Client(base_url=http.base_url) as other:
        if stream:
            with other.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                other.post("/v1/completions", json=body, timeout=0.2)
    deadline = time.monotonic() + 30
    while service.scheduler.active and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.scheduler.active == 0


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-4"}, 404, "there is no model 'gpt-4', but 'tiny'"),
    ({"prompt": "a" * 3001}, 400, "more than the 3000 that one request may bring"),
    ({"max_tokens": 2001}, 400, "max_tokens must be at most 2000"),
    ({"n": 9}, 400, "at most 8 texts, got 9"),
    ({"n": 10**12}, 400, "at most 8 texts, got 1000000000000"),
    ({"prompt": ["a"] * 9}, 400, "at most 8 texts"),
    ({"prompt": [300]}, 400, "a token that is none"),
    ({"prompt": []}, 422, "integers of at least 0), or a list of several of one of these, got an empty list"),
    ({"prompt": [-1]}, 422, "got -1 among the tokens"),
    ({"prompt": [[1], []]}, 422, "got an empty list in a list"),
    ({"prompt": ["a", 1]}, 422, "got 'a' among the tokens"),
    ({"prompt": [1, True]}, 422, "got True among the tokens"),
    ({"prompt": [[1.5]]}, 422, "got 1.5 among the tokens"),
    ({"prompt": 5}, 422, "got int"),
    ({"temperature": 1e-30}, 400, "temperature must be 0 or at least"),
    ({"temperature": -1}, 422, "temperature"),
    ({"top_p": 0}, 422, "top_p"),
    ({"seed": 2**70}, 422, "seed"),
    ({"stop": ["a"] * 17}, 422, "stop"),
    ({"state": "../../etc/passwd"}, 404, "there is no state"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
    ({"store_state": True, "n": 2}, 400, "store_state needs n = 1"),
    ({"prompt": ["a", "b"], "store_state": True}, 400, "store_state needs one prompt"),
]


@pytest.mark.parametrize(("body", "status", "why"), REFUSED, ids=[why[:25] for *_, why in REFUSED])
def test_what_cannot_be_served_is_refused_with_a_reason(
    served: Served, body: dict[str, Any], status: int, why: str
) -> None:
    answer = served[0].post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **body})
    assert answer.status_code == status and why in answer.json()["error"]["message"]


HALF = r"\ud800"
"""Half a character, which JSON can hold and UTF-8 cannot."""
HALVES = [
    ("/v1/completions", f'{{"prompt": "{HALF}"}}', 400, "prompt cannot be encoded as UTF-8"),
    ("/v1/completions", f'{{"prompt": ["a", "{HALF}"]}}', 400, "prompt cannot be encoded as UTF-8"),
    ("/v1/completions", f'{{"prompt": "a", "stop": "{HALF}"}}', 422, "stop"),
    ("/v1/completions", f'{{"prompt": "a", "stop": ["{HALF}"]}}', 422, "stop"),
    ("/v1/completions", f'{{"prompt": "a", "model": "{HALF}"}}', 404, "there is no model"),
    ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{HALF}"}}]}}', 400, "message 1 cannot be"),
    ("/v1/states", f'{{"input": "{HALF}"}}', 400, "input cannot be encoded as UTF-8"),
]


@pytest.mark.parametrize(("path", "body", "status", "why"), HALVES)
def test_half_a_character_is_refused(served: Served, path: str, body: str, status: int, why: str) -> None:
    answer = served[0].post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and why in answer.json()["error"]["message"]


def test_neutral_values_of_unknown_fields_are_accepted(served: Served) -> None:
    neutral = {"presence_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False, "user": "me", "temperature": None}
    answer = served[0].post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **neutral})
    assert answer.status_code == 200


def test_too_many_requests_are_refused_with_429() -> None:
    body = {"prompt": "a", "max_tokens": 4000, "temperature": 0, "stream": True}
    with serving(folder(), rows=1, queue=1) as (http, service), ExitStack() as streams:
        for waiting in (0, 1):
            streams.enter_context(http.stream("POST", "/v1/completions", json=body))
            while service.scheduler.waiting != waiting:
                time.sleep(0.005)
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 429 and refused.headers["Retry-After"]
        assert "1 requests wait already" in refused.json()["error"]["message"]


def test_a_key_and_the_size_of_the_body() -> None:
    key = "a-long-secret"
    with serving(folder(), api_key=key, max_body=2000) as (http, _):
        answer = http.get("/v1/models")
        assert answer.status_code == 401 and "API key" in answer.json()["error"]["message"]
        client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=key)
        assert [each.id for each in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            client.models.retrieve("other")
        large = http.post("/v1/completions", json={"prompt": "a" * 3000}, headers={"X-API-Key": key})
        assert large.status_code == 413 and "2,000 bytes" in large.json()["error"]["message"]


def test_what_the_page_and_prometheus_read(served: Served) -> None:
    stats = served[0].get("/api/stats").json()
    facts = stats["Model"]
    assert (facts["name"], facts["layers"], facts["constant_state"], facts["exact"]) == (NAME, 2, True, False)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 and facts["state_bytes"] > 0 and facts["chat"]
    assert len(stats["Series"]["Tokens"]) == 120
    text = served[0].get("/metrics").text
    for name in ("prism_tokens_total", "prism_texts_active", "prism_requests_waiting", "prism_state_bytes"):
        assert f"\n{name} " in text


def test_the_byte_tokenizer_is_what_these_tests_assume() -> None:
    assert len(ByteTokenizer().encode(["Once upon a time"])[0]) == 16
