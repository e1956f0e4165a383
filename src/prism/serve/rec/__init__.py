"""`prism serve rec`: events in, recommendations out, every user's state kept.

- `store`, `sqlite`, `postgres`: the event log (the truth) and the states (derived from it).
- `writer`: events of concurrent requests become one durable transaction.
- `engine`, `users`: requests of many users become one step of the memory.
- `service`: the parts put together.
- `schemas`, `routes`: the HTTP interface, with the names of Gorse's.
"""
