"""`prism serve`: a trained model behind HTTP.

`app`, `docs`, `errors`, `middleware`, `metrics`, `logs` and `run` are the shell that both services share; `rec` is the
recommender, `lm` the language model, `pages` what a browser shows.
"""
