"""Ready-made tasks, for users who do not write their own. Not here: Task, the class that these and users' tasks
subclass (laststep/task.py)."""
