"""The code that a run trains with: where the user's task is, whether its source shows what cannot be trained, the copy
that every attempt of a job runs. Not here: the task itself (task), or running it (loops)."""
