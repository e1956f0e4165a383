"""`prism serve`: a trained model behind HTTP.

What enters here answers requests and stores what it has acknowledged before it answers; nothing here trains. `app`, `errors`,
`middleware`, `metrics`, `logs` and `run` are the shell that both services share; `rec` is the recommender (start with
rec/routes.py), `lm` the language model (lm/scheduler.py), `pages` what a browser shows.
"""
