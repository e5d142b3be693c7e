"""The loops of one attempt. Not here: how an attempt begins and ends (attempt), and how data are loaded (data).

Read `engine.py` first: its picture shows what calls what. `task_loop.py` is the loop around a Task, `custom_loop.py`
the one around a user's own function, with `run.py` as its face, `registered.py` as its state and `loop_rules.py` as its
checks. `learner.py` is what a step of a Task does to the model; `gradients.py`, `sharded.py` and `shares.py` are how
ranks add their gradients; `initial_weights.py` is what a model starts from. `snapshot.py` is what can be saved at any
moment, `digest.py` whether two states are the same, `measured.py` how values reach metrics.jsonl, and `probe.py` what
`prove` adds.
"""
