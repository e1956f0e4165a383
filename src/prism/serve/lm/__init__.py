"""`prism serve lm`: a language model behind OpenAI's API, whose states are resources.

A request is read (`text`), then written token by token in a batch that requests join and leave (`rows`, `writer`,
`scheduler`). `states` are texts that clients keep, fork and save. `service` puts all of it together.
"""
