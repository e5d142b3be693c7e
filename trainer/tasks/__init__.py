"""Ready-made tasks: what to train when the user brings no Task of their own. Not here: the Task that they subclass
(trainer/task.py)."""
