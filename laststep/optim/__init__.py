"""The optimiser and the learning rate that a configuration asks for, and the checks of an optimiser that a task makes.
Not here: the hooks with which a task replaces them (task.py), and the step that uses them (loops)."""
