"""The loops of one attempt: the ready-made one around a Task, the one around a user's own function, what both share,
and the learner that a step changes; also the validation of a checkpoint outside of any attempt (`evaluate`). Not here:
how an attempt begins and ends (attempt), and how data are loaded (data)."""
