"""/v1/states: create a state from text, continue, fork, save, load and delete it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.params import Path as PathParameter

from prism.serve.lm.schemas import (
    Deleted,
    ForkRequest,
    LoadRequest,
    MoreInput,
    SaveRequest,
    StateInfo,
    StateInput,
    StateList,
    StateName,
)
from prism.serve.lm.service import LmService
from prism.serve.lm.states import KeptState
from prism.serve.lm.text import Text

Id = Annotated[str, PathParameter(max_length=100)]


def state_routes(service: LmService) -> APIRouter:
    """The routes of a service's states."""
    router, states = APIRouter(prefix="/v1/states", tags=["states"]), service.states

    def info(state: KeptState) -> StateInfo:
        return StateInfo(
            id=state.id,
            name=state.name,
            bytes=states.size(state.text),
            tokens=len(state.text),
            created=state.created,
            parent=state.parent,
        )

    @router.post("")
    async def create(body: StateInput) -> StateInfo:
        """Read a text and keep its state."""
        states.check_room()
        text = Text().followed_by(await service.encode(body.input, "input"))
        return info(states.add(await service.read(text), body.name))

    @router.get("")
    def list_states() -> StateList:
        """All states in memory, and the names of those in the store."""
        kept = states.all()
        return StateList(
            data=[info(state) for state in kept], bytes=sum(states.size(s.text) for s in kept), saved=states.saved()
        )

    @router.post("/load")
    def load(body: LoadRequest) -> StateInfo:
        """A new state from a file of the store."""
        return info(states.load(body.name))

    @router.delete("/saved/{name}")
    def delete_saved(name: StateName) -> Deleted:
        """Delete a file of the store."""
        states.delete_saved(name)
        return Deleted(id=name, object="state.saved.deleted")

    @router.get("/{id}")
    def show(id: Id) -> StateInfo:
        """One state."""
        return info(states.get(id))

    @router.delete("/{id}")
    def delete(id: Id) -> Deleted:
        """Delete a state from memory; files of it stay."""
        states.delete(id)
        return Deleted(id=id, object="state.deleted")

    @router.post("/{id}/continue")
    async def continue_state(id: Id, body: MoreInput) -> StateInfo:
        """Read more text. The state itself is changed: fork it before, to keep both."""
        before = states.get(id).text
        text = before.followed_by(await service.encode(body.input, "input"))
        return info(states.change(id, before, await service.read(text)))

    @router.post("/{id}/fork")
    def fork(id: Id, body: ForkRequest | None = None) -> StateInfo:
        """A second state that starts where this one is. It takes no time, and no memory until one of them is continued."""
        state = states.get(id)
        states.check_room(state.text)
        return info(states.add(state.text, None if body is None else body.name, state.id))

    @router.post("/{id}/save")
    async def save(id: Id, body: SaveRequest) -> StateInfo:
        """Write a state to the store, where it outlives the service."""
        await run_in_threadpool(states.save, id, body.name, body.overwrite)
        return info(states.get(id))

    return router
