"""Everything that judges: synthetic tasks, fair comparisons of rules, results and their reports.

What enters here trains or measures models to compare them, and stands on the products; no product imports it. Start with
tasks/task.py (what a synthetic task is) and probe.py (train one model on one). For comparisons, plan.py reads a TOML file and
gives every rule the same number of parameters, entries.py refuses its mistakes, grid.py trains and keeps every result,
statistics.py has means and paired differences, findings.py what they say, curves.py what is drawn, report.py writes pages and
pictures from page.py and charts.py.

A training is a function `function(settings, report) -> results` of plain values, named "module:function".

- settings: among others `seed`, `learning_rate` and `test` (False while a learning rate is searched).
- results: `scores` (by test label, the first is the main one), `validation`, `better` ("higher" or "lower"), `metric`,
  `curve` (a list of step, tokens, seconds, loss), `parameters`, `state_size`, `tokens`, `seconds`; `steps` if it can stop
  at a goal; optionally `ceiling` and `baseline` by label. A training whose main score is not finite has failed.
"""
